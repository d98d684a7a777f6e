"""A linear layer with a precision, and the steps of a training loop as its layers need to know them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dither.engines import ALIGNMENT, PRODUCTS, engine_for
from dither.errors import UserError
from dither.nn import functional
from dither.nn.functional import Amax, Codes, Layouts, Settings, State
from dither.precision import Cast, LayerPrecision
from dither.reference import scaling

OPERANDS = ("input", "weight", "grad")
HELD = tuple(f"_held_{layout}_{part}" for layout in ("along", "across") for part in Codes._fields)
"""Buffers of a cast weight that is held for a step."""

STATE = ("_place", "_counted", "_keys", *(f"{operand}_history" for operand in OPERANDS))
STATE += tuple(f"_{operand}_{what}" for operand in OPERANDS for what in ("amax", "largest"))
"""Buffers of what the layer remembers from step to step, where its precision asks for them."""

FIRST_COUNTED = 1 << 31
"""Where the numbers of calls outside a training_step begin: no run has so many steps, so they never meet."""


class Linear(nn.Linear):
    """`nn.Linear` whose three products run in the precision of a `LayerPrecision`; with no casts it is `nn.Linear`.

    `name` and `seed` say which random bits stochastic casts draw: give each layer its name in the model. `emulate` multiplies
    dequantized numbers in float32 on a GPU too. Input [..., in_features], output [..., out_features].

    >>> import torch, dither
    >>> from dither.precision import LayerPrecision
    >>> fp8 = dither.Cast.parse("e4m3 tile(128)")
    >>> layer = Linear(256, 64, precision=LayerPrecision(input=fp8, weight=fp8, grad=fp8))
    >>> layer(torch.randn(2, 5, 256)).shape
    torch.Size([2, 5, 64])
    >>> layer.engines("cpu")
    {'forward': 'fp32', 'input_grad': 'fp32', 'weight_grad': 'fp32'}
    """

    precision: LayerPrecision
    name: str
    seed: int
    emulate: bool
    transposed: bool
    _place: Tensor | None
    _keys: Tensor | None
    _counted: Tensor | None

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
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._begin(precision, name, seed, emulate, transposed=False)

    @classmethod
    def adopt(
        cls, module: nn.Module, precision: LayerPrecision, *, name: str = "", seed: int = 0, emulate: bool = False
    ) -> "Linear":
        """A Linear in place of `module`: the same Parameter objects, hooks and mode.

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
        if not taken or not _is_matrix(weight) or (not transposed and type(module).forward is not nn.Linear.forward):
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
        new._begin(precision, name, seed, emulate, transposed)
        return new

    def _begin(self, precision: LayerPrecision, name: str, seed: int, emulate: bool, transposed: bool) -> None:
        self.name, self.seed, self.emulate, self.transposed = name, seed, emulate, transposed
        self._inside = False  # whether a training_step is under way
        self._holds = False  # whether the held buffers are those of this step
        self._held_version = 0
        self._seen_version: int | None = None
        self.set_precision(precision)

    def set_precision(self, precision: LayerPrecision) -> None:
        """Change how operands are cast from the next call on. Parameters stay; histories of delayed scaling begin anew."""
        if not isinstance(precision, LayerPrecision):
            raise UserError(f"The layer {self.name!r} takes a LayerPrecision, not {precision!r}.")
        if self._inside:
            raise UserError(f"The precision of the layer {self.name!r} changes between steps, not inside a training_step.")
        self.precision = precision
        self._begin_state(self.weight.device)
        self._settings = tuple(
            functional.settings(precision, name=self.name, transposed=self.transposed, emulate=self.emulate, gpu=gpu)
            for gpu in (False, True)
        )

    def _begin_state(self, device: torch.device) -> None:
        """Everything the layer remembers, as it is before the first step."""
        for name in HELD:
            self.register_buffer(name, None, persistent=False)
        self._outputs: functional.Outputs | None = None  # the held buffers, as a cast writes them
        casts = {operand: getattr(self.precision, operand) for operand in OPERANDS}
        self._measures = True  # whether magnitudes are those of the tensors themselves, because a history is empty
        for operand, cast in casts.items():
            delayed = cast is not None and cast.scaling.kind == "delayed"
            history = scaling.empty_history(cast.scaling.history, device) if delayed else None
            zero = torch.zeros((), device=device)
            self.register_buffer(f"{operand}_history", history)
            self.register_buffer(f"_{operand}_amax", zero if delayed else None, persistent=False)
            self.register_buffer(f"_{operand}_largest", zero.clone() if delayed else None, persistent=False)
        draws = any(cast is not None and cast.round.kind == "stochastic" for cast in casts.values())
        place, counted = (torch.tensor([first, 0], device=device) if draws else None for first in (0, FIRST_COUNTED))
        self.register_buffer("_place", place, persistent=False)
        self.register_buffer(
            "_keys", torch.tensor(functional.keys(self.name, self.seed), device=device) if draws else None, persistent=False
        )
        self.register_buffer("_counted", counted, persistent=False)
        self._delayed = tuple(operand for operand in OPERANDS if getattr(self, f"{operand}_history") is not None)

    def engines(self, device: torch.device | str, tokens: int = ALIGNMENT) -> dict[str, str]:
        """The engine of each product on `device`; a UserError says why one cannot run there."""
        device = torch.device(device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and not self.emulate else None
        x, w, dy = (getattr(self.precision, operand) for operand in OPERANDS)
        K, N, M = self.in_features, self.out_features, -(-tokens // ALIGNMENT) * ALIGNMENT
        pairs: tuple[tuple[Cast | None, Cast | None, tuple[int, int, int]], ...]
        pairs = ((x, w, (M, N, K)), (dy, w, (M, K, N)), (x, dy, (K, N, M)) if self.transposed else (dy, x, (N, K, M)))
        found: dict[str, str] = {}
        for product, (a, b, size) in zip(PRODUCTS, pairs, strict=True):
            try:
                found[product] = engine_for(a, b, size, capability).name
            except UserError as error:
                raise UserError(f"The layer {self.name!r}, {product.replace('_', ' ')} product: {error}.") from None
        return found

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        settings = self._settings[1 if input.is_cuda else 0]
        return functional.linear(input, self.weight, self.bias, settings, state=self._state(settings))

    def _state(self, settings: Settings) -> State:
        if not self._delayed and self._place is None and not self._inside:
            return State()
        place = self._place if self._inside else self._counted
        if place is not None and not self._inside and self.training and torch.is_grad_enabled():
            self._count(place)
        held = None
        if self._holds:
            if not torch.compiler.is_compiling():
                self._check_held()
            held = self._held()
        if self._delayed and self.training and not self._inside:
            self._check_declared()
        return State(place, self._keys, held, *(self._amax(operand) for operand in OPERANDS))

    def _amax(self, operand: str) -> Amax:
        given: Tensor | None = getattr(self, f"_{operand}_amax")
        largest: Tensor | None = getattr(self, f"_{operand}_largest")
        return Amax(None if self._measures else given, largest if self.training and torch.is_grad_enabled() else None)

    def _count(self, place: Tensor) -> None:
        """Without a training_step each call in training is a step of its own, so that no bits are drawn twice."""
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError(
                f"The layer {self.name!r} rounds stochastically on several ranks, which would draw the same bits for different "
                "tokens: run forward and backward inside `with dither.nn.training_step(model, step=..., row=...)`."
            )
        place[0] += 1

    def _check_declared(self) -> None:
        if torch.compiler.is_compiling() or self._seen_version not in (None, self.weight._version):
            raise UserError(
                f"The layer {self.name!r} scales by the magnitudes of earlier steps and has not been told of a step: "
                "run forward and backward inside `with dither.nn.training_step(model, step=...)`."
            )
        self._seen_version = self.weight._version

    # What a training step does to a layer ------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Cast the weight once for all calls of the step, in both layouts, into buffers that stay where they are."""
        settings = self._settings[1 if self.weight.is_cuda else 0]
        # A weight that is sharded now is gathered in forward, and cast there.
        if not settings.weight.cast or type(self.weight) not in (Tensor, nn.Parameter):
            return
        state = State(self._place, self._keys, weight_amax=self._amax("weight"))
        with torch.no_grad():
            # In place: a captured CUDA graph reads the same memory again.
            if self._outputs is not None and (len(self._outputs[0]), self._outputs[2].shape[1]) == self.weight.shape:
                functional.cast_weight_again(self.weight, settings.weight, state, self._outputs)
            else:
                layouts = functional.cast_weight(self.weight, settings.weight, state, along=True, across=True)
                for name, new in zip(HELD, (part for codes in layouts for part in codes), strict=True):  # type: ignore[union-attr]
                    old = getattr(self, name)
                    if old is not None and new is not None and old.shape == new.shape and old.dtype == new.dtype:
                        old.copy_(new)
                    else:
                        setattr(self, name, new)
                self._outputs = functional.outputs(self._held()) if settings.weight.whole else None
        self._holds, self._held_version = True, self.weight._version

    def _held(self) -> Layouts:
        if self._held_along_values is None:
            return Layouts(None, None)
        return Layouts(*(Codes(*(getattr(self, name) for name in half)) for half in (HELD[:3], HELD[3:])))

    def _check_held(self) -> None:
        if self._holds and self.weight._version != self._held_version:
            raise UserError(
                f"The weight of the layer {self.name!r} changed inside a training_step, which holds its codes: "
                "let the training_step end before the optimizer's step."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        """Magnitudes stay float32 whatever the parameters become; held codes are made again where the weight goes."""
        kept = {name: buffer for name in STATE if (buffer := self._buffers[name]) is not None}
        for name in HELD:
            self._buffers[name] = None
        self._holds, self._outputs = False, None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            assert moved is not None
            if buffer.is_meta and not moved.is_meta:  # there was nothing to move
                self._begin_state(moved.device)
                break
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _refresh(self) -> None:
        """What follows from the histories."""
        histories = {operand: getattr(self, f"{operand}_history") for operand in self._delayed}
        for operand, history in histories.items():
            cast: Cast = getattr(self.precision, operand)
            getattr(self, f"_{operand}_amax").copy_(scaling.delayed_amax(history, cast.scaling))
        self._measures = not all(bool(history.any()) for history in histories.values())

    def extra_repr(self) -> str:
        """The layer as nn.Linear shows it, and its precision."""
        return f"{super().extra_repr()}, {self.precision}"


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


class TrainingStep:
    """What `training_step` gives: the place to say which rows of the global batch come next."""

    def __init__(self, layers: list[Linear], step: int) -> None:
        self._layers = layers
        self._places: list[Tensor] = []
        for layer in layers:
            if layer._place is None:
                continue
            # One tensor a device for all layers, so that moving on is one small write.
            shared = next((place for place in self._places if place.device == layer._place.device), None)
            if shared is None:
                self._places.append(layer._place)
            else:
                layer._place = shared
        for place in self._places:
            place[0].fill_(step)

    def row(self, row: int) -> None:
        """The next micro-batch begins at this token of the global batch: (micro-batch * ranks + rank) * tokens, say."""
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < 1 << 32:
            raise UserError(f"A row is the index of a token in the global batch, from 0 to 2^32 - 1, not {row!r}.")
        for place in self._places:
            place[1].fill_(row)

    def _push(self, group: torch.distributed.ProcessGroup | None) -> None:
        """The step's largest magnitudes into the histories, after one reduction over the ranks of `group`."""
        found = [(layer, operand) for layer in self._layers for operand in layer._delayed]
        if not found:
            return
        largest = torch.stack([getattr(layer, f"_{operand}_largest") for layer, operand in found])
        if group is not None:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        by_scale: dict[Any, list[int]] = {}
        for index, (layer, operand) in enumerate(found):
            by_scale.setdefault(getattr(layer.precision, operand).scaling, []).append(index)
        for scale, members in by_scale.items():
            histories = [getattr(found[index][0], f"{found[index][1]}_history") for index in members]
            new, old = largest[members], torch.stack(histories)
            # A step without a number to remember, because the layer was not used or met a NaN, repeats the last one.
            new = torch.where(new.isfinite() & (new > 0), new, old[:, 0])
            pushed = torch.cat([new[:, None], old[:, :-1]], dim=1)
            amax = pushed[:, 0] if scale.algo == "most_recent" else pushed.amax(dim=1)
            torch._foreach_copy_(histories, list(pushed.unbind()))
            torch._foreach_copy_([getattr(found[i][0], f"_{found[i][1]}_amax") for i in members], list(amax.unbind()))
        torch._foreach_zero_([getattr(layer, f"_{operand}_largest") for layer, operand in found])
        if any(layer._measures for layer, _ in found):  # only in the first steps does the host look
            amax = torch.stack([getattr(layer, f"_{operand}_amax") for layer, operand in found])
            empty = {id(layer) for (layer, _), known in zip(found, (amax > 0).tolist(), strict=True) if not known}
            for layer, _ in found:
                layer._measures = id(layer) in empty


@contextmanager
def training_step(
    model: nn.Module, *, step: int, row: int = 0, group: torch.distributed.ProcessGroup | None = None
) -> Iterator[TrainingStep]:
    """Forward and backward of one optimizer step, all its micro-batches, happen inside; the optimizer's step comes after.

    On entering, the weights of the model's `Linear` layers are cast once and held. Inside, stochastic casts draw the bits of
    optimizer step `step` and of the rows from `row` on; say `.row(...)` before each further micro-batch. On leaving, histories
    of delayed scaling take the largest magnitudes of the step, reduced over the ranks of `group` if one is given.

    >>> import torch
    >>> from dither import Cast
    >>> layer = Linear(8, 4, precision=LayerPrecision(grad=Cast.parse("e2m1 tile(4) stochastic(8)")), name="up")
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> for step in range(2):
    ...     with training_step(layer, step=step) as at:
    ...         for start in (0, 16):  # two micro-batches of 16 tokens
    ...             at.row(start)
    ...             layer(torch.randn(16, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < FIRST_COUNTED:
        raise UserError(f"A training step is an integer from 0 to 2^31 - 1, not {step!r}.")
    layers = [module for module in model.modules() if isinstance(module, Linear) and not module.precision.uncast]
    if any(layer._inside for layer in layers):
        raise UserError(f"The training_step {step} begins inside another one of the same model: end that one first.")
    now = TrainingStep(layers, step)
    now.row(row)
    try:
        for layer in layers:
            layer._inside = True
            layer._hold()
        yield now
        for layer in layers:
            layer._check_held()
        now._push(group)
    finally:
        for layer in layers:
            layer._inside = layer._holds = False
