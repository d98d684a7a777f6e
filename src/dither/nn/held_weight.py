"""The weight of a step: a linear layer samples and casts it once, and its forward passes read the codes."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional
from dither.nn.coded_weight import coded_of
from dither.nn.functional import Settings, State
from dither.nn.layer_state import StatefulLayer
from dither.nn.shared_scales import spans_parts
from dither.nn.tensor_parallel import begun, held_settings, local
from dither.precision import OPERANDS


class HoldingLayer(StatefulLayer):
    """Base of `dither.nn.Linear` that holds its weight for a step."""

    # A call ------------------------------------------------------------------------------------------------------------

    def call_state(self, settings: Settings, tokens: int) -> State:
        """Return what a forward pass over `tokens` rows needs besides its tensors and the precision."""
        step = self.step_state
        coded = coded_of(self.weight) if self.gather is not None else None
        if not self.delayed_operands and self.draw_place is None and self.levels is None and not step.active:
            return State(weight=None if coded is None else coded.codes)
        held = None
        if coded is not None:
            held = coded.codes
        elif step.holds_weight:
            if not torch.compiler.is_compiling():
                self.check_held()
            sampled = self.training and self.samples_weight
            held = step.codes if settings.weight.cast and sampled == step.sampled else None
        if self.delayed_operands and self.training and not step.active:
            self._notice_step()
        x_amax, w_amax, dy_amax = (self._amax(operand) for operand in OPERANDS)
        return State(self._drawn_at(tokens), self.draw_keys, held, local(self.levels), x_amax, w_amax, dy_amax)

    def _drawn_at(self, tokens: int) -> Tensor | None:
        """Return the step and the first row of this call, int64[2] on the device; None where nothing is drawn."""
        if self.draw_place is None:
            return None
        compiling = torch.compiler.is_compiling()
        # What depends on the step alone needs no row, but must be told from another step's when it is recomputed.
        if self.step_state.active and not self._rows_matter and (compiling or not self.samples_weight):
            return local(self.draw_place)
        grad = torch.is_grad_enabled()
        if compiling:
            place: Tensor = torch.ops.dither.place(self.draw_handle, local(self.draw_keys), tokens, self.training, grad)
            return place
        return self.draws.place(tokens, training=self.training, grad=grad)

    # Holding the weight ------------------------------------------------------------------------------------------------

    def _samples_once(self) -> bool:
        """Return whether the weight is sampled once per step."""
        sampling = self.precision.sampling
        return self.training and sampling is not None and not sampling.recompute

    # The next four run for every layer in every step, while the device may be waiting: they avoid torch's look-up of names.

    def _own_weight(self) -> Tensor:
        """Return the weight; a parametrized one is computed."""
        weight = self._parameters.get("weight")
        return self.weight if weight is None else weight

    def _stored_weight(self) -> Tensor:
        """Return the numbers of the weight that this rank stores."""
        return local(self._own_weight()) if self.gather is None else self.gather.stored()

    def shares_scales(self) -> bool:
        """Return whether the scales of the weight span the shards of tensor parallelism."""
        weight = self._own_weight()
        if self.gather is not None or not isinstance(weight, DTensor) or weight.device_mesh.size() == 1:
            return False
        casts = self._settings[1 if weight.is_cuda else 0].weight
        return any(casting.cast and spans_parts(casting.cast) for casting in casts)

    def holds_something(self) -> bool:
        """Return whether the weight is sampled or cast once per step. FSDP2 gathers a sharded one in forward."""
        weight = self._own_weight()
        settings = self._settings[1 if weight.is_cuda else 0]
        known = type(weight) in (Tensor, nn.Parameter) or isinstance(self._parameters.get("weight"), DTensor)
        whole = not self.fully_sharded or (self.gather is not None and self.gather.held_by_layer)
        cast = settings.weight.cast and settings.hold != "none"
        return known and whole and (cast or self._samples_once())

    def hold_key(self) -> tuple[object, ...]:
        """Return what launches of this layer depend on, besides numbers: its constants, and where its tensors are."""
        step, place = self.step_state, self._buffers["draw_place"]
        memory = [self._stored_weight().data_ptr(), 0 if place is None else local(place).data_ptr()]
        memory += [0 if layout is None else layout.values.data_ptr() for layout in step.codes or ()]
        if self.precision.sampled:
            tensors = (step.w_hat, step.w_amax, step.b_t, step.input_b_t, step.draw)
            memory += [0 if x is None else x.data_ptr() for x in tensors]
        return (id(step), self.settings_version, self.measures_now, self._samples_once(), *memory)

    def mark_held(self) -> None:
        """Declare that this step's weight is held."""
        self.step_state.hold(self._stored_weight()._version, sampled=self._samples_once())

    def hold(self) -> None:
        """Sample and cast the weight once for all forward passes of the step, into memory that stays."""
        settings, step = self._settings[1 if self.weight.is_cuda else 0], self.step_state
        samples = self._samples_once()
        self.mark_held()
        weight = self.hold_sample() if samples else self._stored_weight().detach()
        if self.gather is not None:
            weight = self.gather.part()  # in the dtype that FSDP2 would gather
        if not settings.weight.cast:
            return
        if self.gather is not None:
            settings = begun(settings, "weight", *self.gather.at)
        elif isinstance(self.weight, DTensor):
            settings = held_settings(self.name, self.weight, settings, self.precision)
        state = State(
            local(self.draw_place), local(self.draw_keys), levels=local(self.levels), weight_amax=self._amax("weight")
        )
        with torch.no_grad():
            memory = step.code_memory
            if memory is not None and step.code_shape == weight.shape:
                functional.cast_weight_again(weight, settings.weight, state, memory)
                return
            along, across = self._held_layouts(settings, samples)
            codes = functional.cast_weight(weight, settings.weight, state, along=along, across=across)
            codes = step.keep_codes(codes if samples else functional.only_cast(codes, settings.weight))
            # A cast of one layout alone does not record its magnitude, which delayed scaling needs.
            records = not (along and across) and state.weight_amax.largest is not None
            again = settings.weight.whole and not settings.weight.shared and not records
            step.code_memory, step.code_shape = functional.cast_memory(codes) if again else None, weight.shape

    def _held_layouts(self, settings: Settings, samples: bool) -> tuple[bool, bool]:
        """Return which layouts of the weight's codes the step holds: (along its rows, along its columns).

        Both layouts of a sampled weight are held if one does not follow from the other, since the sample itself is not kept,
        and both of one whose scales ranks share.
        """
        if settings.hold == "both" or settings.weight.shared or (samples and not settings.weight.turns):
            return True, True
        return not self.transposed, self.transposed

    def check_held(self) -> None:
        """Raise if the weight was changed after it was sampled or cast for this step."""
        if self.step_state.holds_weight and self._stored_weight()._version != self.step_state.weight_version:
            raise UserError(
                f"The weight of the layer {self.name!r} changed inside a step_context, which holds "
                f"{'a sample of it' if self.step_state.sampled else 'its codes'}. A torch.optim.Optimizer may change it there; "
                "make other changes after the step_context."
            )

    def accept_update(self) -> None:
        """Accept that an optimizer changed the weight in the backward pass, after its gradient was complete."""
        if self.step_state.holds_weight:
            self.step_state.weight_version = self._stored_weight()._version
