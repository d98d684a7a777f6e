"""Read the update rule of each weight from the state of an optimizer. Nothing here changes the optimizer."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.adam_update import Update
from dither.errors import UserError
from dither.nn.tensor_parallel import local
from dither.optim.adam_mini import AdamMini
from dither.optim.adamw import AdamW
from dither.optim.roles import role_of
from dither.optim.shards import as_matrix
from dither.reference.adamw import load_state
from dither.snip.update_rules import AdagradRule, AdamRule, MuonRule, RmspropRule, SgdRule, UpdateRule


class _Loading(Mapping[str, UpdateRule]):
    """Update rules that are read when accessed: all of them at once, in float32, can take many gigabytes."""

    def __init__(self, load: dict[str, Callable[[], UpdateRule]]) -> None:
        self._load = load

    def __getitem__(self, name: str) -> UpdateRule:
        return self._load[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def __len__(self) -> int:
        return len(self._load)


def update_rules_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> Mapping[str, UpdateRule]:
    """Return the update rule of each layer's weight, by layer name.

    Supported optimizers are dither's AdamW in every format and AdamMini, and torch's AdamW, Adam, SGD, RMSprop, Adagrad and
    Muon. A rule is read from the optimizer each time it is accessed.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> update_rules_of(optimizer, {"up": layer.weight})
    Traceback (most recent call last):
        ...
    dither.errors.UserError: The optimizer has no state of the layer 'up' yet: take a few steps before its moments are needed.
    >>> update_rules_of(torch.optim.SGD(layer.parameters(), lr=0.1), {"up": layer.weight})["up"].lr
    0.1
    """
    places = {id(p): (group, number) for group in optimizer.param_groups for number, p in enumerate(group["params"])}
    if isinstance(optimizer, AdamW):
        optimizer._stored_slots()  # convert states to the formats that the groups have now
    read = _reader(optimizer)
    found: dict[str, Callable[[], UpdateRule]] = {}
    for name, weight in weights.items():
        if isinstance(weight, DTensor) and isinstance(optimizer, AdamMini | torch.optim.Muon):
            shared = "second moments are" if isinstance(optimizer, AdamMini) else "update of each element is"
            raise UserError(
                f"The weight of the layer {name!r} is sharded over ranks, and {type(optimizer).__name__}'s {shared} shared "
                "between them: score an unsharded copy of the model."
            )
        if id(weight) not in places:
            raise UserError(
                f"The optimizer does not have the weight of the layer {name!r}, so it never changes: leave the layer out."
            )
        state = optimizer.state.get(weight, {})
        group, number = places[id(weight)]
        if (not state and read is not _sgd) or (read is _adam and not int(state.get("step", 0))):
            raise UserError(
                f"The optimizer has no state of the layer {name!r} yet: take a few steps before its moments are needed."
            )
        if read is _adam:
            _check_state(optimizer, name, state, group)
        found[name] = partial(read, optimizer, weight, state, group, number)
    return _Loading(found)


_Reader = Callable[[torch.optim.Optimizer, Tensor, dict[str, Any], dict[str, Any], int], UpdateRule]


def _reader(optimizer: torch.optim.Optimizer) -> _Reader:
    """Return the function that turns a weight's state into its rule."""
    readers: list[tuple[type, _Reader]] = [
        (torch.optim.SGD, _sgd),
        (torch.optim.RMSprop, _rmsprop),
        (torch.optim.Adagrad, _adagrad),
        (torch.optim.Muon, _muon),
    ]
    for kind, read in readers:
        if isinstance(optimizer, kind):
            return read
    # Some other optimizers of torch have states with AdamW's names but another update.
    if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.Adam):
        raise _unknown(optimizer)
    return _adam


def _unknown(optimizer: torch.optim.Optimizer) -> UserError:
    return UserError(
        f"SNIP needs the derivative of an optimizer's update with respect to the gradient, and has none for "
        f"{type(optimizer).__name__}: use AdamW, Adam, AdamMini, SGD, RMSprop, Adagrad or Muon."
    )


def _check_state(optimizer: torch.optim.Optimizer, name: str, state: dict[str, Any], group: dict[str, Any]) -> None:
    missing = [key for key in ("exp_avg", "exp_avg_sq") if key not in state]
    missing += [key for key in ("lr", "betas", "eps") if key not in group]
    if missing:
        raise _unknown(optimizer)


