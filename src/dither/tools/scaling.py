"""Search the precisions and layouts for a model on many GPUs, and rank them by predicted speed."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType

from dither.console import Tick
from dither.errors import UserError
from dither.spec.gpus import GIB, Gpu
from dither.spec.optimizer import WHOLE, state_bytes
from dither.tools.memory import (
    Checkpointing,
    MemoryEstimate,
    PrecisionChoice,
    ScheduledLayout,
    Setting,
    Shape,
    StepPasses,
    check_positive,
    estimate,
    format_bytes,
    layouts,
    resident,
    stage_layers,
    stage_parameters,
    weight_code_bytes,
)
from dither.tools.recommend import FP8_FROM

BF16_SHARE = 0.708
"""Share of the BF16 peak that large products sustain. Fitted: 700 TFLOP/s on an H200, where 4096^3 reaches 719."""

SMALL_SIDE = 90.0
"""A product of sides m, n, k takes 1 + SMALL_SIDE (1/m + 1/n + 1/k) times as long as its FLOPs. Fitted."""

FP8_SHARES = MappingProxyType({"tensor": (0.657, 0.657, 0.657), "block": (0.568, 0.568, 0.458)})
"""Shares of the FP8 peak for the forward product, the input gradient and the weight gradient. Measured on an H200: 1300
TFLOP/s with tensor scales, 1124 with 1 x 128 times 128 x 128, and 906 with 1 x 128 times 1 x 128."""

ATTENTION_SHARES = MappingProxyType({64: 0.327, 128: 0.475})
"""Shares of the BF16 peak of attention by width of a head. Measured on an H200: 323 and 470 TFLOP/s, forward and backward."""

COPY_SHARE = 0.875
"""Share of the memory bandwidth that a copy reaches. Measured on an H200: 4.2 of 4.8 TB/s."""

OPTIMIZER_SHARES = MappingProxyType({"fp32": 0.80, "bf16": 0.89, "dynamic8": 0.426, "companded8": 0.72, "dynamic4": 0.35})
"""Optimizer steps as shares of a copy's bandwidth, by format of the parameters, or of states in few bits; those of a number
format take as long as companded8 (within 2 %). Measured on an H200, but for dynamic4: as long as dynamic8, assumed."""

LINK_SHARE = 0.8
"""Share of a link's bandwidth that collectives sustain. Assumed, not fitted."""

LATENCY = 10e-6
"""Seconds per hop of a ring between nodes. Assumed, not fitted."""

BESIDE = 1.25
"""Time of a pass's compute beside collectives, in a run over several GPUs, over its time on one GPU. Fitted on one published
run, 8B on 32 H200."""

BUBBLE = MappingProxyType({"1f1b": 1.0, "interleaved-1f1b": 0.5})
"""Idle time at the ends of a pipeline, in passes per stage."""

