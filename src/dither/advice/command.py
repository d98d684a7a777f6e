"""The command `dither memory`: what a training step needs, part by part, and what to use on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dither import doctor
from dither.advice.machine import gpus_here
from dither.advice.memory import GIB, PARTS, STORAGE, Setting, Shape, estimate, largest_batch
from dither.advice.recommendation import Gpu, gpu_named, recommend
from dither.advice.shapes import model_shape
from dither.data import is_prepared, load_tokenizer, open_tokens
from dither.errors import UserError
from dither.precision import LayerPrecision
from dither.recipes import recipe as recipe_named
from dither.train import config as configs
from dither.train.job import TOKENS
from dither.train.loop import CONFIG

SHOWN = (
    ("o1", None, None),
    ("o2", None, None),
    ("o1", "fp8-current", None),
    ("bf16-sr", None, None),
    ("bf16-sr", "fp8-current", None),
    ("bf16-sr", None, "dynamic8"),
)
"""(mode, recipe, states) of the columns that are shown unless others are asked for."""

BATCH, SEQUENCE = 8, 2048


def memory(
    model: Annotated[str | None, tyro.conf.arg(metavar="[MODEL]", help_behavior_hint="(or --params)")] = None,
    /,
    params: float | None = None,
    mode: tuple[str, ...] = (),
    recipe: tuple[str, ...] = (),
    states: tuple[str, ...] = (),
    batch: int | None = None,
    sequence: int | None = None,
    checkpointing: bool = False,
    compiled: bool = True,
    accumulate: bool = False,
    gpu: str | None = None,
    risk: Literal["none", "low", "high"] = "low",
) -> int:
    """Show the memory that a training step needs on one GPU, by part and by mode, and recommend a precision for that GPU.

    Estimates are made from sizes alone: nothing is built, and no GPU is needed. docs/memory.md has the formulas, which are
    within a percent of the peaks in docs/benchmarks.md. Without --mode, --recipe and --states the usual choices are shown side
    by side, and of a run its own.

    Args:
        model: A preset such as llama-1b, a Hugging Face folder or its config.json, or a run's folder.
        params: In place of a model: about so many parameters, such as 7e9; sizes are then those of a Llama.
        mode: Precision modes, one column each: fp32, o1, o2, bf16, bf16-sr, bf16-kahan, fp16, fp16-o2.
        recipe: Recipes of linear layers, such as fp8-current, each with every mode; "none" for none.
        states: Formats of the optimizer's moments, such as dynamic8, each with every mode; "mode" for the mode's own.
        batch: Sequences in one forward pass; a run's own, or 8.
        sequence: Tokens in a sequence; a run's own, or 2048.
        checkpointing: Count blocks that keep their input only and are computed again in backward.
        compiled: Count blocks that are compiled, as `dither train` does on a GPU.
        accumulate: Count gradients that wait while further micro-batches run.
        gpu: A GPU such as H100-80GB to recommend for; this machine's, if it has one.
        risk: What the recommendation may take: none (mixed precision as usual), low (FP8, stochastic rounding), high (FP4).
    """
    run = _run_of(model)
    shape = run.shape if run is not None else model_shape(model, params)
    if run is not None and params is not None:
        raise UserError("Give a model (a preset, a Hugging Face folder or a run) or --params, and not both.")
    batch = batch if batch is not None else run.batch if run is not None else BATCH
    sequence = sequence if sequence is not None else run.sequence if run is not None else SEQUENCE
    columns = _columns(mode, recipe, states, None if run is None else run.setting)
    more = {"checkpointing": checkpointing, "compiled": compiled, "accumulate": accumulate}
    changed = {key: value for key, value in more.items() if value != getattr(Setting, key)}
    columns = {name: replace(setting, **changed) for name, setting in columns.items()}  # type: ignore[arg-type]
    place = gpu_named(gpu) if gpu is not None else next(iter(gpus_here()), None)
    _print(shape, columns, batch, sequence, place)
    if place is not None:
        best = recommend(shape, place, sequence=sequence, risk=risk)
        print(f"\nOn {place.name} ({place.usable / GIB:.0f} GiB to use): {best.summary if best.batch else 'does not fit'}")
        if best.batch:
            peak = best.estimate.peak / GIB
            print(
                f"  up to {best.batch} sequences in a pass, {peak:.1f} GiB: dither train --set {' --set '.join(best.settings)}"
            )
        for reason in best.reasons:
            print(f"  {reason}")
    return 0


@dataclass(frozen=True)
class _Run:
    """What a run's folder says."""

    shape: Shape
    setting: Setting
    batch: int
    sequence: int


