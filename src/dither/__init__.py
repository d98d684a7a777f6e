"""Dither: train language models in few bits.

Names are imported when they are first used, so that `import dither` is quick and needs no torch.
"""

from typing import TYPE_CHECKING

from dither.errors import DitherError, PerformanceWarning, UserError
from dither.lazy import lazily

if TYPE_CHECKING:
    from dither import nn as nn
    from dither import optim as optim
    from dither.evaluate import deploy, plan_from_bitwidths
    from dither.exporting import export, rollout_weights
    from dither.models import output_loss
    from dither.models.deployment import qat
    from dither.nn import Linear, bitwidth_loss, capture_passes, effective_precision, sampling_parameters, step_context
    from dither.nn.compile import compile_blocks as compile
    from dither.nn.convert import Conversion, convert
    from dither.numerics import Monitor
    from dither.ops import AmaxHistory, Quantized, Stream, amax, fake_quantize, quantize, quantize_both, round_to, sample
    from dither.parallel import parallelize
    from dither.snip import auto_plan
    from dither.spec import BitwidthLoss, Cast, LayerPrecision, MemoryOptions, Outliers, Plan, Sampling, WeightDecay
    from dither.spec.bitwidths import safe_bitwidth
    from dither.spec.cast import NamedCast
    from dither.spec.formats import Format
    from dither.spec.recipes import Recipe, recipe
    from dither.spec.registry import RoundingRule, ScaleRule, TransformRule, register
    from dither.spec.schedule import PlanSchedule

__version__ = "0.1.0"

__all__ = [
    "AmaxHistory", "BitwidthLoss", "Cast", "Conversion", "DitherError", "Format", "LayerPrecision", "Linear", "MemoryOptions",
    "Monitor", "NamedCast", "Outliers", "PerformanceWarning", "Plan", "PlanSchedule", "Quantized", "Recipe", "RoundingRule",
    "Sampling", "ScaleRule", "Stream", "TransformRule", "UserError", "WeightDecay", "amax", "auto_plan", "bitwidth_loss",
    "capture_passes", "compile", "convert", "deploy",
    "effective_precision", "export", "fake_quantize", "output_loss", "parallelize", "plan_from_bitwidths", "qat", "quantize",
    "quantize_both", "recipe", "register", "rollout_weights", "round_to", "safe_bitwidth", "sample", "sampling_parameters",
    "step_context",
]  # fmt: skip
"""What users call. Everything else is reached by its module, such as `dither.nn.param_groups`."""

_PACKAGES = ("checkpoint", "data", "optim", "report", "tools", "train")
"""Packages without a name above; all packages can be used as attributes, such as dither.nn."""

__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(_PACKAGES, ""),
        "dither.spec.bitwidths": "safe_bitwidth",
        "dither.spec.formats": "Format",
        "dither.spec.cast": "NamedCast",
        "dither.spec.recipes": "Recipe recipe",
        "dither.spec.registry": "RoundingRule ScaleRule TransformRule register",
        "dither.spec.schedule": "PlanSchedule",
        "dither.models.deployment": "qat",
        "evaluate": "deploy plan_from_bitwidths",
        "exporting": "export rollout_weights",
        "models": "output_loss",
        "nn": "Conversion Linear bitwidth_loss capture_passes compile convert effective_precision sampling_parameters "
        "step_context",
        "numerics": "Monitor",
        "ops": "AmaxHistory Quantized Stream amax fake_quantize quantize quantize_both round_to sample",
        "parallel": "parallelize",
        "snip": "auto_plan",
        "spec": "BitwidthLoss Cast LayerPrecision MemoryOptions Outliers Plan Sampling WeightDecay",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
