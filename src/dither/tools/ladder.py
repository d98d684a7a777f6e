"""The runs of a ladder: models x tokens per parameter x arms x seeds of one TOML file, several at a time on one device.

A file is a config of `dither train` with a section [ladder] and a table [[ladder.rungs]] for each model; see docs/comparing.md.
Each finished run is a file of JSON in the results folder, so that a ladder may be interrupted at any time and continued on
another day or machine. A run that a signal or the end of the time interrupts is saved there, and resumes; one that dies starts
again.
"""

import contextlib
import hashlib
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from multiprocessing import connection
from pathlib import Path
from typing import Annotated, Any

from dither import files
from dither.console import printable
from dither.data import BYTES, is_prepared, load_tokenizer, open_tokens, prepared_folder
from dither.data.text import STDLIB
from dither.errors import UserError
from dither.evaluate.deployment import parse_cast
from dither.evaluate.variants import Variants, evaluate
from dither.models import PRESETS, parameter_count, preset
from dither.models.sizes import Model
from dither.report.ladder import LadderReport, Result, read_result
from dither.report.run_folder import read
from dither.run_lock import RunLock
from dither.settings import AtLeast, Count, OneOf, check, from_table, parse, value_at
from dither.tools.arms import NAMED, SHARED, Arm, find_field
from dither.tools.trials import POLL, begin_process, last_line
from dither.train import config as configs
from dither.train.config import CONFIG, ORIGIN, Config
from dither.train.guard import Signals
from dither.train.loop import Outcome, train
from dither.train.plans import known_plans, plans_file
from dither.train.ranks import joined
from dither.train.resume import resolved

LOGS, WORK, TOKENS, KEPT = "logs", "work", "tokens", "runs"
"""Folders beside the results: output of the runs, runs in progress, tokens, and finished runs that are kept."""

IDENTITY = ("arm", "model", "ratio", "seed", "kind", "parameters", "tokens")
"""Fields in which a result must agree with its run."""

POINTS = 50
"""Number of points of a training curve."""

SPEED_STEPS = 80
"""Steps of a run that measures speed."""

Seeds = Annotated[int, AtLeast(1, bits=10)]

FOLLOWS: Mapping[str, str] = {
    "run.steps": "ladder.rungs.tokens_per_parameter sets the steps",
    **dict.fromkeys(("run.out", "run.save_every", "run.sample_every", "run.keep_last", "run.log_every"), "the ladder sets it"),
    "run.eval_every": "ladder.evaluations sets it",
    "model.preset": "ladder.rungs.model names it",
    **dict.fromkeys(NAMED, "an arm names it"),
}
"""Fields of the file and of rungs that would have no effect, and why."""

SAME = ("data.batch", "data.sequence", "run.device")
"""Fields, with those of the model, that all arms of a rung share."""

