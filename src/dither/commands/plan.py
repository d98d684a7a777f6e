"""`dither plan`: choose a plan for a run, and show and compare plans."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dither.commands.arguments import Device, Json, PlanFile, RunPath
from dither.console import ProgressBars, counter, print_result, print_table, printable
from dither.errors import UserError
from dither.models.sizes import PRESETS, preset
from dither.settings import override
from dither.snip.settings import Estimator, Goal
from dither.spec import Plan, did_you_mean
from dither.spec.random import Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dither.data import Batch
    from dither.snip.divergence import Scores
    from dither.snip.options import Option
    from dither.train.trainer import Trainer

Output = Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The batches and the device of estimates at a checkpoint."""

    batches: int = 1
    """Number of micro-batches for the estimates."""
    seed: int = 0
    """Seed of the noise and of stochastic casts."""
    device: str | None = None
    """Device, in place of that of the run."""
    emulate: bool = False
    """Multiply dequantized numbers in float32 on a GPU too, in place of the setting of the run."""
    fallback: Literal["error", "bf16", "emulate"] | None = None
    """For a layer whose casts no matrix units support: error, bf16 or emulate, in place of the setting of the run."""


GOAL, ESTIMATOR, ESTIMATES = Goal(target=0.75), Estimator(), RunOptions()


def plan(
    run: RunPath,
    /,
    goal: tyro.conf.OmitArgPrefixes[Goal] = GOAL,
    estimator: tyro.conf.OmitArgPrefixes[Estimator] = ESTIMATOR,
    estimates: tyro.conf.OmitArgPrefixes[RunOptions] = ESTIMATES,
    times: str = "times.json",
    scores: str | None = None,
    output: Output = None,
    json: Json = False,
) -> int:
    """Choose the precision of each layer of a run, and show the plan.

    The choice follows from the effect of each option on training, estimated at the newest whole checkpoint of the run, or at
    the one that is named, on its next batches. `dither train --set precision.plan=FILE` trains with a plan, and
    `dither train --set snip.target=0.75` chooses plans during training.

    Args:
        goal: What the plan must reach.
        estimator: How the harm of an option is estimated.
        estimates: The batches and the device of the estimates.
        times: With --cost time, the file that stores the measured times.
        scores: A file for the estimates, as JSON.
        output: A file for the plan.
    """
    from dither.snip.planning import build_plan, choose, picture
    from dither.snip.savings import measure_times

    bars, measured = ProgressBars(sys.stderr), None
    found, choices, base, device = _estimated(run, estimator, estimates, bars)
    said = {"probe": found.probe, "power": estimator.power, **estimator.weights, **goal.provenance}
    if goal.cost == "time":
        shapes = [(layer.M, layer.N, layer.K) for layer in found.statistics.layers]
        with bars.stage("Measuring the time of each option") as tick:
            measured = measure_times(shapes, choices, path=times, device=device, tick=tick)
        said["cost"] = f"time on {measured.device}"
    harm = found.harm(estimator.loss_weight, estimator.update_weight, estimator.power)
    solution = choose(harm, found.statistics.layers, choices, goal, measured)
    chosen = build_plan(found.layers, choices, solution, base, step=found.step, **said)
    _write(output, chosen.to_json())
    _write(scores, found.to_json() + "\n")
    print_result(chosen, lambda: print(printable(picture(chosen), keep="\n")), json=json)
    return 0


def options(json: Json = False) -> int:
    """List the levels that --options takes.

    They are recipes and named casts. The text of any other cast works as well, such as "nf4 tile(64)", for
    all three operands.
    """
    from dither.snip.options import HOPPER, known_levels
    from dither.snip.planning import bits_of
    from dither.spec.engines import engines_of

    found = []
    for name, precision in known_levels().items():
        try:
            engines = ", ".join(dict.fromkeys(map(str, engines_of(precision, (128, 128, 128), HOPPER).values())))
        except UserError:
            engines = "none"
        found.append({"level": name, "bits": bits_of(precision), "casts": str(precision), "engines": engines})
    rows = [tuple(each.values()) for each in found]
    print_result(found, lambda: print_table("Levels", ("level", "bits", "casts", "engines, H100"), rows), json=json)
    return 0


def show(path: PlanFile, /, json: Json = False) -> int:
    """Show a plan as a table of blocks and layers.

    Each layer shows the bits of its input, weight and output gradient.
    """
    from dither.snip.planning import picture

    plan = Plan.load(path)
    print_result(plan, lambda: print(printable(picture(plan), keep="\n")), json=json)
    return 0


