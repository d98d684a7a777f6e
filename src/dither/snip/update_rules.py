"""Update rules of optimizers: the next step of a weight as a function of its gradient, and the derivative of that step.

    u(g)    what the next step subtracts from the weight, without decoupled weight decay, which does not depend on g
    h'      derivative of u with respect to g (SNIP, section 4.3.2), elementwise if the rule is; |h'| is its Frobenius norm

Rules compute what torch.optim computes, in float32. Coupled weight decay (`g + weight_decay * w`) is part of the gradient, and
`maximize` flips its sign. `dither.snip.update_rules` reads rules from optimizers.

    AdamW, Adam, AdamMini    `AdamRule`        m, v in any format
    SGD                      `SgdRule`         momentum, dampening, Nesterov
    Muon                     `MuonRule`        momentum in any format, Nesterov, Newton-Schulz iterations
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.ops.ranks import local
from dither.optim.adamw import AdamW
from dither.optim.states import Moments

_Rule = TypeVar("_Rule", bound="UpdateRule")


class UpdateRule:
    """The next step of one weight as a function of its gradient.

    For a sharded weight, the states are those of this rank's shard; `whole` gathers them.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ()
    """Fields that are tensors in the weight's shape, or None."""
    t: int | None
    """Number of the next step, starting at 1; None if the optimizer does not count steps."""

    def update(self, g: Tensor) -> Tensor:
        """Return u(g), which a step subtracts from the weight besides decoupled decay: float32 in the weight's shape."""
        raise NotImplementedError

    def slope(self, g: Tensor) -> Tensor:
        """Return |h'| elementwise: the change of each update per small change of its own gradient."""
        raise NotImplementedError

    def slope_norm(self, g: Tensor) -> Tensor:
        """Return the Frobenius norm of h', 0-d float32."""
        found: Tensor = torch.linalg.vector_norm(self.slope(g), dtype=torch.float32)
        return found

    @property
    def elementwise(self) -> bool:
        """Return True if the update of an element depends on its own gradient and states only."""
        return True

    def secant(self, g: Tensor, size: Tensor | float) -> Tensor:
        """Return the change of each update per change of its own gradient, from g - size to g + size; float32 like g.

        Unlike `slope`, it does not explode where an adaptive step saturates.

        >>> one = torch.ones(1, 1)
        >>> SgdRule(lr=0.5, momentum=0.0, dampening=0.0, nesterov=False).secant(one, 0.25)
        tensor([[0.5000]])
        """
        return (self.update(g + size) - self.update(g - size)).abs() / (2 * size)

    def whole(self: _Rule, gather: Callable[[Tensor], Tensor]) -> _Rule:
        """Return the rule of the whole weight, or of some rows; `gather` takes a tensor of this rank's shard to that part."""
        parts = {name: getattr(self, name) for name in self.TENSORS}
        return replace(self, **{name: gather(part) for name, part in parts.items() if part is not None})  # type: ignore[type-var]