PRODUCTS_AGAIN: Mapping[Checkpointing, float] = MappingProxyType({"none": 0.0, "selective": 0.0, "half": 0.5, "full": 1.0})
"""Share of a block's forward products that backward computes again."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the parts of forward, backward, or both."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    casts: float = 0.0
    loss: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return self.products + self.attention + self.elementwise + self.casts + self.loss

    def __add__(self, other: "StepTimes") -> "StepTimes":
        return StepTimes(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def __mul__(self, factor: float) -> "StepTimes":
        return StepTimes(**{each.name: getattr(self, each.name) * factor for each in fields(self)})


@dataclass(frozen=True)
class Clock:
    """The times of a model's passes in one precision on one kind of GPU, where `tp` GPUs share each product."""

    shape: Shape
    setting: Setting
    gpu: Gpu
    tp: int = 1
    known: dict[tuple[int, int], tuple[StepTimes, StepTimes]] = field(default_factory=dict, compare=False, repr=False)
    """Times of blocks that were computed before, by sequences per pass and tokens per sequence."""

    def __post_init__(self) -> None:
        if self.setting.casts_weight and self.gpu.fp8 is None:
            raise UserError(f"{self.gpu.name} has no FP8 units: choose a setting without casts.")

    @property
    def copy(self) -> float:
        """Return the bytes per second of a copy."""
        return self.gpu.bandwidth * COPY_SHARE

    @property
    def _tensor_scales(self) -> bool:
        precision = self.setting.precision
        cast = None if precision is None else precision.cast("forward", "weight")
        return cast is not None and cast.group.kind == "tensor"

    def _rates(self) -> tuple[float, float, float]:
        """Return FLOP/s of the forward product, the input gradient and the weight gradient of the layers in blocks."""
        if not self.setting.casts_weight:
            return (self.gpu.bf16 * BF16_SHARE,) * 3
        assert self.gpu.fp8 is not None
        shares = FP8_SHARES["tensor" if self._tensor_scales else "block"]
        return tuple(self.gpu.fp8 * share for share in shares)  # type: ignore[return-value]

    def _product(self, tokens: int, inputs: float, outputs: float, rate: float) -> float:
        """Return the seconds of one of the three products of a layer."""
        return 2 * tokens * inputs * outputs * (1 + SMALL_SIDE * (1 / tokens + 1 / inputs + 1 / outputs)) / rate

    def _layers(self) -> list[tuple[float, float]]:
        """Return (inputs, outputs) of the linear layers of a block on one GPU."""
        d, q, k, f = self.shape.width, self.shape.query_width, self.shape.key_width, self.shape.feed_forward
        ups = 2 if self.shape.gated else 1
        q, k, f = q // self.tp, k // self.tp, f // self.tp
        return [(d, q), (d, k), (d, k), (q, d), *[(d, f)] * ups, (f, d)]

    def block(self, passes: StepPasses) -> tuple[StepTimes, StepTimes]:
        """Return the times of one block, forward and backward, without recomputation."""
        key = (passes.batch, passes.sequence)
        if key not in self.known:
            self.known[key] = self._block(passes)
        return self.known[key]

    def _block(self, passes: StepPasses) -> tuple[StepTimes, StepTimes]:
        shape, setting, tokens, tp = self.shape, self.setting, passes.tokens, self.tp
        d, q, k, f = shape.width, shape.query_width, shape.key_width, shape.feed_forward
        rates = self._rates()
        products = [sum(self._product(tokens, i, o, rate) for i, o in self._layers()) for rate in rates]
        width = q // shape.heads
        peak = self.gpu.bf16 * ATTENTION_SHARES[128 if width >= 128 else 64]
        attention = 2 * passes.sequence * q * tokens / tp / peak  # causal: half of all pairs
        p, c = setting.residual_bytes, format_bytes(setting.storage.compute)
        ups = 2 if shape.gated else 1
        moved = tokens * ((5 * p + 4 * c) * d + 2 * c * (q + k) + (1 + ups) * c * f) / tp
        elementwise = moved / self.copy
        codes = [0.0, 0.0]
        if setting.casts_weight:
            each = (2 * c if self._tensor_scales else c) + 2  # tensor scales read twice; codes in two layouts
            inputs, outputs = 2 * d + (q + f) / tp, 2 * d + (q + 2 * k + ups * f) / tp
            codes = [self.gpu.cast_passes * tokens * size * each / self.copy for size in (inputs, outputs)]
        weights = shape.block_weights / shape.layers / tp
        # Under autocast, weights are copied to 16 bits, and their gradients are converted back.
        copied = 6 * weights / self.copy if setting.storage.autocast else 0.0
        forward = StepTimes(
            products=products[0],
            attention=attention,
            elementwise=elementwise + (0.0 if setting.casts_weight else copied),
            casts=codes[0],
        )
        backward = StepTimes(
            products=products[1] + products[2],
            attention=2.5 * attention,
            elementwise=2 * elementwise + copied,
            casts=codes[1],
        )
        return forward, backward

    def recomputed(self, forward: StepTimes, passes: StepPasses) -> StepTimes:
        """Return the time of what one block, whose forward pass takes `forward`, recomputes in backward."""
        if passes.checkpointing == "none":
            return StepTimes()
        share = PRODUCTS_AGAIN[passes.checkpointing]
        full = passes.checkpointing == "full"
        return StepTimes(
            products=share * forward.products,
            attention=forward.attention if full else 0.0,
            elementwise=forward.elementwise,
            casts=share * forward.casts,
        )

    def output(self, passes: StepPasses) -> tuple[StepTimes, StepTimes]:
        """Return the times of the last norm, the output layer and the loss, forward and backward."""
        shape, setting, tokens = self.shape, self.setting, passes.tokens
        p, c = setting.residual_bytes, format_bytes(setting.storage.compute)
        product = self._product(tokens, shape.width, shape.vocab // self.tp, self.gpu.bf16 * BF16_SHARE)
        copied = 6 * shape.output_weights / self.tp / self.copy if setting.storage.autocast else 0.0
        logits = tokens * shape.vocab * c / self.tp / self.copy
        norm = tokens * shape.width * (6 * p + 4 * c) / self.tp / self.copy / 3
        return (
            StepTimes(products=product, loss=logits + norm, elementwise=copied),
            StepTimes(products=2 * product, loss=2 * (logits + norm), elementwise=copied),
        )

    def update(self, parameters: float, weights: float) -> float:
        """Return the seconds of the optimizer for its parameters, and of casting its weights once."""
        setting = self.setting
        storage = setting.storage
        p, g = format_bytes(storage.parameters), format_bytes(storage.gradients)
        moments = 1 if setting.optimizer == "adam-mini" else 2
        whole = storage.states in WHOLE
        moved = 2 * p + g + 2 * moments * state_bytes(storage.states, setting.state_block) + 2 * storage.masters
        kind = storage.states if not whole else "fp32" if storage.parameters == "fp32" else "bf16"
        share = OPTIMIZER_SHARES.get(kind, OPTIMIZER_SHARES["companded8"])
        seconds = parameters * moved / share / self.copy
        if setting.casts_weight:
            each = (2 * p if self._tensor_scales else p) + 2
            seconds += self.gpu.cast_passes * weights * each / self.copy
        return seconds


clock_of = functools.cache(Clock)
"""The clock of a shape, setting, GPU and tp, which the steps of a search share."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends, by link."""

    nvlink: float = 0.0
    network: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.nvlink + other.nvlink, self.network + other.network)

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(self.nvlink * factor, self.network * factor)

    def seconds(self, gpu: Gpu) -> float:
        """Return the time on the busier link."""
        return max(self.nvlink / gpu.nvlink, self.network / gpu.network) / LINK_SHARE


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
class TrainingStep:
    """A training step of a model over many GPUs, and the predictions about it."""

    shape: Shape
    setting: Setting
    layout: ScheduledLayout
    passes: StepPasses
    gpu: Gpu
    node: int = 8
    """GPUs per node."""
    async_tp: bool = False
    """True if the communication of tensor parallelism runs beside its products, as torch's async TP does."""
    gather_bytes: float | None = None
    """Bytes per weight that FSDP2 gathers; None means codes where weights are cast, and the format of products elsewhere."""

    def __post_init__(self) -> None:
        layout, passes = self.layout, self.passes
        if layout.pp > 1 and passes.number < layout.pp:
            raise UserError(f"A pipeline of {layout.pp} stages needs as many passes per step, not {passes.number}.")
        if layout.virtual > 1 and passes.number % layout.pp:
            raise UserError(f"Interleaved stages need a multiple of pp={layout.pp} passes per step, not {passes.number}.")

    @cached_property
    def memory(self) -> MemoryEstimate:
        """Return the memory of the fullest GPU."""
        return estimate(self.shape, self.setting, self.passes, self.layout)

    @property
    def batch(self) -> int:
        """Return the sequences per step."""
        return self.layout.batch_parts * self.passes.number * self.passes.batch

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
        return clock_of(self.shape, self.setting, self.gpu, self.layout.tp)

    @cached_property
    def _compute(self) -> tuple[StepTimes, StepTimes]:
        """Return forward and backward of one pass through the slowest stage, with recomputation and without communication."""
        beside = BESIDE if self.layout.ranks > 1 else 1.0
        forward, backward = self._clock.block(self.passes)
        backward = backward + self._clock.recomputed(forward, self.passes)
        ends = self._clock.output(self.passes)
        found = []
        for last in (False, True):
            layers = stage_layers(self.shape, self.layout, last=last)
            end = ends if last or self.layout.pp == 1 else (StepTimes(), StepTimes())
            found.append(((forward * layers + end[0]) * beside, (backward * layers + end[1]) * beside))
        return max(found, key=lambda pair: pair[0].total + pair[1].total)

    @cached_property
    def seconds_by_part(self) -> Mapping[str, float]:
        """Return the seconds of a step: compute, tensor parallelism, exposed communication, bubbles and the optimizer."""
        layout, passes, gpu = self.layout, self.passes, self.gpu
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
        return self.tokens_per_second / self.layout.ranks * (weights + attention) / self.gpu.bf16


