"""`dither plan`: choose a plan for a run, and show and compare plans."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor, nn

from dither.console import ProgressBars, counter, print_table
from dither.data import Batch
from dither.errors import UserError
from dither.models import PRESETS, hf, preset
from dither.models.open import find_model
from dither.models.presets import skeleton
from dither.nn import Linear
from dither.nn.sites import Fallback
from dither.snip.divergence import Scores
from dither.snip.dry_run import Forward
from dither.snip.effort import passes_of
from dither.snip.fp8_auto import RECIPES, auto_plan
from dither.snip.options import Option
from dither.snip.options import options as combinations
from dither.snip.planning import bits_of, choose, picture, stage_sizes
from dither.snip.planning import build_plan as plan_of
from dither.snip.probes import score
from dither.snip.savings import efficiency, measure_times
from dither.snip.settings import Estimator, Goal
from dither.snip.solver import frontier as frontier_of
from dither.spec import Plan, did_you_mean
from dither.spec.random import Stream
from dither.train import config
from dither.train.files import CONFIG
from dither.train.ranks import joined
from dither.train.trainer import Trainer, open_corpus

Probe = Literal["auto", "measure", "joint", "last", "direct"]
RunPath = Annotated[str, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]
Output = Annotated[str | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")]


def plan(
    run: RunPath,
    /,
    target: float = 0.75,
    options: str = "fp8,fp4",
    cost: Literal["flops", "time"] = "flops",
    stages: str | None = None,
    balance: Literal["slowest", "share"] = "slowest",
    pin: tuple[str, ...] = (),
    probe: Probe = "auto",
    power: float = 2.0,
    loss_weight: float = 1.0,
    update_weight: float = 1.0,
    rows: bool = False,
    seed: int = 0,
    batches: int = 1,
    device: str | None = None,
    emulate: bool = False,
    fallback: Fallback | None = None,
    times: str = "times.json",
    scores: str | None = None,
    output: Output = None,
) -> int:
    """Choose the precision of each layer of a run, and show the plan.

    The choice follows from the effect of each option on training, estimated at the newest whole checkpoint of the run, or at
    the one that is named, on its next batches. `dither train --set precision.plan=FILE` trains with a plan, and
    `dither train --set snip.target=0.75` chooses plans during training.

    Args:
        run: The folder of a run, or one of its checkpoints.
        target: The fraction of the possible savings, from 0 to 1: with fp8,fp4 the fraction of FLOPs in FP4.
        options: The levels of each operand, such as fp8,fp4 or bf16,fp8.
        cost: What to save: FLOPs, or time as measured on this GPU.
        stages: Blocks per pipeline stage, such as 6,6,6,4.
        balance: With stages: bound the slowest stage, or let each stage save its share.
        pin: Layers with a fixed option, as pattern=option, such as *.down_proj=fp8.
        probe: The estimator: measure each option (auto), perturb all layers at once (joint), add noise at the last layer, or
            use closed forms (direct).
        power: The exponent of the divergences of layers in their sum: 2 fits independent errors; the paper has 1.
        loss_weight: The weight of the loss divergence dL; 0 ignores it.
        update_weight: The weight of the weight divergence dW, the change of the next update; 0 ignores it.
        rows: Use the row-wise form of the loss divergence (section 6.3 of the paper).
        seed: The seed of the noise and of stochastic casts.
        batches: The number of micro-batches for the estimates.
        device: The device, in place of that of the run.
        emulate: Multiply dequantized numbers in float32 on a GPU too, in place of the setting of the run.
        fallback: For a layer whose casts no matrix units support: error, bf16 or emulate, in place of the setting of the run.
        times: With --cost time, the file that stores the measured times.
        scores: A file for the estimates, as JSON.
        output: A file for the plan.
    """
    estimator = Estimator(
        options=options, probe=probe, rows=rows, power=power, loss_weight=loss_weight, update_weight=update_weight
    )
    goal = Goal(target=target, cost=cost, stages=_stages(stages), balance=balance, pinned=pin)
    given, bars, measured = combinations(options), ProgressBars(sys.stderr), None
    with _opened(run, device, emulate, fallback, bars) as opened:
        found = opened.score(given, estimator, batches, seed)
    said = {"probe": found.probe, "power": power, **estimator.weights, **goal.provenance}
    if cost == "time":
        shapes = [(layer.M, layer.N, layer.K) for layer in found.statistics.layers]
        with bars.stage("Measuring the time of each option") as tick:
            measured = measure_times(shapes, given, path=times, device=opened.job.ranks.device, tick=tick)
        said["cost"] = f"time on {measured.device}"
    harm = found.harm(loss_weight, update_weight, power)
    solution = choose(harm, found.statistics.layers, given, goal, measured)
    chosen = plan_of(found.layers, given, solution, opened.job.conversion.plan, step=found.step, **said)
    _write(output, chosen.to_json())
    _write(scores, found.to_json() + "\n")
    print(picture(chosen))
    return 0


def show(path: Annotated[str, tyro.conf.arg(metavar="PLAN")], /) -> int:
    """Show a plan as a table of blocks and layers.

    Each layer shows the bits of its input, weight and output gradient.

    Args:
        path: The file of a plan.
    """
    print(picture(Plan.load(path)))
    return 0


def diff(first: Annotated[str, tyro.conf.arg(metavar="PLAN")], second: Annotated[str, tyro.conf.arg(metavar="PLAN")], /) -> int:
    """Show the differences between two plans.

    The exit code is 0 if there are none, and 1 if there are.

    Args:
        first: The file of a plan.
        second: The file of another plan.
    """
    one, other = Plan.load(first), Plan.load(second)
    rows = []
    for place, texts in one.diff(other).items():
        name = place.removeprefix("layers ")
        rules = [dict(each.layers).get(name) for each in (one, other)] if name != place else []
        short = [bits_of(rule) for rule in rules if rule is not None]
        if place != "layers":  # the order of rules alone is not a difference
            rows.append((name, *(short if len(set(short)) == 2 else texts)))
    if rows:
        print_table(f"{len(rows)} differences", ("where", first, second), rows)
    else:
        print("The plans are the same.")
    return 1 if rows else 0


def frontier(
    run: RunPath,
    /,
    options: str = "fp8,fp4",
    targets: int = 11,
    stages: str | None = None,
    probe: Probe = "auto",
    power: float = 2.0,
    loss_weight: float = 1.0,
    update_weight: float = 1.0,
    rows: bool = False,
    seed: int = 0,
    batches: int = 1,
    device: str | None = None,
    emulate: bool = False,
    fallback: Fallback | None = None,
) -> int:
    """Show the cost of every target, from one estimate.

    The targets range from no savings to all possible savings.

    Args:
        run: The folder of a run, or one of its checkpoints.
        options: The levels of each operand.
        targets: The number of equally spaced targets.
        stages: Blocks per pipeline stage, each of which then saves its share.
        probe: The estimator.
        power: The exponent of the divergences of layers in their sum.
        loss_weight: The weight of the loss divergence dL.
        update_weight: The weight of the weight divergence dW.
        rows: Use the row-wise form of the loss divergence.
        seed: The seed of the noise and of stochastic casts.
        batches: The number of micro-batches for the estimates.
        device: The device, in place of that of the run.
        emulate: Multiply dequantized numbers in float32 on a GPU too, in place of the setting of the run.
        fallback: For a layer whose casts no matrix units support: error, bf16 or emulate, in place of the setting of the run.
    """
    estimator = Estimator(
        options=options, probe=probe, rows=rows, power=power, loss_weight=loss_weight, update_weight=update_weight
    )
    given, sizes = combinations(options), _stages(stages)
    with _opened(run, device, emulate, fallback, ProgressBars(sys.stderr)) as opened:
        found = opened.score(given, estimator, batches, seed)
    layers = found.statistics.layers
    shares = efficiency(layers, given)
    split = stage_sizes(found.layers, sizes) if sizes else None
    lines = [
        (f"{each.target:.3f}", f"{each.efficiency:.3f}", f"{each.harm:.4g}", f"{each.gap:g}")
        for each in frontier_of(found.harm(loss_weight, update_weight, power), shares, targets=targets, stages=split)
    ]
    print_table(f"Step {found.step}, {len(layers)} layers", ("target", "saved", "harm", "gap"), lines, right=[0, 1, 2, 3])
    return 0


def auto(
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")],
    /,
    tokens: int = 8192,
    recipes: str = ",".join(RECIPES),
    times: str | None = None,
    device: str = "auto",
    output: Output = None,
) -> int:
    """Choose FP8 or BF16 for each layer of a model by measured time.

    Every shape of a layer is measured on this GPU, forward and backward with all casts. FP8 is chosen where it saves at least
    2 % of the time. `dither train --set precision.recipe=fp8-auto` does the same when a run begins.

    Args:
        model: A preset such as llama-134m, or a Hugging Face folder or its config.json.
        tokens: The tokens per forward pass on one GPU.
        recipes: The recipes to compare with BF16, in the order of preference.
        times: A file of measured times; what is missing is measured and added. Without a GPU all times come from it.
        device: The device: auto (cuda if available), cpu, cuda, or cuda:N.
        output: A file for the plan.
    """
    if model in PRESETS:
        built: nn.Module = skeleton(preset(model))
    elif Path(model).exists():
        built = hf(model)
    else:
        raise UserError(
            f"There is no model {model!r}{did_you_mean(model, PRESETS)}: give a preset ({', '.join(PRESETS)}), or a Hugging "
            "Face folder or config.json."
        )
    names = [name.strip() for name in recipes.split(",")]
    said: list[str] = []
    with joined(device) as ranks, ProgressBars(sys.stderr).stage("Measuring the time of each shape of a layer") as tick:
        chosen = auto_plan(built, tokens=tokens, recipes=names, times=times, device=ranks.device, say=said.append, tick=tick)
    print("\n".join(said))
    _write(output, chosen.to_json())
    return 0


def _check_count(option: str, count: int, least: int) -> None:
    if count < least:
        raise UserError(f"{option} is a number of micro-batches of at least {least}, not {count}.")


# An opened run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opened:
    """A run, restored from one of its checkpoints."""

    job: Trainer
    bars: ProgressBars

    @property
    def layers(self) -> int:
        """The number of layers with a precision of their own."""
        return sum(isinstance(module, Linear) for module in self.job.model.modules())

    @contextmanager
    def counted(self, title: str, passes: int) -> Iterator[Forward]:
        """Show a stage of `passes` passes over micro-batches, and yield the function that computes a loss and counts them."""
        with self.bars.stage(title) as tick:
            add = counter(tick, passes)

            def forward(model: nn.Module, part: Batch) -> Tensor:
                loss = self.job.passes.loss(model, part)
                add(1)
                return loss

            yield forward

    def parts(self, count: int) -> list[Batch]:
        """Return `count` micro-batches, from the next step on."""
        _check_count("--batches", count, 1)
        job, step = self.job, self.job.done + self.job.offset
        found: list[Batch] = []
        while len(found) < count:
            found += job.loader.batch(step).to(job.ranks.device).split(job.parts)
            step += 1
        return found[:count]

    def score(self, options: Sequence[Option], estimator: Estimator, batches: int, seed: int) -> Scores:
        """Return the estimates at the step of the run."""
        stream, optimizer = Stream(seed, "snip", str(self.job.done)), self.job.training.optimizer
        parts = self.parts(batches)
        probe: Any = "measure" if estimator.probe == "auto" else estimator.probe
        with self.counted(f"Estimating with the probe {probe}", len(parts) * passes_of(probe, self.layers, options)) as forward:
            how: dict[str, Any] = {"stream": stream, "forward": forward, "step": self.job.done, "rows": estimator.rows}
            return score(self.job.model, parts, optimizer, options, probe=probe, **how)


@contextmanager
def _opened(path: str, device: str | None, emulate: bool, fallback: Fallback | None, bars: ProgressBars) -> Iterator[_Opened]:
    """Restore the newest whole checkpoint of a run, or the checkpoint at the path."""
    found = find_model(path)
    folder = found.run
    if folder is None:
        kinds = f"neither the folder of a run, with a {CONFIG}, nor a checkpoint of one"
        raise UserError(f"{path!r} is {kinds}: name what `dither train` wrote.")
    changes = [f"run.out={config.toml(str(folder))}", "run.compile=false"]
    changes += [] if device is None else [f"run.device={config.toml(device)}"]
    changes += ["precision.emulate=true"] if emulate else []
    changes += [] if fallback is None else [f"precision.fallback={config.toml(fallback)}"]
    run = config.override(config.load(folder / CONFIG), changes)
    with joined(run.run.device) as ranks:
        if ranks.world > 1:
            raise UserError("dither plan runs in one process: start it without torchrun.")
        with bars.stage(f"Reading {path}"):
            job = Trainer(run, open_corpus(run, folder, ranks), ranks, initial=False)
            job.restore(found.path)
        yield _Opened(job, bars)


def _stages(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--stages is the number of blocks per pipeline stage, such as 6,6,6,4, not {text!r}.")
    return tuple(map(int, parts))


def _write(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path!r} cannot be written: {error}.") from None
