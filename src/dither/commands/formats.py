"""`dither formats`: the number formats as a table, one format with its values, or a comparison of casts on a tensor."""

import math
import sys
from pathlib import Path
from typing import Annotated

import tyro

from dither.commands.arguments import Json
from dither.console import ProgressBars, print_result, print_table, print_text
from dither.errors import UserError
from dither.spec import registry
from dither.spec.formats import Format, number_text

SHORT = 8
"""All values of formats with up to this many bits are listed."""

FIELDS = (
    *("name", "bits", "e/m", "bias", "max", "min normal", "min subnormal"),
    *("unit roundoff", "digits", "range (binades)", "Inf", "NaN", "codes"),
)
"""Columns of the table of formats."""

NUMBERS = (
    *("name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "min_normal", "min_subnormal"),
    *("unit_roundoff", "digits", "binades", "inf", "nan"),
)
"""Facts of a format in JSON."""


def formats(
    name: Annotated[str | None, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="(default: all formats)")] = None,
    /,
    plot: Annotated[
        tuple[Path, ...] | None,
        tyro.conf.arg(metavar="[FILE]", help_behavior_hint="(without a file: formats.svg, or NAME.svg)"),
    ] = None,
    cast: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CAST...", help_behavior_hint="")] = (),
    on: Annotated[str | None, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="(default: normal)")] = None,
    tensor: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
    json: Json = False,
) -> int:
    """Show the number formats as a table, one format with its values, or compare casts on a tensor.

    Args:
        name: A format to show with its values: a name from the table, or any eXmY, such as e4m10.
        plot: Draw number lines, or histograms of the compared casts, into this .svg or .png file instead, and print its path.
        cast: Casts to compare, such as mxfp4 nf4:tile(64) e4m3:row; a format alone means blocks of 32 x 32.
        on: The numbers to cast: normal, uniform, laplace, student or outliers; or a run, a model or a safetensors file.
        tensor: The name of the matrix in that file or model.
    """
    if plot is not None and len(plot) > 1:
        raise UserError(f"--plot writes one file, not {len(plot)}: draw one format as in `dither formats e4m3 --plot`.")
    if cast:
        if name is not None:
            raise UserError(f"--cast compares casts, and {name!r} is shown alone: leave one of them out.")
        return _compare(cast, on or "normal", tensor, plot, json=json)
    if on is not None or tensor is not None:
        raise UserError("--on and --tensor say where to compare casts: name these with --cast, such as --cast mxfp4 nvfp4.")
    shown = list(registry.FORMATS.values()) if name is None else [Format.parse(name)]
    if plot is not None:
        path = plot[0] if plot else Path("formats.svg" if name is None else f"{shown[0].name}.svg")
        with ProgressBars(sys.stderr).stage("Drawing number lines"):
            from dither.report.figures import write_number_lines  # takes seconds

            written = write_number_lines(shown, path)
        print(written)
        return 0
    found = [{field: getattr(each, field) for field in NUMBERS} for each in shown]
    if name is None:
        print_result(found, _print_formats, json=json)
    else:
        values = shown[0].values() if shown[0].bits <= SHORT else None
        print_result({**found[0], "values": values}, lambda: _print_values(shown[0]), json=json)
    return 0


def _compare(casts: tuple[str, ...], on: str, tensor: str | None, plot: tuple[Path, ...] | None, *, json: bool) -> int:
    from dither.evaluate.deployment import parse_cast
    from dither.numerics.monitor import percent
    from dither.tools import cast_bench

    parsed = [parse_cast(each) for each in casts]
    with ProgressBars(sys.stderr).stage("Comparing casts"):
        source, x = cast_bench.find_tensor(on, tensor)
        found = cast_bench.compare_casts(x, parsed, source)
    if plot is not None:
        print(cast_bench.write_histograms(found, plot[0] if plot else Path("casts.svg")))
        return 0
    header = (
        "cast",
        "bits",
        "SQNR, dB",
        "relative error",
        "clipped",
        "flushed",
        "product error",
        "with Hadamard",
        "values used",
    )
    rows = [
        (
            each.cast,
            f"{each.bits:.3g}",
            "exact" if each.sqnr is None else f"{each.sqnr:.1f}",
            percent(each.relative),
            percent(each.clipped),
            percent(each.flushed),
            percent(each.product),
            "-" if each.product_hadamard is None else percent(each.product_hadamard),
            "-" if each.histogram is None else f"{sum(map(bool, each.histogram.values()))} of {len(each.histogram)}",
        )
        for each in found.casts
    ]
    title = f"Casts of {source}, {' x '.join(map(str, found.shape))}"
    print_result(found, lambda: print_table(title, header, rows, right=range(1, 9)), json=json)
    return 0


def _exactly(x: float) -> str:
    """Return a value with all its digits."""
    fraction, exponent = math.frexp(abs(x))
    if fraction == 0.5 and not 2**-10 <= abs(x) <= 2**20:
        return f"{'-' if x < 0 else ''}2^{exponent - 1}"
    return repr(x).removesuffix(".0")


def _row(format: Format) -> tuple[str, ...]:
    return (
        format.name,
        str(format.bits),
        f"{format.exponent_bits}/{format.mantissa_bits}" if format.exponent_bits else "-",
        str(format.bias) if format.exponent_bits else "-",
        number_text(format.max),
        number_text(format.min_normal),
        number_text(format.min_subnormal) if format.mantissa_bits and format.exponent_bits else "-",
        "-" if format.unit_roundoff is None else number_text(format.unit_roundoff),
        "-" if format.digits is None else f"{format.digits:.1f}",
        f"{format.binades:.1f}",
        "yes" if format.inf else "no",
        "yes" if format.nan else "no",
        number_text(float(1 << format.bits)),
    )


def _print_formats() -> None:
    rows = [_row(format) for format in registry.FORMATS.values()]
    print_table("Number formats", FIELDS, rows, right=[1, 2, 3, 4, 5, 6, 7, 8, 9, 12])
    print_text(
        "Unit roundoff: half the distance from 1 to the next value. Digits: decimal. "
        "Range: log2(max / smallest positive value)."
    )
    print_text("int2 to int8, and eXmY for other X from 1 to 8 and Y from 0 to 23, are formats too; e8m0 is for scales only.")
    print_text("`dither formats --cast mxfp4 nf4:tile(64)` compares casts.")


def _print_values(format: Format) -> None:
    print_table(f"Number format {format}", ("field", "value"), list(zip(FIELDS, _row(format), strict=True)))
    print()
    if format.bits <= SHORT:
        values = format.values()
        print(f"All {len(values)} finite values:")
    else:
        codes = (*range(5), *range(format.max_code - 4, format.max_code + 1))
        values = tuple(format.decode(code) for code in codes)
        print(f"{format} has {1 << format.bits:,} codes; the first five and the last five finite values from zero up:")
    cells = [_exactly(value) for value in values]
    width = max(map(len, cells))
    per_line = max(1, 110 // (width + 2)) if format.bits <= SHORT else 5
    for start in range(0, len(cells), per_line):
        print("".join(f"  {cell:>{width}}" for cell in cells[start : start + per_line]))
