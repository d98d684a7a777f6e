"""Dither in torchtitan: a converter, an optimizer container, a trainer, and configurations by name (`config_registry`)."""

from dither.errors import UserError

try:
    import torchtitan.trainer  # noqa: F401
except ImportError as error:
    raise UserError(f"dither.integrations.torchtitan needs torchtitan ({error}): pip install 'dither[torchtitan]'.") from None

from dither.integrations.torchtitan.config_registry import ByteLoader as ByteLoader
from dither.integrations.torchtitan.config_registry import ByteTokenizer as ByteTokenizer
from dither.integrations.torchtitan.config_registry import dither_config as dither_config
from dither.integrations.torchtitan.layers import DitherConverter as DitherConverter
from dither.integrations.torchtitan.layers import DitherLinear as DitherLinear
from dither.integrations.torchtitan.optimizers import DitherOptimizers as DitherOptimizers
from dither.integrations.torchtitan.optimizers import dither_adamw as dither_adamw
from dither.integrations.torchtitan.trainer import DitherMetrics as DitherMetrics
from dither.integrations.torchtitan.trainer import DitherTrainer as DitherTrainer