def _gradient(g: Tensor, decay: Tensor | None, maximize: bool) -> Tensor:
    """Return the gradient that a rule starts from: with the sign of `maximize` and with coupled weight decay."""
    g = -g if maximize else g
    return g if decay is None else g + decay


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """Adam, AdamW and Adam-mini: the moments of one weight before a step, float32 in its shape, and the step's settings.

        m' = b1 m + (1 - b1) g        v' = b2 v + (1 - b2) g^2
        u(g) = lr / (1 - b1^t) * m' / (sqrt(v' / (1 - b2^t)) + eps)

    With Adam-mini, g^2 is averaged over the elements that share a second moment. With `amsgrad` the largest v' so far is used.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("m", "v", "largest", "decay")

    m: Tensor
    v: Tensor
    t: int
    """Number of the next step, starting at 1."""
    lr: float
    betas: tuple[float, float]
    eps: float
    runs: Tensor | None = None
    """Adam-mini: index of the second moment of each row, int64[rows]; None if each element has its own."""
    transposed: bool = False
    """Adam-mini: True if rows are those of the transposed weight."""
    largest: Tensor | None = None
    """amsgrad: largest second moment so far."""
    decay: Tensor | None = None
    """Coupled weight decay: weight_decay * w; None without weight decay or if it is decoupled."""
    maximize: bool = False

    @property
    def elementwise(self) -> bool:
        """Return True unless elements share a second moment, as in Adam-mini."""
        return self.runs is None

    def after(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return m' and v', the moments after a step with the gradient g."""
        b1, b2 = self.betas
        g = _gradient(g, self.decay, self.maximize)
        squares = g.square()
        if self.runs is not None:
            rows = (squares.T if self.transposed else squares).mean(1)
            count = torch.bincount(self.runs)
            mean = torch.zeros_like(count, dtype=rows.dtype).index_add_(0, self.runs, rows) / count
            squares = mean[self.runs][:, None].expand(-1, g.shape[0 if self.transposed else 1])
            squares = squares.T if self.transposed else squares
        return b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * squares

    def update(self, g: Tensor) -> Tensor:
        """Return u(g), which a step subtracts from the weight besides decoupled decay: float32 in the weight's shape.

        >>> one = torch.ones(1, 1)
        >>> AdamRule(m=one, v=one, t=10**6, lr=0.5, betas=(0.9, 0.95), eps=0.0).update(one)
        tensor([[0.5000]])
        """
        b1, b2 = self.betas
        m, v = self.after(g.float())
        v = v if self.largest is None else torch.maximum(v, self.largest)
        return self.lr / (1 - b1**self.t) * m / ((v / (1 - b2**self.t)).sqrt() + self.eps)

    def slope(self, g: Tensor) -> Tensor:
        """Return h' as in SNIP (section 4.3.2), elementwise.

            h' = lr sqrt(1 - b2^t) / (1 - b1^t) * | (1 - b1) / (sqrt v' + eps) - (1 - b2) m' g / (sqrt v' (sqrt v' + eps)^2) |

        With Adam-mini, where n elements share v', the second term is divided by n. With amsgrad, it is 0 for elements whose v'
        stays below the largest so far.
        """
        (b1, b2), g = self.betas, g.float()
        m, v = self.after(g)
        g = _gradient(g, self.decay, self.maximize)
        grows = torch.ones_like(v, dtype=torch.bool) if self.largest is None else v > self.largest
        v = v if self.largest is None else torch.maximum(v, self.largest)
        root = v.sqrt()
        shared: Tensor | float = 1.0
        if self.runs is not None:
            rows = torch.bincount(self.runs)[self.runs][:, None] * g.shape[0 if self.transposed else 1]
            shared = rows.T if self.transposed else rows
        # Where v' is 0, g and m' are 0 too, and the second term is 0.
        second = torch.where((v > 0) & grows, (1 - b2) * m * g / (shared * root * (root + self.eps).square()), 0.0)
        size = self.lr * (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
        slope: Tensor = size * ((1 - b1) / (root + self.eps) - second)
        return slope.abs()


@dataclass(frozen=True)
class SgdRule(UpdateRule):
    """SGD: linear in the gradient, so that h' is one number.

        b' = momentum b + (1 - dampening) g, at the first step b' = g
        u(g) = lr b', with Nesterov lr (g + momentum b'), without momentum lr g
        h' = lr (1 - dampening), with Nesterov lr (1 + momentum (1 - dampening)), without momentum lr

    At the first step with momentum there is no b yet, and (1 - dampening) is replaced by 1.

    >>> g = torch.ones(1, 1)
    >>> rule = SgdRule(lr=0.5, momentum=0.9, dampening=0.1, nesterov=False, buffer=2 * g)
    >>> rule.update(g), rule.slope(g)  # 0.5 * (0.9 * 2 + 0.9 * 1)
    (tensor([[1.3500]]), tensor([[0.4500]]))
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("buffer", "decay")

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    buffer: Tensor | None = None
    """b; None before the first step, and without momentum."""
    decay: Tensor | None = None
    """Coupled weight decay: weight_decay * w."""
    maximize: bool = False
    t: int | None = None

    @property
    def _taken(self) -> float:
        """Return the factor of the gradient in b'."""
        return 1.0 if self.buffer is None else 1 - self.dampening

    def update(self, g: Tensor) -> Tensor:
        """Return u(g), which a step subtracts from the weight: float32 in the weight's shape."""
        g = _gradient(g.float(), self.decay, self.maximize)
        if not self.momentum:
            return self.lr * g
        b = self._taken * g if self.buffer is None else self.momentum * self.buffer + self._taken * g
        return self.lr * (g + self.momentum * b if self.nesterov else b)

    def slope(self, g: Tensor) -> Tensor:
        """Return h', the same number for every element."""
        taken = self._taken if self.momentum else 1.0
        taken = 1 + self.momentum * taken if self.momentum and self.nesterov else taken
        return torch.full_like(g, abs(self.lr * taken), dtype=torch.float32)


@dataclass(frozen=True)
class MuonRule(UpdateRule):
    """Muon: a function of the whole matrix, so that only the norm of h' is available, not its elements.

        b' = momentum b + (1 - momentum) g        c = momentum b' + (1 - momentum) g with Nesterov, else b'
        X = c / max(|c|, eps)        steps times: A = X X^T, X <- a X + (b A + c A^2) X        u(g) = rate X

    The iteration maps a singular value s to p(s) = a s + b s^3 + c s^5 and keeps singular vectors. With
    s_i the singular values of the N x K matrix X before it (N <= K), f = p(p(...)) and f_i = f(s_i), the derivative of the
    iteration has the Frobenius norm

        |F|^2 = sum_i f'_i^2 + sum_{i<j} [((f_i - f_j) / (s_i - s_j))^2 + ((f_i + f_j) / (s_i + s_j))^2]
                + (K - N) sum_i (f_i / s_i)^2

    (for i = j the quotient is f', for s = 0 it is f'(0)). Dividing by |c| removes the direction of X itself:

        |h'| = rate * weight of g in c / |c| * sqrt(|F|^2 - sum_i (f'_i s_i)^2)

    torch computes the iteration in bfloat16. Here it is float32: differences of two bfloat16 updates would be mostly rounding.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ("buffer",)

    buffer: Tensor
    """b."""
    rate: float
    """The learning rate with torch's adjustment for the weight's shape."""
    momentum: float
    nesterov: bool
    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    t: int | None = None
    maximize: bool = False

    @property
    def elementwise(self) -> bool:
        """Return False: every element depends on the whole gradient."""
        return False

    def _direction(self, g: Tensor) -> Tensor:
        g = _gradient(g.float(), None, self.maximize)
        b = torch.lerp(self.buffer, g, 1 - self.momentum)
        return torch.lerp(g, b, self.momentum) if self.nesterov else b

    def update(self, g: Tensor) -> Tensor:
        """Return u(g), which a step subtracts from the weight besides its decay: float32 in the weight's shape."""
        given = self._direction(g)
        x = given.T if given.shape[0] > given.shape[1] else given
        x = x / torch.linalg.vector_norm(x).clamp(min=self.eps)
        one, three, five = self.coefficients
        for _ in range(self.steps):
            gram = x @ x.T
            x = one * x + (three * gram + five * gram @ gram) @ x
        found: Tensor = self.rate * (x.T if given.shape[0] > given.shape[1] else x)
        return found

    def slope(self, g: Tensor) -> Tensor:
        """Raise a UserError: every element of Muon's update depends on the whole gradient."""
        raise UserError("Muon's update of one element depends on the whole gradient: ask for slope_norm, not for slope.")

    def secant(self, g: Tensor, size: Tensor | float) -> Tensor:
        """Return |h'| spread evenly over the elements: there is no slope of one element."""
        return torch.ones_like(g, dtype=torch.float32).mul_(self.slope_norm(g) / math.sqrt(g.numel()))

    def slope_norm(self, g: Tensor) -> Tensor:
        """Return the Frobenius norm of h', 0-d float32, from the singular values of the direction, in float64."""
        given = self._direction(g).double()
        x = given.T if given.shape[0] > given.shape[1] else given
        size = torch.linalg.vector_norm(x)
        s = torch.linalg.eigvalsh(x @ x.T).clamp(min=0).sqrt() / size.clamp(min=self.eps)
        f, slope = s, torch.ones_like(s)
        one, three, five = self.coefficients
        for _ in range(self.steps):
            slope = slope * (one + 3 * three * f.square() + 5 * five * f.pow(4))
            f = one * f + three * f.pow(3) + five * f.pow(5)
        # Singular values that agree to 10 digits use the derivative: their difference quotient would be rounding noise.
        apart, together = s[:, None] - s, s[:, None] + s
        near, zero = apart.abs() <= 1e-10 * together.clamp(min=1e-300), together == 0
        mean = (slope[:, None] + slope) / 2
        minus = torch.where(near, mean, (f[:, None] - f) / torch.where(near, 1.0, apart))
        plus = torch.where(zero, mean, (f[:, None] + f) / torch.where(zero, 1.0, together))
        pairs = (minus.square() + plus.square()).triu(1).sum()
        plain = torch.where(s > 0, f / torch.where(s > 0, s, 1.0), slope).square().sum() * (x.shape[1] - x.shape[0])
        total = slope.square().sum() + pairs + plain
        if bool(size >= self.eps):  # below it torch divides by eps, and no direction is removed
            total = total - (slope * s).square().sum()
        taken = (1 - self.momentum) * (1 + self.momentum if self.nesterov else 1)
        found: Tensor = abs(self.rate) * taken / size.clamp(min=self.eps) * total.clamp(min=0).sqrt()
        return found.float()


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

    Supported optimizers are dither's AdamW and Muon in every format and AdamMini, and torch's AdamW, Adam, SGD and Muon. A rule
    is read from the optimizer each time it is accessed.

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> update_rules_of(optimizer, {"up": layer.weight})
    Traceback (most recent call last):
        ...
    dither.errors.UserError: The optimizer has no state of the layer 'up' yet: take a few steps before its moments are needed.
    >>> update_rules_of(torch.optim.SGD(layer.parameters(), lr=0.1), {"up": layer.weight})["up"].lr
    0.1
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    usual = _reader(optimizer)
    shares = isinstance(optimizer, AdamW) and optimizer.share is not None
    found: dict[str, Callable[[], UpdateRule]] = {}
    for name, weight in weights.items():
        read = _muon if groups.get(id(weight), {}).get("use_muon") else usual
        if isinstance(weight, DTensor) and (shares or read is _muon):
            shared = "second moments are" if shares else "update of each element is"
            raise UserError(
                f"The weight of the layer {name!r} is sharded over ranks, and {type(optimizer).__name__}'s {shared} shared "
                "between them: score an unsharded copy of the model."
            )
        if id(weight) not in groups:
            raise UserError(
                f"The optimizer does not have the weight of the layer {name!r}, so it never changes: leave the layer out."
            )
        state, group = optimizer.state.get(weight, {}), groups[id(weight)]
        if (not state and read is not _sgd) or (read is _adam and not int(state.get("step", 0))):
            raise UserError(
                f"The optimizer has no state of the layer {name!r} yet: take a few steps before its moments are needed."
            )
        if read is _adam and not ({"exp_avg", "exp_avg_sq"} <= state.keys() and {"lr", "betas", "eps"} <= group.keys()):
            raise _unknown(optimizer)
        found[name] = partial(read, optimizer, weight, state, group)
    return _Loading(found)


_Reader = Callable[[torch.optim.Optimizer, Tensor, dict[str, Any], dict[str, Any]], UpdateRule]


def _reader(optimizer: torch.optim.Optimizer) -> _Reader:
    """Return the function that turns a weight's state into its rule."""
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Muon):
        return _sgd if isinstance(optimizer, torch.optim.SGD) else _muon
    # Some other optimizers of torch have states with AdamW's names but another update.
    if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.Adam):
        raise _unknown(optimizer)
    return _adam