def diff(first: PlanFile, second: PlanFile, /, json: Json = False) -> int:
    """Show the differences between two plans.

    The exit code is 0 if there are none, and 1 if there are.
    """
    from dither.snip.planning import bits_of

    one, other = Plan.load(first), Plan.load(second)
    rows = []
    for place, texts in one.diff(other).items():
        name = place.removeprefix("layers ")
        rules = [dict(each.layers).get(name) for each in (one, other)] if name != place else []
        short = [bits_of(rule) for rule in rules if rule is not None]
        if place != "layers":  # the order of rules alone is not a difference
            rows.append((name, *(short if len(set(short)) == 2 else texts)))

    def in_words() -> None:
        if rows:
            print_table(f"{len(rows)} differences", ("where", first, second), rows)
        else:
            print("The plans are the same.")

    print_result([{"where": where, "first": a, "second": b} for where, a, b in rows], in_words, json=json)
    return 1 if rows else 0


def frontier(
    run: RunPath,
    /,
    estimator: tyro.conf.OmitArgPrefixes[Estimator] = ESTIMATOR,
    estimates: tyro.conf.OmitArgPrefixes[RunOptions] = ESTIMATES,
    targets: int = 11,
    stages: tuple[int, ...] = (),
    json: Json = False,
) -> int:
    """Show the cost of every target, from one estimate.

    The targets range from no savings to all possible savings.

    Args:
        estimator: How the harm of an option is estimated.
        estimates: The batches and the device of the estimates.
        targets: The number of equally spaced targets.
        stages: Blocks per pipeline stage, such as 6 6 6 4, each of which then saves its share.
    """
    from dither.snip import solver
    from dither.snip.planning import stage_sizes
    from dither.snip.savings import efficiency

    found, choices, _, _ = _estimated(run, estimator, estimates, ProgressBars(sys.stderr))
    layers = found.statistics.layers
    harm = found.harm(estimator.loss_weight, estimator.update_weight, estimator.power)
    split = stage_sizes(found.layers, stages) if stages else None
    solved = solver.frontier(harm, efficiency(layers, choices), targets=targets, stages=split)
    rows = [(f"{each.target:.3f}", f"{each.efficiency:.3f}", f"{each.harm:.4g}", f"{each.gap:g}") for each in solved]
    header = ("target", "saved", "harm", "gap")
    print_result(
        [{"target": each.target, "saved": each.efficiency, "harm": each.harm, "gap": each.gap} for each in solved],
        lambda: print_table(f"Step {found.step}, {len(layers)} layers", header, rows, right=[0, 1, 2, 3]),
        json=json,
    )
    return 0


def static(run: RunPath, /, headroom: float = 2.0, output: Output = None, json: Json = False) -> int:
    """Write the scales of a run's tensors into its plan.

    The monitor of the run (`monitor.every`) has measured the largest magnitudes of operands. Casts with one scale per tensor
    get the scale `static(s)` for them, so that no step measures a tensor before it casts it.

    Args:
        headroom: The factor by which later values may be larger than the measured ones before they saturate.
        output: A file for the plan.
    """
    from dither.report.layers import magnitudes
    from dither.report.run_folder import read
    from dither.snip.planning import picture
    from dither.spec.plan import static_plan

    found = read(run)
    if found.plan is None:
        raise UserError(f"The run {run!r} has no plan: train with a recipe such as precision.recipe=fp8-current.")
    if not (known := magnitudes(found)):
        raise UserError(f"The run {run!r} has measured no magnitudes: train some steps with monitor.every=10.")
    chosen = static_plan(found.plan, known, headroom)
    _write(output, chosen.to_json())
    print_result(chosen, lambda: print(printable(picture(chosen), keep="\n")), json=json)
    return 0