def _coupled(weight: Tensor, group: dict[str, Any]) -> Tensor | None:
    """Return weight_decay * w, for optimizers that add weight decay to the gradient; None without weight decay."""
    return float(group["weight_decay"]) * local(weight).detach().float() if group["weight_decay"] else None


def _wide(state: dict[str, Any], key: str) -> Tensor | None:
    return None if state.get(key) is None else _some(state, key)


def _some(state: dict[str, Any], key: str) -> Tensor:
    found: Tensor = local(state[key]).detach().float()
    return found


def _sgd(optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any], _: int) -> SgdRule:
    return SgdRule(
        float(group["lr"]),
        group["momentum"],
        group["dampening"],
        group["nesterov"],
        _wide(state, "momentum_buffer"),
        _coupled(weight, group),
        group["maximize"],
    )


def _rmsprop(
    optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any], _: int
) -> RmspropRule:
    return RmspropRule(
        _some(state, "square_avg"),
        int(state["step"]) + 1,
        float(group["lr"]),
        group["alpha"],
        group["eps"],
        group["momentum"],
        _wide(state, "grad_avg") if group["centered"] else None,
        _wide(state, "momentum_buffer") if group["momentum"] > 0 else None,
        _coupled(weight, group),
        group["maximize"],
    )


def _adagrad(
    optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any], _: int
) -> AdagradRule:
    return AdagradRule(
        _some(state, "sum"),
        int(state["step"]) + 1,
        float(group["lr"]),
        group["lr_decay"],
        group["eps"],
        _coupled(weight, group),
        group["maximize"],
    )


def _muon(optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any], _: int) -> MuonRule:
    rows, columns = weight.shape
    adjust = group["adjust_lr_fn"]
    ratio = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    return MuonRule(
        _some(state, "momentum_buffer"),
        float(group["lr"]) * ratio,
        group["momentum"],
        group["nesterov"],
        tuple(group["ns_coefficients"]),
        group["ns_steps"],
        group["eps"],
    )


class StoredMoments(NamedTuple):
    """Moments of a weight as the optimizer stores them now: float32 in the shape of the weight (of this rank's shard)."""

    m: Tensor
    v: Tensor
    runs: Tensor | None = None
    """See `AdamRule.runs`."""
    transposed: bool = False
    """See `AdamRule.transposed`."""
    update: Update | None = None
    """Rounding of the optimizer, if it is one of dither's."""


def read_moments(optimizer: torch.optim.Optimizer, weight: Tensor, group: dict[str, Any], number: int) -> StoredMoments:
    """Read the moments of parameter `number` of a group, without synchronizing with the device."""
    state = optimizer.state[weight]
    if not isinstance(optimizer, AdamW):
        return StoredMoments(local(state["exp_avg"]).float(), local(state["exp_avg_sq"]).float())
    slot = optimizer._slots_of(next(i for i, each in enumerate(optimizer.param_groups) if each is group), 0)[number]
    parts = {key: as_matrix(local(value)) for key, value in state.items() if key != "step"}
    m = load_state(parts["exp_avg"], parts.get("exp_avg_scale"), slot.update, True)
    if not isinstance(optimizer, AdamMini):
        v = load_state(parts["exp_avg_sq"], parts.get("exp_avg_sq_scale"), slot.update, False)
        shape = local(weight).shape
        return StoredMoments(m.view(shape), v.view(shape), update=slot.update)
    transposed = role_of(optimizer.roles, slot.name).transposed
    runs, first = [], 0
    for begin, end, run in optimizer._sections(slot):
        runs.append(first + torch.arange(end - begin, device=m.device) // run)
        first += (end - begin) // run
    of_row = torch.cat(runs)
    v = state["exp_avg_sq"][of_row][:, None].expand_as(m)
    m, v = (m.T, v.T) if transposed else (m, v)
    return StoredMoments(m, v, of_row, transposed, slot.update)


def _adam(
    optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
) -> AdamRule:
    found = read_moments(optimizer, weight, group, number)
    t, lr, betas, eps = int(state["step"]) + 1, float(group["lr"]), tuple(group["betas"]), group["eps"]
    decay = largest = None
    if isinstance(optimizer, torch.optim.Adam):  # torch's AdamW is one, with decoupled decay
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        decay = None if decoupled else _coupled(weight, group)
        largest = _wide(state, "max_exp_avg_sq") if group["amsgrad"] else None
    # An optimizer of another library with AdamW's states is treated as AdamW.
    maximize = bool(group.get("maximize"))
    return AdamRule(found.m, found.v, t, lr, betas, eps, found.runs, found.transposed, largest, decay, maximize)
