"""`dither inspect`: the weights of a saved model, layer by layer."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.console import ProgressBars, print_table

if TYPE_CHECKING:
    from dither.tools.inspect import InspectedModel

CASTS = ("e4m3", "e2m1")
"""The casts that are tried by default."""


def inspect(
    model: Annotated[Path, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")],
    /,
    cast: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FORMAT...", help_behavior_hint=f"(default: {' '.join(CASTS)})")
    ] = (),
    json: bool = False,
) -> int:
    """Show the weights of a saved model, layer by layer.

    It shows magnitudes, what casts do to them, and the last updates. Layers are sorted by the signal-to-noise ratio, the lowest
    first. The updates are those of the last optimizer step, computed from its stored moments and learning rate, and compared
    with the spacing of the format of the weights.

    Args:
        model: A run, whose newest whole checkpoint is read, a checkpoint, or a folder of a Hugging Face model.
        cast: Casts to try, such as e2m1:block(32), e4m3:row or mxfp4; a format alone means blocks of 32 x 32.
        json: Print JSON.
    """
    from dither.evaluate.deployment import parse_cast
    from dither.tools import inspect as inspection

    casts = [parse_cast(each) for each in cast or CASTS]
    inspected = inspection.inspect(model, casts, ProgressBars(sys.stderr).stage)
    if json:
        print(json_text.dumps(inspected.to_dict(), indent=1, allow_nan=False))
    else:
        _print_model(inspected)
    return 0


def _print_model(inspected: InspectedModel) -> None:
    from dither.numerics.report import UPDATE_HEADER, percent

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
    updates = sorted(
        ((layer.name, layer.update) for layer in inspected.layers if layer.update is not None),
        key=lambda pair: pair[1].ratio or 0.0,
    )
    of_updates = [
        (name, each.format, each.rounding, "-" if each.ratio is None else f"{each.ratio:.3g}", percent(each.stagnant))
        for name, each in updates
    ]
    if of_updates:
        print_table(f"Updates of step {inspected.step} against the spacing of weights", UPDATE_HEADER, of_updates, right=[3, 4])
    elif inspected.note:
        print(inspected.note)


def _decibels(sqnr: float | None, nonfinite: float) -> str:
    return "not finite" if nonfinite else "exact" if sqnr is None else f"{sqnr:.1f}"