BATCH_TOKENS = 2**22
"""Tokens per optimizer step by default, about 4 million."""

AGAIN: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Kinds of recomputation that are tried, as `dither.parallelize` has them."""

MOST_TOKENS = 131_072
"""The most tokens per forward pass that are tried; more gain nothing."""

HEADROOM = 0.1
"""Fraction of the usable memory left free in runs over several GPUs: published runs needed more than the formulas say."""

LEAN = "companded8"
"""The narrowest of the formats of states."""

NEARLY = 24
"""Number of the fastest steps with the leanest states that are tried with wider ones."""

OFF_BATCH = 0.25
"""Largest relative deviation from the asked tokens per step."""

EQUAL_LAYOUT, EQUAL_PRECISION = 0.01, 0.02
"""Relative differences in speed below which the simpler layout, and the plainer precision, are preferred."""


CHOICES = tuple(
    PrecisionChoice(mode, name, states)
    for mode, formats in (("o1", (None, "bf16", LEAN)), ("bf16-sr", (None, LEAN)))
    for name in (None, "fp8-current", "fp8-block")
    for states in formats
)
"""The precisions that are compared. Moments are fp32 in o1 and bf16 in bf16-sr unless another format is named."""

PLAINEST = sorted(CHOICES, key=lambda choice: (choice.states is not None, choice.mode != "o1", choice.recipe is not None))
"""The same, in the order of preference among equally fast ones."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, the GPUs for it, and the size of a step."""

    shape: Shape
    gpu: Gpu
    gpus: int
    node: int = 8
    """GPUs per node."""
    sequence: int = 8192
    """Tokens per sequence."""
    batch_tokens: float = BATCH_TOKENS
    """Desired tokens per optimizer step."""

    def __post_init__(self) -> None:
        for name in ("gpus", "node", "sequence"):
            check_positive(f"--{name}", getattr(self, name))
        if self.gpus > self.node and self.gpus % self.node:
            raise UserError(f"{self.gpus} GPUs do not fill nodes of {self.node}: choose a multiple, or change --node.")
        if not self.sequence <= self.batch_tokens <= 1e12:
            raise UserError(f"A step has at least one sequence of {self.sequence} tokens, not {self.batch_tokens:g} tokens.")

    @property
    def usable(self) -> int:
        """Return the bytes per GPU that an estimate may take."""
        return round(self.gpu.usable * (1 - HEADROOM if self.gpus > 1 else 1))

    def passes(self, layout: ScheduledLayout, batch: int) -> StepPasses | None:
        """Return the passes of a step, or None if the layout cannot have a step of about the desired size."""
        share = self.batch_tokens / self.sequence / layout.batch_parts / batch
        number = max(1, round(share))
        if layout.virtual > 1:
            number = max(layout.pp, round(share / layout.pp) * layout.pp)
        if abs(number / share - 1) > OFF_BATCH or number < layout.pp:
            return None
        return StepPasses(batch=batch, sequence=self.sequence, number=number)


