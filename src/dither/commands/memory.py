"""`dither memory`: the memory that a training step needs, and the precision to use on a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dither.commands.arguments import Json
from dither.console import print_result, print_table, print_text
from dither.data.settings import TOKENS
from dither.errors import UserError
from dither.models.sizes import PRESETS
from dither.spec.optimizer import stores
from dither.spec.recipes import MEASURED, recipe_name
from dither.spec.recipes import recipe as recipe_named
from dither.train import config as configs
from dither.train.config import CONFIG

if TYPE_CHECKING:
    from dither.spec.gpus import Gpu
    from dither.tools.memory import MemoryEstimate, Setting, Shape, StepPasses
    from dither.tools.recommend import Recommendation

SHOWN = (
    ("o1", None, None),
    ("o2", None, None),
    ("o1", "fp8-current", None),
    ("bf16-sr", None, None),
    ("bf16-sr", "fp8-current", None),
    ("bf16-sr", None, "companded8"),
)
"""(mode, recipe, states) of the columns that are shown by default."""


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
    released: bool = False,
    states_on: Literal["device", "host"] | None = None,
    save: Literal["codes", "input"] | None = None,
    hold: Literal["both", "one", "none"] | None = None,
    swiglu: Literal["exact", "fp8"] | None = None,
    weights: Literal["fp8"] | None = None,
    logits: Literal["whole", "chunked"] | None = None,
    gpu: str | None = None,
    risk: Literal["none", "low", "high"] = "low",
    json: Json = False,
) -> int:
    """Show the memory that a training step needs, and recommend a precision.

    The estimates for one GPU follow from sizes alone: no model is built, and no GPU is needed. They are within 1 % of
    the peaks in docs/benchmarks.md. Without --mode, --recipe and --states the usual choices are shown
    side by side, or those of the run.

    Args:
        model: A preset such as llama-1b, a Hugging Face folder or its config.json, or the folder of a run.
        params: In place of a model: the number of parameters, such as 7e9, of a Llama.
        mode: Precision modes, one column each: fp32, o1, o2, o2-split, bf16-rn, bf16-sr, bf16-kahan, bf16-24, fp16, fp16-o2.
        recipe: Recipes of linear layers, such as fp8-current or its alias tensorwise, with every mode; "none" for no casts.
        states: Formats of the optimizer's moments, such as dynamic8, each with every mode; "mode" for that of the mode.
        batch: Sequences per forward pass; by default that of the run, or 8.
        sequence: Tokens per sequence; by default that of the run, or 2048.
        checkpointing: Assume activation checkpointing: blocks keep only their inputs and are recomputed in backward.
        compiled: Assume blocks that are not compiled; `dither train` compiles them on a GPU.
        accumulate: Assume gradient accumulation over several micro-batches.
        released: Assume that backward updates each block and frees its gradients.
        states_on: Memory of the optimizer's states: that of the device, or of the host; by default that of the run, or device.
        save: Tensors that cast layers keep of their inputs: codes, or the input; by default that of the run, or codes.
        hold: Layouts of the codes of weights that are held: both, one or none; by default those of the run, or both.
        swiglu: The inputs of SwiGLU that are kept for backward: exact, or as FP8 codes; by default those of the run, or exact.
        weights: Storage of the weights that blocks cast: fp8 for their codes alone; by default that of the run, or of the mode.
        logits: Logits and their gradients: whole, or chunked, for some rows at a time; by default as in the run, or whole.
        gpu: The GPU to recommend for, such as H100-80GB; by default that of this machine.
        risk: Allowed precisions: none (the usual mixed precision), low (also FP8, stochastic rounding), high (also FP4).
    """
    from dither.spec.gpus import gpu_named
    from dither.tools.memory import StepPasses, estimate, largest_batch, model_shape
    from dither.tools.recommend import cpu_here, gpus_here, recommend

    run = _run_of(model)
    if run is not None and params is not None:
        raise UserError("Name either a model (a preset, a Hugging Face folder or a run) or --params, not both.")
    shape, own = (
        (run.shape, run.passes) if run is not None else (model_shape(model, params), StepPasses(batch=8, sequence=2048))
    )
    passes = StepPasses(
        batch=own.batch if batch is None else batch,
        sequence=own.sequence if sequence is None else sequence,
        number=2 if accumulate else own.number,
        checkpointing="full" if checkpointing else own.checkpointing,
    )
    columns = _columns(mode, recipe, states, None if run is None else run.setting)
    for name, each in columns.items() if weights is not None else ():
        cast = None if each.precision is None else each.precision.weight
        if each.mode != "bf16-sr" or cast is None or not stores(cast):
            raise UserError(
                f"--weights fp8 goes with bf16-sr + fp8-current, not {name}: add --mode bf16-sr --recipe fp8-current."
            )
    options = {name: value for name, value in (("save", save), ("hold", hold), ("swiglu", swiglu)) if value is not None}
    settings = {
        name: replace(
            each,
            compiled=each.compiled and compiled,
            released=each.released or released,
            states_on=states_on or each.states_on,
            weights=weights or each.weights,
            chunked_logits=each.chunked_logits if logits is None else logits == "chunked",
            memory=replace(each.memory, **options),  # type: ignore[arg-type]
        )
        for name, each in columns.items()
    }
    estimates = {name: estimate(shape, each, passes) for name, each in settings.items()}
    place = gpu_named(gpu) if gpu is not None else next(iter(gpus_here()), None)
    batches = {} if place is None else {n: largest_batch(shape, s, passes, memory=place.usable) for n, s in settings.items()}
    best = None if place is None or shape.experts > 1 else recommend(shape, place, sequence=passes.sequence, risk=risk)

    def in_words() -> None:
        title = f"{shape.parameters:,} parameters, {passes.batch} x {passes.sequence} tokens per pass: GiB"
        _print(title, estimates, batches, place)
        if left_out:
            print_text(f"\nNot estimated: {', '.join(left_out)} of this run.")
        if shortage := _host_shortage(estimates, cpu_here().memory):
            print_text(f"\n{shortage}")
        if place is not None and best is not None:
            _print_recommendation(place, best, _training(model, is_run=run is not None))

    left_out = () if run is None else run.left_out
    found = {"parameters": shape.parameters, "passes": passes, "estimates": estimates, "left_out": left_out}
    there = {"gpu": place, "largest_batch": batches, "recommended": best}
    print_result({**found, **there}, in_words, json=json)
    return 0


@dataclass(frozen=True)
class _RunShape:
    """The sizes and the precision of a run."""

    shape: Shape
    setting: Setting
    passes: StepPasses
    left_out: tuple[str, ...]
    """Fields of its config that need memory which is not estimated."""


def _run_of(model: str | None) -> _RunShape | None:
    """Return the sizes and the precision of the run in a folder, or None if it is not one."""
    from dither.tools.memory import Setting, StepPasses, shape_of_section

    if model is None or not (Path(model) / CONFIG).is_file():
        return None
    folder = Path(model)
    config = configs.load(folder / CONFIG)
    if config.lora.rank is not None:
        raise UserError(
            f"The run {model!r} trains adapters (lora.rank={config.lora.rank}), and whole models are estimated here: name its "
            "model to estimate that."
        )
    vocab = config.model.vocab or (_words(config, folder) if config.model.hf is None else None)
    shape = shape_of_section(config.model, vocab)
    precision, data = config.precision.resolved(bf16=True), config.data
    # The plan of fp8-auto casts some layers: the estimate is for all of them.
    default = precision.plan_of(precision.entries[0][1], {name: recipe_named("fp8-current") for name in MEASURED}).default
    sampling = precision.sampling
    setting = Setting(
        mode=precision.mode,
        precision=default,
        states=precision.states,
        weights=precision.weights,
        gradients="bf16" if precision.gradients == "bf16-sr" else precision.gradients,  # type: ignore[arg-type]
        chunked_logits=precision.logits == "chunked",
        optimizer=config.optim.optimizer,
        sampling="none" if sampling is None else "recomputed" if sampling.recompute else "kept",
        compiled=config.run.compile is not False,
        released=config.optim.release_gradients,
        states_on=config.optim.states_on,
        watched=config.oscillation.start is not None,
        memory=precision.memory,
    )
    passes = StepPasses(
        batch=data.micro_batch or data.batch,
        sequence=data.sequence,
        number=1 if data.micro_batch in (None, data.batch) else 2,
        checkpointing=config.parallel.checkpointing,
    )
    qat, parallel = config.qat, config.parallel
    others = {
        "precision.output": precision.output is not None,
        "qat.format": qat.format is not None,
        "qat.noise_until": qat.noise_until > 0,
        "qat.teacher": qat.teacher is not None,
        **{f"parallel.{name}": getattr(parallel, name) > 1 for name in ("dp_shard", "tp", "pp")},
    }
    return _RunShape(shape, setting, passes, tuple(name for name, there in others.items() if there))


def _words(config: configs.Config, folder: Path) -> int:
    """Return the vocabulary size of a run's tokenizer."""
    from dither.data import is_prepared, load_tokenizer, open_tokens, prepared_folder

    prepared = prepared_folder(config.data.sources) or folder / TOKENS
    if is_prepared(prepared):
        return open_tokens(prepared, verify=False).tokenizer.vocab_size
    return load_tokenizer(config.data.tokenizer).vocab_size


