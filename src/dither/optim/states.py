"""The state that an optimizer keeps per parameter: its tensors, their formats, and changes of format between steps.

A state has the entries `step`, `exp_avg` and `exp_avg_sq`, for moments in few bits also `exp_avg_scale` and `exp_avg_sq_scale`,
and `master`, `master_low` or `remainder`. Every tensor is a DTensor placed as its parameter, if that is one. The second moments
of Adam-mini are one per run of rows, and whole on every rank. Muon's matrices have a momentum, `exp_avg`, and no `exp_avg_sq`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.ops.ranks import as_matrix, local, sharded_like, shards
from dither.ops.reference import adamw as reference
from dither.ops.reference.adamw import load_state, store_state, zero_state
from dither.optim.groups import Member
from dither.spec.optimizer import Update
from dither.spec.random import matrix_size

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The entries of both moments, and whether they are signed."""

EXTRA = ("master", "master_low", "remainder")
"""The entries beside the moments: float32 masters, low bits of split ones, or Kahan's remainder. A state has one at most."""

OWN = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", *EXTRA)
"""The entries that this optimizer may keep in a parameter's state. Other entries belong to the user and are left alone."""

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Moments:
    """A state without a storage format: the number of steps, and both moments as float32 in the parameter's local shape."""

    step: Any
    m: Tensor
    v: Tensor
    """Muon: float32[0], since there is none."""
    runs: Tensor | None = None
    """Adam-mini: the number of the second moment of each row, int64[rows]; None if each element has its own."""
    transposed: bool = False
    """Adam-mini: True if rows are those of the transposed parameter."""


def moments_of(member: Member) -> dict[str, bool]:
    """Return the entries of the moments that a parameter has, and whether they are signed."""
    return {"exp_avg": True} if member.muon else MOMENTS


def layout(member: Member) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and local shape of every tensor of a parameter's state, but for the count of steps."""
    update, shape = member.update, member.oriented(local(member.parameter)).shape
    dtype = torch.uint8 if update.in_blocks else torch.float32 if update.states == "fp32" else torch.bfloat16
    entries = dict.fromkeys(moments_of(member), (dtype, _stored_shape(shape, update)))
    if update.in_blocks:
        scales = torch.Size((*shape[:-1], math.ceil(shape[-1] / update.block)))
        entries |= dict.fromkeys((f"{key}_scale" for key in moments_of(member)), (torch.float32, scales))
    if member.role is not None:
        entries["exp_avg_sq"] = (torch.float32, torch.Size((member.runs,)))
    if update.master:
        low = reference.LOW.get(update.master)
        return entries | ({"master": (torch.float32, shape)} if low is None else {"master_low": (low, shape)})
    kahan = update.weights == "kahan" and member.parameter.dtype != torch.float32
    return entries | ({"remainder": (member.parameter.dtype, shape)} if kahan else {})


def _stored_shape(shape: torch.Size, update: Update) -> torch.Size:
    """Return the shape in which the moments of a parameter, or of a part, are stored."""
    return torch.Size((*shape[:-1], update.bytes_per_row(shape[-1]))) if update.packed else shape


def new(member: Member, device: torch.device | None = None) -> State:
    """Return the state of a parameter before its first step, its moments on `device` if given."""
    part = member.oriented(local(member.parameter))
    state = {"step": torch.zeros((), dtype=torch.int64, device=part.device)}
    device = part.device if device is None else device
    for key, signed in moments_of(member).items():
        if member.role is not None and key == "exp_avg_sq":
            state[key] = torch.zeros(member.runs, device=device)
        else:
            state |= _placed(member, key, *zero_state(matrix_size(part), member.update, signed, device))
    return state | _extra(member, {})


def decode(state: Mapping[str, Any], member: Member, update: Update) -> Moments:
    """Return the moments of a state that was written with `update`, as float32, without waiting for the device."""
    moments = []
    for key, signed in moments_of(member).items():
        values, scale = local(state[key]), local(state.get(f"{key}_scale"))
        if member.role is not None and key == "exp_avg_sq":
            break
        if scale is not None and update.in_blocks:
            shape = member.oriented(local(member.parameter)).shape
            moments.append(load_state(as_matrix(values), as_matrix(scale), update, signed, shape[-1]).view(shape))
        else:
            moments.append(load_state(values, None, replace(update, states="fp32"), signed, 0))
    if member.role is None:
        return Moments(state["step"], moments[0], moments[0].new_empty(0) if member.muon else moments[1])
    m = moments[0]
    if values.shape == member.parameter.shape != layout(member)["exp_avg_sq"][1]:  # torch's
        return Moments(state["step"], member.oriented(m), values.float())
    run_of_row = member.run_of_row(values.device)
    held = [run_of_row[part.row : part.row + part.end - part.start] for part in shards(member.oriented(member.parameter))]
    runs = torch.cat([run_of_row[:0], *held])
    v = values.float()[runs][:, None].expand(matrix_size(m)).reshape(m.shape)
    return Moments(state["step"], member.oriented(m), member.oriented(v), runs, member.transposed)