GRACE = 120.0
"""Seconds in which a run that is told to end may save."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A model and how long it trains."""

    model: Annotated[str, OneOf(PRESETS)] = ""
    """Name of a preset."""
    tokens_per_parameter: tuple[float, ...] = ()
    """Training tokens per parameter; each is a run of its own, with its own schedule."""
    arms: tuple[str, ...] = ()
    """Some of the ladder's arms; by default all of them."""
    seeds: Seeds | None = None
    """Number of seeds, if not the ladder's."""
    set: tuple[str, ...] = ()
    """Settings of this model, such as optim.lr=2e-3."""

    def __post_init__(self) -> None:
        check("ladder.rungs", self)
        if not self.tokens_per_parameter or min(self.tokens_per_parameter) <= 0:
            raise UserError("ladder.rungs.tokens_per_parameter is a list of positive numbers, such as [5, 10, 20].")


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The section [ladder] of a file, with the config that its runs have in common."""

    arms: tuple[str, ...] = ()
    """Arms as `dither compare` takes them."""
    rungs: tuple[Rung, ...] = ()
    """Models in the order in which they are trained."""
    baseline: str = ""
    """The arm that the others are compared with; by default the first."""
    seeds: Seeds = 3
    """Number of runs per arm and rung: with the seeds of the config, and with the next ones."""
    evaluations: Count = 8
    """Evaluations per run, the last one after its last step."""
    casts: tuple[str, ...] = ()
    """Casts of the trained weights as `dither eval --cast` takes them, such as mxfp4: each run is evaluated after each, in
    place of the casts of its training. By learned bitwidths, whose bits differ by run, `dither eval` casts the runs that
    `keep` kept."""
    out: str = "results"
    """Folder of the results, beside the file."""
    keep: bool = False
    """Keep the folder of each finished run, with its last checkpoint, in the folder `runs` of the results."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Tokens per second of arms over those of the baseline, such as those of a larger model by `dither bench train`; without
    them, those of the runs count."""
    config: Config
    """What all runs have in common: the other sections of the file."""

    def __post_init__(self) -> None:
        check("ladder", self)
        if not self.arms or not self.rungs:
            raise UserError('A ladder has ladder.arms, such as ["o1", "bf16-sr"], and at least one [[ladder.rungs]].')
        if twice := [name for name in self.arms if self.arms.count(name) > 1]:
            raise UserError(f"The arm {twice[0]!r} is named twice: name it once.")
        if twice := [cast for cast in self.casts if self.casts.count(cast) > 1]:
            raise UserError(f"The cast {twice[0]!r} is named twice: name it once.")
        used = {"ladder.baseline": [self.base], "ladder.speeds": self.speeds}
        for number, rung in enumerate(self.rungs, 1):
            used[f"ladder.rungs {number}: arms"] = rung.arms
        for key, names in used.items():
            for name in names:
                OneOf(self.arms).check(key, name)
        if any(not 0 < speed < math.inf for speed in self.speeds.values()) or self.speeds.get(self.base, 1.0) != 1.0:
            raise UserError("ladder.speeds are positive numbers: tokens per second of an arm over those of the baseline.")
        for cast in self.casts:
            parse_cast(cast)
        default = Config()
        for path, why in FOLLOWS.items():
            if value_at(self.config, path) != value_at(default, path):
                raise UserError(f"The ladder cannot set {path}: {why}.")

    @property
    def base(self) -> str:
        """The name of the baseline."""
        return self.baseline or self.arms[0]

    def compared_with(self, arm: str) -> "Ladder":
        """Return the ladder with another baseline, and the given speeds relative to it, if its own is known."""
        OneOf(self.arms).check("--baseline", arm)
        known = {self.base: 1.0, **self.speeds}
        speeds = {name: speed / known[arm] for name, speed in known.items()} if self.speeds and arm in known else {}
        return replace(self, baseline=arm, speeds=speeds)


def load(path: Path) -> Ladder:
    """Read a ladder from a TOML file. A UserError names the key that is wrong."""
    try:
        data = parse(files.read_text(path))
        section = data.pop("ladder", {})
        tables = section.pop("rungs", []) if isinstance(section, dict) else []
        if not isinstance(tables, list):
            raise UserError("[[ladder.rungs]] are tables, one or more per model.")
        if isinstance(section, dict) and "config" in section:
            raise UserError("[ladder] has no key 'config': the other sections of the file are the config.")
        rungs = [from_table(Rung, table, "ladder.rungs") for table in tables]
        common = {"rungs": rungs, "config": from_table(Config, data)}
        ladder = from_table(Ladder, {**section, **common} if isinstance(section, dict) else section, "ladder")
        for rung in rungs:
            arms = [other.arms for other in rungs if other.model == rung.model]
            if all(arms) and not any(ladder.base in each for each in arms):
                raise UserError(f"The arms of {rung.model} are compared with the baseline {ladder.base!r}: add it to a rung.")
        return ladder
    except files.Refused as error:
        raise UserError(f"The ladder {str(path)!r} cannot be read: {error}.") from None
    except UserError as error:
        raise UserError(f"In the ladder {str(path)!r}: {error}") from None


# The runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of a ladder."""

    arm: str
    model: str
    ratio: float
    seed: int
    parameters: int
    sources: tuple[str, ...]
    """The text as the ladder's file names it; that of the config may be the tokens made of it."""
    config: Config
    casts: tuple[str, ...] = ()
    keep: bool = False
    kind: str = "train"

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return self.config.run.steps * self.config.data.batch * self.config.data.sequence

    def plans(self, folder: Path | None = None) -> str | None:
        """Return the SHA-256 of the plans in files that the config names, or of those that a run in a folder stored of them.

        None if the config names no file, or if one cannot be read.
        """
        try:
            known = known_plans(self.config, folder)
        except UserError:
            return None
        named = {name: plan for name, plan in known.items() if self.config.precision.names_file(name)}
        return hashlib.sha256(plans_file(named)).hexdigest() if named else None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the result, without those that have their default value."""
        default, found = (tomllib.loads(configs.dumps(each)) for each in (Config(), self.config))
        found["data"]["sources"] = list(self.sources)
        for name in ("out", "device", "log_every"):
            del found["run"][name]
        changed = {
            section: {name: value for name, value in values.items() if default.get(section, {}).get(name) != value}
            for section, values in found.items()
        }
        return {section: values for section, values in changed.items() if values}

    def result(self, **values: Any) -> Result:
        """Return the result of this run."""
        given = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("config", "sources", "casts", "keep")
        }
        return Result(**given, tokens=self.tokens, config=self.settings, **values)


def plan(ladder: Ladder, out: Path) -> dict[str, Run]:
    """Return the runs by name, in the order in which they start: rung by rung, seed by seed, short runs first, arm by arm."""
    common, sources = ladder.config, ladder.config.data.sources or (STDLIB,)
    prepared = prepared_folder(sources)
    if (vocab := common.model.vocab) is None:  # set model.vocab, so that tables of results need no text
        tokenizer = open_tokens(prepared, verify=False).tokenizer if prepared else load_tokenizer(common.data.tokenizer)
        vocab = tokenizer.vocab_size
    shared = replace(common, data=replace(common.data, sources=sources if prepared else (str(out / TOKENS),)))
    arms = [Arm.parse(name) for name in ladder.arms]
    for arm in arms:
        if taken := [path for path, _ in arm.settings if path.startswith("model.") or path in SAME]:
            raise UserError(f"The arm {arm.text!r} cannot set {taken[0]}: arms are compared on the same model and tokens.")
    found: dict[str, Run] = {}
    seen: dict[str, str] = {}
    for rung in ladder.rungs:
        named = [(find_field(each.partition("=")[0].strip()), each.partition("=")[2]) for each in rung.set]
        why = {**SHARED, **FOLLOWS}
        if taken := [path for path, _ in named if path in why]:
            raise UserError(f"A rung cannot set {taken[0]}: {why[taken[0]]}.")
        sized = configs.override(shared, [f"{path}={value}" for path, value in (*named, ("model.preset", rung.model))])
        parameters = parameter_count(sized.model.sizes(vocab))
        chosen = [arm for arm in arms if not rung.arms or arm.text in rung.arms]
        cases = itertools.product(range(rung.seeds or ladder.seeds), sorted(rung.tokens_per_parameter), chosen)
        for number, ratio, arm in cases:
            run = _run(ladder, arm, sized, parameters, ratio, number, out)
            if (name := Path(run.config.run.out).name) in found:
                raise UserError(
                    f"The run {name!r} occurs twice: name each arm and number of tokens per parameter once, and put rungs with "
                    "other settings into a file of their own."
                )
            bare = configs.dumps(replace(run.config, run=replace(run.config.run, out="anywhere")))
            if (other := seen.setdefault(bare, arm.text)) != arm.text:
                raise UserError(f"{other!r} and {arm.text!r} are the same run: name only one of them.")
            found[name] = run
    return found


def _run(ladder: Ladder, arm: Arm, sized: Config, parameters: int, ratio: float, number: int, out: Path) -> Run:
    data, seed = sized.data, sized.run.seed + number
    steps = max(1, round(ratio * parameters / (data.batch * data.sequence)))
    timing = replace(sized.run, steps=steps, eval_every=-(-steps // ladder.evaluations), log_every=-(-steps // POINTS))
    timed = replace(sized, run=replace(timing, seed=seed, save_every=0, sample_every=0, keep_last=1))
    config = arm.config(replace(timed, data=replace(data, seed=data.seed + number)))
    model = str(config.model.preset)
    placed = out / WORK / f"{model}-{ratio:.4g}-{arm.folder(config)}-seed-{seed}"
    config = replace(config, run=replace(config.run, out=str(placed)))
    return Run(arm.text, model, float(ratio), seed, parameters, ladder.config.data.sources, config, ladder.casts, ladder.keep)


def speed_runs(runs: dict[str, Run]) -> dict[str, Run]:
    """Return a short run for each model and arm, to be trained alone."""
    found = {}
    for run in {(run.model, run.arm): run for run in reversed(runs.values())}.values():
        path = Path(run.config.run.out)
        path = path.with_name(f"speed-{path.name.partition('-seed-')[0]}")
        short = replace(run.config.run, steps=SPEED_STEPS, eval_every=0, log_every=SPEED_STEPS // 8, out=str(path))
        snip = run.config.snip
        if snip.target is not None:  # steps with SNIP's plan count
            snip = replace(snip, start=1, delay=1, horizon=4 if snip.probe == "sampling" else snip.horizon)
        found[path.name] = replace(run, config=replace(run.config, run=short, snip=snip), casts=(), keep=False, kind="speed")
    return found


def tiny(ladder: Ladder) -> Ladder:
    """Return the ladder with the tiny Llama on Python's standard library: minutes on a CPU, to try a file."""
    config = ladder.config
    data = replace(config.data, sources=(), tokenizer="bytes", sequence=32, batch=4, micro_batch=None)
    few = replace(config, model=Model(), data=data, run=replace(config.run, device="cpu", eval_sequences=8))
    per_step = data.batch * data.sequence / parameter_count(preset("tiny", vocab_size=BYTES.vocab_size))
    names = [Arm.parse(arm) for arm in ladder.arms]
    early = {}
    for arm in names:
        settings = dict(arm.settings)
        if "snip.target" in settings:
            horizon = {"snip.horizon": "4"} if settings.get("snip.probe") == "sampling" else {}
            settings |= {"snip.start": "1", "snip.delay": "1", **horizon}
        each = ",".join(f"{path}={value}" for path, value in settings.items())
        early[arm.text] = f"{arm.name}@{each}" if settings else arm.text
    base = early[ladder.base]
    short = Rung(model="tiny", tokens_per_parameter=(4 * per_step, 8 * per_step), arms=(base,))  # for the law of the tokens
    rungs = (short, Rung(model="tiny", tokens_per_parameter=(16 * per_step,)))
    arms, seeds = tuple(early.values()), min(ladder.seeds, 2)
    speeds = {early[name]: speed for name, speed in ladder.speeds.items()}
    named = replace(ladder, arms=arms, baseline=base, speeds=speeds, rungs=rungs)
    return replace(named, seeds=seeds, config=few, out=f"{ladder.out}-tiny")


