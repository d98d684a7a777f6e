"""Convert states from and to other libraries' AdamW: torch's and bitsandbytes'.

torch keeps `exp_avg` and `exp_avg_sq` in the parameter's shape and dtype. bitsandbytes keeps `state1` and `state2`: float32 in
the parameter's shape, or 8-bit codes. `qmap1` and `qmap2` hold the value of each code, `absmax1` and `absmax2` the largest
magnitude of each 256 neighbours of the flattened tensor. Newer versions of bitsandbytes nest these in one entry.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.ops.ranks import local, sharded_like
from dither.ops.reference import state_maps
from dither.ops.reference.adamw import store_state
from dither.optim.groups import MEANING, PREVIOUS, Member
from dither.optim.states import Moments, State, check_placed, count_of, encode
from dither.spec.optimizer import Update

BLOCK = 256
"""bitsandbytes: number of neighbours of the flattened tensor that share a scale."""

SMALLEST = 4096
"""bitsandbytes: tensors with fewer elements keep float32 moments."""

WRAPPED = "__bnb_optimizer_quant_state__"
"""bitsandbytes: the entry of a saved state that holds codes, maps and scales."""

OPTIONS = (
    "amsgrad",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "alpha",
    "t_alpha",
    "t_beta3",
)
"""Group options that only other libraries have; they are dropped when their states are loaded."""


def check_group(group: Mapping[str, Any]) -> None:
    """Raise if the options of another library's group give its moments a different meaning."""
    if group.get("amsgrad"):
        raise UserError("The state was saved with amsgrad=True, whose largest second moments this optimizer does not keep.")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise UserError(
            f"The state was saved by Adam with weight_decay={group['weight_decay']!r}, which went into the gradients, and here "
            "the decay is decoupled: load a state of AdamW, or set its weight_decay to 0."
        )


def loaded(saved: Mapping[str, Any], member: Member) -> State:
    """Return another library's state of a parameter in the member's format. The next step creates master weights if needed."""
    if member.muon:
        raise UserError(
            f"The state is that of another library's optimizer, and {member.name!r} is one of Muon's matrices here: load a "
            "state that dither.optim.Muon saved."
        )
    for key, theirs in saved.items():
        if isinstance(theirs, Tensor) and key in ("exp_avg", "exp_avg_sq", "state1"):
            check_placed(member, key, theirs, member.parameter)
    part = local(member.parameter)
    moments = _moments(saved, part.shape, member.name)
    codes = None if isinstance(member.parameter, DTensor) else _same_codes(saved, part.shape, member.update)
    if codes is None:
        return encode(moments, member)
    return {"step": count_of(moments.step, member.name), **{key: t.to(part.device, copy=True) for key, t in codes.items()}}


def _moments(saved: Mapping[str, Any], shape: torch.Size, name: str) -> Moments:
    """Return the moments of a parameter from a state of torch's or bitsandbytes' AdamW."""
    entries = {**saved, **saved.get(WRAPPED, {})}
    if {"step", "exp_avg", "exp_avg_sq"} <= set(entries):
        if "max_exp_avg_sq" in entries:
            raise UserError(f"The state of {name} has max_exp_avg_sq, amsgrad's, which this optimizer does not keep.")
        moments = Moments(entries["step"], local(entries["exp_avg"]), local(entries["exp_avg_sq"]))
    elif {"step", "state1", "state2"} <= set(entries):
        moments = Moments(entries["step"], _decoded(entries, 1, name), _decoded(entries, 2, name))
    else:
        raise UserError(
            f"The state of {name} has {', '.join(sorted(map(str, saved)))}, which is neither torch's AdamW's (step, exp_avg, "
            "exp_avg_sq) nor bitsandbytes' (step, state1, state2)."
        )
    for moment in (moments.m, moments.v):
        if moment.shape != shape or not moment.is_floating_point():
            raise UserError(
                f"The state of {name} has moments of {moment.dtype} {tuple(moment.shape)}, and the parameter is "
                f"{tuple(shape)}: it belongs to another model."
            )
    return replace(moments, m=moments.m.float(), v=moments.v.float())


