"""`dither inspect`: the weights of a saved model, layer by layer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.commands.arguments import Json, ModelPath
from dither.console import ProgressBars, print_result, print_table

if TYPE_CHECKING:
    from dither.tools.inspect import InspectedModel

CASTS = ("e4m3", "e2m1")
"""The casts that are tried by default."""


def inspect(
    model: ModelPath,
    /,
    cast: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FORMAT...", help_behavior_hint=f"(default: {' '.join(CASTS)})")
    ] = (),
    json: Json = False,
) -> int:
    """Show the weights of a saved model, layer by layer.

    It shows magnitudes, what casts do to them, and the last updates. Layers are sorted by the signal-to-noise ratio, the lowest
    first. The updates are those of the last optimizer step, computed from its stored moments and learning rate, and compared
    with the spacing of the format of the weights.

    Args:
        cast: Casts to try, such as e2m1:block(32), e4m3:row or mxfp4; a format alone means blocks of 32 x 32.
    """
    from dither.evaluate.deployment import parse_cast
    from dither.tools import inspect as inspection

    casts = [parse_cast(each) for each in cast or CASTS]
    inspected = inspection.inspect(model, casts, ProgressBars(sys.stderr).stage)
    print_result(inspected, lambda: _print_model(inspected), json=json)
    return 0


def _print_model(inspected: InspectedModel) -> None:
    from dither.numerics.monitor import UPDATE_HEADER, percent, update_rows

    header = ("layer", "shape", "amax", "median", "binades", "clipped", "flushed", "subnormal", "SQNR, dB")
    for cast in inspected.layers[0].casts if inspected.layers else ():
        rows = [
            (
                layer.name,
                " x ".join(map(str, layer.shape)),
                f"{layer.amax:.3g}",
                f"{layer.median:.3g}",
                "-" if layer.binades is None else f"{layer.binades:.1f}",
                percent(layer.casts[cast].clipped),
                percent(layer.casts[cast].flushed),
                percent(layer.casts[cast].subnormal),
                _decibels(layer.casts[cast].sqnr, layer.nonfinite),
            )
            for layer in inspected.worst_first(cast)
        ]
        print_table(f"{inspected.model}: weights in {cast}", header, rows, right=range(2, 9))
        print()
    updates = update_rows([(layer.name, layer.update) for layer in inspected.layers if layer.update is not None])
    if updates:
        print_table(f"Updates of step {inspected.step} against the spacing of weights", UPDATE_HEADER, updates, right=[3, 4])
    elif inspected.note:
        print(inspected.note)


def _decibels(sqnr: float | None, nonfinite: float) -> str:
    return "not finite" if nonfinite else "exact" if sqnr is None else f"{sqnr:.1f}"
