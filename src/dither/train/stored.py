"""The tensors of a checkpoint as `unpack` reads them: each in the layout of the tensor that it restores, one at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.storage.pieces import empty_like, local_part, pieces_of
from dither.storage.reading import TensorSource


class Stored:
    """Tensors by name: those of a mapping, or those of a checkpoint, which are read when they are asked for.

    >>> stored = Stored({"weight": torch.ones(2)})
    >>> stored.described("weight"), stored.read("weight")
    ((torch.float32, torch.Size([2])), tensor([1., 1.]))
    """

    def __init__(self, tensors: "Mapping[str, Tensor] | TensorSource | Stored") -> None:
        self._tensors: Mapping[str, Tensor] | TensorSource = tensors._tensors if isinstance(tensors, Stored) else tensors
        names = self._tensors.tensors if isinstance(self._tensors, TensorSource) else self._tensors
        self.names: list[str] = list(names)
        self._known = frozenset(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def described(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and the shape of a tensor."""
        if isinstance(self._tensors, TensorSource):
            saved = self._tensors.tensors[name]
            return saved.dtype, torch.Size(saved.shape)
        return self._tensors[name].dtype, self._tensors[name].shape

    def read(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return a tensor: the part of it that this rank holds of the DTensor `like`, or else all of it."""
        if isinstance(self._tensors, TensorSource):
            if not isinstance(like, DTensor):
                return self._tensors.box(name)
            target = empty_like(like, *self.described(name))
            self._tensors.fill(name, target)
            return target
        value = self._tensors[name]
        if isinstance(like, DTensor) and not isinstance(value, DTensor):
            target = empty_like(like, value.dtype, value.shape)
            local = local_part(target)
            for piece in pieces_of(target, name):
                box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offset, piece.shape, strict=True))
                local[piece.local].copy_(value[box])
            return target
        return value


class StoredState(Mapping[str, Any]):
    """The optimizer state of a parameter, whose tensors are read when they are asked for.

    Args:
        stored: The tensors.
        parameter: The parameter. States of its shape, and the scales of blocks of its rows, have its layout.
    """

    def __init__(self, stored: Stored, parameter: Tensor) -> None:
        self.stored, self.parameter = stored, parameter
        self.tensors: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self.tensors:
            return self.numbers[key]
        _, shape = self.stored.described(self.tensors[key])
        own = self.parameter.shape
        follows = (shape == own and key != "step") or (key.endswith("_scale") and len(own) > 0 and shape[:-1] == own[:-1])
        return self.stored.read(self.tensors[key], self.parameter if follows else None)

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.numbers

    def __len__(self) -> int:
        return len(self.tensors) + len(self.numbers)
