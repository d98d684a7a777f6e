"""The kinds of matrix product that torch can compute on a device, each tried on a small example."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.formats import Format
from dither.reference import packing, rounding

M, N, K = 256, 256, 512
"""Small, but several 128 x 128 blocks, so that scales in a wrong order show. cuBLAS needs K / 128 to be a multiple of 4."""


@dataclass(frozen=True)
class Product:
    """The result of trying one kind of matrix product on a small example."""

    name: str
    runs: bool
    note: str
    """Why it does not run, what is wrong with its result, or torch's warning."""


def products(device: str) -> tuple[Product, ...]:
    """Try every kind of product on `device`. A product runs if torch computes it and the result is correct."""
    tries: dict[str, Callable[[str], tuple[Tensor, Tensor]]] = {
        "bf16": functools.partial(_plain_product, torch.bfloat16),
        "fp16": functools.partial(_plain_product, torch.float16),
        "fp8, tensor scales": functools.partial(_fp8_product, "tensor", "tensor"),
        "fp8, row scales": functools.partial(_fp8_product, "row", "row"),
        "fp8, 1x128 times 128x128": functools.partial(_fp8_product, "1x128", "128x128"),
        "fp8, 1x128 times 1x128": functools.partial(_fp8_product, "1x128", "1x128"),
        "MXFP8": functools.partial(_mx_product, "e4m3", 32),
        "MXFP4": functools.partial(_mx_product, "e2m1", 32),
        "NVFP4": functools.partial(_mx_product, "e2m1", 16),
    }
    return tuple(_try(name, run, device) for name, run in tries.items())


def _try(name: str, run: Callable[[str], tuple[Tensor, Tensor]], device: str) -> Product:
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got, expected = run(device)
            error = float((got.cpu().float() - expected).abs().max() / expected.abs().max())
    except Exception as problem:  # any failure is a result here: its first line is reported
        return Product(name, False, first_line(problem))
    # bfloat16 results are accurate to 2^-9; a misplaced scale is off by a half or more.
    if not error < 0.02:
        return Product(name, False, f"It ran, but its result is wrong by {error:.2g} of the largest number.")
    # torch warns when it falls back to a slower path.
    return Product(name, True, first_line(said[0].message) if said else "")


def first_line(problem: Exception | Warning | str) -> str:
    """Return the first line of an error or a warning, without torch's stack of C++ functions."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def _operands() -> tuple[Tensor, Tensor]:
    """Return a_MK and b_NK of small integers, which every format represents exactly."""
    generator = torch.Generator().manual_seed(1)
    a_MK = torch.randint(-3, 4, (M, K), generator=generator).float()
    return a_MK, torch.randint(-3, 4, (N, K), generator=generator).float()


def _plain_product(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = _operands()
    return a_MK.to(device, dtype) @ b_NK.to(device, dtype).t(), a_MK @ b_NK.t()


def _scales(kind: str, lines: int) -> tuple[Tensor, Tensor]:
    """Return scales [groups of lines, groups of K] that differ between neighbours, and the same expanded to [lines, K]."""
    p, q = {"tensor": (lines, K), "row": (1, K), "1x128": (1, 128), "128x128": (128, 128)}[kind]
    exponent = torch.arange(lines // p)[:, None] + torch.arange(K // q)[None, :]
    scale = torch.ldexp(torch.ones(exponent.shape), exponent % 3 - 1)
    return scale, scale.repeat_interleave(p, 0).repeat_interleave(q, 1)


def _fp8_product(kind_a: str, kind_b: str, device: str) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = _operands()
    (scale_a, spread_a), (scale_b, spread_b) = _scales(kind_a, M), _scales(kind_b, N)
    # Consecutive 1x128 scales run along the lines and consecutive 128x128 scales along K. b is transposed.
    if kind_a == "1x128":
        scale_a = scale_a.t().contiguous().t()
    if kind_b == "1x128":
        scale_b = scale_b.t().contiguous().t()
    got = torch._scaled_mm(
        a_MK.to(device).to(torch.float8_e4m3fn),
        b_NK.to(device).to(torch.float8_e4m3fn).t(),
        scale_a=scale_a.to(device),
        scale_b=scale_b.to(device).t(),
        out_dtype=torch.bfloat16,
    )
    return got, (a_MK * spread_a) @ (b_NK * spread_b).t()


def _mx_product(name: str, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Multiply in blocks of 32 with E8M0 scales, or of 16 with E4M3 scales. All scales are 2, so order is irrelevant."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    a_MK, b_NK = _operands()
    element = Format.parse(name)
    dtype = torch.float8_e4m3fn if element.bits == 8 else torch.float4_e2m1fn_x2
    a, b = (packing.pack(rounding.encode(x, element), element).to(device).view(dtype) for x in (a_MK, b_NK))
    if size == 32:
        recipe = ScalingType.BlockWise1x32
        twos = torch.full((M * K // 32,), 128, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    else:
        recipe = ScalingType.BlockWise1x16
        twos = torch.full((M * K // 16,), 0x40, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    swizzle = SwizzleType.SWIZZLE_32_4_4
    got = scaled_mm(a, b.t(), twos, recipe, twos, recipe, swizzle, swizzle)  # M = N, so both use the same scales
    return got, 4 * a_MK @ b_NK.t()