def _decoded(entries: Mapping[str, Any], which: int, name: str) -> Tensor:
    """Return bitsandbytes' first or second moment, decoded if it is stored as codes."""
    codes: Tensor = entries[f"state{which}"]
    if codes.dtype != torch.uint8:
        return codes
    needed = (f"qmap{which}", f"absmax{which}")
    if not all(isinstance(entries.get(key), Tensor) for key in needed):
        raise UserError(f"The state of {name} has codes of 8 bits in state{which} without {' and '.join(needed)}.")
    values, largest = (entries[key].to(codes.device) for key in needed)
    if values.numel() != 256 or largest.numel() != -(-codes.numel() // BLOCK):
        raise UserError(
            f"The state of {name} has {largest.numel()} scales for {codes.numel()} codes: only blocks of {BLOCK} are supported."
        )
    scales = largest.repeat_interleave(BLOCK)[: codes.numel()]
    decoded: Tensor = values[codes.flatten().long()] * scales
    return decoded.view(codes.shape)


def _same_codes(saved: Mapping[str, Any], shape: torch.Size, update: Update) -> dict[str, Tensor] | None:
    """Return bitsandbytes' codes and scales under this library's keys, or None if the two storages differ.

    They are the same for dynamic8 with blocks of 256 if rows are whole blocks: then blocks of the flattened tensor are blocks
    of rows.
    """
    entries = {**saved, **saved.get(WRAPPED, {})}
    if not _alike(shape, update) or not all(f"absmax{which}" in entries for which in (1, 2)):
        return None
    state = {}
    for which, key, signed in ((1, "exp_avg", True), (2, "exp_avg_sq", False)):
        values = state_maps.decode(torch.arange(256), signed)
        if not torch.allclose(entries[f"qmap{which}"].cpu(), values, rtol=1e-6, atol=1e-12):
            return None
        state[key] = entries[f"state{which}"]
        state[f"{key}_scale"] = entries[f"absmax{which}"].view(*shape[:-1], shape[-1] // BLOCK)
    return state


def _alike(shape: torch.Size, update: Update) -> bool:
    """Return whether this library stores moments of `shape` as bitsandbytes does."""
    return update.states == "dynamic8" and update.block == BLOCK and len(shape) > 1 and shape[-1] % BLOCK == 0


def _bitsandbytes_state(state: Mapping[str, Tensor], moments: Moments, update: Update) -> dict[str, Any]:
    """Return bitsandbytes' state of a parameter: this library's codes if the storages agree, else rounded to nearest."""
    made: dict[str, Any] = {"step": int(moments.step)}
    for which, key, moment, signed in ((1, "exp_avg", moments.m, True), (2, "exp_avg_sq", moments.v, False)):
        if moment.numel() < SMALLEST:
            made[f"state{which}"] = moment.clone()
            continue
        if _alike(moment.shape, update):
            codes, largest = state[key].clone(), state[f"{key}_scale"].flatten()
        else:
            flat = torch.nn.functional.pad(moment.flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
            codes, scales = store_state(flat, Update("nearest", "dynamic8", block=BLOCK), signed)
            assert scales is not None
            codes, largest = codes.flatten()[: moment.numel()].view(moment.shape), scales.flatten()
        made[f"state{which}"], made[f"absmax{which}"] = codes, largest.clone()
        made[f"qmap{which}"] = state_maps.decode(torch.arange(256, device=codes.device), signed)
    return made


@torch.no_grad()
def torch_state_dict(optimizer: Any) -> dict[str, Any]:
    """Return the state of an `AdamW` for `torch.optim.AdamW.load_state_dict`, with both moments in float32.

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
    groups = _groups(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for member in optimizer.members():
        if optimizer.state.get(member.parameter):
            moments = optimizer.moments(member.parameter)
            state[member.index] = {
                "step": torch.tensor(float(moments.step)),
                "exp_avg": sharded_like(member.parameter, moments.m.clone()),
                "exp_avg_sq": sharded_like(member.parameter, moments.v.clone()),
            }
    fixed = {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
    fixed["decoupled_weight_decay"] = True
    return {"state": state, "param_groups": [group | fixed for group in groups]}


@torch.no_grad()
def bitsandbytes_state_dict(optimizer: Any) -> dict[str, Any]:
    """Return the state of an `AdamW` for `bitsandbytes.optim.AdamW8bit.load_state_dict`.

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
    if any(group["maximize"] for group in optimizer.param_groups):
        raise UserError("bitsandbytes' AdamW has no maximize=True: its moments would be those of the negated gradients.")
    groups = _groups(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for member in optimizer.members():
        if isinstance(member.parameter, DTensor):
            raise UserError(
                f"The parameter {member.name!r} is a DTensor, and bitsandbytes' blocks run over whole tensors: gather it first."
            )
        if kept := optimizer.state.get(member.parameter):
            state[member.index] = _bitsandbytes_state(kept, optimizer.moments(member.parameter), member.update)
    fixed = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
    return {"state": state, "param_groups": [{k: v for k, v in group.items() if k != "maximize"} | fixed for group in groups]}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the groups with the options that every AdamW has, and custom keys; states have the groups' formats then."""
    if any(group.get("use_muon") for group in optimizer.param_groups):
        raise UserError("The optimizer is Muon, whose matrices have no second moments for another library's AdamW.")
    own = (*MEANING, PREVIOUS, "steps", "skipped")
    groups = [{k: v for k, v in group.items() if k not in own} for group in optimizer.state_dict()["param_groups"]]
    return [group | {"betas": tuple(group["betas"])} for group in groups]
