"""Layers in few bits, and the conversion of models to them."""

from dither.nn.conv1d import Conv1D as Conv1D
from dither.nn.convert import Conversion as Conversion
from dither.nn.convert import apply as apply
from dither.nn.convert import convert as convert
from dither.nn.deploy import Deployment as Deployment
from dither.nn.deploy import EffectivePrecision as EffectivePrecision
from dither.nn.deploy import deploy as deploy
from dither.nn.deploy import deploy_blocks as deploy_blocks
from dither.nn.deploy import effective_precision as effective_precision
from dither.nn.deploy import plan_from_bitwidths as plan_from_bitwidths
from dither.nn.guidance import bitwidth_loss as bitwidth_loss
from dither.nn.guidance import param_groups as param_groups
from dither.nn.guidance import sampling_parameters as sampling_parameters
from dither.nn.linear import Linear as Linear
from dither.nn.step import training_step as training_step
from dither.nn.targets import Targets as Targets
from dither.nn.targets import choose_targets as choose_targets
from dither.nn.targets import measure_rise as measure_rise
