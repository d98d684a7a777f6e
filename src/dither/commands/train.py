"""`dither train`: train a language model as a config says, and print the result."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dither.console import print_table
from dither.data.settings import TOKENS
from dither.errors import DitherError, UserError
from dither.models.sizes import CHANGES, Model
from dither.settings import override, toml
from dither.spec import registry
from dither.spec.modes import AUTO
from dither.train import config as configs
from dither.train.config import CONFIG, PLUGINS, Config

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from dither.train.loop import Outcome

Words = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""Words after an option, which may be repeated."""


def train(
    words: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="[RUN.toml] [SECTION.FIELD=VALUE...]", help_behavior_hint="(default: the tiny Llama)"),
    ] = (),
    /,
    data: Annotated[Words, tyro.conf.arg(metavar="SOURCE ...", help_behavior_hint="")] = (),
    set: Annotated[Words, tyro.conf.arg(metavar="SECTION.FIELD=VALUE ...", help_behavior_hint="")] = (),
    resume: bool = False,
    resume_auto: Annotated[bool, tyro.conf.arg(name="resume=auto", aliases=["--resume-auto"])] = False,
    start_from: Annotated[str | None, tyro.conf.arg(name="from", metavar="RUN|CHECKPOINT|MODEL", help_behavior_hint="")] = None,
    qat: Annotated[str | None, tyro.conf.arg(metavar="FORMAT", help_behavior_hint="")] = None,
    teacher: Annotated[str | None, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL", help_behavior_hint="")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None,
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    fast: bool = False,
    gpu_memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None,
    fields: bool = False,
) -> int:
    """Train a language model, or resume a run.

    The config comes from a TOML file, from --set, and from defaults. Without any, this trains a tiny Llama on the source code
    of Python's standard library, in about two minutes on two CPU cores. The folder of the run holds metrics, checkpoints and
    the complete config. `dither train --fields` lists every field. Exit codes: 0 done, 1 another rank was lost or ranks came to
    differ, 2 a mistake in the arguments or the config, 3 stopped by the guard, 130, 143 or
    129 saved after SIGINT, SIGTERM or SIGHUP.

    Args:
        words: A config in TOML; with --resume also the folder of the run, whose config is the default. Fields, as in --set.
        data: Text files, globs, folders, datasets or a prepared folder: sets data.sources.
        set: Fields as section.field=value, such as optim.lr=3e-4 run.steps=1000.
        resume: Resume the run in the folder from its newest whole checkpoint.
        resume_auto: Resume the run in the folder, or start it if there is none: for jobs that a scheduler restarts.
        start_from: Start a new run, with a new schedule, from the weights of a run, a checkpoint (also a
            DCP or torchtitan one) or a Hugging Face folder.
        qat: Train the model of --from for a deployment format, such as nvfp4: sets qat.format; see docs/qat.md.
        teacher: Learn the predictions of this model too: sets qat.teacher.
        out: The folder of the run: sets run.out.
        nproc: Start N ranks on this machine, which share the run as [parallel] says; only rank 0 prints.
        fast: Choose what was measured to be fastest for this model on this GPU and fits: FP8 products, BF16 weights and states
            with stochastic rounding, an FP8 output layer, and options that save memory. Fields that you set stay as they are.
            precision.recipe=auto does the same.
        gpu_memory: Choose what costs least and fits into a GPU of this memory, such as 24GB, or "all" for that of the GPU here:
            formats of weights and states, released gradients, checkpointing and micro-batches. Prints each choice and its cost.
        fields: Print every field with its type, default and meaning, and do not train.
    """
    from dither.report.figures import line_images
    from dither.tools.recommend import fastest_config, fitted_config, memory_of
    from dither.train.loop import Outcome
    from dither.train.loop import train as run
    from dither.train.ranks import check_device
    from dither.train.records import Progress

    if fields:
        print_fields()
        return 0
    how: bool | Literal["auto"] = "auto" if resume_auto else resume
    sources = sum(data, ())
    file, folder, given = _sorted((*words, *filter(_is_setting, sources)), bool(how))
    sources = tuple(source for source in sources if not _is_setting(source))
    if out is not None and folder is not None:
        raise UserError(f"The run is in {folder!r} or in --out {out!r}: name one folder.")
    named = {"qat.format": qat, "qat.teacher": teacher}
    settings = (*(f"{field}={value}" for field, value in named.items() if value is not None), *given, *sum(set, ()))
    config = resolve(file, data=sources, settings=settings, resume=how, start_from=start_from, out=out or folder)
    if gpu_memory is not None and (fast or nproc is not None or config.precision.recipe == AUTO):
        raise UserError(
            "--gpu-memory chooses settings for one GPU itself: leave out --fast, precision.recipe=auto and --nproc."
        )
    if nproc is not None:
        config.parallel.sizes(nproc)
        return launch(nproc, _words(file, sources, settings, how, start_from, out or folder, fast=fast))
    if fast or gpu_memory is not None or config.precision.recipe == AUTO:
        check_device(config.run.device)
        folder_of_run = Path(config.run.out)
        stored = _stored(folder_of_run) if how and os.path.isfile(folder_of_run / CONFIG) else None
        if gpu_memory is not None:
            config, lines = fitted_config(config, None if gpu_memory == "all" else memory_of(gpu_memory), stored)
        else:
            config, lines = fastest_config(config, stored)
        for line in lines if os.environ.get("RANK", "0") == "0" else ():
            print(line)
    with Progress(sys.stdout, steps=config.run.steps) as progress:

        def tell(end: Outcome | DitherError) -> None:
            if isinstance(end, Outcome):
                progress.say(summary(end))
            else:
                print(f"dither: error: {end}", file=sys.stderr, flush=True)

        return run(config, resume=how, command=sys.argv, progress=progress, tell=tell, draw=line_images).code


