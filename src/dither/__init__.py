"""Dither: train language models in few bits."""

from dither import nn as nn
from dither import optim as optim
from dither.bitwidths import safe_bitwidth as safe_bitwidth
from dither.errors import DitherError as DitherError
from dither.errors import PerformanceWarning as PerformanceWarning
from dither.errors import UserError as UserError
from dither.errors import renamed
from dither.formats import Format as Format
from dither.nn import Conversion as Conversion
from dither.nn import Linear as Linear
from dither.nn import apply_plan as apply_plan
from dither.nn import bitwidth_loss as bitwidth_loss
from dither.nn import choose_targets as choose_targets
from dither.nn import compile_blocks as compile_blocks
from dither.nn import convert as convert
from dither.nn import deploy as deploy
from dither.nn import effective_precision as effective_precision
from dither.nn import plan_from_bitwidths as plan_from_bitwidths
from dither.nn import prepare_plans as prepare_plans
from dither.nn import sampling_parameters as sampling_parameters
from dither.nn import step_context as step_context
from dither.numerics import Monitor as Monitor
from dither.ops import AmaxHistory as AmaxHistory
from dither.ops import Quantized as Quantized
from dither.ops import amax as amax
from dither.ops import fake_quantize as fake_quantize
from dither.ops import quantize as quantize
from dither.ops import quantize_both as quantize_both
from dither.ops import round_to as round_to
from dither.ops import sample as sample
from dither.precision import BitwidthLoss as BitwidthLoss
from dither.precision import Cast as Cast
from dither.precision import LayerPrecision as LayerPrecision
from dither.precision import Plan as Plan
from dither.precision import Sampling as Sampling
from dither.precision import WeightDecay as WeightDecay
from dither.random import Stream as Stream
from dither.recipes import recipe as recipe

compile = compile_blocks
__version__ = "0.1.0"

_RENAMED = {"training_step": "step_context", "apply": "apply_plan"}


def __getattr__(name: str) -> object:
    return globals()[renamed(__name__, _RENAMED, name)]
