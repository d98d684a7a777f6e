"""A linear layer with a precision."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dither import devices
from dither.engines import ALIGNMENT, engines_of
from dither.errors import UserError
from dither.levels import NO_LEVELS
from dither.nn import functional, hints
from dither.nn.functional import Settings
from dither.nn.held_weight import HoldingLayer
from dither.nn.output import Output
from dither.nn.sampled_layer import BITWIDTHS
from dither.nn.step_state import StepState
from dither.nn.swiglu import KeptInputs
from dither.precision import COMPUTE, LayerPrecision, MemoryOptions

PLAIN = (nn.Linear.forward, Output.forward)
"""Forward methods of the layers that Linear can take the place of."""


class Linear(HoldingLayer):
    """`nn.Linear` whose three products run in the precision of a `LayerPrecision`; with no casts it is `nn.Linear`.

    `name` and `seed` say which random bits casts and samplings draw: give each layer its name in the model. `emulate`
    multiplies dequantized numbers in float32 on a GPU too; `verified` names native units that passed the self-test there
    (`dither.engines`). `compute` is what a sampled weight is kept in for a step: that of autocast, or "fp32" for the weight's
    own type. Input [..., in_features], output [..., out_features].

    >>> import torch, dither
    >>> from dither.precision import LayerPrecision
    >>> fp8 = dither.Cast.parse("e4m3 tile(128)")
    >>> layer = Linear(256, 64, precision=LayerPrecision(input=fp8, weight=fp8, grad=fp8))
    >>> layer(torch.randn(2, 5, 256)).shape
    torch.Size([2, 5, 64])
    >>> layer.engines("cpu")
    {'forward': 'fp32', 'input_grad': 'fp32', 'weight_grad': 'fp32'}
    """

    emulate: bool
    compute: Literal["fp32", "bf16", "fp16"]
    memory: MemoryOptions
    """Choice of the tensors that are kept between forward and backward; `set_memory` changes it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: LayerPrecision = LayerPrecision(),  # noqa: B008 (frozen)
        name: str = "",
        seed: int = 0,
        emulate: bool = False,
        compute: Literal["fp32", "bf16", "fp16"] = "fp32",
        verified: Sequence[str] = (),
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if compute not in COMPUTE:
            raise UserError(f"The compute of the layer {name!r} is one of {', '.join(map(repr, COMPUTE))}, not {compute!r}.")
        self.begin(precision, name, seed, emulate, transposed=False, verified=verified)
        self.compute = compute

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        precision: LayerPrecision,
        *,
        name: str = "",
        seed: int = 0,
        emulate: bool = False,
        verified: Sequence[str] = (),
    ) -> "Linear":
        """Return a Linear in place of `module`, with the same Parameter objects, hooks and mode.

        `module` is an `nn.Linear`, or a layer like Hugging Face's Conv1D, whose weight is [in, out] and stays so.

        >>> from torch import nn
        >>> old = nn.Linear(8, 4)
        >>> new = Linear.adopt(old, LayerPrecision(), name="head")
        >>> new.weight is old.weight
        True
        """
        weight: Any = getattr(module, "weight", None)
        transposed = not isinstance(module, nn.Linear)
        if isinstance(module, Linear):
            raise UserError(f"The layer {name!r} is a dither.Linear already: change it with set_precision.")
        taken = getattr(module, "nf", None) == weight.shape[1] if transposed and _is_matrix(weight) else not transposed
        if not taken or not _is_matrix(weight) or (not transposed and type(module).forward not in PLAIN):
            raise UserError(
                f"The layer {name!r} is a {type(module).__name__}; dither.Linear takes the place of nn.Linear and of Conv1D."
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        # The hooks' own dictionaries, so that the handles which others keep still remove them.
        new.__dict__.update(module.__dict__)
        for owned in ("_parameters", "_buffers", "_modules"):
            new.__dict__[owned] = dict(module.__dict__[owned])
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        new.in_features, new.out_features = weight.shape if transposed else reversed(weight.shape)
        new.begin(precision, name, seed, emulate, transposed, verified)
        return new

    def begin(
        self,
        precision: LayerPrecision,
        name: str,
        seed: int,
        emulate: bool,
        transposed: bool,
        verified: Sequence[str] = (),
    ) -> None:
        self.name, self.seed, self.emulate, self.transposed = name, seed, emulate, transposed
        self._begin_draws()
        self.step_state = StepState()
        self.verified = tuple(verified)
        self.fallback: Literal["error", "bf16", "emulate"] = "error"  # what conversion does where no units take the precision
        self.emulates_here = False  # whether it did so by emulation
        self.memory = MemoryOptions()
        self._seen_version = None
        self.settings_version = 0  # of what compiled code takes as constants
        self.warned = set()
        self.resting_bitwidths = {}
        self.compute = "fp32"
        self.precision, self.families = LayerPrecision(), NO_LEVELS
        self.planned = precision  # that of the plan, also where a fallback replaces it
        self.set_precision(precision)

    def set_precision(self, precision: LayerPrecision, *, others: Iterable[LayerPrecision] = ()) -> None:
        """Change how operands are cast and sampled from the next call on. Histories of delayed scaling begin anew.

        Parameters stay. Bitwidths appear with a sampling, go with it, and come back as they were if it comes back with blocks
        of the same size. `others` are precisions that this layer may take later, and those of the layers that share compiled
        code with it: a change among them writes numbers on the device, and nothing is compiled again (`dither.levels`).
        """
        if not isinstance(precision, LayerPrecision):
            raise UserError(f"The layer {self.name!r} takes a LayerPrecision, not {precision!r}.")
        if self.step_state.active:
            raise UserError(f"The precision of the layer {self.name!r} changes between steps, not inside a step_context.")
        others = tuple(others)
        multiplies_alike = self.families == NO_LEVELS or self._settings[0].emulate == (self.emulate or self.emulates_here)
        if multiplies_alike and self.switch_level(precision, others):
            return
        self.begin_bitwidths(precision)
        self.precision = precision
        self.begin_levels(others)
        self.begin_state(self.weight.device)
        self.begin_constants(precision)
        self._begin_settings()

    def set_memory(self, memory: MemoryOptions) -> None:
        """Change what is kept between forward and backward, from the next step on."""
        if self.step_state.active:
            raise UserError(f"The memory options of the layer {self.name!r} change between steps, not inside a step_context.")
        self.memory = memory
        self._begin_settings()

    def prepare_levels(self, others: Iterable[LayerPrecision]) -> None:
        """Prepare the layer for later changes to the precisions `others`; its own precision and state stay."""
        before = self.families
        self.begin_levels(tuple(others))
        if self.families != before:
            self.begin_draw_buffers(self.weight.device)
            self._begin_settings()

    def _begin_settings(self) -> None:
        self._settings, self._nameless = (
            tuple(
                functional.make_settings(
                    self.precision,
                    name=name,
                    transposed=self.transposed,
                    emulate=self.emulate or self.emulates_here,
                    verified=self.verified,
                    levels=self.families,
                    memory=self.memory,
                    gpu=gpu,
                )
                for gpu in (False, True)
            )
            for name in (self.name, "")
        )
        self.step_state = StepState()  # held codes have the format of the old settings
        self.settings_version += 1

    def constants(self) -> tuple[object, ...]:
        """Return what compiled code takes as constants: two layers of one size that agree in it share a graph."""
        settings = self._nameless[1 if self.weight.is_cuda else 0]
        sampling = tuple(sorted(map(repr, self._constants.items())))
        shape = (tuple(self.weight.shape), self.weight.dtype, self.bias is not None)
        return (*shape, repr(settings), sampling, self.delayed_operands, self.draw_place is None, self.levels is None)

    def reset_parameters(self) -> None:
        """Initialize the weight and the bias as nn.Linear does, and the bitwidths to 1."""
        super().reset_parameters()
        for name in BITWIDTHS:
            if (bitwidth := self._parameters.get(name)) is not None:
                nn.init.ones_(bitwidth)

    def engines(self, device: torch.device | str, tokens: int = ALIGNMENT) -> dict[str, str]:
        """Return the engine of each product on `device`; raise UserError if one cannot run there."""
        capability = None if self.emulate or self.emulates_here else devices.capability_of(torch.device(device))
        size = (-(-tokens // ALIGNMENT) * ALIGNMENT, self.out_features, self.in_features)
        plain = "fp16" if self.compute == "fp16" else "bf16"
        try:
            found = engines_of(self.precision, size, capability, plain, self.verified, self.transposed)
        except UserError as error:
            raise UserError(f"The layer {self.name!r}, {error}.") from None
        return {product: str(engine) for product, engine in found.items()}

    def forward(self, input: Tensor, kept: KeptInputs | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features]. `kept` are the inputs of the SwiGLU that made the input, if any."""
        hints.slow_autocast(input)
        settings = self._settings_for(input)
        state = self.call_state(settings, rows_of(input))
        if kept is not None:
            if self.training and self.samples_input:
                raise UserError(
                    f"The layer {self.name!r} samples its input, which MemoryOptions(swiglu='fp8') makes again without noise: "
                    "use one of them."
                )
            state = state._replace(kept=kept)
        if self.training and (self.samples_weight or self.samples_input):
            return self.sampled_forward(input, settings, state)
        return self.product(input, self.weight, settings, state)

    def keeps_swiglu(self, x: Tensor) -> bool:
        """Return whether the inputs of the SwiGLU that makes the input x are kept for backward as codes."""
        return torch.is_grad_enabled() and self._settings_for(x).swiglu == "fp8"

    def _settings_for(self, x: Tensor) -> Settings:
        """Return the precision, ready for use. Under torch.compile the name is left out so that all layers share one graph."""
        return (self._nameless if torch.compiler.is_compiling() else self._settings)[1 if x.is_cuda else 0]

    # What a training step does to a layer ------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """Return what nn.Linear shows, and the precision."""
        return f"{super().extra_repr()}, {self.precision}"


def rows_of(x: Tensor) -> int:
    """Return the number of rows of x [..., K], viewed as a matrix."""
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
