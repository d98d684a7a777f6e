"""Optimizers that keep weights and states in few bits: see docs/optimizers.md."""

from dither.optim.adamw import AdamMini as AdamMini
from dither.optim.adamw import AdamW as AdamW
from dither.optim.adamw import AdamW8bit as AdamW8bit
from dither.optim.adamw import Muon as Muon
from dither.optim.adamw import NonFiniteError as NonFiniteError
from dither.optim.foreign import bitsandbytes_state_dict as bitsandbytes_state_dict
from dither.optim.foreign import torch_state_dict as torch_state_dict
from dither.optim.gradients import Gradients as Gradients
from dither.optim.oscillation import OscillationReset as OscillationReset
from dither.optim.released import ReleasedGradients as ReleasedGradients
from dither.optim.released import release_gradients as release_gradients
from dither.optim.roles import Role as Role
from dither.optim.roles import muon_groups as muon_groups
from dither.optim.roles import roles as roles
from dither.optim.training import LossScaler as LossScaler
from dither.optim.training import Training as Training
from dither.optim.training import training as training
from dither.spec.modes import GRADIENTS as GRADIENTS
from dither.spec.modes import MODES as MODES
from dither.spec.modes import LossScaling as LossScaling
from dither.spec.modes import Mode as Mode
