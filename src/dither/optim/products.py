"""Products of 16-bit numbers on a CPU, computed in float32.

A CPU without matrix units for bfloat16 takes up to 300 times as long for such a product as for one in float32. Matrix units
multiply 16-bit numbers exactly, add in float32 and round the sum once; so does this, in another order of additions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""What linear layers and attention come to below autograd and autocast, in forward and backward passes."""

SHORT = (torch.bfloat16, torch.float16)


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, products and attention of bfloat16 or float16 tensors on the CPU are computed in float32 and rounded once.

    Everything else is computed as without it. Backward passes belong inside as well as forward passes.

    >>> import torch
    >>> x = torch.randn(4, 64).bfloat16()
    >>> with Float32Products():
    ...     y = x @ x.T
    >>> torch.equal(y, (x.float() @ x.float().T).bfloat16())
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called for every operation."""
        kwargs = dict(kwargs or {})
        if (
            func not in PRODUCTS
            or not isinstance(args[0], Tensor)
            or args[0].device.type != "cpu"
            or args[0].dtype not in SHORT
        ):
            return func(*args, **kwargs)
        dtype = args[0].dtype
        found = func(*map(_long, args), **{key: _long(value) for key, value in kwargs.items()})
        if isinstance(found, Tensor):
            return found.to(dtype)
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return found[0].to(dtype), *found[1:]  # the second are logarithms of sums, in float32 either way
        return tuple(each.to(dtype) for each in found)


def _long(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value
