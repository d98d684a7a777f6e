"""`dither compare`: the same model, data and seed in several precisions, one after the other, ranked by held-out loss."""

import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from dither.data import is_prepared, load_tokenizer, open_tokens, prepare
from dither.data.text import STDLIB
from dither.doctor import print_table
from dither.errors import UserError
from dither.optim import MODES
from dither.precision import PARTS, Sampling, did_you_mean
from dither.recipes import RECIPES
from dither.report.load import read_all
from dither.report.summary import Summary, summarize
from dither.train import config as configs
from dither.train.config import Config, Data, Optim, Precision, Run
from dither.train.guard import Status
from dither.train.loop import CONFIG
from dither.train.loop import train as run
from dither.train.progress import Progress

NAMES = ("fp32", "bf16", "fp8-block", "fp4-block", "gaussws:od", "bf16-sr")
"""What is compared when nothing is named."""

NOISES = {"gaussws": "rounded_normal", "diffq": "uniform"}
"""Samplings by the names of their papers."""

BASE = Config(
    data=Data(sequence=128, batch=8),
    optim=Optim(lr=2e-3),
    run=Run(steps=80, eval_every=40, sample_every=0, save_every=40, log_every=5, out="runs/compare"),
)
"""What is run where no config is given: `NAMES` on the tiny Llama take under ten minutes on two CPU cores."""


def compare(
    names: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="[NAME...]", help_behavior_hint=f"(default: {' '.join(NAMES)})")
    ] = (),
    /,
    base: Annotated[Path | None, tyro.conf.arg(metavar="RUN.toml")] = None,
    set: tuple[str, ...] = (),
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = None,
    seeds: int = 1,
    resume: bool = False,
) -> int:
    """Train in several precisions with the same data and seed, rank them by held-out loss, and write a report.

    A run that is done is not run again, so names and seeds can be added later. With several seeds, losses are means, and
    differences those within a seed, with their standard error.

    Args:
        names: A recipe (fp8-block), a mode (o1, bf16-sr), a sampling (gaussws:od, diffq:all), or several (bf16-sr+fp8-block).
        base: The config that the runs have in common; by default a tiny Llama on the source text of Python's standard library.
        set: Fields as section.field=value, such as run.steps=400.
        out: The folder of the runs and the report; by default the config's run.out.
        seeds: How many times each is trained: with the config's seeds of weights and data, and with those that follow them.
        resume: Go on with a comparison that was interrupted.
    """
    for setting in set:
        if setting.strip().startswith("precision.") and not setting.strip().startswith("precision.states"):
            raise UserError(
                f"The setting {setting!r:.80} would be replaced: in a comparison the names say what the precision is."
            )
    common = configs.override(BASE if base is None else configs.load(base), set)
    folder = Path(common.run.out) if out is None else out
    jobs = plan(common, names or NAMES, folder, seeds)
    todo = [job for job in jobs if not is_done(job, resume)]
    if todo:
        prepare_once(common, folder)
    for number, job in enumerate(jobs, 1):
        if job not in todo:
            print(f"{job} ({number} of {len(jobs)}) is done already.")
            continue
        print(f"{job} ({number} of {len(jobs)})", flush=True)
        with Progress(sys.stdout, steps=job.config.run.steps) as progress:
            outcome = run(job.config, resume=resume and job.begun, command=sys.argv, progress=progress)
        if outcome.how == "signal":
            print(f"{outcome.why} Go on with --resume.")
            return outcome.code
    from dither.report import write  # matplotlib and jinja2 take half a second

    folders = [job.folder for job in jobs]
    print()
    found: dict[str, list[Summary]] = {}
    for job, each in zip(jobs, read_all(folders), strict=True):
        found.setdefault(job.name, []).append(summarize(each))
    print_ranking(found)
    print(f"report: {write(folders, folder / 'report.html')}")
    return 0


@dataclass(frozen=True)
class Job:
    """One of the runs."""

    name: str
    config: Config
    first: bool = True
    """Whether its seeds are the config's own."""

    def __str__(self) -> str:
        """The name, and the seed if it is another."""
        return self.name if self.first else f"{self.name}, seed {self.config.run.seed}"

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.run.out)

    @property
    def begun(self) -> bool:
        """Whether there is a run in its folder."""
        return os.path.isfile(self.folder / CONFIG)


def plan(common: Config, names: Sequence[str], folder: Path, seeds: int = 1) -> list[Job]:
    """A run for each seed and name, in a folder of its own, on tokens that they share."""
    if seeds < 1:
        raise UserError(f"--seeds is how many times each is trained, at least 1, not {seeds}.")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f"{twice[0]!r} is named twice: name each once.")
    sources = common.data.sources or (STDLIB,)
    shared = sources if len(sources) == 1 and is_prepared(sources[0]) else (str(folder / "tokens"),)
    found = []
    for number in range(seeds):
        seed = common.run.seed + number
        data = replace(common.data, sources=shared, seed=common.data.seed + number)
        for name in names:
            home = folder / (name.replace(":", "-") + (f"-seed-{seed}" if number else ""))
            precision = replace(precision_of(name), states=common.precision.states)
            where = replace(common.run, out=str(home), seed=seed)
            found.append(Job(name, replace(common, data=data, precision=precision, run=where), first=not number))
    return found


