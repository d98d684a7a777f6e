"""What an optimizer will do with a gradient: AdamW's update, from the moments that it keeps, in whatever format.

    m' = b1 m + (1 - b1) g        v' = b2 v + (1 - b2) g^2        u(g) = lr / (1 - b1^t) * m' / (sqrt(v' / (1 - b2^t)) + eps)

With Adam-mini, g^2 is its mean over the elements that share a second moment. Weight decay is left out: it is the same for every
gradient. Nothing here changes the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.cut import local
from dither.optim.adam_mini import AdamMini
from dither.optim.adamw import AdamW
from dither.optim.roles import role_of
from dither.optim.shards import as_matrix
from dither.reference.adamw import load_state


@dataclass(frozen=True)
class Moments:
    """The moments of one weight before a step, float32 in the weight's shape, and what the step will use.

    Of a weight that is spread over processes they are those of this process's part.
    """

    m: Tensor
    v: Tensor
    t: int
    """The number of the step to come, from 1 on."""
    lr: float
    betas: tuple[float, float]
    eps: float
    runs: Tensor | None = None
    """Adam-mini: the number of the second moment of each row, int64[rows]; None: each element has its own."""
    transposed: bool = False
    """Adam-mini: whether rows are those of the transposed weight."""

    def after(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """m' and v', the moments after a step with the gradient g."""
        b1, b2 = self.betas
        squares = g.square()
        if self.runs is not None:
            rows = (squares.T if self.transposed else squares).mean(1)
            count = torch.bincount(self.runs)
            mean = torch.zeros_like(count, dtype=rows.dtype).index_add_(0, self.runs, rows) / count
            squares = mean[self.runs][:, None].expand(-1, g.shape[0 if self.transposed else 1])
            squares = squares.T if self.transposed else squares
        return b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * squares

    def update(self, g: Tensor) -> Tensor:
        """u(g), what a step subtracts from the weight besides its decay; float32, the weight's shape.

        >>> one = torch.ones(1, 1)
        >>> Moments(m=one, v=one, t=10**6, lr=0.5, betas=(0.9, 0.95), eps=0.0).update(one)
        tensor([[0.5000]])
        """
        b1, b2 = self.betas
        m, v = self.after(g.float())
        return self.lr / (1 - b1**self.t) * m / ((v / (1 - b2**self.t)).sqrt() + self.eps)

    def slope(self, g: Tensor) -> Tensor:
        """h' as SNIP has it (section 4.3.2), element by element: how far an update moves for a small change of its gradient.

            h' = lr sqrt(1 - b2^t) / (1 - b1^t) * | (1 - b1) / (sqrt v' + eps) - (1 - b2) m' g / (sqrt v' (sqrt v' + eps)^2) |

        With Adam-mini, where n elements share v', the second term is 1/n of that.
        """
        (b1, b2), g = self.betas, g.float()
        m, v = self.after(g)
        root = v.sqrt()
        shared: Tensor | float = 1.0
        if self.runs is not None:
            rows = torch.bincount(self.runs)[self.runs][:, None] * g.shape[0 if self.transposed else 1]
            shared = rows.T if self.transposed else rows
        # Where v' is 0 so are g and m', and an element that never had a gradient has no second term.
        second = torch.where(v > 0, (1 - b2) * m * g / (shared * root * (root + self.eps).square()), 0.0)
        size = self.lr * (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
        slope: Tensor = size * ((1 - b1) / (root + self.eps) - second)
        return slope.abs()


class _Loading(Mapping[str, Moments]):
    """Moments that are read from the optimizer when they are asked for: all at once, in float32, they can be many gigabytes."""

    def __init__(self, load: dict[str, Callable[[], Moments]]) -> None:
        self._load = load

    def __getitem__(self, name: str) -> Moments:
        return self._load[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def __len__(self) -> int:
        return len(self._load)


def moments_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> Mapping[str, Moments]:
    """The moments of the weights of layers, by the layers' names: of dither's AdamW in every format, AdamMini, torch's AdamW.

    They are those that the optimizer has when they are asked for; formats other than float32 are read anew each time.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> moments_of(optimizer, {"up": layer.weight})
    Traceback (most recent call last):
        ...
    dither.errors.UserError: The optimizer has no state of the layer 'up' yet: take a few steps before its moments are needed.
    """
    places = {id(p): (group, number) for group in optimizer.param_groups for number, p in enumerate(group["params"])}
    found: dict[str, Callable[[], Moments]] = {}
    if isinstance(optimizer, AdamW):
        optimizer._stored_slots()  # in the formats that its groups have now
    for name, weight in weights.items():
        if isinstance(weight, DTensor) and isinstance(optimizer, AdamMini):
            raise UserError(
                f"The weight of the layer {name!r} is spread over processes, and AdamMini's second moments are shared between "
                "them: score a whole copy of the model."
            )
        if id(weight) not in places:
            raise UserError(f"The optimizer does not have the weight of the layer {name!r}: it never changes, so leave it out.")
        state = optimizer.state.get(weight)
        if not state or not int(state.get("step", 0)):
            raise UserError(
                f"The optimizer has no state of the layer {name!r} yet: take a few steps before its moments are needed."
            )
        _check_state(optimizer, name, state, places[id(weight)][0])
        found[name] = partial(_moments, optimizer, weight, state, *places[id(weight)])
    return _Loading(found)


def _check_state(optimizer: torch.optim.Optimizer, name: str, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not {"exp_avg", "exp_avg_sq"} <= set(state) or not {"lr", "betas", "eps"} <= set(group):
        raise UserError(
            f"{type(optimizer).__name__} keeps {', '.join(sorted(map(str, state)))} of the layer {name!r}, and what a step "
            "does follows from exp_avg, exp_avg_sq, lr, betas and eps: use AdamW or AdamMini."
        )
    if group.get("maximize"):
        raise UserError(
            f"The optimizer maximizes with the weight of the layer {name!r}, and divergences are of a loss that falls."
        )


def _moments(
    optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any], number: int
) -> Moments:
    t, lr = int(state["step"]) + 1, float(group["lr"])
    numbers: Any = (t, lr, tuple(group["betas"]), group["eps"])
    if not isinstance(optimizer, AdamW):
        return Moments(local(state["exp_avg"]).float(), local(state["exp_avg_sq"]).float(), *numbers)
    slot = optimizer._slots_of(next(i for i, each in enumerate(optimizer.param_groups) if each is group), 0)[number]
    parts = {key: as_matrix(local(value)) for key, value in state.items() if key != "step"}
    m = load_state(parts["exp_avg"], parts.get("exp_avg_scale"), slot.update, True)
    if not isinstance(optimizer, AdamMini):
        v = load_state(parts["exp_avg_sq"], parts.get("exp_avg_sq_scale"), slot.update, False)
        shape = local(weight).shape
        return Moments(m.view(shape), v.view(shape), *numbers)
    transposed = role_of(optimizer.roles, slot.name).transposed
    runs, first = [], 0
    for begin, end, run in optimizer._sections(slot):
        runs.append(first + torch.arange(end - begin, device=m.device) // run)
        first += (end - begin) // run
    of_row = torch.cat(runs)
    v = state["exp_avg_sq"][of_row][:, None].expand_as(m)
    m, v = (m.T, v.T) if transposed else (m, v)
    return Moments(m, v, t, lr, tuple(group["betas"]), group["eps"], of_row, transposed)