# Training ---------------------------------------------------------------------------------------------------------------------


def open_results(runs: dict[str, Run], out: Path) -> tuple[dict[str, Result], dict[str, str]]:
    """Return the results by name of run, and sentences about files that are no result of these runs."""
    found: dict[str, Result] = {}
    problems: dict[str, str] = {}
    sources = {source for run in runs.values() for source in run.config.data.sources}
    texts = {source: open_tokens(source, verify=False).sha256 for source in sources if is_prepared(source)}
    for name, run in runs.items():
        if not os.path.lexists(path := out / f"{name}.json"):
            continue
        result = read_result(path)
        if isinstance(result, str):
            problems[name] = result
        elif other := next((key for key in IDENTITY if getattr(result, key) != getattr(run, key)), None):
            problems[name] = (
                f"The result {path.name!r} is not used: its {other} is {getattr(result, other)!r:.40}, and that of the run "
                f"{getattr(run, other)!r:.40}. Remove it to train this run again."
            )
        elif result.final and result.config != run.settings:
            changed = ", ".join(_changes(result.config, run.settings))
            problems[name] = (
                f"The result {path.name!r} is not used: it has other settings ({changed}). Remove it, or restore them."
            )
        elif result.final and (text := result.machine.get("corpus")) and texts.get(run.config.data.sources[0], text) != text:
            problems[name] = (
                f"The result {path.name!r} is not used: the tokens of {', '.join(run.sources or (STDLIB,))} have changed "
                "since. Remove it, or restore them."
            )
        elif result.final and (plans := result.machine.get("plans")) and run.plans() not in (plans, None):
            problems[name] = (
                f"The result {path.name!r} is not used: the file of its plan has changed since. Remove it, or restore the plan."
            )
        else:
            found[name] = result
    return found, problems