def precision_of(name: str) -> Precision:
    """The precision that a name means. What is cast or sampled computes the rest in bf16 with fp32 weights (o1) unless told.

    >>> precision_of("fp8-block").mode, precision_of("bf16-sr+fp8-block").mode, precision_of("gaussws:od").sampling.parts
    ('o1', 'bf16-sr', 'od')
    """
    found: dict[str, str | Sampling] = {}
    for part in name.split("+"):
        kind, value = _setting(part)
        if kind in found:
            raise UserError(
                f"{name!r} names two of one kind, {part!r} the second: a recipe, a mode and a sampling can be joined."
            )
        found[kind] = value
    return Precision(**{"mode": "o1", **found})  # type: ignore[arg-type]


def _setting(part: str) -> tuple[str, str | Sampling]:
    """Which field of a config a part of a name sets, and to what."""
    noise, colon, layers = part.partition(":")
    if colon and noise in NOISES and layers in PARTS:
        return "sampling", Sampling(noise=NOISES[noise], parts=layers)  # type: ignore[arg-type]
    if part in RECIPES:
        # A recipe that says what parameters are is a mode: bf16 is o1, and plain bf16 weights are bf16-pure.
        of_mode = [mode for mode, each in MODES.items() if each.recipe == part]
        return ("mode", of_mode[0]) if of_mode else ("recipe", part)
    if part in MODES:
        return "mode", part
    samplings = [f"{noise}:{layers}" for noise in NOISES for layers in PARTS]
    known = [*RECIPES, *(mode for mode in MODES if mode not in RECIPES), *samplings]
    raise UserError(f"There is no precision {part!r:.80}{did_you_mean(part, known)}: choose from {', '.join(known)}.")


def is_done(job: Job, resume: bool) -> bool:
    """Whether a run is there with all its steps; one of another config, or one that is not done, is an error unless resumed."""
    if not job.begun:
        return False
    if configs.load(job.folder / CONFIG) != job.config:
        raise UserError(
            f"The folder {str(job.folder)!r} has a run of another config: name another by --out, or take the change back."
        )
    # A run that was killed while it was built has a config and no status yet.
    if (job.folder / Status.FILE).exists() and Status.load(job.folder).state in ("done", "stopped"):
        return True
    if not resume:
        raise UserError(
            f"The run in {str(job.folder)!r} was begun and is not done: go on with --resume, or name another --out."
        )
    return False


def prepare_once(common: Config, folder: Path) -> None:
    """The tokens that all runs read."""
    sources, own = common.data.sources or (STDLIB,), folder / "tokens"
    if len(sources) == 1 and is_prepared(sources[0]):
        return
    if not is_prepared(own):
        prepare(sources, own, load_tokenizer(common.data.tokenizer), held_out=common.data.held_out)
    elif open_tokens(own).sources != sources:
        raise UserError(f"The tokens in {str(own)!r} were made from other text: name another folder by --out.")


def print_ranking(found: Mapping[str, Sequence[Summary]]) -> None:
    """Each name's runs as a line of a table, the lowest mean loss first; those without one come last."""
    from dither.report.page import fixed, short, size

    first = next(iter(found))
    means = {name: _mean([run.loss for run in runs]) for name, runs in found.items()}
    rows = [
        (
            str(rank),
            name,
            fixed(means[name]),
            "" if name == first else difference([run.loss for run in runs], [run.loss for run in found[first]]),
            fixed(_mean([run.bits_per_byte for run in runs])),
            short(_mean([run.tokens_per_s for run in runs])),
            size(max((run.memory for run in runs if run.memory is not None), default=None)),
            ", ".join(dict.fromkeys(run.state for run in runs)),
        )
        for rank, (name, runs) in enumerate(sorted(found.items(), key=lambda pair: (means[pair[0]] is None, means[pair[0]])), 1)
    ]
    header = ("", "precision", "held-out loss", f"to {first}", "bits per byte", "tokens/s", "memory", "how it ended")
    count = len(found[first])
    title = f"Held-out loss, mean of {count} seeds, lowest first" if count > 1 else "Held-out loss, lowest first"
    print_table(title, header, rows, right=[2, 3, 4, 5, 6])


def difference(losses: Sequence[float | None], base: Sequence[float | None]) -> str:
    """The mean difference within a seed, and its standard error where there are several.

    >>> difference([2.5, 2.75], [2.0, 2.0])
    '+0.6250 ± 0.1250'
    """
    from dither.report.page import fixed

    pairs = [mine - theirs for mine, theirs in zip(losses, base, strict=True) if mine is not None and theirs is not None]
    if not pairs:
        return ""
    error = f" ± {statistics.stdev(pairs) / math.sqrt(len(pairs)):.4f}" if len(pairs) > 1 else ""
    return fixed(statistics.fmean(pairs), 4, sign=True) + error


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one is missing: a mean of fewer seeds would compare with no other."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
