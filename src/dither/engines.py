"""Which matrix units a product can run on without changing a value. Nothing here imports torch.

Every product is A B^T, with A [P, L] and B [Q, L] both stored along the axis L that it sums over. An engine multiplies the same
numbers whichever it is; only the order and the width of the additions differ.
"""

from dataclasses import dataclass
from typing import Literal

from dither.errors import UserError
from dither.precision import Cast

PRODUCTS = ("forward", "input_grad", "weight_grad")
"""The products of a linear layer, in the order in which they are computed."""

CONTAINED = ("e2m1", "e2m3", "e3m2")
"""Formats whose every value is an E4M3 value: FP8 units multiply them unchanged."""

FP8_GROUPS = 128
"""The length of the tiles and blocks that FP8 units scale."""

ALIGNMENT = 16
"""FP8 units take matrices whose L and Q are multiples of this."""


@dataclass(frozen=True)
class Engine:
    """How a product is computed.

    `fp8`: FP8 units, which apply the scales. `fp8-container`: the same, FP4 or FP6 values in E4M3 codes. `bf16`: BF16 units
    on values that BF16 holds exactly; a scale of a tensor or a row is applied after them. `fp32`: dequantized numbers,
    multiplied in float32.
    """

    name: Literal["fp8", "fp8-container", "bf16", "fp32"]
    scaling: Literal["", "tensor", "row", "group"] = ""
    """How FP8 units scale: by tensor, by row, or by groups of 128 along L."""


def container(cast: Cast) -> str:
    """The format in which a GPU stores the codes of `cast`: e4m3 for FP4 and FP6 that FP8 units can scale, else its own.

    >>> container(Cast.parse("e2m1 tile(128)")), container(Cast.parse("mxfp4"))
    ('e4m3', 'e2m1')
    """
    return "e4m3" if cast.format in CONTAINED and _fp8_scaling(cast) else cast.format


def engine_for(
    a: Cast | None,
    b: Cast | None,
    size: tuple[int, int, int],
    capability: tuple[int, int] | None,
    plain: str = "bf16",
) -> Engine:
    """The engine of A B^T for operands cast by `a` and `b`: a pure function of them, `size` (P, Q, L) and the GPU.

    `capability` is that of the CUDA device, None for the CPU, which always emulates. `plain` is the format of an operand that
    is not cast. What the GPU cannot run as asked is a UserError: nothing runs in another precision, or slowly, unasked.

    >>> fp4, fp8 = Cast.parse("e2m1 tile(128)"), Cast.parse("e4m3 block(128)")
    >>> engine_for(fp4, fp8, (4096, 512, 1024), (9, 0)).name
    'fp8-container'
    >>> engine_for(Cast.parse("mxfp4"), Cast.parse("mxfp4"), (4096, 512, 1024), (9, 0)).name
    'bf16'
    """
    if capability is None:
        return Engine("fp32")
    if a is None or b is None:
        if plain != "bf16":
            return Engine("fp32")
        if all(cast is None or _exact_in_bf16(cast) for cast in (a, b)):
            return Engine("bf16")
    else:
        scaling = _joint_scaling(a, b)
        if scaling:
            _check_fp8(scaling, size, capability)
            return Engine("fp8-container" if {a.format, b.format} & set(CONTAINED) else "fp8", scaling)
        if _exact_in_bf16(a) and _exact_in_bf16(b):
            return Engine("bf16")
    raise UserError(
        f"no matrix units of the GPU multiply {_described(a, plain)} by {_described(b, plain)} exactly: FP8 units take e4m3 "
        "and e5m2 (not both e5m2) scaled by tensor or row, and e4m3, e2m1, e2m3 and e3m2 in tile(128) by tile(128) or "
        "block(128); "
        "BF16 units take scales that are powers of two or nvfp4, or one a tensor or row; emulate=True multiplies in float32"
    )


def _fp8_scaling(cast: Cast) -> str:
    """How FP8 units would scale this operand: "tensor", "row", "tile", "block", or "" if they cannot."""
    kind, size = cast.group.kind, cast.group.size
    if cast.format not in ("e4m3", "e5m2", *CONTAINED) or cast.scaling.kind == "nvfp4":
        return ""
    if kind in ("none", "tensor"):
        return "tensor"
    if kind == "row":
        return "row"
    # PyTorch's scaled_mm takes 128-element groups of E4M3 only.
    return kind if size == FP8_GROUPS and cast.format != "e5m2" else ""


def _joint_scaling(a: Cast, b: Cast) -> Literal["", "tensor", "row", "group"]:
    kinds = {_fp8_scaling(a), _fp8_scaling(b)}
    if a.format == b.format == "e5m2":  # a pair that no NVIDIA GPU multiplies
        return ""
    if kinds == {"tensor"}:
        return "tensor"
    if kinds <= {"tensor", "row"}:
        return "row"
    return "group" if kinds in ({"tile"}, {"tile", "block"}) else ""


def _check_fp8(scaling: str, size: tuple[int, int, int], capability: tuple[int, int]) -> None:
    _, q, length = size
    if scaling == "group" and capability[0] != 9:
        raise UserError(
            f"groups of 128 are scaled by the FP8 units of Hopper GPUs (compute capability 9.0), and this one has "
            f"{capability[0]}.{capability[1]}: scale by tensor or row, or pass emulate=True to multiply in float32"
        )
    if capability < (8, 9):
        raise UserError(
            f"FP8 needs a GPU of compute capability 8.9 or more, and this one has {capability[0]}.{capability[1]}: "
            "leave the layer in bf16, or pass emulate=True to multiply in float32"
        )
    if q % ALIGNMENT or length % ALIGNMENT:
        raise UserError(
            f"FP8 units take dimensions that are multiples of {ALIGNMENT}, not {q} x {length}: "
            "pad the layer, leave it in bf16, or pass emulate=True to multiply in float32"
        )


def _exact_in_bf16(cast: Cast) -> bool:
    """Whether code * scale has at most BF16's 8 significant bits; a scale of a tensor or a row stays outside the product."""
    element = cast.element
    bits = element.bits - 1 if element.is_integer else element.mantissa_bits + 1
    if cast.group.kind in ("tile", "block"):
        if cast.scaling.kind == "fp32":
            return False
        bits += 4 if cast.scaling.kind == "nvfp4" else 0  # an E4M3 scale brings its own four bits
    return bits <= 8


def _described(cast: Cast | None, plain: str) -> str:
    return f"uncast {plain}" if cast is None else repr(str(cast))
