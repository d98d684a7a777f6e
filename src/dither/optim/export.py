"""Export an optimizer's state to torch's and bitsandbytes' AdamW."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.optim.adamw import AdamW
from dither.optim.peers import bitsandbytes_state
from dither.optim.shards import like


@torch.no_grad()
def torch_state_dict(optimizer: AdamW) -> dict[str, Any]:
    """Return the state for `torch.optim.AdamW.load_state_dict`, with both moments in float32.

    torch casts them to the parameter's dtype when it loads them. Master weights, Kahan's remainders, the seed and the number
    of skipped steps are left out: torch has no place for them.

    >>> import dither, torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), states="dynamic8")
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> other = torch.optim.AdamW(model.named_parameters())
    >>> other.load_state_dict(dither.optim.torch_state_dict(optimizer))
    >>> other.state[model.weight]["step"]
    tensor(1.)
    """
    state: dict[int, dict[str, Any]] = {}
    for slot in optimizer._stored_slots():
        moments = optimizer._moments(slot)
        state[slot.index] = {
            "step": torch.tensor(float(moments.step)),
            "exp_avg": like(slot.parameter, moments.m.clone()),
            "exp_avg_sq": like(slot.parameter, moments.v.clone()),
        }
    fixed = {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    fixed["decoupled_weight_decay"] = True
    return {"state": state, "param_groups": [group | fixed for group in _groups(optimizer)]}


@torch.no_grad()
def bitsandbytes_state_dict(optimizer: AdamW) -> dict[str, Any]:
    """Return the state for `bitsandbytes.optim.AdamW8bit.load_state_dict`.

    With states="dynamic8", block=256 and rows of a multiple of 256 elements, the codes are copied as they are. All other states
    are rounded to the nearest value of bitsandbytes' map. Tensors of fewer than 4096 elements have float32 moments, as in
    bitsandbytes.

    >>> import dither, torch
    >>> model = torch.nn.Linear(512, 16)
    >>> optimizer = dither.optim.AdamW8bit(model.named_parameters())
    >>> model(torch.ones(1, 512)).sum().backward()
    >>> optimizer.step()
    >>> dither.optim.bitsandbytes_state_dict(optimizer)["state"][0]["state1"].dtype
    torch.uint8
    """
    state: dict[int, dict[str, Any]] = {}
    for slot in optimizer._stored_slots():
        if isinstance(slot.parameter, DTensor):
            raise UserError(
                f"The parameter {slot.name!r} is a DTensor, and bitsandbytes' blocks run over whole tensors: gather it first."
            )
        state[slot.index] = bitsandbytes_state(optimizer.state[slot.parameter], optimizer._moments(slot), slot.update)
    fixed = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
    groups = [{key: value for key, value in group.items() if key != "maximize"} | fixed for group in _groups(optimizer)]
    if any(group["maximize"] for group in optimizer.param_groups):
        raise UserError("bitsandbytes' AdamW has no maximize=True: its moments would be those of the negated gradients.")
    return {"state": state, "param_groups": groups}


def _groups(optimizer: AdamW) -> list[dict[str, Any]]:
    """Return the groups with the options that every AdamW has, and custom keys."""
    own = ("weights", "states", "state_rounding", "block", "master", "seed", "min_8bit_size", "steps", "skipped")
    groups = [{k: v for k, v in group.items() if k not in own} for group in optimizer.state_dict()["param_groups"]]
    return [group | {"betas": tuple(group["betas"])} for group in groups]