def _run_of(model: str | None) -> _Run | None:
    """Return what the folder of a run says, or None where it is none."""
    if model is None or not (Path(model) / CONFIG).is_file():
        return None
    folder = Path(model)
    config = configs.load(folder / CONFIG)
    shape = model_shape(config.model.size or config.model.hf)
    if config.model.hf is None:
        shape = replace(shape, vocab=config.model.vocab or _words(config, folder))
    precision, data = config.precision, config.data
    default = precision.load_plan().default
    sampling = precision.sampling
    setting = Setting(
        mode=precision.mode,
        precision=_casts(default),
        states=precision.states,
        optimizer=config.optim.optimizer,
        sampling="none" if sampling is None else "recomputed" if sampling.recompute else "kept",
        compiled=config.run.compile is not False,
        accumulate=data.micro_batch not in (None, data.batch),
    )
    return _Run(shape, setting, data.micro_batch or data.batch, data.sequence)


def _words(config: configs.Config, folder: Path) -> int:
    """Return the vocabulary size of a run's tokenizer."""
    sources = config.data.sources
    prepared = sources[0] if len(sources) == 1 and is_prepared(sources[0]) else folder / TOKENS
    if is_prepared(prepared):
        return open_tokens(prepared).tokenizer.vocab_size
    return load_tokenizer(config.data.tokenizer).vocab_size


def _casts(precision: LayerPrecision | None) -> LayerPrecision | None:
    """Return the casts of a precision, or None where there are none."""
    return None if precision is None or precision.uncast else precision


def _columns(modes: Sequence[str], recipes: Sequence[str], states: Sequence[str], own: Setting | None) -> dict[str, Setting]:
    """Return the settings to show, by what their columns are called."""
    if not (modes or recipes or states):
        asked = [] if own is not None else list(SHOWN)
    else:
        given = own.mode if own is not None else "o1"
        asked = [
            (mode, None if name == "none" else name, None if kept == "mode" else kept)
            for mode in modes or (given,)
            for name in recipes or ("none",)
            for kept in states or ("mode",)
        ]
    found = {} if own is None else {"this run": own}
    for mode, name, kept in asked:
        if mode not in STORAGE:
            raise UserError(f"There is no mode {mode!r}: choose from {', '.join(STORAGE)}.")
        precision = None if name is None else _casts(recipe_named(name).default)
        title = " + ".join(part for part in (mode, name, kept) if part)
        found[title] = replace(own or Setting(), mode=mode, precision=precision, states=kept)
    return found


def _print(shape: Shape, columns: dict[str, Setting], batch: int, sequence: int, gpu: Gpu | None) -> None:
    """Print a table of parts in GiB, a column for each setting."""
    made = [estimate(shape, setting, batch=batch, sequence=sequence) for setting in columns.values()]
    gib = [[f"{found.parts[part] / GIB:.2f}" for found in made] for part in PARTS]
    rows = [(part.replace("_", " "), *cells) for part, cells in zip(PARTS, gib, strict=True) if set(cells) != {"0.00"}]
    rows.append(("peak", *(f"{found.peak / GIB:.2f}" for found in made)))
    rows.append(("at", *(found.moment for found in made)))
    if gpu is not None:
        fits = (largest_batch(shape, each, sequence=sequence, memory=gpu.usable) for each in columns.values())
        rows.append((f"largest batch, {gpu.name}", *map(str, fits)))
    title = f"{shape.parameters:,} parameters, {batch} x {sequence} tokens in a pass: GiB"
    doctor.print_table(title, ("part", *columns), rows, right=range(1, len(columns) + 1))
