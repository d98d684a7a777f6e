"""Compare casts on one tensor: bits per value, errors, shares clipped and flushed, the error of a product, the codes used."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.models.open import find_model, open_model
from dither.numerics.counts import COUNTS, cast_counts
from dither.ops import Quantized, fake_quantize, quantize
from dither.ops.storage import integer_dtype, unpack
from dither.report.charts import format_colour
from dither.report.figures import write_drawing
from dither.spec import Cast, did_you_mean
from dither.spec.random import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = (512, 1024)
"""The shape of a drawn tensor."""

ROWS = 256
"""Most rows of each operand of the product whose error is measured."""

TRANSFORM = "hadamard(16)"
"""The transform with which the product is measured again."""


def _student(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw from Student's t with three degrees of freedom, which has heavy tails."""
    normal = torch.randn((4, *shape), generator=generator)
    return normal[0] / normal[1:].square().mean(0).sqrt()


def _outliers(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw normal numbers, and multiply one column of 128 by 30, as in the activations of language models."""
    x = torch.randn(shape, generator=generator)
    x[:, ::128] *= 30
    return x


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "uniform": lambda shape, generator: torch.rand(shape, generator=generator) * 2 - 1,
    "laplace": lambda shape, generator: (
        torch.empty(shape).exponential_(generator=generator) * (torch.rand(shape, generator=generator) - 0.5).sign()
    ),
    "student": _student,
    "outliers": _outliers,
}
"""What a tensor is drawn from, by name."""


@dataclass(frozen=True)
class CastOfTensor:
    """The cost and the errors of a cast of one tensor. Shares are of its finite nonzero numbers."""

    cast: str
    bits: float
    """Bits per value, with its share of the scales."""
    sqnr: float | None
    """10 log10(sum of x^2 / sum of (cast(x) - x)^2) in dB; None if the cast is exact."""
    relative: float
    """The mean of |cast(x) - x| / |x|."""
    clipped: float
    flushed: float
    product: float
    """Norm of the error of a product, relative to the product: both operands are cast, the other is normal."""
    product_hadamard: float | None
    """The same with both operands under a Hadamard transform of 16; None for a cast that has or takes no other transform."""
    histogram: dict[float, float] | None
    """The share of each value of the format, by value; None above 8 bits."""


@dataclass(frozen=True)
class Comparison:
    """Casts of one tensor."""

    tensor: str
    shape: tuple[int, ...]
    casts: tuple[CastOfTensor, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def find_tensor(source: str, name: str | None = None) -> tuple[str, Tensor]:
    """Return a matrix and what it is: drawn from a distribution, or read from a model or a safetensors file.

    Args:
        source: One of DISTRIBUTIONS; or a run, a checkpoint or a folder of a model; or a safetensors file.
        name: The name of a tensor in it, which may be left out if there is one matrix.
    """
    if source in DISTRIBUTIONS:
        if name is not None:
            raise UserError(f"The distribution {source!r} has no tensor {name!r}: leave --tensor out.")
        return source, DISTRIBUTIONS[source](SHAPE, torch.Generator().manual_seed(0))
    path = Path(source)
    if not path.exists():
        raise UserError(
            f"There is no distribution or file {source!r}{did_you_mean(source, DISTRIBUTIONS)}: choose from "
            f"{', '.join(DISTRIBUTIONS)}, or give a run, a model or a safetensors file."
        )
    found = _of_file(path) if path.is_file() else dict(open_model(find_model(path)).model.named_parameters())
    matrices = {key: value for key, value in found.items() if value.dim() == 2 and value.is_floating_point()}
    if name is None and len(matrices) == 1:
        (name,) = matrices
    if name not in matrices:
        some = ", ".join([*list(matrices)[:5], *["..."] * (len(matrices) > 5)])
        wrong = f"{source!r} has {len(matrices)} matrices"
        if name is not None:
            wrong = f"There is no matrix {name!r} in {source!r}{did_you_mean(name, matrices)}"
        raise UserError(f"{wrong}: choose one with --tensor, such as {some}.")
    return f"{name} of {source}", matrices[name].detach().float()


def _of_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{str(path)!r} is not a safetensors file: {error}.") from None


def compare_casts(x: Tensor, casts: Sequence[Cast], tensor: str = "") -> Comparison:
    """Measure casts of the matrix `x` along its rows.

    >>> found = compare_casts(torch.eye(32) + 0.25, [Cast.parse("mxfp4"), Cast.parse("e4m3 row")])
    >>> [(each.cast.split()[0], each.bits) for each in found.casts]
    [('e2m1', 4.25), ('e4m3', 9.0)]
    """
    return Comparison(tensor, tuple(x.shape), tuple(_measured(x, cast) for cast in casts))


def _measured(x: Tensor, cast: Cast) -> CastOfTensor:
    options: dict[str, Any] = {"stream": Stream(0, "formats", str(cast))}
    if cast.scaling.kind == "delayed":
        options["amax"] = x.abs().amax()
    codes = quantize(x, cast, **options)
    error = codes.dequantize(torch.float32).double() - x.double()
    noise, signal = error.square().sum().item(), x.double().square().sum().item()
    counts = dict(zip(COUNTS, cast_counts(x, cast, 1, options.get("amax")).counts.tolist(), strict=True))
    known = max(counts["elements"] - counts["zeros"] - counts["nonfinite"], 1.0)
    return CastOfTensor(
        str(cast),
        codes.bits,
        10 * math.log10(signal / noise) if noise and signal else None,
        (error.abs() / x.double().abs())[x != 0].mean().item(),
        counts["clipped"] / known,
        counts["flushed"] / known,
        _product_error(x, cast, options),
        None if cast.transforming.size or "amax" in options else _product_error(x, replace(cast, transform=TRANSFORM), options),
        _histogram(codes),
    )


def _product_error(x: Tensor, cast: Cast, options: dict[str, Any]) -> float:
    a = x[:ROWS]
    b = torch.randn((ROWS, x.shape[1]), generator=torch.Generator().manual_seed(1))
    exact = a.double() @ b.double().T
    if "amax" in options:
        options = {**options, "amax": torch.maximum(a.abs().amax(), b.abs().amax())}
    one = fake_quantize(a, cast, **options).double()
    if cast.round.bits:  # other random bits, since errors of equal ones would not cancel
        options = {**options, "stream": Stream(1, "formats", str(cast))}
    other = fake_quantize(b, cast, **options).double()
    return float((one @ other.T - exact).norm() / exact.norm())


def _histogram(codes: Quantized) -> dict[float, float] | None:
    element = codes.cast.element
    if element.bits > 8:
        return None
    length = -(-codes.shape[1] // max(codes.cast.transforming.size, 1)) * max(codes.cast.transforming.size, 1)  # transforms pad
    indices = unpack(codes.values.view(integer_dtype(element)), length, element).flatten().long()
    shares = torch.bincount(indices, minlength=1 << element.bits).double() / indices.numel()
    found = dict.fromkeys(element.values(), 0.0)
    if element.is_integer and shares[lowest := 1 << element.bits - 1]:  # the code that few scales use
        found = {-float(lowest): float(shares[lowest]), **found}
    for code, share in enumerate(shares.tolist()):
        if (value := element.decode(code) + 0.0) in found:
            found[value] += share
    return found


def write_histograms(comparison: Comparison, path: Path) -> Path:
    """Draw the share of each value of each cast into an SVG or PNG file, and return its path."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"Histograms are written as .svg or .png, not as {path.name!r:.80}: as in --plot casts.svg.")

    def draw(figure: "Figure") -> None:
        shown = [each for each in comparison.casts if each.histogram is not None]
        figure.set_size_inches(8.2, 0.4 + 1.3 * max(len(shown), 1))
        for row, each in enumerate(shown):
            axes = figure.add_subplot(len(shown), 1, row + 1)
            values, shares = list(each.histogram or ()), list((each.histogram or {}).values())
            largest = max(map(abs, values))
            axes.bar([v / largest for v in values], shares, 1.4 / len(values), color=format_colour(each.cast.split()[0]))
            error = "exact" if each.sqnr is None else f"{each.sqnr:.1f} dB"
            axes.set_title(f"{each.cast}: {each.bits:.2f} bits, {error}", loc="left", fontsize=9)
            axes.set_xlim(-1.05, 1.05)
        figure.supxlabel("value / largest value", fontsize=9)

    return write_drawing(draw, path)