def _changes(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[str]:
    for key in {**old, **new}:
        one, two = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(two, dict):
            yield from _changes(one, two, f"{path}{key}.")
        elif one != two:
            yield f"{path}{key} was {one!s:.40} and is {two!s:.40}"


def run_all(
    runs: dict[str, Run], out: Path, *, jobs: int = 1, minutes: float | None = None, say: Callable[[str], None] = print
) -> int:
    """Train the runs that have no result, `jobs` at a time. Return 0, 1 if one failed, or the exit code of a signal.

    What still runs after `minutes` is saved, and continues next time.
    """
    context: Any = multiprocessing.get_context("forkserver")  # CUDA survives no fork; modules are imported once for all runs
    context.set_forkserver_preload(["dither.tools.ladder"])
    if jobs > 1:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process starts one compiler per core
    running: dict[Any, tuple[str, Any, float]] = {}
    failed = interrupted = 0
    with _locked(out), Signals() as signals:
        results, problems = open_results(runs, out)
        for sentence in problems.values():
            say(sentence)
        waiting = [name for name in runs if name not in problems and not (name in results and results[name].final)]
        final = sum(result.final for result in results.values())
        for name, result in results.items():
            if runs[name].keep and result.status == "done" and not (out / KEPT / name).exists():
                say(f"The run of the result {name}.json is not in {str(out / KEPT)!r}: remove the result to train it again.")
        unused = f" {len(problems)} have a file that is not used." if problems else ""
        say(f"Of {len(runs)} runs, {final} have a result, and {len(waiting)} are to be trained.{unused}")
        end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        try:
            while not signals.received and time.monotonic() < end:
                while len(running) < jobs and waiting:
                    name = waiting.pop(0)
                    process = context.Process(target=_work, args=(runs[name], name, str(out), jobs), name=name)
                    process.start()
                    running[process.sentinel] = (name, process, time.monotonic())
                if not running:
                    break
                ended = connection.wait(list(running), timeout=POLL)
                for sentinel in () if signals.received else ended:  # a signal to all processes ends runs too
                    name, process, began = running.pop(sentinel)
                    process.join()
                    if process.exitcode > 128:
                        interrupted += 1
                        say(f"{name}: it was told to end, and continues next time.")
                        continue
                    result = _collect(runs[name], name, out, process.exitcode, time.monotonic() - began, jobs)
                    failed += not result.final
                    say(f"{name}: {_said(result)}")
        finally:
            for _, process, _ in running.values():
                process.terminate()
            for _, process, _ in running.values():
                process.join(GRACE)
                process.kill()  # one that hangs
            with contextlib.suppress(OSError):  # runs to resume are in it
                (out / WORK).rmdir()
    if left := len(waiting) + len(running) + interrupted:
        say(f"{left} runs are left, {len(running) + interrupted} of them begun: the same command continues.")
    return signals.exit_code or int(failed > 0)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Let one ladder at a time write into a folder, and make the folders in it."""
    lock = RunLock(out)
    lock.acquire(create=True)
    try:
        for folder in (LOGS, WORK):
            try:
                (out / folder).mkdir(exist_ok=True)
            except OSError as error:
                raise UserError(f"The results cannot be written into {str(out)!r}: {files.reason(error, out)}.") from None
        yield
    finally:
        lock.release()


def _said(result: Result) -> str:
    """Return how a run ended, for the terminal."""
    words: list[str] = [result.status]
    if result.kind == "speed" and result.tokens_per_s is not None:
        words.append(f"{result.tokens_per_s:,.0f} tokens per second")
    elif result.loss is not None:
        words.append(f"held-out loss {result.loss:.4f} after {result.tokens:,} tokens")
    return ", ".join([*words, f"{result.seconds:.0f} s"]) + (f". {printable(result.why)}" if result.why else ".")


def _collect(run: Run, name: str, out: Path, code: int | None, seconds: float, jobs: int) -> Result:
    """Return the result that a process wrote, or write one that says how it died."""
    result = read_result(out / f"{name}.json") if code == 0 else ""
    if isinstance(result, Result):
        return result
    died = f"it was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"it ended with code {code}"
    why = f"{last_line(out / LOGS / f'{name}.txt') or 'no output'} ({died})"
    failed = run.result(status="failed", why=why, seconds=seconds, jobs=jobs, machine={})
    with contextlib.suppress(OSError):  # such as a full disk: the others go on
        _write(out / f"{name}.json", failed)
    return failed


def _work(run: Run, name: str, out: str, jobs: int) -> None:
    """Train one run in this process, or resume it, and write its result."""
    path, log, kept = (Path(out) / each for each in (f"{name}.json", f"{LOGS}/{name}.txt", f"{KEPT}/{name}"))
    for old in (path, log):  # a result is here only if it failed
        old.unlink(missing_ok=True)
    begin_process(log, jobs)
    began, folder = time.monotonic(), Path(run.config.run.out)
    if not _resumes(run, folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        outcome = train(run.config, resume="auto", command=sys.argv, save_last=bool(run.casts or run.keep))
        if outcome.how == "signal":  # it is saved, and resumes next time
            sys.exit(outcome.code)
        began -= max(0.0, outcome.seconds - (time.monotonic() - began))  # the time before an interruption counts
        values = _measured(outcome)
        values["machine"]["plans"] = run.plans(outcome.folder)
    except Exception as error:  # such as too little memory, or no GPU
        traceback.print_exc()
        values = {"status": "failed", "why": _sentence(error), "machine": {}}
    done = values["status"] == "done"
    if done and run.casts:
        with _noted("Casting its weights", values):
            values["casts"] = _losses_after_casts(run)
    if done and run.keep:
        with _noted("Keeping it", values):
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(exist_ok=True)
            folder.rename(kept)
    _write(path, run.result(**values, seconds=round(time.monotonic() - began, 1), jobs=jobs))
    if not (done and run.keep):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _noted(task: str, values: dict[str, Any]) -> Iterator[None]:
    """Note an error of a task after training: the loss of the run stays."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        values["why"] = f"{values['why']} {task} failed: {_sentence(error)}".strip()


def _sentence(error: Exception) -> str:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + str(error).partition("\n")[0]


def _resumes(run: Run, folder: Path) -> bool:
    """Return whether a folder has this run, begun with the same settings and plans."""
    try:
        same = resolved(configs.load(folder / CONFIG)) == resolved(run.config)
    except UserError:
        return False
    return same and run.plans() in (None, run.plans(folder))


def _losses_after_casts(run: Run) -> dict[str, float]:
    """Return the held-out losses of the last checkpoint of a run, with its weights in each cast."""
    settings = run.config.run
    with joined(settings.device) as ranks:
        variants, count = Variants(casts=run.casts), settings.eval_sequences
        found = evaluate(settings.out, variants=variants, sequences=count, device=ranks.device).variants[1:]
    return {cast: each.held_out.loss for cast, each in zip(run.casts, found, strict=True) if each.held_out is not None}


def _measured(outcome: Outcome) -> dict[str, Any]:
    """Return what the folder of a run says about it."""
    folder = read(outcome.folder)
    trained, facts = folder.of("train"), folder.environment
    machine = {name: facts.get(name) for name in ("device", "torch", "python", "dither")}
    machine |= {"commit": os.environ.get("DITHER_COMMIT") or facts.get("git"), "corpus": facts.get("corpus_sha256")}
    if (origin := outcome.folder / ORIGIN).exists():
        machine["weights"] = files.read_json(origin)[0]["sha256"]
    per_step = trained[-1]["tokens"] // trained[-1]["step"] if trained else 0
    done = outcome.how == "done" and outcome.loss is not None and math.isfinite(outcome.loss)
    layers: dict[str, Any] = next((line["layers"] for line in reversed(folder.of("bitwidths"))), {})
    held_out = [(line["step"] * per_step, line["loss"]) for line in folder.of("eval")]
    speeds = [line["tokens_per_s"] for line in trained[len(trained) // 2 :] if line["tokens_per_s"]]
    return {
        "status": "done" if done else "diverged",
        "why": "" if done else outcome.why if outcome.how != "done" else "The held-out loss is not finite.",
        "loss": outcome.loss if done else None,
        "bits_per_byte": outcome.bits_per_byte if done else None,
        "bitwidths": {name: round(layer["mean"], 3) for name, layer in layers.items()},
        "held_out": tuple((tokens, round(loss, 5)) for tokens, loss in held_out if loss is not None),
        "curve": tuple((line["tokens"], round(line["loss_ema"], 4)) for line in trained if line["loss_ema"] is not None),
        "tokens_per_s": statistics.median(speeds) if speeds else None,
        "memory": max((line["memory"] for line in trained if line["memory"]), default=None),
        "machine": machine,
    }


def _write(path: Path, result: Result) -> None:
    files.replace(path, files.to_json(result.to_dict(), path.name))


def report(ladder: Ladder, out: Path) -> LadderReport:
    """Return the tables of the results that a ladder has so far."""
    runs = plan(ladder, out)
    both = {**runs, **speed_runs(runs)}
    results, problems = open_results(both, out)
    missing = sum(name not in results or not results[name].final for name in runs)
    done = [result for result in results.values() if result.kind == "train" and result.status == "done"]
    lacking = {cast: sum(cast not in result.casts for result in done) for cast in ladder.casts}
    sentences = list(problems.values())
    if any(lacking.values()):
        listed = ", ".join(f"{cast} ({number})" for cast, number in lacking.items() if number)
        sentences.append(f"Of {len(done)} results, some have no loss after the cast to {listed}: remove them to train again.")
    return LadderReport(ladder.base, ladder.arms, tuple(results.values()), tuple(sentences), missing, ladder.speeds)
