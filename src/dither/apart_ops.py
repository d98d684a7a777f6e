"""The operator `torch.ops.dither.quantize_apart`: both layouts of a matrix from one reading, each by its own cast."""

from torch import Tensor

from dither import grouping, torch_ops
from dither.precision import Cast


def _quantize_apart_op(x: Tensor, along: str, across: str, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales by `along` along axis 1, and by `across` along axis 0; see `reference.quantize`."""
    casts = Cast.parse(along), Cast.parse(across)
    for cast in casts:
        torch_ops._check_hidden_nan(x, cast, None)
    code = torch_ops.implementation("quantize", x.device, backend)
    return code.quantize_apart(x, *casts)  # type: ignore[no-any-return]


torch_ops._operator(_quantize_apart_op)


@torch_ops._fake_of("quantize_apart")
def _(x: Tensor, along: str, across: str, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one, other = Cast.parse(along), Cast.parse(across)
    return (*grouping.empty_outputs(x, one, 1, one.element), *grouping.empty_outputs(x, other, 0, other.element))