@dataclass(frozen=True)
class RankedStep:
    """The best layout of a precision: what it needs and how fast it is."""

    choice: PrecisionChoice
    step: TrainingStep

    def shortfall(self, usable: int) -> str:
        """Return a sentence on the missing memory."""
        needs, layout = self.step.memory.peak / GIB, self.step.layout
        return f"{self.choice} does not fit: needs {needs:.0f} GiB of {usable / GIB:.0f} usable, with {layout} at the least"


@dataclass(frozen=True)
class Ranking:
    """The outcome of a search."""

    job: Job
    options: tuple[RankedStep, ...]
    """The best layout of each precision that fits, the fastest first."""
    refused: tuple[RankedStep, ...]
    """The layout of least memory of each precision that does not fit."""
    alternatives: tuple[RankedStep, ...]
    """Other layouts of the recommended precision, the fastest for each pair of tp and pp."""

    @property
    def best(self) -> RankedStep:
        """Return the recommendation: the plainest precision among the fastest."""
        if not self.options:
            least = min(self.refused, key=lambda option: option.step.memory.peak)
            missing = (least.step.memory.peak - self.job.usable) / GIB
            raise UserError(
                f"No layout fits on {self.job.gpus} {least.step.gpu.name}: the leanest, {least.choice} with "
                f"{least.step.layout} and checkpointing {least.step.passes.checkpointing}, lacks {missing:.1f} GiB per GPU. "
                "Give more GPUs or shorter sequences."
            )
        fast = self.options[0].step.tokens_per_second * (1 - EQUAL_PRECISION)
        equal = [option for option in self.options if option.step.tokens_per_second >= fast]
        return min(equal, key=lambda option: PLAINEST.index(option.choice))


