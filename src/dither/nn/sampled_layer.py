"""The sampling side of a linear layer: learned bitwidths, and the forward pass by sampled weights and inputs (GaussWS)."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither import torch_ops
from dither.errors import UserError
from dither.nn import functional, sampling, tensor_parallel
from dither.nn.coded_weight import coded_of
from dither.nn.functional import Codes, OperandCodes, Settings, State
from dither.nn.operands import autocast_dtype
from dither.nn.sampling import SamplingConstants
from dither.nn.step_state import StepState, keep_in_place
from dither.nn.tensor_parallel import local
from dither.precision import Cast, LayerPrecision

BITWIDTHS = {"bitwidth": "sampling", "input_bitwidth": "input_sampling"}
"""The parameters of learned bitwidths, and the field of a LayerPrecision that asks for each."""

SAMPLED = {"sampling": "weight", "input_sampling": "input"}
"""The operand of each sampling of a LayerPrecision."""


class SampledLayer(nn.Linear):
    """Base of `dither.nn.Linear` with everything that concerns samplings."""

    precision: LayerPrecision
    name: str
    transposed: bool
    compute: str
    step_state: StepState
    bitwidth: nn.Parameter | None
    """b_i, float32, one per block of the weight as it is stored; None where the weight is not sampled."""
    input_bitwidth: nn.Parameter | None
    """The same, one per block of input features."""
    resting_bitwidths: dict[str, nn.Parameter]
    """Bitwidths of samplings that are switched off, by parameter name."""
    warned: set[str]
    """Parameters whose unsafe bitwidths were reported."""

    # Bitwidths ---------------------------------------------------------------------------------------------------------

    def begin_bitwidths(self, precision: LayerPrecision) -> None:
        """Create, bring back or put aside the parameters of bitwidths as `precision` asks for them."""
        for name, field in BITWIDTHS.items():
            chosen = getattr(precision, field)
            old = self._parameters.get(name)
            old = self.resting_bitwidths.get(name) if old is None else old
            new = None
            if chosen is not None:
                sizes = self.weight.shape if name == "bitwidth" else (self.in_features,)
                shape = tuple(-(-size // chosen.block) for size in sizes)
                if old is not None and tuple(old.shape) == shape:
                    new = old
                    if new.device != self.weight.device:
                        new.data = new.data.to(self.weight.device)
                elif isinstance(self.weight, DTensor):
                    raise UserError(
                        f"The layer {self.name!r} is sharded already, and new bitwidths would not be: "
                        "convert the model before it is parallelized."
                    )
                else:
                    new = nn.Parameter(torch.ones(shape, dtype=torch.float32, device=self.weight.device))
            self.register_parameter(name, new)
            if (kept := old if new is None else new) is not None:
                self.resting_bitwidths[name] = kept

    def bitwidths(self, *, input: bool = False) -> Tensor:
        """Return b_t, float32, one per block of the weight (or of the input's features), without gradients.

        >>> from dither.nn import Linear
        >>> from dither.precision import Sampling
        >>> Linear(64, 32, precision=LayerPrecision(sampling=Sampling(b_init=5, b_target=3))).bitwidths()
        tensor([[5., 5.]])
        """
        bitwidth = self.input_bitwidth if input else self.bitwidth
        if bitwidth is None:
            raise UserError(
                f"The {'input' if input else 'weight'} of the layer {self.name!r} is not sampled: it has no bitwidths."
            )
        whole = bitwidth.full_tensor() if isinstance(bitwidth, DTensor) else bitwidth
        return sampling.bitwidths(whole, self.sampling_constants("input_sampling" if input else "sampling"))

    # Constants ---------------------------------------------------------------------------------------------------------

    def begin_constants(self, precision: LayerPrecision) -> None:
        """Compute the constants of each sampling for all dtypes, so that compiled code finds them in a table."""
        self._constants = self._constants_of(precision)
        # Compiled code reads these and not the precision, which may change while the code stays the same.
        self.samples_weight, self.samples_input = precision.sampling is not None, precision.input_sampling is not None
        self.casts_nothing = precision.uncast
        self._casts_forward = {field: precision.cast("forward", operand) is not None for field, operand in SAMPLED.items()}

    def _constants_of(self, precision: LayerPrecision) -> dict[tuple[str, torch.dtype, torch.dtype], SamplingConstants]:
        return {
            (field, dtype, master): sampling.constants(chosen, precision.cast("forward", operand), dtype, master)
            for field, operand in SAMPLED.items()
            if (chosen := getattr(precision, field)) is not None
            for dtype in sampling.FORMATS
            for master in sampling.FORMATS
        }

    def same_constants(self, precision: LayerPrecision) -> bool:
        """Return whether `precision` samples as the layer does now, to compiled code."""
        samples = (precision.sampling is not None, precision.input_sampling is not None)
        return samples == (self.samples_weight, self.samples_input) and self._constants_of(precision) == self._constants

    def safe_limit(self, field: str) -> tuple[float, str]:
        """Return (bitwidth, format): above that bitwidth the noise of `field` can vanish in rounding to the format."""
        kept, master = self._dtypes(field)
        return sampling.safe_limit(getattr(self.precision, field), self.forward_cast(SAMPLED[field]), kept, master)

    def sampling_constants(self, field: str) -> SamplingConstants:
        """Return the constants of `sampling` or `input_sampling` inside a step_context."""
        return self._constants_for(field, *self._dtypes(field))

    def _dtypes(self, field: str) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of samples and of what is sampled, inside a step_context."""
        kept = torch.float32 if self._casts_forward[field] else self._kept_dtype()
        return kept, self.weight.dtype if field == "sampling" else torch.float32

    def _constants_for(self, field: str, kept: torch.dtype, master: torch.dtype) -> SamplingConstants:
        """Return the constants of a sampling of numbers of dtype `master` whose samples have the dtype `kept`."""
        if (field, kept, master) not in self._constants:
            raise UserError(
                f"The layer {self.name!r} samples numbers of {', '.join(map(str, sampling.FORMATS))}, and has "
                f"{master if master not in sampling.FORMATS else kept}: convert the model to one of these."
            )
        return self._constants[field, kept, master]

    def _kept_dtype(self) -> torch.dtype:
        """Return the dtype in which a step keeps a weight that is sampled and not cast."""
        return sampling.AUTOCAST.get(self.compute, self.weight.dtype)

    def forward_cast(self, operand: str) -> Cast | None:
        """Return the cast of an operand in the forward product, for which it is sampled even if backward casts it."""
        return self.precision.cast("forward", operand)

    # Forward -----------------------------------------------------------------------------------------------------------

    def product(self, x: Tensor, weight: Tensor, settings: Settings, state: State) -> Tensor:
        """Return x W^T + bias with casts; a weight that tensor parallelism shards is multiplied in parts."""
        coded = coded_of(weight)
        if coded is not None and coded.w_hat is not None:
            weight = _gathered_weight(self.name, weight, coded.w_hat, x)
        if isinstance(weight, DTensor) and not (self.casts_nothing and state.kept is None):
            return tensor_parallel.linear(x, weight, self.bias, settings, state, self.precision)
        return functional.linear(x, weight, self.bias, settings, state=state)

    def sampled_forward(self, x: Tensor, settings: Settings, state: State) -> Tensor:
        """Return the layer's output by its sampled weight, its sampled input, or both."""
        dtype = autocast_dtype(x)
        x = self._sampled_input(x, state, dtype or x.dtype) if self.samples_input else x
        weight, step = self.weight, self.step_state
        if not self.samples_weight:
            return functional.linear(x, weight, self.bias, settings, state=state)
        assert self.bitwidth is not None
        bitwidth = self.in_float32("bitwidth", self.bitwidth)
        self._check_sampled(dtype or weight.dtype)
        # A cast takes w_hat before it has been rounded to any other type.
        kept = torch.float32 if self._casts_forward["sampling"] else dtype or weight.dtype
        constants = self._constants_for("sampling", kept, weight.dtype)
        draw = step.draw if step.active else functional.drawn(state, functional.PURPOSES.index("sample"), moved=False)
        assert draw is not None
        if isinstance(weight, DTensor):
            part = self._sampled_shard(weight, bitwidth, local(draw), constants, kept)
            return self.product(x, part, settings, state)
        b_t = step.b_t if step.bitwidths_ready else sampling.bitwidths(bitwidth, constants)
        assert b_t is not None
        w_hat, amax = self._held_sample()
        if amax is None:
            with torch.no_grad():
                w_hat, amax = sampling.sample(weight, b_t, draw, constants, kept)
        assert amax is not None
        if self.casts_nothing:
            assert w_hat is not None
            learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, constants, kept)
            if state.kept is not None:
                known = _with_sample(self.name, state, w_hat, constants)
                return functional.linear(x, learner, self.bias, settings, state=known)
            bias = self.bias if dtype is None or self.bias is None else self.bias.to(dtype)
            redo = sampling.Redo(weight, b_t, draw, constants) if constants.recompute else None
            return sampling.linear(x if dtype is None else x.to(dtype), learner, bias, w_hat, redo, transposed=self.transposed)
        learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, constants, weight.dtype)
        if state.weight is None:
            assert w_hat is not None
            both = torch.is_grad_enabled()
            with torch.no_grad():
                codes = functional.cast_weight(
                    w_hat, settings.weight, state, both or not self.transposed, both or self.transposed, dtype
                )
            state = state._replace(weight=codes)
        return functional.linear(x, learner, self.bias, settings, state=state)

    def _held_sample(self) -> tuple[Tensor | None, Tensor | None]:
        """Return w_hat, unless only its codes are kept, and the largest magnitude per block; (None, None) if none is held."""
        step, coded = self.step_state, coded_of(self.weight)
        if coded is not None:
            return coded.w_hat, coded.block_amax
        return (step.w_hat, step.w_amax) if step.holds_weight and step.sampled else (None, None)

    def _sampled_shard(
        self, weight: DTensor, bitwidth: Tensor, draw: Tensor, constants: SamplingConstants, kept: torch.dtype
    ) -> DTensor:
        """Return the sampled weight as tensor parallelism shards it: held numbers if there are any, else sampled now."""
        w_hat, amax = self._held_sample()
        if amax is None:
            return sampling.sample_sharded(weight, bitwidth, draw, constants, kept, self.name)
        part, b_i, at = sampling.shard_of(weight, bitwidth, constants, self.name)
        b_t = sampling.bitwidths(b_i, constants)
        dtype = kept if self.casts_nothing else weight.dtype
        learner = sampling.gradient_of(part, b_i, b_t, amax, draw, constants, dtype, at)
        if self.casts_nothing:
            assert w_hat is not None
            learner = sampling.with_value(learner, w_hat)
        return sampling.sharded_like(learner, weight)

    def _sampled_input(self, x: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        assert self.input_bitwidth is not None
        bitwidth = self.in_float32("input_bitwidth", self.input_bitwidth)
        if isinstance(x, DTensor) or isinstance(bitwidth, DTensor):
            raise UserError(f"The input of the layer {self.name!r} is sharded, and only weights are sampled there.")
        step, field = self.step_state, "input_sampling"
        if step.bitwidths_ready:
            constants, b_t = self.sampling_constants(field), step.input_b_t
        else:
            constants = self._constants_for(field, dtype, torch.float32)
            b_t = sampling.bitwidths(bitwidth, constants)
        assert b_t is not None
        draw = functional.drawn(state, functional.PURPOSES.index("sample_input"))
        return sampling.sample_input(x, bitwidth, b_t, draw, constants, dtype)

    def _check_sampled(self, dtype: torch.dtype) -> None:
        if self.step_state.active and not self._casts_forward["sampling"] and dtype != self._kept_dtype():
            raise UserError(
                f"The layer {self.name!r} computes in {dtype}, and this step_context samples its weight for "
                f"compute={self.compute!r}: convert by a plan whose compute is what autocast has, or 'fp32' without autocast."
            )

    def in_float32(self, name: str, bitwidth: Tensor) -> Tensor:
        """Return the bitwidth as the forward pass reads it."""
        if bitwidth.dtype != torch.float32:
            raise UserError(
                f"The {name} of the layer {self.name!r} is {bitwidth.dtype}, and bitwidths are learned in float32: "
                "leave it out of what changes the types of parameters, such as a mixed precision policy of FSDP."
            )
        return bitwidth

    def hold_sample(self) -> Tensor:
        """Sample the weight for this step and return w_hat. It is kept, unless it will be cast and only its codes are."""
        step, constants, weight = self.step_state, self.sampling_constants("sampling"), self.weight.detach()
        uncast = self.forward_cast("weight") is None
        dtype = self._kept_dtype() if uncast else torch.float32
        if isinstance(weight, DTensor):
            assert self.bitwidth is not None
            assert step.draw is not None
            part, b_i, at = sampling.shard_of(weight, self.bitwidth.detach(), constants, self.name)
            w_hat, amax = sampling.sample(part, sampling.bitwidths(b_i, constants), step.draw, constants, dtype, at)
            keep_in_place([(step, "w_amax", amax)])
            step.w_hat = w_hat if uncast else None
            return w_hat
        assert step.b_t is not None
        assert step.draw is not None
        if step.w_hat is not None and step.w_hat.dtype == dtype and step.w_hat.shape == weight.shape:
            assert step.w_amax is not None
            memory = (step.w_hat, step.w_amax)
            torch_ops.sample_into(weight, step.b_t, step.draw, constants.kind, constants.block, memory)
            return step.w_hat
        w_hat, amax = sampling.sample(weight, step.b_t, step.draw, constants, dtype)
        keep_in_place([(step, "w_amax", amax)])
        if uncast:
            step.w_hat = w_hat
        return w_hat


def _with_sample(name: str, state: State, w_hat: Tensor, constants: SamplingConstants) -> State:
    """Return the state of a call whose products read a sampled weight without casts."""
    if constants.recompute:
        raise UserError(
            f"The layer {name!r} has no casts and samples its weight again in backward (recompute=True), which "
            "MemoryOptions(swiglu='fp8') does not allow: use one of them."
        )
    return state._replace(weight=OperandCodes(Codes(w_hat), Codes(w_hat.T)))


def _gathered_weight(name: str, weight: Tensor, w_hat: Tensor, x: Tensor) -> Tensor:
    """Return a weight that was gathered in the dtype of samples, where it is not sampled: in evaluation."""
    if x.dtype != w_hat.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UserError(
            f"The layer {name!r} gathers its weight in {w_hat.dtype}, and its input is {x.dtype}: run it under "
            "autocast as in training, or parallelize with gather='weights'."
        )
    value = sampling.with_value(local(weight), w_hat)
    return sampling.sharded_like(value, weight) if isinstance(weight, DTensor) else value
