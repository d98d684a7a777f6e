"""16-bit matrix products on a CPU, computed in float32.

Without matrix units for bfloat16, a CPU takes up to 300 times as long for such a product as for one in float32. Matrix units
multiply 16-bit numbers exactly, add in float32 and round the sum once. This does the same, in another order of additions.
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
"""The operations of linear layers and attention below autograd and autocast, in forward and backward passes."""

SHORT = (torch.bfloat16, torch.float16)


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute matrix products and attention of 16-bit CPU tensors in float32 inside this context, and round once.

    All other operations are unchanged. Run both forward and backward passes inside the context.

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
        """Run one operation; torch calls this for every operation inside the context."""
        kwargs = dict(kwargs or {})
        if (
            func not in PRODUCTS
            or not isinstance(args[0], Tensor)
            or args[0].device.type != "cpu"
            or args[0].dtype not in SHORT
        ):
            return func(*args, **kwargs)
        dtype = args[0].dtype
        result = func(*map(_long, args), **{key: _long(value) for key, value in kwargs.items()})
        if isinstance(result, Tensor):
            return result.to(dtype)
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return result[0].to(dtype), *result[1:]  # the logsumexp is float32 in either case
        return tuple(tensor.to(dtype) for tensor in result)


def _long(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value
