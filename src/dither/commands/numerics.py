"""`dither inspect`: the weights of a model, layer by layer; `dither bisect`: where two precisions begin to differ."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.commands.arguments import Json, ModelPath
from dither.console import ProgressBars, print_result, print_table, print_text
from dither.errors import UserError
from dither.tools.arms import check_used, precision_or_plan
from dither.train import config as configs

if TYPE_CHECKING:
    from dither.tools.bisect import Bisection
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
    if inspected.note:
        print(inspected.note)


def _decibels(sqnr: float | None, nonfinite: float) -> str:
    return "not finite" if nonfinite else "exact" if sqnr is None else f"{sqnr:.1f}"


SHOWN = 20
"""The most rows of the table of differences; JSON has them all."""


def bisect(
    base: Annotated[Path | None, tyro.conf.arg(metavar="[RUN.toml]", help_behavior_hint="(default: a tiny Llama)")] = None,
    /,
    *,
    a: str = "fp32",
    b: str,
    set: tuple[str, ...] = (),
    steps: int = 10,
    bound: float | None = None,
    free: bool = False,
    json: Json = False,
) -> int:
    """Run two precisions in lockstep and name the first layer that differs.

    Both have the same model, data and seeds, and the same weights at the start of each step. Each layer of B is compared with
    that of A on the same operands, so that an error shows in the layer that causes it. The exit code is 0 if no difference
    exceeds the bound, 1 if one does, and 2 for a mistake in the arguments.

    Args:
        base: The config of both runs; by default a tiny Llama on the source code of Python's standard library.
        a: The reference, named as in `dither compare` (fp32, o1, bf16-sr+fp8-block), or with the file of a plan (o1+plan.json).
        b: The precision to compare with it, named in the same way.
        set: Fields as section.field=value, such as data.batch=4.
        steps: Most steps to run; the first difference beyond the bound ends the run.
        bound: The largest relative difference of a layer; by default well above that of the other layers.
        free: Let B keep its own weights, so that differences accumulate as in two separate runs.
    """
    from dither.data import open_corpus
    from dither.tools import bisect as lockstep
    from dither.tools.trials import BASE
    from dither.train.ranks import joined
    from dither.train.trainer import Trainer

    common = configs.override(BASE if base is None else configs.load(base), set)
    if not 1 <= steps <= common.run.steps:
        raise UserError(f"--steps is from 1 to run.steps={common.run.steps}, not {steps}.")
    for field, given in (("precision.weights", common.precision.weights), ("lora.rank", common.lora.rank)):
        if given is not None:
            raise UserError(f"dither bisect compares the training of whole weights, which {field} leaves out: remove it.")
    both = [
        replace(common, precision=precision_or_plan(name, common.precision), run=replace(common.run, compile=False))
        for name in (a, b)
    ]
    check_used(set, sampled=any(each.precision.sampling is not None for each in both))
    with joined(common.run.device) as ranks, tempfile.TemporaryDirectory(prefix="dither-bisect-") as folder:
        if ranks.world > 1:
            raise UserError("dither bisect runs in one process: start it without torchrun.")
        bars = ProgressBars(sys.stderr)
        with bars.stage("Reading the text") as tick:
            corpus = open_corpus(common.data, Path(folder), once=ranks.once, tick=tick)
        with bars.stage("Building both models"):
            first, second = (Trainer(config, corpus, ranks) for config in both)
        with bars.stage(f"Running {a} and {b} in lockstep") as tick:
            bisection = lockstep.bisect(
                first, second, names=(a, b), steps=steps, bound=bound, free=free, tell=bars.say, tick=tick
            )
    print_result(bisection, lambda: _print_differences(bisection), json=json)
    return 0 if bisection.culprit is None else 1


def _print_differences(bisection: Bisection) -> None:
    header = ("step", "layer", "product", "local", "total", "bound", "relative to the bound")
    largest = sorted(bisection.differences, key=lambda difference: -difference.ratio)
    rows: Sequence[Sequence[str]] = [
        (
            str(difference.step),
            difference.layer,
            difference.product,
            f"{difference.local:.3g}",
            "" if difference.total is None else f"{difference.total:.3g}",
            f"{difference.bound:.3g}",
            f"{difference.ratio:.2f}",
        )
        for difference in largest[:SHOWN]
    ]
    print_table(
        f"Relative differences of {bisection.b} from {bisection.a}, the largest first", header, rows, right=[0, 3, 4, 5, 6]
    )
    if len(largest) > SHOWN:
        print(f"and {len(largest) - SHOWN} more; --json prints all of them")
    print_text(bisection.sentence)
