"""The cache of a layer for an optimizer step: its weight as products read it, and the bitwidths of its samplings."""

import itertools

import torch
from torch import Tensor

from dither.errors import UserError
from dither.nn.functional import CastMemory, OperandCodes

_numbers = itertools.count()


class StepCache:
    """The cached weight of one layer, between the beginning and the end of a `step_context`.

        active   a step has begun; nothing is cached yet
        ready    the layer has sampled or cast its weight, and all forward passes of the step read that
        neither  forward passes sample and cast for themselves

    Tensors keep their memory from step to step, since captured CUDA graphs read them there. A layer whose constants change, or
    that moves, takes a new cache.
    """

    def __init__(self, *, active: bool = False) -> None:
        self.number = next(_numbers)
        """Tells this cache from others; an id may be that of a cache that is gone."""
        self.active = active
        """True while a step_context is active."""
        self.ready = False
        """True if the tensors below belong to the weight of this step."""
        self.sampled = False
        """True if the cached weight was sampled."""
        self.bitwidths_ready = False
        """True if `b_t` and `input_b_t` are those of this step."""
        self.version = 0
        """The version of the weight that was sampled or cast."""
        self.codes: OperandCodes | None = None
        """The cast weight, in both layouts or in that of the forward product."""
        self.memory: CastMemory | None = None
        """The memory of `codes` as one cast writes it; None if each layout is a cast of its own."""
        self.shape = torch.Size()
        """The shape of the weight whose codes these are."""
        self.w_hat: Tensor | None = None
        """The sampled weight, unless it is cast and only its codes are kept."""
        self.w_amax: Tensor | None = None
        """The largest magnitude of each block of the sampled weight, float32."""
        self.b_t: Tensor | None = None
        """Bitwidths of the weight's blocks, float32."""
        self.input_b_t: Tensor | None = None
        """Bitwidths of the input's blocks, float32."""
        self.draw: Tensor | None = None
        """The draw of the weight's noise, int64[3]: the step, 0 and the key."""

    def mark(self, version: int, *, sampled: bool) -> None:
        """Declare that the tensors are those of the weight's `version`, sampled or as it is."""
        self.ready, self.sampled, self.version = True, sampled, version

    def end(self) -> None:
        """End the step. The tensors stay allocated for the next one."""
        self.active = self.ready = self.sampled = self.bitwidths_ready = False

    def store(self, codes: OperandCodes) -> OperandCodes:
        """Store codes where those of an earlier step are, if shapes and dtypes agree."""
        if self.codes is not None and _shapes(self.codes) == _shapes(codes):
            for old, new in zip(_tensors(self.codes), _tensors(codes), strict=True):
                old.copy_(new)
        else:
            self.codes = codes
        return self.codes

    def addresses(self) -> list[int | None]:
        """Return where the tensors are."""
        along, across = self.codes or (None, None)
        codes = (along and along.values, across and across.values)
        tensors = (self.w_hat, self.w_amax, self.b_t, self.input_b_t, self.draw, *codes)
        return [None if x is None else x.data_ptr() for x in tensors]


def store_in_place(values: list[tuple[StepCache, str, Tensor]]) -> None:
    """Set attributes of caches: where the old tensor is, if it has the new one's shape, since CUDA graphs read there."""
    copies = []
    for cache, name, new in values:
        old = getattr(cache, name)
        if old is None or old.shape != new.shape:
            setattr(cache, name, new)
        else:
            copies.append((old, new))
    if copies:
        torch._foreach_copy_([old for old, _ in copies], [new for _, new in copies])


def check_unchanged(name: str, cached: int, version: int, what: str) -> None:
    """Raise if the weight of a layer has another version than the cached one."""
    if version != cached:
        raise UserError(
            f"The weight of the layer {name!r} changed inside a step_context, which {what}. A torch.optim.Optimizer may change "
            "it there; make other changes after the step_context."
        )


def _tensors(codes: OperandCodes) -> list[Tensor]:
    return [part for layout in codes if layout is not None for part in layout if part is not None]


def _shapes(codes: OperandCodes) -> list[object]:
    return [
        None if layout is None else [None if part is None else (part.shape, part.dtype) for part in layout] for layout in codes
    ]
