"""Predict the time of a training step from sizes: products, attention, elementwise kernels, casts, loss and optimizer.

docs/scaling.md has the formulas, the constants and where each of them comes from, and measured step times to compare with.
"""

from dataclasses import dataclass, field, fields

from dither.adam_update import WHOLE
from dither.advice.accelerators import (
    ATTENTION_SHARES,
    BF16_SHARE,
    COPY_SHARE,
    FP8_SHARES,
    OPTIMIZER_SHARES,
    SMALL_SIDE,
    Accelerator,
)
from dither.advice.layouts import Checkpointing, Passes
from dither.advice.memory import Setting, Shape, format_bytes
from dither.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Times:
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

    def __add__(self, other: "Times") -> "Times":
        return Times(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def __mul__(self, factor: float) -> "Times":
        return Times(**{each.name: getattr(self, each.name) * factor for each in fields(self)})


@dataclass(frozen=True)
class Clock:
    """The times of a model's passes in one precision on one kind of GPU, where `tp` GPUs share each product."""

    shape: Shape
    setting: Setting
    accelerator: Accelerator
    tp: int = 1
    known: dict[tuple[int, int], tuple[Times, Times]] = field(default_factory=dict, compare=False, repr=False)
    """Times of blocks that were computed before, by sequences per pass and tokens per sequence."""

    def __post_init__(self) -> None:
        if self.setting.casts_weight and self.accelerator.fp8 is None:
            raise UserError(f"{self.accelerator.name} has no FP8 units: choose a setting without casts.")

    @property
    def copy(self) -> float:
        """Return the bytes per second of a copy."""
        return self.accelerator.bandwidth * COPY_SHARE

    @property
    def _tensor_scales(self) -> bool:
        precision = self.setting.precision
        cast = None if precision is None else precision.cast("forward", "weight")
        return cast is not None and cast.group.kind == "tensor"

    def _rates(self) -> tuple[float, float, float]:
        """Return FLOP/s of the forward product, the input gradient and the weight gradient of the layers in blocks."""
        if not self.setting.casts_weight:
            return (self.accelerator.bf16 * BF16_SHARE,) * 3
        assert self.accelerator.fp8 is not None
        shares = FP8_SHARES["tensor" if self._tensor_scales else "block"]
        return tuple(self.accelerator.fp8 * share for share in shares)  # type: ignore[return-value]

    def _product(self, tokens: int, inputs: float, outputs: float, rate: float) -> float:
        """Return the seconds of one of the three products of a layer."""
        return 2 * tokens * inputs * outputs * (1 + SMALL_SIDE * (1 / tokens + 1 / inputs + 1 / outputs)) / rate

    def _layers(self) -> list[tuple[float, float]]:
        """Return (inputs, outputs) of the linear layers of a block on one GPU."""
        d, q, k, f = self.shape.width, self.shape.query_width, self.shape.key_width, self.shape.feed_forward
        ups = 2 if self.shape.gated else 1
        q, k, f = q // self.tp, k // self.tp, f // self.tp
        return [(d, q), (d, k), (d, k), (q, d), *[(d, f)] * ups, (f, d)]

    def block(self, passes: Passes) -> tuple[Times, Times]:
        """Return the times of one block, forward and backward, without recomputation."""
        key = (passes.micro, passes.sequence)
        if key not in self.known:
            self.known[key] = self._block(passes)
        return self.known[key]

    def _block(self, passes: Passes) -> tuple[Times, Times]:
        shape, setting, tokens, tp = self.shape, self.setting, passes.tokens, self.tp
        d, q, k, f = shape.width, shape.query_width, shape.key_width, shape.feed_forward
        rates = self._rates()
        products = [sum(self._product(tokens, i, o, rate) for i, o in self._layers()) for rate in rates]
        width = q // shape.heads
        peak = self.accelerator.bf16 * ATTENTION_SHARES[128 if width >= 128 else 64]
        attention = 2 * passes.sequence * q * tokens / tp / peak  # causal: half of all pairs
        p, c = setting.residual_bytes, format_bytes(setting.storage.compute)
        ups = 2 if shape.gated else 1
        moved = tokens * ((5 * p + 4 * c) * d + 2 * c * (q + k) + (1 + ups) * c * f) / tp
        elementwise = moved / self.copy
        codes = [0.0, 0.0]
        if setting.casts_weight:
            each = (2 * c if self._tensor_scales else c) + 2  # tensor scales read twice; codes in two layouts
            inputs, outputs = 2 * d + (q + f) / tp, 2 * d + (q + 2 * k + ups * f) / tp
            codes = [self.accelerator.cast_passes * tokens * size * each / self.copy for size in (inputs, outputs)]
        weights = shape.block_weights / shape.layers / tp
        # Under autocast, weights are copied to 16 bits, and their gradients are converted back.
        copied = 6 * weights / self.copy if setting.storage.autocast else 0.0
        forward = Times(
            products=products[0],
            attention=attention,
            elementwise=elementwise + (0.0 if setting.casts_weight else copied),
            casts=codes[0],
        )
        backward = Times(
            products=products[1] + products[2],
            attention=2.5 * attention,
            elementwise=2 * elementwise + copied,
            casts=codes[1],
        )
        return forward, backward

    def recomputed(self, forward: Times, passes: Passes) -> Times:
        """Return the time of what one block, whose forward pass takes `forward`, recomputes in backward."""
        if passes.checkpointing == "none":
            return Times()
        share = PRODUCTS_AGAIN[passes.checkpointing]
        full = passes.checkpointing == "full"
        return Times(
            products=share * forward.products,
            attention=forward.attention if full else 0.0,
            elementwise=forward.elementwise,
            casts=share * forward.casts,
        )

    def output(self, passes: Passes) -> tuple[Times, Times]:
        """Return the times of the last norm, the output layer and the loss, forward and backward."""
        shape, setting, tokens = self.shape, self.setting, passes.tokens
        p, c = setting.residual_bytes, format_bytes(setting.storage.compute)
        product = self._product(tokens, shape.width, shape.vocab // self.tp, self.accelerator.bf16 * BF16_SHARE)
        copied = 6 * shape.output_weights / self.tp / self.copy if setting.storage.autocast else 0.0
        logits = tokens * shape.vocab * c / self.tp / self.copy
        norm = tokens * shape.width * (6 * p + 4 * c) / self.tp / self.copy / 3
        return (
            Times(products=product, loss=logits + norm, elementwise=copied),
            Times(products=2 * product, loss=2 * (logits + norm), elementwise=copied),
        )

    def update(self, parameters: float, weights: float) -> float:
        """Return the seconds of the optimizer for its parameters, and of casting its weights once."""
        setting = self.setting
        storage = setting.storage
        p, g = format_bytes(storage.parameters), format_bytes(storage.gradients)
        moments = 1 if setting.optimizer == "adam-mini" else 2
        whole = storage.states in WHOLE
        state = format_bytes(storage.states) if whole else 1 + 4 / setting.state_block
        master = 2 * storage.master or (2 * p if storage.compensation else 0)
        moved = 2 * p + g + 2 * moments * state + master
        share = OPTIMIZER_SHARES["8-bit" if not whole else "o1" if storage.parameters == "fp32" else "bf16-sr"]
        seconds = parameters * moved / share / self.copy
        if setting.casts_weight:
            each = (2 * p if self._tensor_scales else p) + 2
            seconds += self.accelerator.cast_passes * weights * each / self.copy
        return seconds


PRODUCTS_AGAIN: dict[Checkpointing, float] = {"none": 0.0, "selective": 0.0, "half": 0.5, "full": 1.0}
"""Share of a block's forward products that backward computes again."""


def step_seconds(shape: Shape, setting: Setting, accelerator: Accelerator, passes: Passes) -> float:
    """Predict the seconds of a training step on one GPU.

    >>> from dither.advice.accelerators import ACCELERATORS
    >>> shape = Shape(width=2048, layers=22, heads=32, feed_forward=5632, vocab=32000)
    >>> round(step_seconds(shape, Setting(), ACCELERATORS["h200"], Passes(micro=8, sequence=2048)), 2)  # measured: 0.25
    0.26
    """
    clock = Clock(shape, setting, accelerator)
    forward, backward = clock.block(passes)
    blocks = forward + backward + clock.recomputed(forward, passes)
    ends = sum(clock.output(passes), Times())
    passing = shape.layers * blocks.total + ends.total
    return passes.number * passing + clock.update(shape.parameters, shape.block_weights)
