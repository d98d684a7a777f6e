"""Compare the last update of each layer's weight, reconstructed from the optimizer's moments, with the spacing of its format.

    u = lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps) + lr * weight_decay * w

m and v are the moments after step t as they are stored: in bfloat16 or 8 bits they are rounded, and so is u. Nothing here
changes the optimizer or synchronizes with the device.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dither.errors import UserError
from dither.nn.experts import ExpertLinear
from dither.nn.linear import Linear
from dither.nn.tensor_parallel import local
from dither.optim.adamw import AdamW
from dither.optim.states import EXTRA
from dither.reference.adamw import FORMATS
from dither.reference.masters import wide_weight
from dither.reference.numerics import UpdateCounts, update_counts
from dither.snip.optimizer_state import read_moments

NEEDED = ("lr", "betas", "eps", "weight_decay")


class Measured(NamedTuple):
    """Counts of a layer's weight, and the format and rounding in which its updates are accumulated."""

    counts: UpdateCounts
    format: str
    rounding: str


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless an optimizer has moments like AdamW's."""
    if any(key not in group for group in optimizer.param_groups for key in NEEDED):
        raise UserError(
            f"{type(optimizer).__name__} has no moments like AdamW's, from which updates could be computed: leave out "
            "optimizer= to monitor operands only."
        )


@torch.no_grad()
def measured(optimizer: torch.optim.Optimizer, layers: Mapping[str, Linear]) -> dict[str, Measured]:
    """Measure the last update of each layer's weight; skip layers that have no step yet or are not in the optimizer."""
    places = {id(p): (group, number) for group in optimizer.param_groups for number, p in enumerate(group["params"])}
    found: dict[str, Measured] = {}
    experts: dict[int, tuple[Tensor, Tensor, Any, str]] = {}  # one parameter holds all experts: compute its update once
    for name, layer in layers.items():
        parameter, index = (
            (getattr(layer._home[0], layer._parameter), layer._index)
            if isinstance(layer, ExpertLinear)
            else (layer.weight, None)
        )
        if id(parameter) not in places or "exp_avg" not in optimizer.state.get(parameter, {}):
            continue
        if index is None:
            w, update, dtype, rounding = weight_and_update(optimizer, parameter, *places[id(parameter)])
        else:
            if id(parameter) not in experts:
                experts[id(parameter)] = weight_and_update(optimizer, parameter, *places[id(parameter)])
            w, update, dtype, rounding = experts[id(parameter)]
            w, update = w[index], update[index]
        found[name] = Measured(update_counts(w, update, FORMATS[dtype]), FORMATS[dtype].name, rounding)
    return found


def weight_and_update(
    optimizer: torch.optim.Optimizer, parameter: Tensor, group: dict[str, Any], number: int
) -> tuple[Tensor, Tensor, torch.dtype, str]:
    """Return (weight, last update in float32, dtype in which updates are accumulated, rounding).

    For a sharded parameter, these are those of this rank's shard.
    """
    state = optimizer.state[parameter]
    found = read_moments(optimizer, parameter, group, number)
    w = local(parameter.detach())
    v = local(state["max_exp_avg_sq"]).float() if group.get("amsgrad") else found.v
    rounding = "nearest"
    if found.update is not None and found.update.master:
        own = {key: local(state[key]) for key in (*EXTRA, "exp_avg_sq") if key in state}
        w = as_stored(wide_weight(as_stored(w, found.transposed), own), found.transposed)
    elif found.update is not None and w.dtype != torch.float32:
        rounding = found.update.weights
    t, lr = (on_device(each, w.device) for each in (state["step"], group["lr"]))
    rest1, rest2 = (1 - torch.pow(beta, t) for beta in group["betas"])
    update = (lr / rest1).float() * found.m / (v.sqrt() / rest2.sqrt().float() + group["eps"])
    decoupled = isinstance(optimizer, torch.optim.AdamW | AdamW)
    if decoupled and group["weight_decay"]:
        update += (lr * group["weight_decay"]).float() * w.float()
    return w, update, w.dtype, rounding


def on_device(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a 0-d float64 tensor; a number of the host is filled in, since copying it would synchronize with the device."""
    if isinstance(value, Tensor) and value.device == device:
        return value.detach().double()
    return torch.full((), float(value), dtype=torch.float64, device=device)


def as_stored(x: Tensor, transposed: bool) -> Tensor:
    """Return a state in the orientation of its weight."""
    return x.T if transposed else x