def encode(moments: Moments, member: Member) -> State:
    """Return the state of a parameter with these moments, rounded to nearest, without master weights or remainder.

    The second moment of one of Adam-mini's runs is the mean over its elements, which is exact: a moving average of squares is
    linear.
    """
    device = local(member.parameter).device
    state: State = {"step": count_of(moments.step, member.name).to(device)}
    for (key, signed), moment in zip(moments_of(member).items(), (moments.m, moments.v), strict=False):
        if member.role is not None and key == "exp_avg_sq":
            placed = sharded_like(member.parameter, moment)
            whole = member.oriented(placed.full_tensor() if isinstance(placed, DTensor) else placed)
            rows = whole.reshape(matrix_size(whole)).double()
            means = [rows[start:end].reshape((end - start) // run, -1).mean(1) for start, end, run in member.sections]
            state[key] = torch.cat(means).float().to(device)
            continue
        moment = member.oriented(moment.to(device)).contiguous()
        storage, scale = zero_state(matrix_size(moment), member.update, signed, device)
        values, restore = store_state(as_matrix(moment), member.update, signed)
        storage.copy_(values)
        state |= _placed(member, key, storage, scale if restore is None else restore)
    return state


def _placed(member: Member, key: str, values: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
    """Return the storage of a moment, a matrix and its scales, in the parameter's shape and placement."""
    shape, update = member.oriented(local(member.parameter)).shape, member.update
    columns = update.bytes_per_row(member.parameter.shape[-1]) if update.packed else None
    state = {key: sharded_like(member.parameter, values.view(_stored_shape(shape, update)), columns)}
    if scale is not None:
        blocks = math.ceil(member.parameter.shape[-1] / update.block)
        state[f"{key}_scale"] = sharded_like(member.parameter, scale.view(*shape[:-1], scale.shape[-1]), blocks)
    return state


def wide_weight(state: Mapping[str, Any], member: Member) -> Tensor:
    """Return the float32 weight of a parameter in its local shape: its master, the weight and its remainder, or the weight."""
    if member.coded is not None:
        return member.coded.numbers()
    known = {key: local(state[key]) for key in (*EXTRA, "exp_avg_sq") if key in state}
    return member.oriented(reference.wide_weight(member.oriented(local(member.parameter.detach())), known))


def write_weight(state: Mapping[str, Any], member: Member, values: Tensor, where: Tensor) -> None:
    """Set the float32 weight of a parameter to `values` at `where`, in local shapes, and what is kept beside it."""
    part = local(member.parameter.detach())
    wide = torch.where(where, values, wide_weight(state, member))
    part.copy_(torch.where(where, values.to(part.dtype), part))
    v = state.get("exp_avg_sq")
    if member.update.master == "split" and v is not None:
        local(v).abs_()  # its signs are those of ties, which are marked again
    for key, made in _extra(member, {"master": member.oriented(wide)}, v).items():
        if key in state:
            kept = local(state[key])
            kept.copy_(torch.where(member.oriented(where), local(made), kept))


def _extra(member: Member, old: Mapping[str, Any], v: Tensor | None = None) -> dict[str, Tensor]:
    """Return the master weights, their low bits or Kahan's remainder, if the parameter has any.

    They are taken from the `old` state if possible. A parameter whose masters are split is set to their nearest value, and
    ties are marked in `v`, the new second moment.
    """
    part, update = local(member.parameter.detach()), member.update

    def kept(x: Tensor) -> Tensor:
        return sharded_like(member.parameter, member.oriented(x).clone(memory_format=torch.contiguous_format))

    if update.master:
        wide = wide_weight(old, member).contiguous()
        if update.master == "fp32":
            return {"master": kept(wide)}
        weight, low, *tie = reference.split(wide) if update.master == "split" else reference.split24(wide)
        part.copy_(weight)
        if tie and v is not None:
            local(v).copy_(torch.where(tie[0], -local(v), local(v)))
        return {"master_low": kept(low)}
    if update.weights == "kahan" and part.dtype != torch.float32:
        if "remainder" in old:
            return {"remainder": kept(member.oriented(local(old["remainder"])).to(part.dtype))}
        known = any(key in old for key in EXTRA)
        return {
            "remainder": kept((wide_weight(old, member) - part.float()).to(part.dtype) if known else torch.zeros_like(part))
        }
    return {}


# Edits between steps, and loading --------------------------------------------------------------------------------------


def settle(state: State, member: Member, before: Update, keep: Callable[[Tensor], Tensor] | None = None) -> None:
    """Create a state, or convert it to the format and device that it should have now, in place.

    A state is created at the first gradient. It is converted if the group, the parameter or the state was edited since the
    last step; `before` is the update that it was written with.

    keep: moves a tensor to where states are kept in host memory; by default they are on the device of the parameter.
    """
    update, device = member.update, local(member.parameter).device
    home = None if keep is None else torch.device("cpu")
    keep = keep or partial(on_device, device=device)
    if not state:
        state.update(kept(new(member, home), keep))
        return
    if "step" not in state:
        raise UserError(f"The state of {member.name} has {', '.join(map(str, state))} and no step: delete it to start afresh.")
    state["step"] = count_of(state["step"], member.name).to(device)
    wanted = layout(member)
    here = {key: (local(state[key]).dtype, local(state[key]).shape) for key in wanted if isinstance(state.get(key), Tensor)}
    codes = update.in_blocks and (before.states, before.block) != (update.states, update.block)
    if here == wanted and not codes and before.master == update.master:
        for key in set(OWN) - set(wanted) - {"step"}:
            state.pop(key, None)  # of an option that was switched off
        for key in wanted:
            state[key] = keep(state[key] if local(state[key]).is_contiguous() else state[key].contiguous())
        return
    old = {key: on_device(state[key], device) for key in OWN if key in state}
    moments = [key for key in wanted if key.startswith("exp_avg")]
    whole = not codes and all(here.get(key) == wanted[key] for key in moments)
    fresh = {"step": state["step"], **{key: old[key] for key in moments}} if whole else _converted(old, member, before)
    if whole and before.master == "split":
        fresh["exp_avg_sq"] = fresh["exp_avg_sq"].abs()
    fresh |= _extra(member, old, fresh.get("exp_avg_sq"))
    for key in OWN:
        state.pop(key, None)
    state.update(kept(fresh, keep))


def kept(state: State, keep: Callable[[Tensor], Tensor]) -> State:
    """Return a state whose tensors are moved to where states are kept, but for the count of steps."""
    return {key: keep(value) if key in OWN and key != "step" else value for key, value in state.items()}


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tensor on a device, and anything else unchanged."""
    return value.to(device) if isinstance(value, Tensor) and value.device != device else value


def _converted(old: State, member: Member, before: Update) -> State:
    """Return the moments of a state that was written in another format; `before` is how it was written."""
    shape = member.oriented(local(member.parameter)).shape
    shape = _stored_shape(shape, before) if "exp_avg_scale" in old else shape
    for key in moments_of(member):
        moment = old.get(key)
        wrong = not isinstance(moment, Tensor) or (local(moment).shape != shape and key == "exp_avg")
        if wrong or (moment is not None and moment.dtype == torch.uint8 and not before.in_blocks):
            what = f"{moment.dtype} {tuple(moment.shape)}" if isinstance(moment, Tensor) else repr(moment)
            raise UserError(
                f"The state {key!r} of {member.name} is {what}, and the parameter is {member.parameter.dtype} "
                f"{tuple(member.parameter.shape)}: delete its state to start afresh."
            )
    return encode(decode(old, member, before), member)


def loaded(saved: Mapping[str, Any], member: Member) -> State:
    """Return a saved state of this library, copied into new tensors; keys, dtypes and shapes must agree."""
    state = new(member)
    if set(saved) != set(state):
        raise UserError(
            f"The state of {member.name} has {', '.join(sorted(map(str, saved)))}, "
            f"and this optimizer keeps {', '.join(sorted(state))}."
        )
    state["step"].copy_(count_of(saved["step"], member.name))
    for key, ours in state.items():
        theirs = saved[key]
        if key == "step":
            continue
        if not isinstance(theirs, Tensor) or (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            what = f"{theirs.dtype} {tuple(theirs.shape)}" if isinstance(theirs, Tensor) else repr(theirs)
            raise UserError(
                f"The state {key!r} of {member.name} is {what}, and this optimizer keeps {ours.dtype} {tuple(ours.shape)}."
            )
        check_placed(member, key, theirs, ours)
        ours.copy_(theirs)
    return state


def check_placed(member: Member, key: str, theirs: Tensor, ours: Tensor) -> None:
    """Raise if one of the two tensors is a DTensor and the other is not."""
    if isinstance(theirs, DTensor) != isinstance(ours, DTensor):
        raise UserError(
            f"The state {key!r} of {member.name} is "
            f"{'a DTensor' if isinstance(theirs, DTensor) else 'one whole tensor'} and the optimizer's is not: load it "
            "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )


def count_of(step: Any, name: str) -> Tensor:
    """Return a step count as a 0-d int64 tensor. torch's counts are float32 tensors, bitsandbytes' are Python integers."""
    count = step if isinstance(step, Tensor) else torch.tensor(step)
    if count.dtype == torch.int64 and count.dim() == 0 and count.device.type != "cpu":
        return count  # this library's own: reading it would wait for the device
    number = math.nan if count.numel() != 1 or count.is_complex() or count.dtype == torch.bool else float(count)
    if not number.is_integer() or number < 0:
        raise UserError(f"The state of {name} has step={step!r}, which is not a number of steps.")
    return count if count.dtype == torch.int64 and count.dim() == 0 else count.to(torch.int64).reshape(())
