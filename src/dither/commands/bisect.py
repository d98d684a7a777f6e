"""`dither bisect`: run two precisions in lockstep and name the first layer and step where they differ."""

import json as json_text
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from dither.errors import UserError
from dither.experiments import lockstep
from dither.experiments.arms import precision_or_plan
from dither.experiments.lockstep import Bisection
from dither.experiments.trials import BASE
from dither.tables import print_table
from dither.train import config as configs
from dither.train.distributed import joined
from dither.train.trainer import Trainer, open_corpus

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
    both = [
        replace(common, precision=precision_or_plan(name, common.precision.states), run=replace(common.run, compile=False))
        for name in (a, b)
    ]
    with joined(common.run.device) as ranks, tempfile.TemporaryDirectory(prefix="dither-bisect-") as folder:
        if ranks.world > 1:
            raise UserError("dither bisect runs in one process: start it without torchrun.")
        say: Callable[[str], object] = (lambda _: None) if json else partial(print, flush=True)
        say(f"Reading the text; then {a} and {b} take {steps} steps ...")
        corpus = open_corpus(common, Path(folder), ranks)
        jobs = [Trainer(config, corpus, ranks) for config in both]
        found = lockstep.bisect(jobs[0], jobs[1], names=(a, b), steps=steps, bound=bound, free=free, tell=say)
    if json:
        print(json_text.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        _print_differences(found)
    return 0 if found.culprit is None else 1


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