def _unknown(optimizer: torch.optim.Optimizer) -> UserError:
    return UserError(
        f"SNIP needs the derivative of an optimizer's update with respect to the gradient, and has none for "
        f"{type(optimizer).__name__}: use AdamW, Adam, AdamMini, SGD or Muon."
    )


def _coupled(weight: Tensor, group: dict[str, Any]) -> Tensor | None:
    """Return weight_decay * w, for optimizers that add weight decay to the gradient; None without weight decay."""
    return float(group["weight_decay"]) * local(weight).detach().float() if group["weight_decay"] else None


def _wide(state: dict[str, Any], key: str) -> Tensor | None:
    return None if state.get(key) is None else _some(state, key)


def _some(state: dict[str, Any], key: str) -> Tensor:
    found: Tensor = local(state[key]).detach().float()
    return found


def _sgd(optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> SgdRule:
    return SgdRule(
        float(group["lr"]),
        group["momentum"],
        group["dampening"],
        group["nesterov"],
        _wide(state, "momentum_buffer"),
        _coupled(weight, group),
        group["maximize"],
    )


def _muon(optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> MuonRule:
    if isinstance(optimizer, AdamW):
        buffer, ratio, t = optimizer.moments(weight).m, optimizer.member(weight).ratio, int(state["step"]) + 1
    else:
        buffer, t = _some(state, "momentum_buffer"), None
        rows, columns = weight.shape
        adjust = group["adjust_lr_fn"]
        ratio = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    return MuonRule(
        buffer,
        float(group["lr"]) * ratio,
        float(group["momentum"]),
        group["nesterov"],
        tuple(group["ns_coefficients"]),
        group["ns_steps"],
        group["eps"],
        t,
        bool(group.get("maximize")),
    )


def _adam(optimizer: torch.optim.Optimizer, weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> AdamRule:
    if isinstance(optimizer, AdamW):
        found = optimizer.moments(weight)
    else:
        found = Moments(state["step"], _some(state, "exp_avg"), _some(state, "exp_avg_sq"))
    t, lr, betas, eps = int(state["step"]) + 1, float(group["lr"]), tuple(group["betas"]), group["eps"]
    decay = largest = None
    if isinstance(optimizer, torch.optim.Adam):  # torch's AdamW is one, with decoupled decay
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        decay = None if decoupled else _coupled(weight, group)
        largest = _wide(state, "max_exp_avg_sq") if group["amsgrad"] else None
    # An optimizer of another library with AdamW's states is treated as AdamW.
    maximize = bool(group.get("maximize"))
    return AdamRule(found.m, found.v, t, lr, betas, eps, found.runs, found.transposed, largest, decay, maximize)
