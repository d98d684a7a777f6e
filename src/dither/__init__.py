"""Dither: train language models in few bits.

Names are imported when they are first used, so that `import dither` is quick and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

from dither.errors import DitherError as DitherError
from dither.errors import PerformanceWarning as PerformanceWarning
from dither.errors import UserError as UserError

if TYPE_CHECKING:
    from dither import nn as nn
    from dither import optim as optim
    from dither.evaluate import deploy as deploy
    from dither.evaluate import plan_from_bitwidths as plan_from_bitwidths
    from dither.exporting import export as export
    from dither.models import output_loss as output_loss
    from dither.nn import Conversion as Conversion
    from dither.nn import Linear as Linear
    from dither.nn import bitwidth_loss as bitwidth_loss
    from dither.nn import capture_passes as capture_passes
    from dither.nn import compile as compile
    from dither.nn import convert as convert
    from dither.nn import effective_precision as effective_precision
    from dither.nn import sampling_parameters as sampling_parameters
    from dither.nn import step_context as step_context
    from dither.numerics import Monitor as Monitor
    from dither.ops import AmaxHistory as AmaxHistory
    from dither.ops import Quantized as Quantized
    from dither.ops import Stream as Stream
    from dither.ops import amax as amax
    from dither.ops import fake_quantize as fake_quantize
    from dither.ops import quantize as quantize
    from dither.ops import quantize_both as quantize_both
    from dither.ops import round_to as round_to
    from dither.ops import sample as sample
    from dither.parallel import parallelize as parallelize
    from dither.snip import auto_plan as auto_plan
    from dither.spec import BitwidthLoss as BitwidthLoss
    from dither.spec import Cast as Cast
    from dither.spec import LayerPrecision as LayerPrecision
    from dither.spec import MemoryOptions as MemoryOptions
    from dither.spec import Plan as Plan
    from dither.spec import Sampling as Sampling
    from dither.spec import WeightDecay as WeightDecay
    from dither.spec.bitwidths import safe_bitwidth as safe_bitwidth
    from dither.spec.formats import Format as Format
    from dither.spec.recipes import recipe as recipe
    from dither.spec.schedule import PlanSchedule as PlanSchedule
    from dither.tools.targets import choose_targets as choose_targets

__version__ = "0.1.0"

__all__ = [
    "AmaxHistory", "BitwidthLoss", "Cast", "Conversion", "DitherError", "Format", "LayerPrecision", "Linear", "MemoryOptions",
    "Monitor", "PerformanceWarning", "Plan", "PlanSchedule", "Quantized", "Sampling", "Stream", "UserError", "WeightDecay",
    "amax", "auto_plan", "bitwidth_loss", "capture_passes", "choose_targets", "compile", "convert", "deploy",
    "effective_precision", "export", "fake_quantize", "output_loss", "parallelize", "plan_from_bitwidths", "quantize",
    "quantize_both", "recipe", "round_to", "safe_bitwidth", "sample", "sampling_parameters", "step_context",
]  # fmt: skip
"""What users call. Everything else is reached by its module, such as `dither.nn.param_groups`."""

_MODULES = {
    "spec.bitwidths": ("safe_bitwidth",),
    "exporting": ("export",),
    "spec.formats": ("Format",),
    "evaluate": ("deploy", "plan_from_bitwidths"),
    "models": ("output_loss",),
    "nn": (
        "Conversion",
        "Linear",
        "bitwidth_loss",
        "capture_passes",
        "compile",
        "convert",
        "effective_precision",
        "sampling_parameters",
        "step_context",
    ),
    "numerics": ("Monitor",),
    "tools.targets": ("choose_targets",),
    "ops": ("AmaxHistory", "Quantized", "Stream", "amax", "fake_quantize", "quantize", "quantize_both", "round_to", "sample"),
    "parallel": ("parallelize",),
    "spec": ("BitwidthLoss", "Cast", "LayerPrecision", "MemoryOptions", "Plan", "Sampling", "WeightDecay"),
    "spec.recipes": ("recipe",),
    "spec.schedule": ("PlanSchedule",),
    "snip": ("auto_plan",),
}
"""The module of each name above: the same imports, for use at run time."""

_HOME = {name: module for module, names in _MODULES.items() for name in names}

_PACKAGES = (
    *("checkpoint", "data", "evaluate", "exporting", "models", "nn", "numerics", "ops", "optim", "parallel", "report", "snip"),
    *("spec", "tools", "train"),
)
"""Modules that can be used as attributes without an import of their own, such as dither.nn."""


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"dither.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"dither.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES})
