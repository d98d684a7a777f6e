"""Numerics of training: effects of casts on operands and of rounding on updates, and the layer that makes a run diverge."""

from dither.numerics.monitor import Monitor as Monitor
from dither.numerics.report import LayerNumerics as LayerNumerics
from dither.numerics.report import LossScale as LossScale
from dither.numerics.report import NumericsReport as NumericsReport
from dither.numerics.report import Operand as Operand
from dither.numerics.report import WeightUpdate as WeightUpdate