def rank(job: Job, tick: Tick = lambda done, total: None) -> Ranking:
    """Rank the precisions of CHOICES on a number of GPUs, each with its fastest layout that fits.

    `tick` is called after each precision.

    >>> from dither.spec.gpus import GPUS
    >>> from dither.tools.memory import llama_of
    >>> found = rank(Job(shape=llama_of(8e9), gpu=GPUS["h200"], gpus=8))
    >>> print(found.best.choice, "|", found.best.step.layout)
    bf16-sr + fp8-current | dp_shard 8
    """
    options, refused = list[RankedStep](), list[RankedStep]()
    fitting: dict[PrecisionChoice, list[TrainingStep]] = {}
    least: TrainingStep | None = None
    for number, choice in enumerate(CHOICES):
        tick(number, len(CHOICES))
        if choice.setting.casts_weight and job.gpu.fp8 is None:
            continue
        lean = replace(choice, states=LEAN)
        if lean not in fitting:
            fitting[lean], least = _candidates(job, lean)
        steps = fitting[lean] if choice == lean else _widened(fitting[lean], choice, job.usable)
        if steps:
            options.append(RankedStep(choice, _fastest(steps)))
        elif least is not None:
            refused.append(RankedStep(choice, replace(least, setting=choice.setting)))
    if not options and not refused:
        raise UserError(
            f"No layout of {job.gpus} GPUs divides a step of {job.batch_tokens:g} tokens into sequences of {job.sequence}: "
            "change --batch-tokens or the number of GPUs."
        )
    options.sort(key=lambda option: -option.step.tokens_per_second)
    ranking = Ranking(job, tuple(options), tuple(refused), ())
    if not options:
        return ranking
    best = ranking.best
    same = (
        _lightest(replace(step, setting=best.choice.setting), job.usable) for step in fitting[replace(best.choice, states=LEAN)]
    )
    return replace(ranking, alternatives=_alternatives(best, [step for step in same if step is not None]))


def _candidates(job: Job, choice: PrecisionChoice) -> tuple[list[TrainingStep], TrainingStep | None]:
    """Return the steps of a precision that fit, and the step of least memory."""
    usable = job.usable
    fitting, least = list[TrainingStep](), None
    for layout in layouts(job.shape, job.gpus, node=job.node):
        batch = 1
        while batch == 1 or batch * job.sequence <= MOST_TOKENS:
            passes = job.passes(layout, batch)
            batch *= 2
            if passes is None:
                continue
            step = TrainingStep(
                shape=job.shape, setting=choice.setting, layout=layout, passes=passes, gpu=job.gpu, node=job.node
            )
            leanest = replace(step, passes=replace(passes, checkpointing=AGAIN[-1]))
            least = leanest if least is None or leanest.memory.peak < least.memory.peak else least
            if leanest.memory.peak > usable:
                break
            fitting.append(_lightest(step, usable) or leanest)
    return fitting, least


def _lightest(step: TrainingStep, usable: int) -> TrainingStep | None:
    """Return a step with the least recomputation that fits, which is the fastest; None if it does not fit."""
    for again in AGAIN[AGAIN.index(step.passes.checkpointing) :]:
        found = replace(step, passes=replace(step.passes, checkpointing=again))
        if found.memory.peak <= usable:
            return found
    return None


