"""Numerics of training: effects of casts on operands and of rounding on updates, and the layer that makes a run diverge."""

from dither.numerics.monitor import LayerNumerics as LayerNumerics
from dither.numerics.monitor import LossScale as LossScale
from dither.numerics.monitor import Monitor as Monitor
from dither.numerics.monitor import NumericsReport as NumericsReport
from dither.numerics.monitor import Operand as Operand
from dither.numerics.monitor import WeightUpdate as WeightUpdate