def _columns(modes: Sequence[str], recipes: Sequence[str], states: Sequence[str], own: Setting | None) -> dict[str, Setting]:
    """Return the settings to show, by the titles of their columns."""
    from dither.tools.memory import Setting

    if not (modes or recipes or states):
        asked = [] if own is not None else list(SHOWN)
    else:
        given = own.mode if own is not None else "o1"
        asked = [
            (mode, None if name == "none" else recipe_name(name), None if kept == "mode" else kept)
            for mode in modes or (given,)
            for name in recipes or ("none",)
            for kept in states or ("mode",)
        ]
    found = {} if own is None else {"this run": own}
    for mode, name, kept in asked:
        precision = None if name is None else recipe_named(name).default
        title = " + ".join(part for part in (mode, name, kept) if part)
        found[title] = replace(own or Setting(), mode=mode, precision=precision, states=kept)
    return found


def _print(title: str, estimates: Mapping[str, MemoryEstimate], batches: Mapping[str, int], gpu: Gpu | None) -> None:
    """Print a table of parts in GiB, with one column per setting."""
    from dither.tools.memory import GIB, PARTS

    gib = [[f"{found.parts[part] / GIB:.2f}" for found in estimates.values()] for part in PARTS]
    rows = [(part.replace("_", " "), *cells) for part, cells in zip(PARTS, gib, strict=True) if set(cells) != {"0.00"}]
    rows.append(("peak", *(f"{found.peak / GIB:.2f}" for found in estimates.values())))
    rows.append(("at", *(found.moment for found in estimates.values())))
    if any(found.host for found in estimates.values()):
        rows.append(("in host memory", *(f"{found.host / GIB:.2f}" for found in estimates.values())))
    if gpu is not None:
        rows.append((f"largest batch, {gpu.name}", *map(str, batches.values())))
    print_table(title, ("part", *estimates), rows, right=range(1, len(estimates) + 1))