def _widened(steps: list[TrainingStep], choice: PrecisionChoice, usable: int) -> list[TrainingStep]:
    """Return the fastest steps of the leanest states with those of `choice`, if they fit. States hardly change the speed."""
    found = list[TrainingStep]()
    for step in sorted(steps, key=lambda step: -step.tokens_per_second):
        wider = _lightest(replace(step, setting=choice.setting), usable)
        found += [] if wider is None else [wider]
        if len(found) == NEARLY:
            break
    return found


def _fastest(steps: list[TrainingStep]) -> TrainingStep:
    """Return the fastest step, or a simpler one that is as fast."""
    most = max(step.tokens_per_second for step in steps) * (1 - EQUAL_LAYOUT)

    def simplicity(step: TrainingStep) -> tuple[int, int, int]:
        layout = step.layout
        cuts = sum(size > 1 for size in (layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.virtual))
        return cuts, AGAIN.index(step.passes.checkpointing), step.memory.peak

    return min((step for step in steps if step.tokens_per_second >= most), key=simplicity)


def _alternatives(best: RankedStep, steps: list[TrainingStep]) -> tuple[RankedStep, ...]:
    """Return the fastest other layouts of a precision, one for each pair of tp and pp."""
    pairs: dict[tuple[int, int], list[TrainingStep]] = {}
    for step in steps:
        pairs.setdefault((step.layout.tp, step.layout.pp), []).append(step)
    own = (best.step.layout.tp, best.step.layout.pp)
    others = [_fastest(found) for pair, found in pairs.items() if pair != own]
    return tuple(RankedStep(best.choice, step) for step in sorted(others, key=lambda step: -step.tokens_per_second))


def reasons(ranking: Ranking) -> tuple[str, ...]:
    """Return sentences that explain the recommendation, the most important first."""
    best = ranking.best
    step, layout, usable = best.step, best.step.layout, ranking.job.usable / GIB
    found = list[str]()
    speed = {option.choice: option.step.tokens_per_second for option in ranking.options}
    first = ranking.options[0]
    if first is not best:
        found.append(
            f"{best.choice} is within {100 * EQUAL_PRECISION:.0f} % of the fastest, {first.choice}, with plainer numerics."
        )
    plain = PrecisionChoice("o1")
    if best.choice != plain and plain in speed:
        found.append(f"{best.choice} trains at {speed[best.choice] / speed[plain]:.2f} times the speed of o1 on these GPUs.")
    elif best.choice != plain:
        lacking = {option.choice: option for option in ranking.refused}
        if plain in lacking:
            found.append(f"{lacking[plain].shortfall(ranking.job.usable)}.")
    if layout.ranks > 1:
        whole = sum(resident(step.shape, step.setting).values()) / GIB
        parts = step.memory.parts
        here = (parts["weights"] + parts["masters"] + parts["states"]) / GIB
        found.append(f"Weights, masters and states take {whole:,.0f} GiB in all, and {here:.1f} GiB per GPU with {layout}.")
    if step.passes.checkpointing != "none":
        passes = replace(step.passes, checkpointing="none")
        needs = replace(step, passes=passes).memory.peak / GIB
        why = f"without checkpointing this pass needs {needs:.0f} GiB" if needs > usable else "the larger pass is worth it"
        found.append(f"Checkpointing is {step.passes.checkpointing}: {why}, and {usable:.0f} GiB are usable.")
    parts_of_step = step.seconds_by_part
    lost = {name: parts_of_step[name] / step.seconds for name in WORDS}
    if layout.ranks > 1:
        texts = [f"{share:.0%} {WORDS[name]}".replace("%", " %") for name, share in lost.items() if share >= 0.005]
        found.append(f"Of the step, {' and '.join(texts)}." if texts else "Communication is hidden behind compute.")
    if ranking.alternatives:
        other = ranking.alternatives[0].step
        relative = other.tokens_per_second / step.tokens_per_second
        found.append(f"The next layout, {other.layout}, reaches {relative:.2f} times its speed.")
    if step.setting.casts_weight and step.shape.parameters < FP8_FROM:
        found.append("FP8 below 1B parameters was measured at 134M alone, with bf16-sr: 1.10 times the speed of o1.")
    return tuple(found)


WORDS: Mapping[str, str] = {
    "tensor parallel": "is communication of tensor parallelism",
    "waiting": "is waiting for weights and gradients",
    "bubbles": "is idle time of the pipeline",
}
"""Parts of a step that are not compute, in words."""
