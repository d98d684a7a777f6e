"""`dither advise`: memory, communication, speed and cost of a training run over many GPUs, and the config to run it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither.commands.arguments import Json
from dither.console import ProgressBars, print_result, print_table, print_text
from dither.errors import UserError
from dither.models import PRESETS
from dither.settings import toml

if TYPE_CHECKING:
    from dither.tools.memory import Shape
    from dither.tools.scaling import RankedStep, Ranking, TrainingStep

SHOWN, OTHERS = 15, 4
"""Rows of the table of precisions, and of the table of other layouts."""

DEVIATION = "Published runs reached 0.82 to 1.18 times the speed that these formulas predict: see docs/results/many-gpus.md."


def advise(
    gpus: int,
    gpu: str,
    params: float | None = None,
    model: str | None = None,
    tokens: float | None = None,
    price: float | None = None,
    sequence: int = 8192,
    batch_tokens: float = 2**22,
    node: int = 8,
    network: float | None = None,
    toml: str | None = None,
    json: Json = False,
) -> int:
    """Rank precisions and layouts for a model on many GPUs, with the config to run.

    Memory per GPU, communication, step time and cost follow from sizes alone: no model is built, and no GPU is needed.
    docs/results/many-gpus.md compares its formulas with measured runs.

    Args:
        gpus: Number of GPUs.
        gpu: Kind of GPU: a100, h100, h200 or b200.
        params: Number of parameters, such as 70e9, of a model in the proportions of Llama 3.
        model: Or the model: a preset such as llama-8b, or a Hugging Face folder with its config.json.
        tokens: Tokens to train on, such as 1.4e12: adds days, and cost if there is a price.
        price: Price of one GPU for one hour, in any currency.
        sequence: Tokens per sequence.
        batch_tokens: Desired tokens per optimizer step.
        node: GPUs per node, connected by NVLink.
        network: Network bandwidth per GPU in Gbit/s; by default 400, and 200 for the A100.
        toml: Write the recommended config to this file.
    """
    from dither.spec.gpus import gpu_named
    from dither.tools.memory import dense, llama3_of, model_shape
    from dither.tools.scaling import Job, rank

    kind = gpu_named(gpu, rated=True)
    kind = kind if network is None else kind.with_network(network)
    for name, given in (("tokens", tokens), ("price", price)):
        if given is not None and not 0 < given < 1e18:
            raise UserError(f"--{name} is a positive number, not {given:g}.")
    if price is not None and tokens is None:
        raise UserError("--price gives a cost together with --tokens: give both.")
    if toml is not None and Path(toml).exists():
        raise UserError(f"{toml} exists already: choose another name for --toml.")
    if (model is None) == (params is None):
        raise UserError("Give either --model (a preset or a Hugging Face folder) or --params.")
    shape = dense(model_shape(model)) if params is None else llama3_of(params)
    job = Job(shape=shape, gpu=kind, gpus=gpus, node=node, sequence=sequence, batch_tokens=batch_tokens)
    with ProgressBars(sys.stderr).stage("Comparing precisions and layouts") as tick:
        ranking = rank(job, tick)
    text = config_text(ranking.best, model, tokens)
    if toml is not None:
        try:
            Path(toml).write_text(text)
        except OSError as error:
            raise UserError(f"{toml} cannot be written: {error.strerror}.") from None

    def in_words() -> None:
        _print(ranking, tokens, price)
        print(f"\nThe config{'' if toml is None else f', written to {toml}'}:\n\n{text}", end="")

    print_result(_as_dict(ranking, tokens, price, text), in_words, json=json)
    return 0


def config_text(option: RankedStep, model: str | None, tokens: float | None) -> str:
    """Return the config of an option as TOML."""
    step, layout, choice = option.step, option.step.layout, option.choice
    if model is None:
        sizes = f"{step.shape.layers} blocks of width {step.shape.width}"
        named = {"hf": "MODEL"}
        said = f"# MODEL is a folder with a config.json: a model of {sizes}\n"
    else:
        named, said = {"preset" if model in PRESETS else "hf": model}, ""
    sections: dict[str, dict[str, Any]] = {
        "model": named,
        "data": {"sequence": step.passes.sequence, "batch": step.batch, "micro_batch": step.passes.batch},
        "precision": {"mode": choice.mode, "recipe": choice.recipe, "states": choice.states},
        "parallel": {
            "dp_replicate": layout.dp_replicate,
            "dp_shard": layout.dp_shard,
            "tp": layout.tp,
            "pp": layout.pp,
            "schedule": layout.schedule if layout.pp > 1 else None,
            "checkpointing": step.passes.checkpointing,
        },
        "run": {"steps": None if tokens is None else math.ceil(tokens / step.tokens)},
    }
    lines = list[str]()
    for name, values in sections.items():
        given = [f"{key} = {toml(value)}" for key, value in values.items() if value is not None]
        lines += [f"[{name}]", *given, ""] if given else []
    return said + "\n".join(lines)


def _days(step: TrainingStep, tokens: float) -> float:
    return tokens / step.tokens_per_second / 86400


def _cost(step: TrainingStep, tokens: float, price: float) -> float:
    return _days(step, tokens) * 24 * price * step.layout.ranks


def _row(option: RankedStep, tokens: float | None, price: float | None) -> tuple[str, ...]:
    """Return the cells of an option in the table."""
    from dither.tools.memory import GIB

    step, layout, passes = option.step, option.step.layout, option.step.passes
    cells = [
        " ".join(part for part in (option.choice.mode, option.choice.recipe, option.choice.states) if part),
        *(str(size) for size in (layout.dp_replicate, layout.dp_shard, layout.tp)),
        f"{layout.pp}{'i' if layout.virtual > 1 else ''}",
        f"{passes.batch}x{passes.number}",
        passes.checkpointing,
        f"{step.memory.peak / GIB:.1f}",
        f"{step.tokens_per_second / 1e3:.1f}",
        f"{step.mfu:.2f}",
    ]
    if tokens is not None:
        cells.append(f"{_days(step, tokens):.1f}")
        cells += [] if price is None else [f"{_cost(step, tokens, price):,.0f}"]
    return tuple(cells)


def _print(ranking: Ranking, tokens: float | None, price: float | None) -> None:
    """Print the ranking, the parts of the recommendation, and the reasons."""
    from dither.tools.memory import GIB
    from dither.tools.scaling import reasons

    job, best = ranking.job, ranking.best
    header = ["precision", "repl", "shard", "tp", "pp", "passes", "recompute", "GiB", "ktok/s", "MFU"]
    header += [] if tokens is None else ["days"]
    header += [] if price is None else ["cost"]
    right = (1, 2, 3, 4, 5, *range(7, len(header)))
    print(f"{_sizes(job.shape)} on {job.gpus} {job.gpu.name} with {job.usable / GIB:.0f} GiB to use on each\n")
    title = "The fastest layout of each precision"
    print_table(title, header, [_row(option, tokens, price) for option in ranking.options[:SHOWN]], right)
    for option in ranking.refused:
        print_text(f"  {option.shortfall(job.usable)}.")
    print_text(
        "  repl: dp_replicate, shard: dp_shard; pp with i: interleaved; passes: sequences per pass x passes per step and GPU"
    )
    print(f"\nRecommended: {best.choice} with {best.step.layout}")
    print(f"  A step has {best.step.tokens:,} tokens and takes {best.step.seconds:.2f} s.")
    for reason in reasons(ranking):
        print_text(f"  {reason}")
    print_text(f"  {DEVIATION}")
    print()
    parts = {part.replace("_", " "): size for part, size in best.step.memory.parts.items() if size >= 0.005 * GIB}
    print_table(
        f"Memory of the fullest GPU at the moment {best.step.memory.moment!r}, GiB",
        (*parts, "peak"),
        [(*(f"{size / GIB:.2f}" for size in parts.values()), f"{best.step.memory.peak / GIB:.2f}")],
        range(len(parts) + 1),
    )
    seconds = best.step.seconds_by_part
    print_table("Time of a step, s", tuple(seconds), [tuple(f"{part:.2f}" for part in seconds.values())], range(len(seconds)))
    traffic = {name: sent for name, sent in best.step.traffic.items() if sent.nvlink or sent.network}
    if traffic:
        rows = [(name, f"{sent.nvlink / 1e9:.1f}", f"{sent.network / 1e9:.1f}") for name, sent in traffic.items()]
        print_table("Sent per GPU and step, GB", ("for", "NVLink", "network"), rows, (1, 2))
    if ranking.alternatives:
        others = [_row(option, tokens, price) for option in ranking.alternatives[:OTHERS]]
        print_table("Other layouts in this precision", header, others, right)


def _sizes(shape: Shape) -> str:
    """Return the size of a model in words."""
    kept = shape.key_value_heads or shape.heads
    return f"{shape.parameters / 1e9:.2f}B parameters (width {shape.width}, {shape.layers} blocks, {shape.heads}/{kept} heads)"


def _as_dict(ranking: Ranking, tokens: float | None, price: float | None, text: str) -> dict[str, Any]:
    """Return everything that was found."""
    from dither.tools.scaling import reasons

    def found(option: RankedStep) -> dict[str, Any]:
        step, layout = option.step, option.step.layout
        return {
            "precision": option.choice,
            "parallel": {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "schedule")},
            "checkpointing": step.passes.checkpointing,
            "sequences_per_pass": step.passes.batch,
            "passes": step.passes.number,
            "tokens_per_step": step.tokens,
            **step.memory.to_dict(),
            "sent_bytes": step.traffic,
            "seconds": step.seconds_by_part,
            "step_seconds": step.seconds,
            "tokens_per_second": step.tokens_per_second,
            "mfu": step.mfu,
            "days": None if tokens is None else _days(step, tokens),
            "cost": None if tokens is None or price is None else _cost(step, tokens, price),
        }

    job = ranking.job
    return {
        "gpus": job.gpus,
        "gpu": job.gpu.name,
        "usable_bytes": job.usable,
        "parameters": job.shape.parameters,
        "recommended": found(ranking.best),
        "reasons": reasons(ranking),
        "ranked": [found(option) for option in ranking.options],
        "alternatives": [found(option) for option in ranking.alternatives],
        "refused": [{**found(option), "reason": option.shortfall(job.usable)} for option in ranking.refused],
        "toml": text,
    }
