"""How far an option leads a training astray: the change of its loss and the change of its weights' next step.

Layer l computes Y = X W^T with X: M x K and W: N x K. A cast adds to an operand T an error of norm |err T|, taken as white:
every element deviates by s_T = |err T| / sqrt(number of elements). Norms are Frobenius norms, gradients those of the loss L.

What follows without another pass is here; `dither.snip.probes` measures the rest.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dither.errors import UserError
from dither.snip.layer_options import Option
from dither.snip.statistics import VERSION, LayerStatistics, Statistics, check_version, load_json

Table = tuple[tuple[float, ...], ...]
"""One row a layer, one column an option."""


def loss_divergence(layer: LayerStatistics, option: Option, loss: float, *, rows: bool = False) -> float:
    """SNIP's loss divergence (section 4.2): the change of the loss that the slope explains, in units of the loss.

        dL = sqrt((|grad X| |err X| / sqrt(M K))^2 + (|grad W| |err W| / sqrt(N K))^2) / |L|

    With M = 4, N = 2, K = 4, |grad X| = 2, |err X| = 0.4, |grad W| = 3, |err W| = 0.2 and L = 5 that is
    sqrt((0.8 / 4)^2 + (0.6 / sqrt 8)^2) / 5 = 0.0583. The paper's section 6.3 takes norms row by row: `rows=True` replaces the
    square of |grad X| |err X| / sqrt(M K) by the sum over rows of |grad X_m|^2 |err X_m|^2 / K, and that of W likewise.
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
    """|err g| of the layer's own weight gradient g = dY^T X, from the errors of dY and X in that product: the direct term.

        |err g|^2 = K s_X^2 |dY|^2 + N s_dY^2 |X|^2 = (|dY|^2 |err X|^2 + |X|^2 |err dY|^2) / M

    With M = 4, |dY| = 2, |err X| = 0.4, |X| = 5 and |err dY| = 0.1 that is sqrt((0.64 + 0.25) / 4) = 0.4717.
    """
    x = layer.norms["dy"] * layer.error("input", option.cast("weight_grad", "input"))
    dy = layer.norms["x"] * layer.error("grad", option.cast("weight_grad", "grad"))
    return math.hypot(x, dy) / math.sqrt(layer.M)


def output_deviation(layer: LayerStatistics, option: Option) -> float:
    """By how much an element of Y = X W^T deviates: sqrt(s_X^2 |W|^2 / N + s_W^2 |X|^2 / M), what later layers see.

    With s_X = 0.1, |W| = 4, N = 2, s_W = 0.05, |X| = 6 and M = 4 that is sqrt(0.08 + 0.0225) = 0.3202.
    """
    x = layer.deviation("input", option.cast("forward", "input")) * layer.norms["w"] / math.sqrt(layer.N)
    w = layer.deviation("weight", option.cast("forward", "weight")) * layer.norms["x"] / math.sqrt(layer.M)
    return math.hypot(x, w)


def input_gradient_deviation(layer: LayerStatistics, option: Option) -> float:
    """By how much an element of dX = dY W deviates: sqrt(s_dY^2 |W|^2 / K + s_W^2 |dY|^2 / M), what earlier layers see.

    With s_dY = 0.1, |W| = 4, K = 4, s_W = 0.05, |dY| = 6 and M = 4 that is sqrt(0.04 + 0.0225) = 0.25.
    """
    dy = layer.deviation("grad", option.cast("input_grad", "grad")) * layer.norms["w"] / math.sqrt(layer.K)
    w = layer.deviation("weight", option.cast("input_grad", "weight")) * layer.norms["dy"] / math.sqrt(layer.M)
    return math.hypot(dy, w)


def weight_divergence(statistics: Statistics, errors: Mapping[str, float]) -> float:
    """SNIP's weight divergence (section 4.3): errors of gradients, as AdamW passes them on to the weights.

        dW = mean over all layers i of |h'_i| |err g_i| / sqrt(N_i K_i) / |W_i|

    `errors` has |err g_i| by layer, and layers that are not in it have none. With two layers, |h'| = 0.02, |err g| = 0.5,
    N K = 8 and |W| = 4 in the first and no error in the second, that is 0.02 * 0.5 / sqrt 8 / 4 / 2 = 0.000442.
    """
    passed = zip(statistics.layers, sensitivities(statistics), strict=True)
    return math.fsum(each * errors.get(layer.name, 0.0) for layer, each in passed) / len(statistics.layers)


def sensitivities(statistics: Statistics) -> list[float]:
    """|h'_i| / sqrt(N_i K_i) / |W_i| of each layer: how far an error of its gradient moves its weights, in units of them.

    A weight that is all zeros has no such units, and counts as one that does not move.
    """
    return [
        layer.update / math.sqrt(layer.N * layer.K) / layer.norms["w"] if layer.norms["w"] else 0.0
        for layer in statistics.layers
    ]


@dataclass(frozen=True)
class Scores:
    """What each option of each layer does to training, as one of the probes found it."""

    step: int
    probe: str
    layers: tuple[str, ...]
    options: tuple[str, ...]
    loss: Table
    """The change of the loss, in units of the loss: one row a layer, one column an option."""
    weights: Table
    """The change that the next weights take, in units of the weights, the mean over all layers."""
    statistics: Statistics
    passes: int = 0
    """How many passes over a micro-batch, forward and backward, it took to find out."""
    seconds: float = 0.0
    """And how long."""

    def __post_init__(self) -> None:
        for name in ("loss", "weights"):
            table = getattr(self, name)
            if len(table) != len(self.layers) or any(len(row) != len(self.options) for row in table):
                raise UserError(
                    f"The {name} of scores has a row for each of {len(self.layers)} layers and a column for each of "
                    f"{len(self.options)} options."
                )
            for layer, row in zip(self.layers, table, strict=True):
                if not all(isinstance(number, int | float) and math.isfinite(number) for number in row):
                    raise UserError(f"The scores of the layer {layer!r} hold a number that is not finite in {name}.")

    def quality(self, loss_weight: float = 1.0, update_weight: float = 1.0, power: float = 2.0) -> list[list[float]]:
        """Return q = (loss_weight dL)^power + (update_weight dW)^power of each layer and option, which `solve` makes small.

        Errors of two layers are independent, so squares of what they do add up, and the root of their sum is what a plan does.
        The paper adds up divergences as they are: power=1. docs/results/snip.md tells what training says to either.

        >>> one = Scores(0, "direct", ("up",), ("fp8", "fp4"), ((0.5, 2.0),), ((0.5, 1.0),), Statistics(0, 1.0, ()))
        >>> one.quality(), one.quality(update_weight=2.0, power=1)
        ([[0.5, 5.0]], [[1.5, 4.0]])
        """
        return [
            [(loss_weight * a) ** power + (update_weight * b) ** power for a, b in zip(one, other, strict=True)]
            for one, other in zip(self.loss, self.weights, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"version": VERSION, **vars(self), "statistics": self.statistics.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Scores":
        """The inverse of `to_dict`."""
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
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Scores":
        """The inverse of `to_json`."""
        return cls.from_dict(load_json("scores", text))