def _words(
    file: str | None,
    data: Sequence[str],
    settings: Sequence[str],
    resume: bool | Literal["auto"],
    start_from: str | None,
    out: str | None,
    *,
    fast: bool = False,
) -> list[str]:
    """Return the arguments of `dither` on each rank.

    >>> _words("run.toml", ["a.txt"], ["optim.lr=1e-3", "run.steps=9"], "auto", None, "runs/a")
    ['train', 'run.toml', '--data', 'a.txt', '--set', 'optim.lr=1e-3', 'run.steps=9', '--resume=auto', '--out', 'runs/a']
    """
    words = ["train", *([] if file is None else [file])]
    for option, values in (("--data", data), ("--set", settings)):
        words += [option, *values] * bool(values)
    words += {True: ["--resume"], "auto": ["--resume=auto"], False: []}[resume] + ["--fast"] * fast
    plugins = [("--plugin", plugin.path) for plugin in registry.PLUGINS.values()]
    for option, value in (("--from", start_from), ("--out", out), *plugins):
        words += [] if value is None else [option, value]
    return words


def _is_setting(word: str) -> bool:
    """Return whether a word on the command line sets a field."""
    return re.match(r"[a-z_]+(\.[a-z_]+)+=", word) is not None


def _sorted(words: Sequence[str], resuming: bool) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Return the config file, the folder of a run to resume, and the settings among words.

    >>> _sorted(["a.toml", "optim.lr=3e-4"], False)
    ('a.toml', None, ('optim.lr=3e-4',))
    """
    settings = tuple(word for word in words if _is_setting(word))
    others = [word for word in words if word not in settings]
    if len(others) > 1:
        raise UserError(f"A run has one config file, and these words are neither files nor fields: {' '.join(others)!r:.200}.")
    if others and resuming and os.path.isdir(others[0]):
        return None, others[0], settings
    return (others[0] if others else None), None, settings


def resolve(
    file: str | None,
    *,
    data: Sequence[str] = (),
    settings: Sequence[str] = (),
    resume: bool | Literal["auto"] = False,
    start_from: str | None = None,
    out: str | None = None,
) -> Config:
    """Return the config of the arguments: the file, or that of a run, and then --from, --data, --out and --set.

    >>> resolve(None, data=["a.txt"], settings=["optim.lr=3e-4"], out="runs/a").data.sources
    ('a.txt',)
    """
    values: dict[str, Any] = ({"data.sources": tuple(data)} if data else {}) | ({} if out is None else {"run.out": out})
    if resume is True and start_from is not None:
        raise UserError("--resume continues a run and --from starts a new one: use only one of them, or --resume=auto.")
    base = Config() if file is None else configs.load(file)
    if resume:
        # The folder of the run is itself a field, which only the file and arguments can set here.
        wanted = [setting for setting in settings if setting.startswith("run.out")]
        folder = Path(override(base, wanted, values).run.out)
        there = os.path.isfile(folder / CONFIG)
        if there:
            from dither.train.run_folder import check_plugins

            check_plugins(folder)
        if not there and resume is True and file is None:
            raise UserError(
                f"There is no run in {str(folder)!r} to resume: start it without --resume, or name its folder with --out."
            )
        if there and file is None:
            base = override(_stored(folder), values={"run.out": str(folder)})
        elif there and start_from is not None:  # the weights that the run has started from, not newer ones
            base = replace(base, model=_stored(folder).model)
        start_from = None if there else start_from
    if start_from is not None:
        base = _starting_from(Path(start_from), base, own=file is not None)
        if file is None and any(setting.startswith("qat.format=") for setting in settings):
            # The casts of the run that made the weights are not those of the new one.
            kept = replace(base.precision, recipe=None, plan=None, schedule=(), output=None, sampling=None, weights=None)
            base = replace(base, precision=kept, snip=Config().snip)
        if file is None and any(setting.startswith("lora.rank=") for setting in settings):
            # Weights that the run stored as codes are frozen now: they have codes of the recipe anyway.
            base = replace(base, precision=replace(base.precision, weights=None))
    return override(base, settings, values)


def _stored(folder: Path) -> Config:
    """Return the config of a run. The tokenizer of prepared tokens is left implicit: the tokens may have moved since."""
    from dither.data.tokenizer import TOKENIZER

    config = configs.load(folder / CONFIG)
    sources = config.data.sources
    implied = len(sources) == 1 and config.data.tokenizer == str(Path(sources[0]) / TOKENIZER)
    return replace(config, data=replace(config.data, tokenizer="bytes")) if implied else config


def _starting_from(path: Path, base: Config, own: bool) -> Config:
    """Return a config whose model has the architecture and weights at a path, with the tokenizer that belongs to them.

    `own` keeps the other fields of `base`, else those of a run are used.
    """
    from dither.data.tokenizer import TOKENIZER
    from dither.models.open import find_model

    found = find_model(path)
    if found.kind == "folder":
        _check_model(base.model, Model(hf=str(path)), path)
        return _with_tokenizer(replace(base, model=replace(base.model, hf=str(path))), path / TOKENIZER)
    found.tell()
    folder = found.run
    if folder is None:
        return replace(base, model=replace(base.model, weights=str(found.path)))
    saved = _stored(folder)
    if saved.lora.rank is not None:
        raise UserError(
            f"The run {str(folder)!r} trained adapters: write the whole model with `dither export {folder} --merge -o FOLDER`, "
            "and start from that folder."
        )
    _check_model(base.model, saved.model, path)
    if not own:
        base = replace(saved, run=replace(saved.run, out=Config().run.out), qat=Config().qat)
    prepared = [Path(source) / TOKENIZER for source in saved.data.sources[:1]]
    tokenizer = next((file for file in (folder / TOKENS / TOKENIZER, *prepared) if os.path.isfile(file)), None)
    return _with_tokenizer(replace(base, model=replace(saved.model, weights=str(found.path))), tokenizer)


def _check_model(asked: Model, found: Model, path: Path) -> None:
    """Raise a UserError if the config asks for another model than the one that the initial weights belong to."""
    for name in ("preset", "hf", "vocab", *CHANGES):
        given = getattr(asked, name)
        there = found.size if name == "preset" else getattr(found, name)
        if given is not None and given != there:
            raise UserError(
                f"model.{name}={given!r} is another model than that of --from {str(path)!r}, which has "
                f"{'none' if there is None else repr(there)}: remove it from the config."
            )


def _with_tokenizer(config: Config, tokenizer: Path | None) -> Config:
    """Return a config with the tokenizer of the initial weights, unless it names one itself; tokens of another are refused."""
    if tokenizer is None or config.data.tokenizer != "bytes" or not os.path.isfile(tokenizer):
        return config
    return replace(config, data=replace(config.data, tokenizer=str(tokenizer)))


def summary(outcome: Outcome) -> str:
    """Return a few lines about the result of a run."""
    from dither.train.records import duration

    lines = [outcome.why]
    if outcome.loss is not None:
        bits = "" if outcome.bits_per_byte is None else f", {outcome.bits_per_byte:.3f} bits per byte"
        lines.append(f"held-out loss    {outcome.loss:.4f} nats per token{bits}")
    if outcome.unigram is not None:
        lines.append(
            f"unigram entropy  {outcome.unigram:.4f} nats, {outcome.unigram / math.log(2):.3f} bits per byte, without context"
        )
    if outcome.skipped and outcome.how != "done":  # whose first line says so
        lines.append(f"skipped steps    {outcome.skipped} of {outcome.step}, {outcome.overflows} of them overflows")
    lines.append(f"folder           {outcome.folder} after {outcome.step} steps in {duration(outcome.seconds)}")
    if not os.path.isfile(outcome.folder / CONFIG):
        lines.append("again            start it with the same command: nothing was kept")
    elif outcome.how == "done":
        lines.append(f"report           dither report {shlex.quote(str(outcome.folder))}")
    else:
        words = ["dither", "train", "--resume", "--out", str(outcome.folder)]
        for plugin in registry.PLUGINS.values():
            words += ["--plugin", str(outcome.folder / PLUGINS / plugin.name)]
        lines.append(f"resume           {shlex.join(words)}")
    return "\n".join(lines)


def print_fields() -> None:
    """Print every field of a config as a table."""
    rows = [
        (field.path, field.type, "" if field.default in (None, ()) else toml(field.default), field.sentence)
        for field in configs.describe()
    ]
    print_table("Fields of a config", ("field", "type", "default", "meaning"), rows)


# Ranks -----------------------------------------------------------------------------------------------------------------


MOST = 1024
"""Most ranks on one machine."""

LEAVING = 60
"""Seconds that ranks have to save and end after a signal before they are killed."""


def launch(count: int, words: Sequence[str]) -> int:
    """Run `dither` with these words on `count` ranks, and return its exit code.

    Rank 0 has the console. The other ranks write to files that are removed at the end; if one of them fails by itself, the last
    lines of its output are printed. SIGINT and SIGTERM are passed on to all ranks, and their exit code is returned.

    Args:
        count: Number of ranks.
        words: The arguments of `dither`, such as ["train", "run.toml"].
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    if not 1 <= count <= MOST:
        raise UserError(f"--nproc is a number of ranks from 1 to {MOST}, not {count}.")
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("--nproc starts ranks, and torchrun has started this process as one already: use only one of them.")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported here
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is a warning with a stack of C++ in it
    with tempfile.TemporaryDirectory(prefix="dither-ranks-") as folder:
        others = {rank: Std.NONE if rank == 0 else Std.ALL for rank in range(count)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=others),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=LEAVING,
        )
        try:
            launch_agent(config, sys.executable, ["-m", "dither.cli", *words])
        except ChildFailedError as error:
            return _failed(error.failures, Path(folder))
        except SignalException as told:
            return 128 + told.sigval.value
    return 0


def _failed(failures: Mapping[int, ProcessFailure], folder: Path) -> int:
    """Return the exit code of the first rank that failed, after printing its last lines unless rank 0 has spoken."""
    rank, first = min(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    spoken = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
    if rank != 0 and not (0 in failures and failures[0].exitcode > 0):
        for path in sorted(folder.glob(f"*/attempt_0/{rank}/stderr.log")):
            lines = path.read_text(errors="replace").splitlines()[-30:]
            print("\n".join(lines), file=sys.stderr, end="\n" if lines else "")
    if not spoken:
        name = signal.Signals(-first.exitcode).name
        print(f"dither: error: Rank {rank} (process {first.pid}) was ended by {name}: resume with --resume.", file=sys.stderr)
        return 1
    return first.exitcode if first.exitcode > 0 else spoken[0]
