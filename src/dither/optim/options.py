"""Options of a parameter group: what they may be, other libraries' names for them, and which numbers a step reads."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dither.adam_update import Update
from dither.errors import UserError
from dither.random import Stream

NONFINITE = ("raise", "skip", "unchecked")
"""What a NaN or Inf in a gradient may do."""

MEANING = ("weights", "states", "state_rounding", "block", "master", "seed", "min_8bit_size")
"""What in a parameter group decides what the saved numbers mean: a state is loaded only where these agree."""

NUMBERS = ("lr", "betas", "eps", "weight_decay")
"""What a step reads anew; a state that is loaded brings its own."""

IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""torch's choice between implementations. There is one here, and its bits are the same for every choice."""

WATCHED = (*MEANING, "maximize", "amsgrad", "differentiable", "bf16_stochastic_round")
"""What a step compares with the last one, to notice that a group was edited."""

NEWER = {"min_8bit_size": 0, "maximize": False}
"""Options that groups of earlier versions lack, and what these did."""

MOST_NORM = torch.finfo(torch.float32).max
"""The largest norm that gradients can be clipped to: norms are float32."""


@functools.lru_cache(maxsize=1024)
def update_for(
    weights: str,
    states: str | None,
    state_rounding: str | None,
    block: int,
    master: str | None,
    dtype: torch.dtype,
    small: bool,
) -> Update:
    """Return how a parameter is kept; a `small` one (a norm, a bias) has fp32 moments where others have 8 bits."""
    chosen = states or ("fp32" if dtype == torch.float32 else "bf16")
    update = Update(weights, chosen, state_rounding or "", block, master == "fp32")  # type: ignore[arg-type]
    # A norm or a bias is small, matters much, and is what FSDP cuts at any place.
    return Update(update.weights, "fp32", "", update.block, update.master) if update.in_blocks and small else update


def rounding_of(weights: str | None, bf16_stochastic_round: bool | None) -> str | None:
    """Return `weights`, or what torchao's `bf16_stochastic_round` says instead; None where neither is given.

    >>> rounding_of(None, False)
    'nearest'
    """
    if bf16_stochastic_round is None:
        return weights
    if not isinstance(bf16_stochastic_round, bool):
        raise UserError(f"bf16_stochastic_round is True or False, not {bf16_stochastic_round!r}.")
    said = "stochastic" if bf16_stochastic_round else "nearest"
    if weights not in (None, said):
        raise UserError(
            f"bf16_stochastic_round={bf16_stochastic_round} means weights={said!r}, and weights={weights!r} was given too: "
            "choose one of them."
        )
    return said


def check_optimizer(max_norm: Any, nonfinite: Any) -> None:
    """Raise if an option of the whole optimizer cannot be."""
    if nonfinite not in NONFINITE:
        raise UserError(f"nonfinite={nonfinite!r} is unknown: choose from {', '.join(map(repr, NONFINITE))}.")
    if max_norm is not None and not (isinstance(max_norm, int | float) and 0 < max_norm <= MOST_NORM):
        raise UserError(f"max_norm is a positive number, or None for no clipping, and at most {MOST_NORM:g}, not {max_norm!r}.")


def check_group(group: Mapping[str, Any], *, wait: bool = True) -> None:
    """Raise if an option of a group cannot be; formats are checked with its parameters. `wait` reads numbers on a device."""
    check_numbers(read_numbers(group, wait=wait))
    check_torchs(group)
    if group["master"] not in (None, "fp32"):
        raise UserError(f"master is None or 'fp32', not {group['master']!r}.")
    least = group["min_8bit_size"]
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise UserError(f"min_8bit_size is a number of elements from 0 on, not {least!r}.")
    Stream(group["seed"], "", "")  # says what is wrong with a seed
    if not group["params"]:
        raise UserError("A parameter group is empty.")


def check_torchs(group: Mapping[str, Any]) -> None:
    """Raise if one of torch's options is asked for that would not be done."""
    if group.get("amsgrad"):
        raise UserError("amsgrad=True keeps the largest second moments, which this optimizer does not: use torch.optim.AdamW.")
    if group.get("differentiable"):
        raise UserError(
            "differentiable=True needs a step that autograd records, and this one is a kernel: use torch.optim.AdamW."
        )
    if not isinstance(group.get("maximize"), bool):
        raise UserError(f"maximize is True or False, not {group.get('maximize')!r}.")
    if group.get("bf16_stochastic_round") is not None:
        raise UserError(
            "bf16_stochastic_round is another name for weights when an optimizer is made: set the group's 'weights'."
        )
    for key in IMPLEMENTATIONS:
        if group.get(key) not in (None, True, False):
            raise UserError(f"{key} is True, False or None, not {group[key]!r}.")


def read_numbers(group: Mapping[str, Any], *, wait: bool = False) -> list[Any]:
    """Return lr, both betas, eps and weight_decay: numbers, or tensors on a device, which only `wait` reads."""
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise UserError(f"betas are two numbers from 0 to below 1, such as (0.9, 0.999), not {betas!r}.")
    found = [group["lr"], *betas, group["eps"], group["weight_decay"]]
    for place, value in enumerate(found):
        if isinstance(value, Tensor):
            if value.numel() != 1:
                what = ("A learning rate", "A beta", "A beta", "eps", "weight_decay")[place]
                raise UserError(f"{what} is one number, not a tensor of shape {tuple(value.shape)}.")
            if wait or value.device.type == "cpu":
                found[place] = float(value)
    return found


def check_numbers(numbers: Sequence[Any]) -> None:
    """Raise if a rate, beta, eps or decay cannot be. Tensors on a device pass: `prepare` looks at these."""
    lr, beta1, beta2, eps, decay = numbers
    if not _number(lr) or (not isinstance(lr, Tensor) and not 0 <= lr < math.inf):
        raise UserError(f"The learning rate is a number from 0 on, such as 1e-3, not {lr!r}.")
    if not all(_number(beta) and (isinstance(beta, Tensor) or 0 <= beta < 1) for beta in (beta1, beta2)):
        raise UserError(f"betas are two numbers from 0 to below 1, such as (0.9, 0.999), not {(beta1, beta2)!r}.")
    if not _number(eps) or (not isinstance(eps, Tensor) and not 1e-30 <= eps <= 1e30):
        raise UserError(
            f"eps is a number from 1e-30 to 1e30, such as 1e-8, not {eps!r}: it keeps the division by a zero moment away."
        )
    if not _number(decay) or (not isinstance(decay, Tensor) and not 0 <= decay < math.inf):
        raise UserError(f"weight_decay is a number from 0 on, such as 0.01, not {decay!r}.")


def _number(value: object) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)
