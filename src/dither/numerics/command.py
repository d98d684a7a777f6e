"""`dither inspect`, a model at rest, and `dither bisect`, two precisions in lockstep."""

import json as json_text
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from dither.arms import precision_of
from dither.doctor import print_table
from dither.errors import UserError
from dither.evaluate.command import parse_cast
from dither.numerics import lockstep, rest
from dither.numerics.lockstep import Bisection
from dither.numerics.report import UPDATE_HEADER, percent
from dither.numerics.rest import ModelAtRest
from dither.train import config as configs
from dither.train.config import Config, Precision
from dither.train.distributed import joined
from dither.train.job import Job, open_corpus
from dither.trials import BASE

CASTS = ("e4m3", "e2m1")
"""What weights are inspected for unless casts are named."""

SHOWN = 20
"""Rows of a table of differences; JSON has them all."""


def inspect(
    model: Annotated[Path, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")],
    /,
    cast: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FORMAT...", help_behavior_hint=f"(default: {' '.join(CASTS)})")
    ] = (),
    json: bool = False,
) -> int:
    """Show the weights of a model at rest, layer by layer: magnitudes, what casts do to them, and the last updates.

    Layers come worst first: those whose signal-to-noise ratio is lowest. Updates are those of the optimizer's last step, from
    its stored moments and rate, against the spacing of the format that weights are kept in.

    Args:
        model: A run's folder, of which the newest whole checkpoint counts, a checkpoint, or a folder of a Hugging Face model.
        cast: Casts to try, such as e2m1:block(32), e4m3:row or mxfp4; a format alone is cast in blocks of 32 x 32.
        json: Print JSON.
    """
    casts = [parse_cast(each) for each in cast or CASTS]
    if not json:
        print(f"Reading {model} ...", file=sys.stderr, flush=True)
    found = rest.inspect(model, casts)
    if json:
        print(json_text.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        _print_rest(found)
    return 0


def _print_rest(found: ModelAtRest) -> None:
    header = ("layer", "shape", "amax", "median", "binades", "clipped", "flushed", "subnormal", "SQNR, dB")
    for cast in found.layers[0].casts if found.layers else ():
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
            for layer in found.worst_first(cast)
        ]
        print_table(f"{found.model}: weights in {cast}", header, rows, right=range(2, 9))
        print()
    updates = sorted(
        ((layer.name, layer.update) for layer in found.layers if layer.update is not None),
        key=lambda pair: pair[1].ratio or 0.0,
    )
    of_updates = [
        (name, each.format, each.rounding, "-" if each.ratio is None else f"{each.ratio:.3g}", percent(each.stagnant))
        for name, each in updates
    ]
    if of_updates:
        print_table(f"Updates of step {found.step} against the weights' spacing", UPDATE_HEADER, of_updates, right=[3, 4])
    elif found.note:
        print(found.note)


def _decibels(sqnr: float | None, nonfinite: float) -> str:
    return "not finite" if nonfinite else "exact" if sqnr is None else f"{sqnr:.1f}"


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
    json: bool = False,
) -> int:
    """Run two precisions in lockstep and name the first layer and step where they differ beyond a bound.

    Both have the same model, data, seeds and, at the start of each step, weights. Each layer of B is compared with A's on the
    same operands, so that a fault shows in the layer that has it. The exit code is 0 when nothing is beyond the bound, 1 when
    something is, and 2 for a mistake in the arguments.

    Args:
        base: The config that the runs have in common; by default a tiny Llama on the source text of Python's standard library.
        a: The reference, as dither compare names precisions (fp32, o1, bf16-sr+fp8-block), or a plan's file (o1+plan.json).
        b: What is compared with it, named likewise.
        set: Fields as section.field=value, such as data.batch=4.
        steps: Steps to run at most; the first beyond the bound ends it.
        bound: The relative difference that no layer may exceed; by default far from what the other layers have.
        free: Let B keep the weights that it learns: differences grow as they do in two runs.
        json: Print JSON.
    """
    common = configs.override(BASE if base is None else configs.load(base), set)
    if not 1 <= steps <= common.run.steps:
        raise UserError(f"--steps is from 1 to run.steps={common.run.steps}, whose learning rates it takes, not {steps}.")
    both = [replace(common, precision=arm(name, common), run=replace(common.run, compile=False)) for name in (a, b)]
    with joined(common.run.device) as ranks, tempfile.TemporaryDirectory(prefix="dither-bisect-") as folder:
        if ranks.world > 1:
            raise UserError("dither bisect runs in one process: start it without torchrun.")
        say: Callable[[str], object] = (lambda _: None) if json else partial(print, flush=True)
        say(f"Reading the text; then {a} and {b} take {steps} steps ...")
        corpus = open_corpus(common, Path(folder), ranks)
        jobs = [Job(config, corpus, ranks) for config in both]
        found = lockstep.bisect(jobs[0], jobs[1], names=(a, b), steps=steps, bound=bound, free=free, tell=say)
    if json:
        print(json_text.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        _print_differences(found)
    return 0 if found.culprit is None else 1


def arm(name: str, common: Config) -> Precision:
    """The precision that a name means: as `dither compare` has it, or with a plan's file in place of a recipe.

    >>> arm("bf16-sr+plan.json", BASE).plan, arm("bf16-sr+plan.json", BASE).mode
    ('plan.json', 'bf16-sr')
    """
    plans = [part for part in name.split("+") if part.endswith(".json")]
    if not plans:
        return replace(precision_of(name), states=common.precision.states)
    others = [part for part in name.split("+") if part not in plans]
    if len(plans) > 1:
        raise UserError(f"{name!r} names two plans: give one.")
    rest_of = precision_of("+".join(others)) if others else Precision(mode="o1")
    return replace(rest_of, plan=plans[0], states=common.precision.states)


def _print_differences(found: Bisection) -> None:
    header = ("step", "layer", "product", "local", "total", "bound", "of the bound")
    worst = sorted(found.differences, key=lambda each: -each.ratio)
    rows: Sequence[Sequence[str]] = [
        (
            str(each.step),
            each.layer,
            each.product,
            f"{each.local:.3g}",
            "" if each.total is None else f"{each.total:.3g}",
            f"{each.bound:.3g}",
            f"{each.ratio:.2f}",
        )
        for each in worst[:SHOWN]
    ]
    print_table(f"Relative differences of {found.b} from {found.a}, the largest first", header, rows, right=[0, 3, 4, 5, 6])
    if len(worst) > SHOWN:
        print(f"and {len(worst) - SHOWN} more, which --json has")
    print(found.sentence)
