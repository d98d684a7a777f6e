"""The command `dither train`: a config from a file and settings, a run, and what is printed when it ends."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dither.errors import UserError
from dither.tables import print_table
from dither.train import config as configs
from dither.train.config import Config
from dither.train.loop import CONFIG, Outcome
from dither.train.loop import train as run
from dither.train.progress import Progress, duration

Words = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""Words after an option, which may come several times."""

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


def train(
    file: Annotated[str | None, tyro.conf.arg(metavar="[RUN.toml]", help_behavior_hint="(default: the tiny Llama)")] = None,
    /,
    data: Annotated[Words, tyro.conf.arg(metavar="SOURCE ...", help_behavior_hint="")] = (),
    set: Annotated[Words, tyro.conf.arg(metavar="SECTION.FIELD=VALUE ...", help_behavior_hint="")] = (),
    resume: Switch = False,
    out: Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None,
    fields: Switch = False,
) -> int:
    """Train a language model: data, model, precision and the rest come from a TOML file, from --set, or from defaults.

    Without a file this trains a tiny Llama on the source text of Python's standard library, in about two minutes on two CPU
    cores. The run's folder has metrics, checkpoints and the whole config. `dither train --fields` lists every field.
    Exit codes: 0 done, 2 a mistake in what was given, 3 stopped by the guard, 130 or 143 after SIGINT or SIGTERM, saved.

    Args:
        file: A config in TOML; with --resume, by default the one in the run's folder.
        data: Text files, globs, folders, data sets or a prepared folder, in place of data.sources.
        set: Fields as section.field=value, such as optim.lr=3e-4 run.steps=1000.
        resume: Go on with the run in the folder, from its newest whole checkpoint.
        out: The run's folder, in place of run.out.
        fields: Print every field with its type, default and meaning, and train nothing.
    """
    if fields:
        print_fields()
        return 0
    config = resolve(file, data=sum(data, ()), settings=sum(set, ()), resume=resume, out=out)
    with Progress(sys.stdout, steps=config.run.steps) as progress:
        outcome = run(config, resume=resume, command=sys.argv, progress=progress)
        progress.say(summary(outcome))
    return outcome.code


def resolve(file: str | None, *, data: Sequence[str], settings: Sequence[str], resume: bool, out: str | None) -> Config:
    """The config that the arguments mean: the file, or the run's own where it is resumed, then --data, --out and --set.

    >>> resolve(None, data=["a.txt"], settings=["optim.lr=3e-4"], resume=False, out="runs/a").data.sources
    ('a.txt',)
    """
    given = [f"data.sources=[{', '.join(map(configs.toml, data))}]"] * bool(data)
    given += [f"run.out={configs.toml(out)}"] * (out is not None)
    if file is not None:
        base = configs.load(file)
    elif resume:
        # Where the run lies is itself a field, which only arguments can say here.
        folder = Path(configs.override(Config(), [*given, *(each for each in settings if each.startswith("run.out"))]).run.out)
        if not os.path.isfile(folder / CONFIG):
            raise UserError(
                f"There is no run in {str(folder)!r} to resume: start it without --resume, or name its folder by --out."
            )
        base = configs.override(configs.load(folder / CONFIG), [f"run.out={configs.toml(str(folder))}"])
    else:
        base = Config()
    return configs.override(base, [*given, *settings])


def summary(outcome: Outcome) -> str:
    """How a run ended, in a few lines."""
    lines = [outcome.why]
    if outcome.loss is not None:
        bits = "" if outcome.bits_per_byte is None else f", {outcome.bits_per_byte:.3f} bits a byte"
        lines.append(f"held-out loss    {outcome.loss:.4f} nats a token{bits}")
    if outcome.unigram is not None:
        lines.append(f"unigram entropy  {outcome.unigram:.4f} nats, {outcome.unigram / math.log(2):.3f} bits, without context")
    if outcome.skipped and outcome.how != "done":  # which says so itself
        lines.append(f"skipped steps    {outcome.skipped} of {outcome.step}, {outcome.overflows} of them for overflows")
    lines.append(f"folder           {outcome.folder} after {outcome.step} steps in {duration(outcome.seconds)}")
    if outcome.how == "done":
        lines.append(f"report           dither report {outcome.folder}")
    else:
        lines.append(f"go on            dither train --resume --out {outcome.folder}")
    return "\n".join(lines)


def print_fields() -> None:
    """Every field of a config as a table."""
    rows = [
        (field.path, field.type, "" if field.default in (None, ()) else configs.toml(field.default), field.sentence)
        for field in configs.describe()
    ]
    print_table("Fields of a config", ("field", "type", "default", "meaning"), rows)
