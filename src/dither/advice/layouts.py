"""Layouts of a model over many GPUs, and the memory of the fullest GPU, part by part."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dither.advice.memory import (
    ALIGNED,
    MOMENTS,
    PARTS,
    WORKSPACE,
    Estimate,
    Setting,
    Shape,
    block_activations,
    format_bytes,
    last_norm,
    resident,
    weight_code_bytes,
)
from dither.errors import UserError
from dither.parallel.layout import Layout

Checkpointing = Literal["none", "selective", "half", "full"]
"""Recomputation in backward. none: nothing beyond what the compiler recomputes. selective: all but products and attention.
half: also every second product, as torchtitan's per-op option does. full: whole blocks."""

SCHEDULES = MappingProxyType({"1f1b": 1, "interleaved-1f1b": 2})
"""Pipeline schedules and their stages per GPU."""


@dataclass(frozen=True)
class ScheduledLayout(Layout):
    """A layout with the schedule of its pipeline.

    >>> layout = ScheduledLayout(dp_shard=8, tp=8)
    >>> layout.ranks, str(layout)
    (64, 'dp_shard 8, tp 8')
    """

    schedule: str = "1f1b"
    """Order of the passes in a pipeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise UserError(f"There is no schedule {self.schedule!r}: choose from {', '.join(SCHEDULES)}.")

    @property
    def virtual(self) -> int:
        """Return the number of stages per GPU."""
        return SCHEDULES[self.schedule]

    def __str__(self) -> str:
        names = ("dp_replicate", "dp_shard", "tp", "pp")
        text = ", ".join(f"{name} {self.sizes[name]}" for name in names if self.sizes[name] > 1) or "one GPU"
        return text if self.virtual == 1 else f"{text} interleaved"


def layouts(shape: Shape, gpus: int, *, node: int = 8) -> Iterator[ScheduledLayout]:
    """Yield the layouts worth trying: tp inside a node, and replicas only of whole nodes or of whole models.

    Sizes that heads, features, blocks of 128 or layers do not allow are left out.

    >>> len(list(layouts(Shape(width=4096, layers=32, heads=32, feed_forward=14336, vocab=128256), 8)))
    25
    """
    heads = math.gcd(shape.heads, shape.key_value_heads or shape.heads)
    for tp in (size for size in range(1, min(node, gpus) + 1) if gpus % size == 0 and node % size == 0):
        if heads % tp or shape.vocab % tp or (tp > 1 and not splits_evenly(shape, tp)):
            continue
        for pp in (size for size in range(1, min(shape.layers, gpus // tp) + 1) if gpus // tp % size == 0):
            data = gpus // tp // pp
            shards = sorted({1, data, min(data, node // tp)} if data % min(data, node // tp) == 0 else {1, data})
            for schedule, virtual in SCHEDULES.items():
                if virtual > 1 and (pp == 1 or virtual * pp > shape.layers):
                    continue
                for dp_shard in shards:
                    yield ScheduledLayout(dp_replicate=data // dp_shard, dp_shard=dp_shard, tp=tp, pp=pp, schedule=schedule)


def splits_evenly(shape: Shape, tp: int, block: int = 128) -> bool:
    """Return True if tensor parallelism leaves whole blocks of scales to each GPU, or whole features if blocks never fit."""
    sizes = (shape.query_width, shape.key_width, shape.feed_forward)
    return all(size % (tp * (block if size % block == 0 else 1)) == 0 for size in sizes)


def stage_layers(shape: Shape, layout: ScheduledLayout, *, last: bool) -> int:
    """Return the number of blocks of the first or the last stage; the first stages have one more if they do not divide."""
    return shape.layers // layout.pp if last and layout.pp > 1 else math.ceil(shape.layers / layout.pp)


def stage_parameters(shape: Shape, layout: ScheduledLayout, *, last: bool) -> float:
    """Return the parameters of a stage per rank of tensor parallelism, before they are sharded by FSDP2."""
    embedding = shape.output_weights + shape.positions * shape.width
    output = 0 if shape.tied else shape.output_weights
    blocks = (shape.parameters - embedding - output) * stage_layers(shape, layout, last=last) / shape.layers
    if layout.pp == 1:
        return shape.parameters / layout.tp
    return (blocks + (shape.output_weights if last else embedding)) / layout.tp


def in_flight(layout: ScheduledLayout, passes: int, *, last: bool) -> float:
    """Return the number of micro-batches whose activations a stage holds at once."""
    if layout.pp == 1:
        return 1.0
    if layout.virtual == 1:
        return 1.0 if last else float(min(passes, layout.pp))
    chunks = (layout.virtual - 1) * layout.pp + 1 + (0 if last else 2 * (layout.pp - 1))
    return min(chunks, passes * layout.virtual) / layout.virtual


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The forward passes of a step: their number, size and recomputation."""

    micro: int = 1
    """Sequences per forward pass and GPU."""
    sequence: int = 8192
    """Tokens per sequence."""
    number: int = 1
    """Forward passes per step and GPU."""
    checkpointing: Checkpointing = "none"
    """Recomputation in backward."""

    @property
    def tokens(self) -> int:
        """Return the tokens per forward pass."""
        return self.micro * self.sequence