def _host_shortage(estimates: Mapping[str, MemoryEstimate], memory: int) -> str:
    """Return a sentence if this machine has too little memory for states in host memory, or "" if not or not known."""
    from dither.tools.memory import GIB

    most = max(found.host for found in estimates.values())
    if not memory or most <= memory:
        return ""
    return f"States in host memory need {most / GIB:.1f} GiB of it, and this machine has {memory / GIB:.1f} GiB."


def _training(model: str | None, *, is_run: bool) -> list[str]:
    """Return the command that trains a model, up to its settings; without a model, the flag of settings alone."""
    if model is None:
        return ["--set"]
    if is_run:
        return ["dither", "train", str(Path(model) / CONFIG), "--set"]
    return ["dither", "train", "--set", f"model.{'preset' if model in PRESETS else 'hf'}={model}"]


def _print_recommendation(gpu: Gpu, best: Recommendation, training: Sequence[str]) -> None:
    from dither.tools.memory import GIB

    print(f"\nOn {gpu.name} ({gpu.usable / GIB:.0f} GiB usable): {best if best.batch else 'does not fit'}")
    if best.batch:
        peak = best.estimate.peak / GIB
        print(f"  up to {best.batch} sequences per pass, {peak:.1f} GiB: {shlex.join([*training, *best.settings])}")
    for reason in best.reasons:
        print_text(f"  {reason}")
