"""Predict memory, communication and time of a training step over many GPUs.

The mesh has the dimensions pp, dp_replicate, dp_shard and tp, outermost first, as `dither train` builds it: tp is inside a
node, and shards fill the rest of a node before they go to the next one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from dither.advice.accelerators import BESIDE, LINK_SHARE, Accelerator
from dither.advice.layouts import Passes, ScheduledLayout, memory_per_gpu, stage_layers, stage_parameters
from dither.advice.memory import Estimate, Setting, Shape, format_bytes, weight_code_bytes
from dither.advice.step_time import Clock, Times
from dither.errors import UserError

BUBBLE = MappingProxyType({"1f1b": 1.0, "interleaved-1f1b": 0.5})
"""Idle time at the ends of a pipeline, in passes per stage."""


LATENCY = 10e-6
"""Seconds per hop of a ring between nodes. Assumed, not fitted."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends, by link."""

    nvlink: float = 0.0
    network: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.nvlink + other.nvlink, self.network + other.network)

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(self.nvlink * factor, self.network * factor)

    def seconds(self, accelerator: Accelerator) -> float:
        """Return the time on the busier link."""
        return max(self.nvlink / accelerator.nvlink, self.network / accelerator.network) / LINK_SHARE


def gathering(size: float, ranks: int, inside: int) -> Traffic:
    """Return the traffic per GPU of an all-gather or reduce-scatter of `size` bytes.

    The group has `ranks` GPUs, `inside` of them per node. Rings send everything once over NVLink; the GPUs of
    a node share what goes over the network.

    >>> gathering(8e9, 8, 8)
    Traffic(nvlink=7000000000.0, network=0.0)
    >>> gathering(8e9, 16, 8)
    Traffic(nvlink=7500000000.0, network=500000000.0)
    """
    if ranks == 1:
        return Traffic()
    inside = min(inside, ranks)
    nodes = math.ceil(ranks / inside)
    return Traffic(size * (ranks - 1) / ranks if inside > 1 else 0.0, size * (nodes - 1) / nodes / inside)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step of a model over many GPUs, and the predictions about it."""

    shape: Shape
    setting: Setting
    layout: ScheduledLayout
    passes: Passes
    accelerator: Accelerator
    node: int = 8
    """GPUs per node."""
    async_tp: bool = False
    """True if the communication of tensor parallelism runs beside its products, as torch's async TP does."""
    gather_bytes: float | None = None
    """Bytes per weight that FSDP2 gathers; None means codes where weights are cast, and the format of products elsewhere."""
    clock: Clock | None = field(default=None, compare=False, repr=False)
    """Times that other steps of the same model, precision and tp have computed already."""

    def __post_init__(self) -> None:
        layout, passes = self.layout, self.passes
        if layout.pp > 1 and passes.number < layout.pp:
            raise UserError(f"A pipeline of {layout.pp} stages needs as many passes per step, not {passes.number}.")
        if layout.virtual > 1 and passes.number % layout.pp:
            raise UserError(f"Interleaved stages need a multiple of pp={layout.pp} passes per step, not {passes.number}.")

    @cached_property
    def memory(self) -> Estimate:
        """Return the memory of the fullest GPU."""
        return memory_per_gpu(self.shape, self.setting, self.layout, self.passes)

    @property
    def batch(self) -> int:
        """Return the sequences per step."""
        return self.layout.batch_parts * self.passes.number * self.passes.micro

    @property
    def tokens(self) -> int:
        """Return the tokens per step."""
        return self.batch * self.passes.sequence

    # Communication ---------------------------------------------------------------------------------------------------------

    @property
    def _inside(self) -> int:
        """Return the ranks of a group of shards that are in one node."""
        return max(1, min(self.layout.dp_shard, self.node // self.layout.tp))

    @cached_property
    def _stage_weights(self) -> float:
        """Return the weights of the largest stage, per rank of tensor parallelism."""
        return max(stage_parameters(self.shape, self.layout, last=last) for last in (False, True))

    @cached_property
    def _gather(self) -> Traffic:
        """Return the traffic of gathering the weights of a stage once."""
        each = float(format_bytes(self.setting.storage.compute))
        if self.setting.casts_weight:
            narrow = each if self.setting.storage.autocast else 0
            codes = weight_code_bytes(self.shape, self.setting) - self.shape.output_weights * narrow
            share = self.shape.block_weights / self.shape.parameters
            each = share * codes / self.shape.block_weights / 2 + (1 - share) * each
        each = each if self.gather_bytes is None else self.gather_bytes
        return gathering(self._stage_weights * each, self.layout.dp_shard, self._inside)

    @cached_property
    def _reduce(self) -> Traffic:
        """Return the traffic of reducing the gradients of a stage into shards."""
        each = format_bytes(self.setting.storage.gradients)
        return gathering(self._stage_weights * each, self.layout.dp_shard, self._inside)

    @cached_property
    def _replicas(self) -> Traffic:
        """Return the traffic of all-reducing gradient shards over replicas."""
        layout = self.layout
        size = self._stage_weights / layout.dp_shard * format_bytes(self.setting.storage.gradients)
        inside = max(1, self.node // layout.tp // layout.dp_shard)
        return gathering(size, layout.dp_replicate, inside) * 2

    @cached_property
    def _block_exchange(self) -> Traffic:
        """Return the traffic of tensor and sequence parallelism in one pass through one block, forward."""
        size = self.passes.tokens * self.shape.width * format_bytes(self.setting.storage.compute)
        return gathering(size, self.layout.tp, self.layout.tp) * 4

    @cached_property
    def _hop(self) -> Traffic:
        """Return the traffic of handing one micro-batch to the next stage."""
        layout = self.layout
        if layout.pp == 1:
            return Traffic()
        size = self.passes.tokens * self.shape.width * self.setting.residual_bytes / layout.tp * layout.virtual
        inside = layout.ranks // layout.pp < self.node
        return Traffic(size, 0.0) if inside else Traffic(0.0, size)

    @cached_property
    def traffic(self) -> Mapping[str, Traffic]:
        """Return the bytes that one GPU sends per step, by purpose."""
        layout, passes = self.layout, self.passes
        layers = stage_layers(self.shape, layout, last=False)
        rounds = 3 if passes.checkpointing == "full" else 2
        gathers, reductions = (1, 1) if layout.pp > 1 else (2 * passes.number, passes.number)
        return MappingProxyType(
            {
                "weights": self._gather * gathers,
                "gradients": self._reduce * reductions + self._replicas,
                "tensor parallel": self._block_exchange * (rounds * layers * passes.number),
                "pipeline": self._hop * (2 * passes.number),
            }
        )

    # Time --------------------------------------------------------------------------------------------------------------

    @cached_property
    def _clock(self) -> Clock:
        if self.clock is not None and self.clock.setting is self.setting and self.clock.tp == self.layout.tp:
            return self.clock
        return Clock(self.shape, self.setting, self.accelerator, self.layout.tp)

    @cached_property
    def _compute(self) -> tuple[Times, Times]:
        """Return forward and backward of one pass through the slowest stage, with recomputation and without communication."""
        beside = BESIDE if self.layout.ranks > 1 else 1.0
        forward, backward = self._clock.block(self.passes)
        backward = backward + self._clock.recomputed(forward, self.passes)
        ends = self._clock.output(self.passes)
        found = []
        for last in (False, True):
            layers = stage_layers(self.shape, self.layout, last=last)
            end = ends if last or self.layout.pp == 1 else (Times(), Times())
            found.append(((forward * layers + end[0]) * beside, (backward * layers + end[1]) * beside))
        return max(found, key=lambda pair: pair[0].total + pair[1].total)

    @cached_property
    def seconds_by_part(self) -> Mapping[str, float]:
        """Return the seconds of a step: compute, tensor parallelism, exposed communication, bubbles and the optimizer."""
        layout, passes, gpu = self.layout, self.passes, self.accelerator
        layers = stage_layers(self.shape, layout, last=False)
        forward, backward = (times.total for times in self._compute)
        rounds = 2 if passes.checkpointing == "full" else 1
        each = layers * self._block_exchange.seconds(gpu)
        exchange = [each, rounds * each]
        if self.async_tp:
            exchange = [max(0.0, part - work.products) for part, work in zip(exchange, self._compute, strict=True)]
        hop = self._hop.seconds(gpu)
        ahead, behind = forward + exchange[0] + hop, backward + exchange[1] + hop
        gather, reduce, replicas = (part.seconds(gpu) for part in (self._gather, self._reduce, self._replicas))
        if layout.dp_shard > 1:  # one ring per block and collective
            hops = LATENCY * layers * math.ceil(layout.dp_shard / self._inside)
            gather, reduce = gather + hops, reduce + hops
        if layout.pp > 1:
            exposed = max(0.0, gather - ahead) + max(0.0, reduce + replicas - behind)
        else:
            exposed = passes.number * (max(0.0, gather - ahead) + max(0.0, gather + reduce - behind))
            left = max(0.0, behind - gather - reduce)
            exposed += max(0.0, replicas - left)
        exposed += (gather + reduce + replicas) / layers  # the first block waits, and so does the last one
        held = self._stage_weights / layout.dp_shard
        weights = self.shape.block_weights / layout.pp / layout.tp / layout.dp_shard
        return MappingProxyType(
            {
                "compute": passes.number * (forward + backward),
                "tensor parallel": passes.number * sum(exchange),
                "waiting": exposed + passes.number * 2 * hop,
                "bubbles": (layout.pp - 1) * BUBBLE[layout.schedule] * (ahead + behind),
                "optimizer": self._clock.update(held, weights),
            }
        )

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return sum(self.seconds_by_part.values())

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all GPUs together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Return the FLOPs of the model per second, relative to the peak of BF16 also where products are FP8.

        They are 6 per weight of a product and token, and those of causal attention, without recomputation.
        """
        shape = self.shape
        weights = 6 * (shape.block_weights + shape.output_weights)
        attention = 6 * shape.layers * shape.query_width * self.passes.sequence
        return self.tokens_per_second / self.layout.ranks * (weights + attention) / self.accelerator.bf16
