"""Estimate how an option perturbs training: the change of the loss and the change of the next weight update.

Layer l computes Y = X W^T with X: M x K and W: N x K. A cast adds an error of norm |err T| to an operand T. The error
is modelled as white noise: every element has the standard deviation s_T = |err T| / sqrt(number of elements). Norms are
Frobenius norms, and gradients are those of the loss L.

This module has the closed forms, which need no further pass; `dither.snip.probes` measures the rest.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dither.errors import UserError
from dither.files import Refused, from_json
from dither.snip.options import Option
from dither.snip.settings import harm
from dither.snip.statistics import VERSION, LayerStatistics, Statistics, check_version

Table = tuple[tuple[float, ...], ...]
"""One row per layer, one column per option."""


def loss_divergence(layer: LayerStatistics, option: Option, loss: float, *, rows: bool = False) -> float:
    """Return SNIP's loss divergence (section 4.2): the first-order change of the loss, relative to the loss.

        dL = sqrt((|grad X| |err X| / sqrt(M K))^2 + (|grad W| |err W| / sqrt(N K))^2) / |L|

    With M = 4, N = 2, K = 4, |grad X| = 2, |err X| = 0.4, |grad W| = 3, |err W| = 0.2 and L = 5 that is
    sqrt((0.8 / 4)^2 + (0.6 / sqrt 8)^2) / 5 = 0.0583. Section 6.3 of the paper takes norms row by row: `rows=True` replaces
    the square of |grad X| |err X| / sqrt(M K) by the sum over rows of |grad X_m|^2 |err X_m|^2 / K, and that of W likewise.
    """
    parts = []
    for operand, gradient in (("input", "dx"), ("weight", "dw")):
        cast = option.cast("forward", operand)
        if rows:
            parts.append(0.0 if cast is None else layer.rows[operand][str(cast)])
        else:
            parts.append(layer.norms[gradient] * layer.deviation(operand, cast))
    return math.hypot(*parts) / abs(loss)


def gradient_error(layer: LayerStatistics, option: Option) -> float:
    """Return |err g| of the layer's own weight gradient g = dY^T X, from the errors of dY and X in that product.

        |err g|^2 = K s_X^2 |dY|^2 + N s_dY^2 |X|^2 = (|dY|^2 |err X|^2 + |X|^2 |err dY|^2) / M

    With M = 4, |dY| = 2, |err X| = 0.4, |X| = 5 and |err dY| = 0.1 that is sqrt((0.64 + 0.25) / 4) = 0.4717.
    """
    x = layer.norms["dy"] * layer.error("input", option.cast("weight_grad", "input"))
    dy = layer.norms["x"] * layer.error("grad", option.cast("weight_grad", "grad"))
    return math.hypot(x, dy) / math.sqrt(layer.M)


def output_deviation(layer: LayerStatistics, option: Option) -> float:
    """Return the standard deviation of the error of an element of Y = X W^T, which later layers see.

        s_Y = sqrt(s_X^2 |W|^2 / N + s_W^2 |X|^2 / M)

    With s_X = 0.1, |W| = 4, N = 2, s_W = 0.05, |X| = 6 and M = 4 that is sqrt(0.08 + 0.0225) = 0.3202.
    """
    x = layer.deviation("input", option.cast("forward", "input")) * layer.norms["w"] / math.sqrt(layer.N)
    w = layer.deviation("weight", option.cast("forward", "weight")) * layer.norms["x"] / math.sqrt(layer.M)
    return math.hypot(x, w)


def input_gradient_deviation(layer: LayerStatistics, option: Option) -> float:
    """Return the standard deviation of the error of an element of dX = dY W, which earlier layers see.

        s_dX = sqrt(s_dY^2 |W|^2 / K + s_W^2 |dY|^2 / M)

    With s_dY = 0.1, |W| = 4, K = 4, s_W = 0.05, |dY| = 6 and M = 4 that is sqrt(0.04 + 0.0225) = 0.25.
    """
    dy = layer.deviation("grad", option.cast("input_grad", "grad")) * layer.norms["w"] / math.sqrt(layer.K)
    w = layer.deviation("weight", option.cast("input_grad", "weight")) * layer.norms["dy"] / math.sqrt(layer.M)
    return math.hypot(dy, w)


def weight_divergence(statistics: Statistics, errors: Mapping[str, float]) -> float:
    """Return SNIP's weight divergence (section 4.3): errors of gradients, propagated through the optimizer's update.

        dW = mean over all layers i of |h'_i| |err g_i| / sqrt(N_i K_i) / |W_i|

    `errors` maps layer names to |err g_i|; other layers have no error. With two layers, |h'| = 0.02, |err g| = 0.5,
    N K = 8 and |W| = 4 in the first and no error in the second, that is 0.02 * 0.5 / sqrt 8 / 4 / 2 = 0.000442.
    """
    passed = zip(statistics.layers, sensitivities(statistics), strict=True)
    return math.fsum(each * errors.get(layer.name, 0.0) for layer, each in passed) / len(statistics.layers)


def sensitivities(statistics: Statistics) -> list[float]:
    """Return |h'_i| / sqrt(N_i K_i) / |W_i| of each layer: the relative change of its weights per unit error of its gradient.

    A weight that is all zeros has no relative change and counts as 0.
    """
    return [
        layer.update / math.sqrt(layer.N * layer.K) / layer.norms["w"] if layer.norms["w"] else 0.0
        for layer in statistics.layers
    ]


@dataclass(frozen=True)
class Scores:
    """Estimated effect of each option of each layer on training; see `dither.snip.score`."""

    step: int
    """Step of the statistics."""
    probe: str
    """Probe that made the estimates."""
    layers: tuple[str, ...]
    """Names of the layers."""
    options: tuple[str, ...]
    """Names of the options."""
    loss: Table
    """dL, the change of the loss relative to the loss: one row per layer, one column per option."""
    weights: Table
    """dW, the change of the next weights relative to the weights, averaged over all layers."""
    statistics: Statistics
    passes: int = 0
    """Number of passes over a micro-batch, forward and backward, that the estimates took."""
    seconds: float = 0.0
    """Time that the estimates took."""
    pause: float = 0.0
    """Longest time that training waited for them at once; less than `seconds` if they were spread over steps."""

    def __post_init__(self) -> None:
        for name in ("loss", "weights"):
            table = getattr(self, name)
            if len(table) != len(self.layers) or any(len(row) != len(self.options) for row in table):
                raise UserError(
                    f"Scores need a table {name!r} with one row per layer ({len(self.layers)}) and one column per option "
                    f"({len(self.options)})."
                )
            for layer, row in zip(self.layers, table, strict=True):
                if not all(isinstance(number, int | float) and math.isfinite(number) for number in row):
                    raise UserError(f"The scores of the layer {layer!r} hold a number that is not finite in {name}.")

    @classmethod
    def join(cls, parts: "Sequence[Scores]") -> "Scores":
        """Return the scores of all layers from scores of some of them, which were taken at the same or at later steps.

        >>> parts = [Scores(0, "direct", (name,), ("mxfp8",), ((0.5,),), ((0.25,),), Statistics(0, 1.0, ())) for name in "ab"]
        >>> Scores.join(parts).layers
        ('a', 'b')
        """
        first = parts[0]
        if any(each.options != first.options or each.probe != first.probe for each in parts):
            raise UserError("These scores are of different options or probes, which cannot be joined.")
        seen = [each.statistics for each in parts]
        return replace(
            first,
            layers=tuple(name for each in parts for name in each.layers),
            loss=tuple(row for each in parts for row in each.loss),
            weights=tuple(row for each in parts for row in each.weights),
            statistics=replace(
                seen[0],
                loss=math.fsum(each.loss for each in seen) / len(seen),
                layers=tuple(layer for each in seen for layer in each.layers),
            ),
            passes=sum(each.passes for each in parts),
            seconds=sum(each.seconds for each in parts),
            pause=max(each.pause for each in parts),
        )

    def harm(self, loss_weight: float = 1.0, update_weight: float = 1.0, power: float = 2.0) -> list[list[float]]:
        """Return (loss_weight dL)^power + (update_weight dW)^power of each layer and option, which `solve` minimises.

        Errors of different layers are independent, so the squares of their effects add up: power=2. The paper adds the
        divergences themselves: power=1. reproduce/snip compares both in training.

        >>> one = Scores(0, "direct", ("up",), ("mxfp8", "mxfp4"), ((0.5, 2.0),), ((0.5, 1.0),), Statistics(0, 1.0, ()))
        >>> one.harm(), one.harm(update_weight=2.0, power=1)
        ([[0.5, 5.0]], [[1.5, 4.0]])
        """
        return harm(self.loss, self.weights, loss_weight, update_weight, power)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"version": VERSION, **vars(self), "statistics": self.statistics.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Scores":
        """Return the object that `to_dict` described."""
        check_version("scores", data)
        fields = {key: value for key, value in data.items() if key != "version"}
        try:
            for key in ("layers", "options"):
                fields[key] = tuple(fields[key])
            for key in ("loss", "weights"):
                fields[key] = tuple(tuple(row) for row in fields[key])
            return cls(**{**fields, "statistics": Statistics.from_dict(fields["statistics"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"These are not scores as this version writes them: {error}.") from None

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Scores":
        """Return the object that `to_json` described."""
        try:
            return cls.from_dict(from_json(text.encode()))
        except (Refused, UnicodeEncodeError) as error:
            raise UserError(f"This cannot be read as scores: {error}.") from None
