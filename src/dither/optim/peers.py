"""Read and write the states of other libraries' AdamW: torch's and bitsandbytes'.

torch keeps `exp_avg` and `exp_avg_sq` in the parameter's shape and dtype. bitsandbytes keeps `state1` and `state2`: float32 in
the parameter's shape, or 8-bit codes. `qmap1` and `qmap2` hold the value of each code, `absmax1` and `absmax2` the largest
magnitude of each 256 neighbours of the flattened tensor. Newer versions of bitsandbytes nest these in one entry.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dither.errors import UserError
from dither.nn.sharded.tensor_parallel import local
from dither.ops.reference import state_maps
from dither.ops.reference.adamw import store_state
from dither.spec.optimizer import Update

BLOCK = 256
"""bitsandbytes: number of neighbours of the flattened tensor that share a scale."""

SMALLEST = 4096
"""bitsandbytes: tensors with fewer elements keep float32 moments."""

WRAPPED = "__bnb_optimizer_quant_state__"
"""bitsandbytes: the entry of a saved state that holds codes, maps and scales."""

THEIRS = (
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


class Moments(NamedTuple):
    """A state without a storage format: the number of steps, and both moments as float32 in the parameter's local shape."""

    step: Any
    m: Tensor
    v: Tensor


def check_saved_group(group: Mapping[str, Any]) -> None:
    """Raise if the options of another library's group give its moments a different meaning."""
    if group.get("amsgrad"):
        raise UserError("The state was saved with amsgrad=True, whose largest second moments this optimizer does not keep.")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise UserError(
            f"The state was saved by Adam with weight_decay={group['weight_decay']!r}, which went into the gradients, and here "
            "the decay is decoupled: load a state of AdamW, or set its weight_decay to 0."
        )


def read_moments(saved: Mapping[str, Any], shape: torch.Size, name: str) -> Moments:
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
    for moment in moments[1:]:
        if moment.shape != shape or not moment.is_floating_point():
            raise UserError(
                f"The state of {name} has moments of {moment.dtype} {tuple(moment.shape)}, and the parameter is "
                f"{tuple(shape)}: it belongs to another model."
            )
    return moments._replace(m=moments.m.float(), v=moments.v.float())


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


def same_codes(saved: Mapping[str, Any], shape: torch.Size, update: Update) -> dict[str, Tensor] | None:
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


def bitsandbytes_state(state: Mapping[str, Tensor], moments: Moments, update: Update) -> dict[str, Any]:
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
