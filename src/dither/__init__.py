"""Dither: train language models in few bits."""

from dither import optim as optim
from dither.errors import DitherError as DitherError
from dither.errors import UserError as UserError
from dither.formats import Format as Format
from dither.ops import AmaxHistory as AmaxHistory
from dither.ops import Quantized as Quantized
from dither.ops import amax as amax
from dither.ops import fake_quantize as fake_quantize
from dither.ops import quantize as quantize
from dither.ops import quantize_both as quantize_both
from dither.ops import round_to as round_to
from dither.precision import Cast as Cast
from dither.random import Stream as Stream

__version__ = "0.1.0"