def memory_per_gpu(shape: Shape, setting: Setting, layout: ScheduledLayout, passes: Passes) -> Estimate:
    """Estimate the memory of the fullest GPU of a layout, in the first or in the last stage.

    >>> from dither.advice.memory import GIB, llama_of
    >>> alone = memory_per_gpu(llama_of(8e9), Setting(), ScheduledLayout(), Passes())
    >>> sharded = memory_per_gpu(llama_of(8e9), Setting(), ScheduledLayout(dp_shard=8), Passes())
    >>> round(alone.peak / GIB), round(sharded.peak / GIB)
    (144, 53)
    """
    first = _stage(shape, setting, layout, passes, last=layout.pp == 1)
    if layout.pp == 1:
        return first
    return max(first, _stage(shape, setting, layout, passes, last=True), key=lambda found: found.peak)


def kept_per_token(shape: Shape, setting: Setting, checkpointing: Checkpointing, tp: int) -> tuple[float, float]:
    """Return (activations, codes of inputs) that one block keeps until backward, in bytes per token."""
    if checkpointing == "none":
        return block_activations(shape, setting, tp=tp)
    own = setting.residual_bytes * shape.width / tp
    if checkpointing == "full":
        return own, 0.0
    c, d, q, k, f = format_bytes(setting.storage.compute), shape.width, shape.query_width, shape.key_width, shape.feed_forward
    ups = 2 if shape.gated else 1
    # Results of q, k, v, out, gate and up, down, or every second of them; attention keeps its output and log-sum-exp.
    products = q + 2 * k + 2 * d + ups * f if checkpointing == "selective" else q + k + d + f
    return own + (c * (products + q) + 4 * shape.heads) / tp, 0.0


def _stage(shape: Shape, setting: Setting, layout: ScheduledLayout, passes: Passes, *, last: bool) -> Estimate:
    """Estimate the memory of one GPU of a stage; `estimate` of `dither.advice.memory` is the case of one GPU."""
    storage, tokens, tp = setting.storage, passes.tokens, layout.tp
    layers = stage_layers(shape, layout, last=last)
    whole = stage_parameters(shape, layout, last=last)
    held = whole / layout.dp_shard
    sharded, pipeline = layout.dp_shard > 1, layout.pp > 1
    c, g = format_bytes(storage.compute), format_bytes(storage.gradients)
    weights = shape.block_weights * layers / shape.layers / tp
    output = shape.output_weights / tp if last else 0.0
    still = _persistent(shape, setting, held)

    narrow = c if storage.autocast else 0
    per_weight = (weight_code_bytes(shape, setting) - shape.output_weights * narrow) / shape.block_weights
    codes_held = setting.casts_weight
    copies = per_weight * weights / layout.dp_shard if codes_held or not sharded else 0.0
    copies += 0.0 if sharded else narrow * output
    gathered = 0.0
    gradients = held * g
    if sharded:
        # Blocks are gathered one ahead and freed again; a pipeline keeps its stage gathered, and its gradients unsharded.
        block, one = weights / layers, per_weight / 2 if codes_held else c
        gathered = weights * 2 * one if pipeline and codes_held else weights * one if pipeline else 2 * block * one
        gathered += max(output, shape.output_weights / tp) * c + (0.0 if pipeline else block * (c + g))
        gradients = whole * g if pipeline else gradients

    kept, codes = (tokens * each for each in kept_per_token(shape, setting, passes.checkpointing, tp))
    block_kept, block_codes = (tokens * each for each in block_activations(shape, setting, tp=tp))
    flight = in_flight(layout, passes.number, last=last)
    columns = math.ceil(shape.vocab / ALIGNED) * ALIGNED / tp
    logits = tokens * columns * setting.logit_bytes if last else 0.0
    ending = tokens * last_norm(shape, setting) / tp if last else 0.0
    accumulated = gradients if passes.number > 1 else 0.0
    forward = {**still, "gradients": accumulated, "weight_codes": copies}
    everything = {"activations": flight * layers * kept, "input_codes": flight * layers * codes}
    moments = {}
    if passes.checkpointing != "none":
        forward["weight_codes"] = copies if codes_held or not setting.compiled else copies / layers
        again = {**forward, **everything, "logits": 0.0, "temporaries": block_kept + WORKSPACE + gathered}
        again["input_codes"] = block_codes
        again["gradients"] = max(accumulated, output / layout.dp_shard * g)
        moments["recompute"] = again
    moments["loss"] = {**forward, **everything, "logits": logits, "temporaries": ending + WORKSPACE + gathered}
    widest = (output or shape.output_weights / tp) * c
    first = block_kept + block_codes - gradients * weights / whole / layers
    nothing = {"activations": 0.0, "input_codes": 0.0, "logits": 0.0, "temporaries": max(widest, first) + WORKSPACE + gathered}
    moments["update"] = {
        **still,
        "gradients": gradients,
        "weight_codes": copies if codes_held else 0.0,
        **nothing,
    }
    rounded = {
        moment: MappingProxyType({part: round(moments[moment][part]) for part in PARTS})
        for moment in MOMENTS
        if moment in moments
    }
    return Estimate(MappingProxyType(rounded))


def _persistent(shape: Shape, setting: Setting, held: float) -> dict[str, float]:
    """Return the bytes of the weights, masters and states of `held` parameters."""
    share = held / shape.parameters
    return {part: size * share for part, size in resident(shape, setting).items()}
