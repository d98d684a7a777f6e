"""What a training step shows of its linear layers: norms of their tensors, and of what casting would change in them.

Shapes: x_MK input, w_NK weight, y_MN = x_MK w_NK^T output, and dx, dw, dy their gradients. M counts the tokens of all
micro-batches of the step, on all ranks: x, y and their gradients are those of the whole step, stacked.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.files import Refused, from_json
from dither.nn.experts import ExpertLinear
from dither.nn.linear import Linear
from dither.precision import Cast
from dither.random import Stream
from dither.snip.moments import Moments
from dither.snip.options import Option, casts_of

TENSORS = ("x", "w", "y", "dy", "dx", "dw")

VERSION = 1
"""Of the JSON of statistics and scores."""


@dataclass(frozen=True)
class LayerStatistics:
    """Numbers of one layer in one step; norms are Frobenius norms."""

    name: str
    M: int
    """Tokens."""
    N: int
    """Outputs."""
    K: int
    """Inputs."""
    norms: Mapping[str, float]
    """Of x, w, y, dy, dx and dw."""
    errors: Mapping[str, Mapping[str, float]]
    """|Q(T) - T| of each cast, by operand (input, weight, grad) and the cast's text."""
    rows: Mapping[str, Mapping[str, float]]
    """sqrt(sum over rows of |gradient's row|^2 |error's row|^2 / K) of input and weight: the row-wise loss change."""
    update: float
    """|h'|: see `Moments.slope`. With clipping it is that of the unclipped gradient."""

    def error(self, operand: str, cast: Cast | None) -> float:
        """The norm of what a cast of an operand changes; 0 for none."""
        return 0.0 if cast is None else self.errors[operand][str(cast)]

    def deviation(self, operand: str, cast: Cast | None) -> float:
        """The same for one element: the norm divided by the root of the number of elements."""
        size = {"input": self.M * self.K, "weight": self.N * self.K, "grad": self.M * self.N}[operand]
        return self.error(operand, cast) / math.sqrt(size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {key: _plain(value) for key, value in vars(self).items()}


@dataclass(frozen=True)
class Statistics:
    """Numbers of all layers in one step."""

    step: int
    loss: float
    layers: tuple[LayerStatistics, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"version": VERSION, "step": self.step, "loss": self.loss, "layers": [each.to_dict() for each in self.layers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Statistics":
        """The inverse of `to_dict`."""
        check_version("statistics", data)
        try:
            return cls(data["step"], data["loss"], tuple(LayerStatistics(**each) for each in data["layers"]))
        except (KeyError, TypeError) as error:
            raise UserError(f"These are not the statistics of a step as this version writes them: {error}.") from None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Statistics":
        """The inverse of `to_json`."""
        return cls.from_dict(load_json("statistics", text))


def layers_of(model: nn.Module) -> dict[str, Linear]:
    """The layers that statistics are taken of, by name: every `dither.Linear`; experts share a parameter and are left out."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and not isinstance(module, ExpertLinear)
    }
    if not found:
        raise UserError(f"{type(model).__name__} has no dither.Linear to take statistics of: convert it first.")
    if frozen := [name for name, layer in found.items() if not layer.weight.requires_grad]:
        raise UserError(
            f"The weight of the layer {frozen[0]!r} does not learn, and scores are about learning: convert without it."
        )
    return found


@dataclass
class _Sums:
    """What has been added up of one layer so far, 0-d float64 on its device."""

    tokens: int = 0
    squares: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, value: Tensor) -> None:
        value = value.double()
        self.squares[key] = self.squares[key] + value if key in self.squares else value


class Collector:
    """What `collecting` gives: numbers add up on the device until `statistics` reads them."""

    def __init__(self, layers: Mapping[str, Linear], options: Iterable[Option], stream: Stream) -> None:
        self._layers, self._casts, self._stream = dict(layers), casts_of(options), stream
        self._sums = {name: _Sums() for name in layers}

    def _forward(self, name: str, layer: Linear, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            sums, x_MK = self._sums[name], x.detach().reshape(-1, layer.in_features)
            first = torch._C._current_graph_task_id() == -1  # else a checkpointed block is computed again, in backward
            rows = {str(cast): self._error(name, x_MK, cast) for cast in self._casts["input"]}
            if first:
                sums.tokens += x_MK.shape[0]
                sums.add("x", _square(x_MK))
                sums.add("y", _square(y))
                for text, found in rows.items():
                    sums.add(f"input {text}", found.sum(dtype=torch.float64))
        if y.requires_grad:
            y.register_hook(partial(self._backward, name, layer, rows))  # type: ignore[no-untyped-call]

    def _backward(self, name: str, layer: Linear, rows: dict[str, Tensor], dy: Tensor) -> None:
        with torch.no_grad():
            sums, dy_MN = self._sums[name], dy.reshape(-1, layer.out_features)
            # The layer's own part of its input's gradient, which autograd adds to that of others who read the same input.
            squares = _row_squares(dy_MN @ _weight(layer).to(dy_MN.dtype))
            sums.add("dy", _square(dy_MN))
            sums.add("dx", squares.sum(dtype=torch.float64))
            for text, found in rows.items():
                sums.add(f"rows input {text}", (squares.double() * found).sum() / layer.in_features)
            for cast in self._casts["grad"]:
                sums.add(f"grad {cast}", self._error(name, dy_MN, cast).sum(dtype=torch.float64))

    def _error(self, name: str, x: Tensor, cast: Cast) -> Tensor:
        """The squares of what the cast changes, added up in each row: float32[rows]."""
        amax = x.abs().amax().float() if cast.scaling.kind == "delayed" else None
        drawn: tuple[int, Tensor | None, int, int] = (0, None, 0, 0)
        if cast.round.kind == "stochastic":
            stream = Stream(self._stream.seed, self._stream.purpose, f"{self._stream.name}.{name}")
            drawn = (stream.key, stream.draw(0, (x.shape[0], x.shape[1]), (0, 0), x.device).step, 0, 0)
        # The operator itself: the function around it would look, on the host, for numbers that are not finite.
        return _row_squares(torch.ops.dither.fake_quantize(x, str(cast), 1, amax, *drawn, "auto").float() - x.float())

    @torch.no_grad()
    def statistics(
        self,
        moments: Mapping[str, Moments],
        *,
        step: int,
        loss: Tensor | float,
        gradients: Mapping[str, Tensor] | None = None,
        scale: Tensor | float = 1.0,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> Statistics:
        """The step's numbers; call it after backward and before the optimizer's step.

        `moments` are `moments_of(optimizer, ...)`; `gradients` those of the weights by layer, or None for their `.grad`;
        `scale` is what clipping will multiply them by. `loss` is the step's, whose gradients these are. With `group`, tensors
        of its ranks count as stacked and the loss is the mean of theirs, as in data parallelism: every rank gets the same.
        """
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        device = next(iter(self._layers.values())).weight.device
        values: list[Tensor] = [torch.as_tensor(loss).detach().double().to(device) / ranks]
        for name in self._layers:
            if not self._sums[name].tokens or "dy" not in self._sums[name].squares:
                raise UserError(f"The layer {name!r} took no part in this step: run forward and backward inside `collecting`.")
            values.append(torch.full((), float(self._sums[name].tokens), dtype=torch.float64, device=device))
            for key, value in self._sums[name].squares.items():
                # Each rank's loss is its own mean; in the loss of all of them its gradients are as many times smaller.
                smaller = key in ("dy", "dx") or key.startswith(("grad ", "rows "))
                values.append(value.to(device) / (ranks**2 if smaller else 1))
        together = torch.stack(values)
        if group is not None:
            torch.distributed.all_reduce(together, group=group)
        numbers = iter(together.tolist())
        total = next(numbers)
        found: dict[str, dict[str, float]] = {}
        for name, sums in self._sums.items():
            found[name] = {"tokens": next(numbers), **{key: next(numbers) for key in sums.squares}}
        if not math.isfinite(total):
            raise UserError(f"The loss of step {step} is {total}, so there is nothing to learn about its layers.")
        layers = []
        for name, layer in self._layers.items():
            g = layer.weight.grad if gradients is None else gradients[name]
            if g is None:
                raise UserError(
                    f"The weight of the layer {name!r} has no gradient: run backward before statistics are asked for."
                )
            layers.append(self._layer(name, layer, found[name], g, moments[name], scale))
        return Statistics(step, total, tuple(layers))

    def _layer(
        self, name: str, layer: Linear, found: dict[str, float], g: Tensor, moments: Moments, scale: Tensor | float
    ) -> LayerStatistics:
        w_NK, dw_NK = _weight(layer), g.detach().T if layer.transposed else g.detach()
        gradient_rows = _row_squares(dw_NK)
        late = {"w": _square(w_NK), "dw": _square(g), "update": _square(scale * moments.slope(scale * g))}
        for cast in self._casts["weight"]:
            rows = self._error(name, w_NK, cast)
            late[f"weight {cast}"] = rows.sum(dtype=torch.float64)
            late[f"rows weight {cast}"] = (rows.double() * gradient_rows).sum() / layer.in_features
        found = found | dict(zip(late, torch.stack([value.double() for value in late.values()]).tolist(), strict=True))
        if wrong := [key for key, value in found.items() if not math.isfinite(value)]:
            raise UserError(
                f"The statistics of the layer {name!r} hold {found[wrong[0]]} ({wrong[0]}): a tensor of this step is not "
                "finite, so no plan can be made from it; later steps may do."
            )
        norm = {key: math.sqrt(value) for key, value in found.items()}
        return LayerStatistics(
            name,
            round(found["tokens"]),
            layer.out_features,
            layer.in_features,
            {key: norm[key] for key in TENSORS},
            {operand: {str(cast): norm[f"{operand} {cast}"] for cast in casts} for operand, casts in self._casts.items()},
            {
                operand: {str(cast): norm[f"rows {operand} {cast}"] for cast in self._casts[operand]}
                for operand in ("input", "weight")
            },
            norm["update"],
        )


@contextmanager
def collecting(model: nn.Module, options: Iterable[Option], *, stream: Stream) -> Iterator[Collector]:
    """Forward and backward of one step, all its micro-batches, happen inside; they compute what they would without it.

    Error norms are taken where X, W and dY are at hand, and only numbers are kept. Inside, compiled blocks run uncompiled:
    hooks that come after compilation would not be called. `stream` draws the bits of stochastic casts.

    >>> import dither
    >>> from dither.snip import collecting, moments_of, options
    >>> layer = dither.Linear(8, 4, name="up")
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> for step in range(2):
    ...     with collecting(layer, options("fp8,fp4"), stream=dither.Stream(0, "snip", "")) as seen:
    ...         loss = layer(torch.randn(16, 8)).square().mean()
    ...         loss.backward()
    ...     if step == 1:
    ...         statistics = seen.statistics(moments_of(optimizer, {"": layer.weight}), step=step, loss=loss)
    ...     optimizer.step()
    >>> statistics.layers[0].M, sorted(statistics.layers[0].norms)
    (16, ['dw', 'dx', 'dy', 'w', 'x', 'y'])
    """
    layers = layers_of(model)
    seen = Collector(layers, options, stream)
    hooks = [layer.register_forward_hook(partial(_hooked, seen, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _hooked(
    seen: Collector, name: str, layer: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor], y: Tensor
) -> None:
    assert isinstance(layer, Linear)
    seen._forward(name, layer, args[0] if args else named["input"], y)


def _weight(layer: Linear) -> Tensor:
    """w_NK, however it is stored."""
    weight = layer.weight.detach()
    return weight.T if layer.transposed else weight


def _square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x.detach(), dtype=torch.float32)
    return norm.double().square()


def _row_squares(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.detach(), dim=1, dtype=torch.float32)
    return norms.square()


def _plain(value: Any) -> Any:
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def check_version(what: str, data: Mapping[str, Any]) -> None:
    """Raise unless `data` is an object of the version that this code reads."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        given = data.get("version") if isinstance(data, Mapping) else data
        raise UserError(f"The {what} have version {given!r}, and this dither reads version {VERSION}.")


def load_json(what: str, text: str) -> Any:
    """JSON, or a sentence."""
    try:
        return from_json(text.encode())
    except (Refused, UnicodeEncodeError) as error:
        raise UserError(f"This cannot be read as {what}: {error}.") from None
