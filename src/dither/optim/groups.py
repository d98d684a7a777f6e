"""Parameter groups: their options, the names of their parameters, and the `Member` that each parameter is.

Names come from `model.named_parameters()`, or from a model that is given later. They determine the random bits that a parameter
draws, so they must be unique. Unnamed parameters are named by position: "group 0, parameter 3". Saved states identify unnamed
parameters by position too, so a resumed run draws the same bits.
"""

import functools
import math
import numbers as number_types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.sharded.gather import CodedWeight, coded_of
from dither.ops.ranks import local, shards
from dither.ops.reference.adamw import FORMATS, LOW
from dither.optim.roles import Role, role_of, sections
from dither.spec.modes import MOST_NORM
from dither.spec.optimizer import ADJUST_LR, LEAST_BETA, MASTERS, MOST_BLOCK, MOST_EPS, NS_DTYPES, Update
from dither.spec.random import Stream

NONFINITE = ("raise", "skip", "unchecked")
"""The choices for NaN or Inf in a gradient; see `AdamW`."""

STATES_ON = ("device", "host")
"""The memories that states may be kept in; see `AdamW`."""

MEANING = ("weights", "states", "state_rounding", "block", "master", "error_feedback", "seed", "min_8bit_size", "use_muon")
"""Options that decide what saved numbers mean. A state is loaded only if these agree."""

NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Options that every step reads again. Loading a state overwrites them."""

IMPLEMENTATIONS = ("foreach", "fused", "capturable")
"""torch's choices of implementation. They have no effect here: there is one implementation."""

