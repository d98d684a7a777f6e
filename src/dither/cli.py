"""Train language models in few bits, compare precisions, evaluate, report, and choose each layer's precision."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from dither import doctor
from dither.advice.command import memory
from dither.compare import compare
from dither.data.command import data
from dither.errors import DitherError, UserError
from dither.evaluate.command import evaluate
from dither.formats import TABLE, Format
from dither.numerics.command import bisect, inspect
from dither.report.command import report
from dither.snip import command as plans
from dither.train.command import train

SHORT = 8
"""Formats of up to this many bits are listed whole."""

FIELDS = (
    *("name", "bits", "e/m", "bias", "max", "min normal", "min subnormal"),
    *("unit roundoff", "digits", "range (binades)", "Inf", "NaN", "codes"),
)
"""Columns of the table of formats."""


def formats(
    name: Annotated[str | None, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="(default: all formats)")] = None, /
) -> int:
    """Show the number formats as a table, or one format with its values.

    Args:
        name: A format to show with its values: a name from the table, or any eXmY, such as e4m10.
    """
    if name is None:
        _print_formats(list(TABLE.values()))
    else:
        _print_values(Format.parse(name))
    return 0


def check_machine(elements: int = doctor.ELEMENTS, engines: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None) -> int:
    """Show versions and devices, try matrix products, test that kernels and devices agree bit for bit, and give advice.

    The exit code is 0 when all bits agree and 1 when any differ. Without a GPU the kernels run in Triton's interpreter,
    in about 20 seconds on two cores. On a GPU the first run compiles them, which takes minutes. The advice at the end is which
    precision to use on this machine, for models of several sizes, and why.

    Args:
        elements: How many elements each cast of the self-test gets; the time grows with it.
        engines: A file to record the GPU's native matrix units in, those whose every bit was right: precision.engines names it.
    """
    return doctor.run(elements, engines)


COMMANDS: dict[str, Callable[..., int]] = {
    "train": train,
    "compare": compare,
    "eval": evaluate,
    "inspect": inspect,
    "bisect": bisect,
    "data": data,
    "report": report,
    "plan": plans.plan,
    "plan-show": plans.show,
    "plan-diff": plans.diff,
    "plan-verify": plans.verify,
    "plan-frontier": plans.trade_off,
    "memory": memory,
    "formats": formats,
    "doctor": check_machine,
}
"""What can stand after `dither`: functions whose arguments are the options and whose docstrings are the help.

`dither plan show` is `plan-show`: a space may stand for the dash.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `dither`; returns its exit code. A mistake in the arguments is one line on stderr and code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"dither {doctor.version()}")
        return 0
    if "-".join(given[:2]) in COMMANDS:
        given[:2] = ["-".join(given[:2])]
    description = f"{__doc__}\n\n`dither --version` prints the version; `dither COMMAND --help` explains a command."
    try:
        code: int = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="dither", description=description, args=given)
        sys.stdout.flush()  # so that a closed pipe shows here
        return code
    except UserError as error:
        print(f"dither: error: {error}", file=sys.stderr)
        return 2
    except DitherError as error:  # nothing that the arguments could change, such as a process that was lost
        print(f"dither: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output, such as `head`, has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _number(x: float) -> str:
    """A power of two by its exponent, unless that is a small number, and others in up to six digits."""
    fraction, exponent = math.frexp(x)
    return f"2^{exponent - 1}" if fraction == 0.5 and not 1 <= x <= 1024 else f"{x:g}"


def _exactly(x: float) -> str:
    """A value with all its digits."""
    fraction, exponent = math.frexp(abs(x))
    if fraction == 0.5 and not 2**-10 <= abs(x) <= 2**20:
        return f"{'-' if x < 0 else ''}2^{exponent - 1}"
    return repr(x).removesuffix(".0")


def _row(format: Format) -> tuple[str, ...]:
    return (
        format.name,
        str(format.bits),
        "-" if format.is_integer else f"{format.exponent_bits}/{format.mantissa_bits}",
        "-" if format.is_integer else str(format.bias),
        _number(format.max),
        _number(format.min_normal),
        _number(format.min_subnormal) if format.mantissa_bits and not format.is_integer else "-",
        "-" if format.unit_roundoff is None else _number(format.unit_roundoff),
        "-" if format.digits is None else f"{format.digits:.1f}",
        f"{format.binades:.1f}",
        "yes" if format.inf else "no",
        "yes" if format.nan else "no",
        _number(float(1 << format.bits)),
    )


def _print_formats(rows: Sequence[Format]) -> None:
    doctor.print_table("Number formats", FIELDS, [_row(format) for format in rows], right=[1, 2, 3, 4, 5, 6, 7, 8, 9, 12])
    print(
        "Unit roundoff: half the distance from 1 to the next value. Digits: decimal. "
        "Range: log2(max / smallest positive value)."
    )
    print("eXmY for other X from 2 to 8 and Y from 1 to 23 is a format too; e8m0 holds scales only.")


def _print_values(format: Format) -> None:
    doctor.print_table(f"Number format {format}", ("field", "value"), list(zip(FIELDS, _row(format), strict=True)))
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


if __name__ == "__main__":
    sys.exit(main())