def auto(
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    /,
    tokens: int = 8192,
    recipes: str = "fp8-block,fp8-current",
    times: str | None = None,
    device: Device = "auto",
    output: Output = None,
    json: Json = False,
) -> int:
    """Choose FP8 or BF16 for each layer of a model by measured time.

    Every shape of a layer is measured on this GPU, forward and backward with all casts. FP8 is chosen where it saves at least
    2 % of the time. `dither train --set precision.recipe=fp8-auto` does the same when a run begins.

    Args:
        model: A preset such as llama-134m, or a Hugging Face folder or its config.json.
        tokens: The tokens per forward pass on one GPU.
        recipes: The recipes to compare with BF16, in the order of preference.
        times: A file of measured times; what is missing is measured and added. Without a GPU all times come from it.
        output: A file for the plan.
    """
    from dither.models import hf
    from dither.models.presets import skeleton
    from dither.snip.fp8_auto import auto_plan
    from dither.train.ranks import joined

    if model not in PRESETS and not Path(model).exists():
        raise UserError(
            f"There is no model {model!r}{did_you_mean(model, PRESETS)}: give a preset ({', '.join(PRESETS)}), or a Hugging "
            "Face folder or config.json."
        )
    built = skeleton(preset(model)) if model in PRESETS else hf(model)
    names = [name.strip() for name in recipes.split(",")]
    said: list[str] = []
    with joined(device) as ranks, ProgressBars(sys.stderr).stage("Measuring the time of each shape of a layer") as tick:
        chosen = auto_plan(built, tokens=tokens, recipes=names, times=times, device=ranks.device, say=said.append, tick=tick)
    _write(output, chosen.to_json())
    print_result(chosen, lambda: print("\n".join(said)), json=json)
    return 0


# Estimates at a checkpoint --------------------------------------------------------------------------------------------


def _estimated(
    path: str, estimator: Estimator, chosen: RunOptions, bars: ProgressBars
) -> "tuple[Scores, tuple[Option, ...], Plan, torch.device]":
    """Return the estimated harm of options at a checkpoint of a run, on its next micro-batches; the options; plan and device.

    `path` is a run, whose newest whole checkpoint is taken, or a checkpoint. The probe "auto" measures each option.
    """
    from dither.nn import Linear
    from dither.snip.dry_run import TrainingSetup
    from dither.snip.effort import passes_of
    from dither.snip.options import options as combinations
    from dither.snip.probes import check_probe, score

    batches = chosen.batches
    if batches < 1:
        raise UserError(f"--batches is a number of micro-batches of at least 1, not {batches}.")
    options = combinations(estimator.options)
    probe: Any = "measure" if estimator.probe == "auto" else estimator.probe
    check_probe(probe)
    with _restored(path, chosen, bars) as trainer:
        parts: list[Batch] = []
        while len(parts) < batches:
            step = trainer.done + trainer.offset + len(parts) // trainer.parts
            parts += trainer.loader.batch(step).to(trainer.ranks.device).split(trainer.parts)
        parts = parts[:batches]
        layers = sum(isinstance(module, Linear) for module in trainer.model.modules())
        with bars.stage(f"Estimating with the probe {probe}") as tick:
            add = counter(tick, len(parts) * passes_of(probe, layers, options))

            def forward(model: "nn.Module", part: "Batch") -> "Tensor":
                loss = trainer.passes.loss(model, part)
                add(1)
                return loss

            scores = score(
                trainer.model,
                parts,
                trainer.training.optimizer,
                options,
                stream=Stream(chosen.seed, "snip", str(trainer.done)),
                forward=forward,
                probe=probe,
                rows=estimator.rows,
                step=trainer.done,
                setup=TrainingSetup(products=trainer.training.backward_context),
            )
        return scores, options, trainer.conversion.plan, trainer.ranks.device


@contextmanager
def _restored(path: str, chosen: RunOptions, bars: ProgressBars) -> "Iterator[Trainer]":
    """Restore the newest whole checkpoint of a run, or the checkpoint at the path."""
    from dither.data import open_corpus
    from dither.models.open import find_model
    from dither.train import config
    from dither.train.config import CONFIG
    from dither.train.ranks import joined
    from dither.train.trainer import Trainer

    found = find_model(path)
    found.tell()
    folder = found.run
    if folder is None:
        kinds = f"neither the folder of a run, with a {CONFIG}, nor a checkpoint of one"
        raise UserError(f"{path!r} is {kinds}: name what `dither train` wrote.")
    given = {
        "run.device": chosen.device,
        "precision.emulate": chosen.emulate or None,
        "precision.fallback": chosen.fallback,
    }
    changes = {path: value for path, value in given.items() if value is not None}
    run = override(config.load(folder / CONFIG), values={"run.out": str(folder), "run.compile": False, **changes})
    with joined(run.run.device) as ranks:
        if ranks.world > 1:
            raise UserError("dither plan runs in one process: start it without torchrun.")
        with bars.stage(f"Reading {path}"):
            trainer = Trainer(run, open_corpus(run.data, folder, once=ranks.once), ranks, initial=False)
            trainer.restore(found.path)
        yield trainer


def _write(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path!r} cannot be written: {error}.") from None
