"""A weight that was gathered as codes: it has the shape of the weight and takes its gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.functional import Codes, OperandCodes

_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
}
"""Operations that FSDP2 and autograd do to a parameter; they change neither its shape nor its numbers."""


class CodedWeight(Tensor):
    """A whole weight as codes and scales, or as a sample: it has a shape, a dtype and a gradient, and no numbers of its own."""

    NAMES = ("along", "along_scale", "along_tensor", "across", "across_scale", "across_tensor", "w_hat", "block_amax")
    sampled: bool
    along: Tensor | None
    across: Tensor | None
    w_hat: Tensor | None
    block_amax: Tensor | None

    @staticmethod
    def __new__(cls, tensors: dict[str, Tensor], sampled: bool, shape: torch.Size, dtype: torch.dtype) -> "CodedWeight":
        """Return a weight of this shape without memory."""
        device = next(iter(tensors.values())).device
        made: CodedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __init__(self, tensors: dict[str, Tensor], sampled: bool, shape: torch.Size, dtype: torch.dtype) -> None:
        self.fill(tensors, sampled)

    def fill(self, tensors: dict[str, Tensor], sampled: bool) -> None:
        """Take the codes and scales of another gather."""
        self.sampled = sampled
        for name in self.NAMES:
            setattr(self, name, tensors.get(name))

    @property
    def codes(self) -> OperandCodes | None:
        """Return the codes in both layouts, or None if the weight is not cast."""
        along, across = (
            None
            if (values := getattr(self, layout)) is None
            else Codes(values, getattr(self, f"{layout}_scale"), getattr(self, f"{layout}_tensor"))
            for layout in ("along", "across")
        )
        return None if along is None else OperandCodes(along, across)

    def tensors(self) -> dict[str, Tensor]:
        """Return codes, scales and samples by name."""
        return {name: tensor for name in self.NAMES if (tensor := getattr(self, name)) is not None}

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors inside, and the rest, for torch.compile."""
        return list(self.tensors()), (self.sampled, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], rest: Any, size: Any, stride: Any) -> "CodedWeight":
        """Return the weight that `__tensor_flatten__` took apart."""
        sampled, dtype = rest
        return CodedWeight(inner, sampled, size, dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Pass on what does not read numbers."""
        self = args[0]
        if func in _ALIASES and isinstance(self, CodedWeight):
            return CodedWeight(self.tensors(), self.sampled, self.shape, self.dtype)
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        raise UserError(
            f"{func} reads a weight that was gathered as codes, and only products can: parallelize with gather='weights'."
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, and what stands for the numbers."""
        return f"CodedWeight({list(self.shape)}, {self.dtype}, {', '.join(self.tensors())})"


def coded_of(weight: Tensor | None) -> CodedWeight | None:
    """Return a weight that was gathered as codes, in this rank's part if tensor parallelism shards it; None for another."""
    part = weight._local_tensor if isinstance(weight, DTensor) else weight
    return part if isinstance(part, CodedWeight) else None