MUON = ("nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "adjust_lr_fn", "transposed")
"""Options of Muon's groups beside `use_muon` and numbers."""

WATCHED = (*MEANING, *MUON, "maximize", "amsgrad", "differentiable", "bf16_stochastic_round")
"""Options that a step compares with the last one's, to notice an edited group."""

PREVIOUS = "previous_squares"
"""The key of saved groups with the squared norm of the last step's gradients; only if steps clip by it."""


# Members ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of an optimizer, how it is stored, and its row in the tables of hyperparameters and step counts."""

    index: int
    group: dict[str, Any]
    name: str
    parameter: Tensor
    update: Update
    role: Role | None = None
    """Adam-mini: which rows share a second moment; None if each element has its own."""

    @property
    def muon(self) -> bool:
        """Return True if Muon orthogonalizes the update of this parameter, which then has no second moment."""
        return bool(self.group.get("use_muon"))

    @property
    def ratio(self) -> float:
        """Return the scale of the update of one of Muon's matrices, by its shape; 1 for other parameters.

        Experts [experts, rows, columns] have that of one matrix.
        """
        if not self.muon:
            return 1.0
        rows, columns = self.parameter.shape[-2:]
        if self.group["transposed"]:
            rows, columns = columns, rows
        if self.group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))

    @property
    def draws(self) -> bool:
        """Return whether a step of this parameter draws random bits."""
        narrow = self.parameter.itemsize < 4 or self.coded is not None
        return (narrow and not self.update.master and self.update.weights == "stochastic") or self.update.draws_states

    @property
    def coded(self) -> CodedWeight | None:
        """Return the parameter if it exists only as codes, else None."""
        return coded_of(self.parameter)

    @property
    def keys(self) -> tuple[int, int]:
        """Return the keys of the random streams of the weights and of the moments."""
        seed = self.group["seed"]
        return Stream(seed, "optimizer weight", self.name).key, Stream(seed, "optimizer moments", self.name).key

    @property
    def transposed(self) -> bool:
        """Return True if the update works on the transposed parameter, so that outputs are rows."""
        return self.role is not None and self.role.transposed

    def oriented(self, part: Tensor) -> Tensor:
        """Return the local part of the parameter or of its gradient in the orientation that the update works in, or back."""
        return part.t() if self.transposed else part

    @property
    def sections(self) -> list[tuple[int, int, int]]:
        """Return (first row, end, rows per second moment) of each section of the whole parameter, as oriented."""
        assert self.role is not None
        shape = self.parameter.shape
        rows = shape[1] if self.transposed else self.parameter.numel() // max(shape[-1], 1) if len(shape) else 1
        return sections(self.role, rows, self.name)

    @property
    def runs(self) -> int:
        """Return the number of second moments that rows share."""
        return sum((end - start) // run for start, end, run in self.sections)

    def run_of_row(self, device: torch.device) -> Tensor:
        """Return the number of the second moment of each row of the whole parameter, as oriented: int64[rows]."""
        lengths = [torch.full(((end - start) // run,), run, device=device) for start, end, run in self.sections]
        return torch.arange(self.runs, device=device).repeat_interleave(torch.cat(lengths))

    def refreshed(self) -> "Member":
        """Return the member with the update that its parameter takes now, checked; its dtype may have changed."""
        update = update_of(self.group, self.parameter)
        member = self if update is self.update else replace(self, update=update)
        member.check()
        return member

    def check(self) -> None:
        """Raise if the dtype is not supported, a shard boundary splits a block of an 8-bit state, or the role does not fit."""
        parameter, update = self.parameter, self.update
        if parameter.dtype not in FORMATS:
            raise UserError(
                f"Parameters are float32, bfloat16 or float16, and the parameter {self.name!r} is {parameter.dtype}."
            )
        rules = {f"master={update.master!r}": update.master, "weights='kahan'": update.weights == "kahan"}
        rules["Adam-mini"] = self.role is not None
        kind = next((name for name, present in rules.items() if present), None)
        if self.coded is not None and kind is not None:
            raise UserError(
                f"The parameter {self.name!r} exists only as FP8 codes, which AdamW and Muon round stochastically or to "
                f"nearest, and {kind} was given: leave it out, or do not store weights as codes."
            )
        if update.master in LOW and parameter.dtype != torch.bfloat16:
            raise UserError(
                f"master={update.master!r} splits masters into bfloat16 weights and more bits, and the parameter {self.name!r} "
                f"is {parameter.dtype}: use master='fp32'."
            )
        if update.in_blocks:
            for shard in shards(parameter):
                end = shard.column + local(parameter).shape[-1]
                if shard.column % update.block or (end % update.block and end != parameter.shape[-1]):
                    fits = math.gcd(shard.column, end) & -math.gcd(shard.column, end)  # the largest power of two in both
                    raise UserError(
                        f"The parameter {self.name!r} is sharded at columns {shard.column} to {end}, inside a block of "
                        f"{update.block} that shares a scale: "
                        + (f"use block={min(fits, MOST_BLOCK)}, or shard" if fits >= 16 else "shard")
                        + f" at multiples of {update.block}; states='bf16' has no blocks, and min_8bit_size="
                        f"{parameter.numel() + 1} gives fp32 moments to parameters of this size."
                    )
        if self.group["error_feedback"] and (self.muon or self.role is not None):
            raise UserError(
                "error_feedback=True is for AdamW with a second moment per weight, which neither Adam-mini nor the matrices of "
                "Muon have: leave it out."
            )
        if self.role is not None:
            self._check_role()
        if self.muon and parameter.dim() not in (2, 3):
            raise UserError(
                f"Muon orthogonalizes matrices, and experts [experts, rows, columns], and the parameter {self.name!r} is "
                f"{tuple(parameter.shape)}: put it into a group with use_muon=False, as dither.optim.muon_groups(model) does."
            )
        if self.muon and update.master == "split":
            raise UserError(
                "master='split' keeps one bit in the sign of each weight's second moment, and Muon has no second moments: "
                "use master='fp32' or 'split24'."
            )

    def _check_role(self) -> None:
        if self.update.in_blocks:
            raise UserError(
                f"Adam-mini keeps its first moments in fp32 or bf16, not in states={self.update.states!r}: its second moments "
                "are few already; use AdamW for 8-bit states."
            )
        if self.update.master == "split":
            raise UserError(
                "master='split' keeps one bit in the sign of each weight's second moment, and Adam-mini shares second moments: "
                "use master='fp32' or 'split24'."
            )
        if self.transposed and (self.parameter.dim() != 2 or isinstance(self.parameter, DTensor)):
            raise UserError(
                f"The parameter {self.name!r} has a transposed role, which takes an unsharded matrix: "
                "convert the model to one with [outputs, inputs] weights, or use AdamW."
            )
        _ = self.sections  # raises if the role does not fit


def members_of(groups: Sequence[dict[str, Any]], share: Mapping[str, Role] | None = None) -> list[Member]:
    """Return the members of all groups; with roles (`share`), those of Adam-mini."""
    members: list[Member] = []
    for number, group in enumerate(groups):
        if share is not None and group.get("param_names") is None:
            raise UserError("Adam-mini finds roles by name: pass model.named_parameters() instead of model.parameters().")
        for name, parameter in zip(names_of(groups, number), group["params"], strict=True):
            role = None if share is None else role_of(share, name)
            members.append(Member(len(members), group, name, parameter, update_of(group, parameter), role))
    return members


def update_of(group: Mapping[str, Any], parameter: Tensor) -> Update:
    """Return the update that a group's options mean for a parameter."""
    small = parameter.dim() < 2 or parameter.numel() < group["min_8bit_size"]
    options = [group[key] for key in ("weights", "states", "state_rounding", "block", "master", "error_feedback")]
    return update_for(*options, parameter.dtype, small, coded_of(parameter) is not None)


# Options --------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def update_for(
    weights: str,
    states: str | None,
    state_rounding: str | None,
    block: int,
    master: str | None,
    error_feedback: bool,
    dtype: torch.dtype,
    small: bool,
    coded: bool,
) -> Update:
    """Return the update that a group's options mean for a parameter of `dtype`, or one that is stored as codes (`coded`).

    A `small` parameter (a norm, a bias) has fp32 moments where others have 8-bit ones.

    >>> update_for("stochastic", None, None, 128, None, False, torch.bfloat16, False, False).states
    'bf16'
    """
    chosen = states or ("fp32" if dtype == torch.float32 else "bf16")
    update = Update(weights, chosen, state_rounding or "", block, master or "", error_feedback)  # type: ignore[arg-type]
    if dtype == torch.float32 and update.master != "fp32":  # nothing to split, and nothing to round without codes
        update = replace(update, master=update.master if coded else "", error_feedback=error_feedback and coded)
    # Norms and biases are small and sensitive, and FSDP may split them anywhere.
    return replace(update, states="fp32", state_rounding="") if update.in_blocks and small else update


def rounding_of(weights: str | None, bf16_stochastic_round: bool | None, master: str | None = None) -> str | None:
    """Return `weights`, or the rounding that torchao's `bf16_stochastic_round` means; None if neither is given.

    >>> rounding_of(None, False)
    'nearest'
    """
    if bf16_stochastic_round is None:
        return weights
    if not isinstance(bf16_stochastic_round, bool):
        raise UserError(f"bf16_stochastic_round is True or False, not {bf16_stochastic_round!r}.")
    meant = "stochastic" if bf16_stochastic_round else "nearest"
    if weights not in (None, meant):
        raise UserError(
            f"bf16_stochastic_round={bf16_stochastic_round} means weights={meant!r}, and weights={weights!r} was given too: "
            "choose one of them."
        )
    if bf16_stochastic_round and master is not None:
        raise UserError(
            f"bf16_stochastic_round=True rounds bfloat16 weights stochastically, and master={master!r} keeps wider weights, "
            "which are rounded to nearest: choose one of them."
        )
    return meant


def check_optimizer(max_norm: Any, nonfinite: Any, states_on: Any) -> None:
    """Raise if an option of the whole optimizer is invalid."""
    if states_on not in STATES_ON:
        raise UserError(f"states_on={states_on!r} is unknown: choose from {', '.join(map(repr, STATES_ON))}.")
    if nonfinite not in NONFINITE:
        raise UserError(f"nonfinite={nonfinite!r} is unknown: choose from {', '.join(map(repr, NONFINITE))}.")
    if max_norm is not None and not (isinstance(max_norm, int | float) and 0 < max_norm <= MOST_NORM):
        raise UserError(f"max_norm is a positive number, or None for no clipping, and at most {MOST_NORM:g}, not {max_norm!r}.")


def check_group(group: Mapping[str, Any], *, wait: bool = True) -> None:
    """Raise if an option of a group is invalid. `wait` reads numbers on a device. Formats are checked with the parameters."""
    check_numbers(read_numbers(group, wait=wait))
    check_torchs(group)
    if "use_muon" in group:
        check_muon(group)
    if group["master"] not in (None, *MASTERS):
        raise UserError(f"master is None, {', '.join(map(repr, MASTERS[:-1]))} or {MASTERS[-1]!r}, not {group['master']!r}.")
    least = group["min_8bit_size"]
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise UserError(f"min_8bit_size is a number of elements from 0 on, not {least!r}.")
    if not isinstance(group["error_feedback"], bool):
        raise UserError(f"error_feedback is True or False, not {group['error_feedback']!r}.")
    if group["error_feedback"] and not group.get("use_muon"):  # whose matrices are refused by `Member.check`
        _, beta1, _, eps, _ = read_numbers(group, wait=wait)
        if not isinstance(beta1, Tensor) and beta1 < LEAST_BETA:
            raise UserError(f"error_feedback=True lets the first moment carry errors, so betas[0] is at least {LEAST_BETA:g}.")
        if not isinstance(eps, Tensor) and eps > MOST_EPS:
            raise UserError(f"error_feedback=True multiplies errors by eps, which is at most {MOST_EPS:g}, not {eps!r}.")
    Stream(group["seed"], "", "")  # raises if the seed is invalid
    if not group["params"]:
        raise UserError("A parameter group is empty.")


def check_muon(group: Mapping[str, Any]) -> None:
    """Raise if an option of Muon is invalid."""
    for key in ("use_muon", "nesterov", "transposed"):
        if not isinstance(group[key], bool):
            raise UserError(f"{key} is True or False, not {group[key]!r}.")
    if group["adjust_lr_fn"] not in (None, *ADJUST_LR):
        raise UserError(f"adjust_lr_fn is {', '.join(map(repr, ADJUST_LR))} or None, not {group['adjust_lr_fn']!r}.")
    if group["ns_dtype"] not in NS_DTYPES:
        raise UserError(f"ns_dtype is {' or '.join(map(repr, NS_DTYPES))}, not {group['ns_dtype']!r}.")
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps < 100:
        raise UserError(f"ns_steps is a number of iterations from 1 to 99, not {steps!r}.")
    finite = isinstance(coefficients, Sequence) and len(coefficients) == 3 and all(map(_finite, coefficients))
    if not finite:
        raise UserError(f"ns_coefficients are three numbers, such as (3.4445, -4.775, 2.0315), not {coefficients!r}.")


def _finite(value: object) -> bool:
    return isinstance(value, number_types.Real) and not isinstance(value, bool) and math.isfinite(value)


def check_torchs(group: Mapping[str, Any]) -> None:
    """Raise if an option of torch's AdamW is set that this optimizer does not support."""
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
    """Return [lr, beta1, beta2, eps, weight_decay]: numbers, or tensors on a device, which are read only if `wait`.

    For Muon, beta1 is 0, so that the size of a step is lr, and beta2 is the momentum.
    """
    betas = group["betas"]
    if group.get("use_muon"):
        betas = (0.0, momentum := group["momentum"])
        if not isinstance(momentum, Tensor) and not (_finite(momentum) and 0 <= momentum < 1):
            raise UserError(f"momentum is a number from 0 to below 1, such as 0.95, not {momentum!r}.")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise UserError(f"betas are two numbers from 0 to below 1, such as (0.9, 0.999), not {betas!r}.")
    numbers = [group["lr"], *betas, group["eps"], group["weight_decay"]]
    for index, value in enumerate(numbers):
        if isinstance(value, Tensor):
            if value.numel() != 1:
                what = ("A learning rate", "A beta", "A beta", "eps", "weight_decay")[index]
                raise UserError(f"{what} is one number, not a tensor of shape {tuple(value.shape)}.")
            if wait or value.device.type == "cpu":
                numbers[index] = float(value)
    return numbers


def check_numbers(numbers: Sequence[Any]) -> None:
    """Raise if a learning rate, beta, eps or decay is invalid. Tensors on a device pass here; `prepare` checks them."""
    lr, beta1, beta2, eps, decay = numbers
    if not _number(lr) or (not isinstance(lr, Tensor) and not 0 <= lr < math.inf):
        raise UserError(f"The learning rate is a number from 0 on, such as 1e-3, not {lr!r}.")
    if not all(_number(beta) and (isinstance(beta, Tensor) or 0 <= beta < 1) for beta in (beta1, beta2)):
        raise UserError(f"betas are two numbers from 0 to below 1, such as (0.9, 0.999), not {(beta1, beta2)!r}.")
    if not _number(eps) or (not isinstance(eps, Tensor) and not 1e-30 <= eps <= 1e30):
        raise UserError(f"eps is a number from 1e-30 to 1e30, such as 1e-8, not {eps!r}: it prevents a division by zero.")
    if not _number(decay) or (not isinstance(decay, Tensor) and not 0 <= decay < math.inf):
        raise UserError(f"weight_decay is a number from 0 on, such as 0.01, not {decay!r}.")


def _number(value: object) -> bool:
    return isinstance(value, number_types.Real | Tensor) and not isinstance(value, bool)


# Names ----------------------------------------------------------------------------------------------------------------


def names_of(groups: Sequence[Mapping[str, Any]], number: int) -> list[str]:
    """Return the names of the parameters of group `number`: its own, or names by position.

    >>> names_of([{"params": ["a"], "param_names": ["weight"]}, {"params": ["b", "c"]}], 1)
    ['group 1, parameter 0', 'group 1, parameter 1']
    """
    group = groups[number]
    own = group.get("param_names")
    if own is None:
        return [f"group {number}, parameter {index}" for index in range(len(group["params"]))]
    if len(own) != len(group["params"]):
        raise UserError(
            f"Parameter group {number} has {len(group['params'])} parameters and {len(own)} names: "
            "change its 'params' and 'param_names' together."
        )
    return list(own)


def check_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a name or a parameter occurs twice."""
    names: set[str] = set()
    parameters: dict[int, str] = {}
    for number, group in enumerate(groups):
        for name, parameter in zip(names_of(groups, number), group["params"], strict=True):
            if id(parameter) in parameters:
                raise UserError(
                    f"The parameter {name!r} is the same tensor as {parameters[id(parameter)]!r}, and would be updated twice: "
                    "list it once."
                )
            if name in names:
                raise UserError(
                    f"Two parameters are called {name!r}, and would draw the same random bits: give each a unique name."
                )
            names.add(name)
            parameters[id(parameter)] = name


def names_from(model: nn.Module | Iterable[tuple[str, Tensor]], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names that a model has for the parameters of each group."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model
    known = {id(parameter): name for name, parameter in named}
    for number, group in enumerate(groups):
        for name, parameter in zip(names_of(groups, number), group["params"], strict=True):
            if id(parameter) not in known:
                raise UserError(
                    f"The parameter {name!r} of shape {tuple(parameter.shape)} is not one of the model's: "
                    "pass the model that the optimizer was created for."
                )
    return [[known[id(parameter)] for parameter in group["params"]] for group in groups]
