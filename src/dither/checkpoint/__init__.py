"""Checkpoints: what is on disk. Write, verify, reshard and read the state of training."""

from dither.checkpoint.format import leftovers as leftovers
from dither.checkpoint.format import step_of as step_of
from dither.checkpoint.read import SavedTensors as SavedTensors
from dither.checkpoint.read import load as load
from dither.checkpoint.read import newest as newest
from dither.checkpoint.read import verify as verify
from dither.checkpoint.state import Resumed as Resumed
from dither.checkpoint.state import pack as pack
from dither.checkpoint.state import unpack as unpack
from dither.checkpoint.write import Saver as Saver
from dither.checkpoint.write import drop as drop
from dither.checkpoint.write import keep as keep
from dither.checkpoint.write import save as save
