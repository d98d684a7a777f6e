"""Reference against kernel, one body for every device: `tests/test_pairs.py` (interpreter) and `tests/gpu/` run it."""

import torch
from torch import Tensor

from dither import Cast, Stream, UserError
from dither.formats import TABLE, Format
from dither.kernels import philox as kernel_philox
from dither.kernels import quantize as kernel_quantize
from dither.kernels import rounding as kernel_rounding
from dither.precision import Rounding
from dither.random import Draw, matrix_size
from dither.reference import philox, quantize, rounding

STREAM = Stream(2024, "pairs", "x")
FORMATS = [name for name in TABLE if name != "e8m0"]
SCALINGS = [
    "none none",
    "tensor fp32",
    "row fp32",
    "block(32) fp32",
    "tile(128) fp32",
    "tile(32) pow2",
    "tile(32) pow2_ceil",
    "block(16) nvfp4",
    "tile(16) nvfp4",
]
ROUNDINGS = ["nearest", "stochastic(16)"]


def casts(formats: list[str] = FORMATS, scalings: list[str] = SCALINGS, roundings: list[str] = ROUNDINGS) -> list[Cast]:
    """Every valid combination."""
    found = []
    for name in formats:
        for scaling in scalings:
            for how in roundings:
                bits = min(16, 30 - Format.parse(name).mantissa_bits)
                try:
                    found.append(Cast.parse(f"{name} {scaling} {how.replace('16', str(bits))}"))
                except UserError:  # fp32 takes no scale, nvfp4 only small formats
                    assert name in ("fp32", "bf16", "fp16")
                    assert scaling != "none none"
    return found


def as_integers(x: Tensor) -> Tensor:
    """Raw bits, with one NaN for all: a product's NaN has no agreed sign or payload."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in any bit; shapes, dtypes and strides must agree."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.stride() == b.stride() or not a.numel()
    return int((as_integers(a) != as_integers(b).to(a.device)).sum())


def hard_values(rows: int, columns: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Numbers of every size, with zeros, subnormals, powers of two and their neighbours; all finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    scale = torch.randint(-12, 12, (rows, 1), generator=generator)
    x = torch.ldexp(x, scale)
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0.0
    powers = torch.ldexp(torch.ones(columns), torch.randint(-10, 10, (columns,), generator=generator))
    x[0] = torch.nextafter(powers, torch.tensor(torch.inf))
    x[rows // 2] = powers
    x[-1] = torch.nextafter(powers, torch.tensor(0.0))
    if rows > 4:
        x[1] *= 1e-38  # subnormal groups
        x[2] *= 1e37 if dtype != torch.float16 else 1.0
        x[3] = 0.0
    finite = torch.finfo(dtype).max
    return x.clamp(-finite, finite).to(dtype).to(device)


def draw_for(x: Tensor, rounding: Rounding, offset: tuple[int, int]) -> Draw | None:
    """The stream at step 5, if the rounding draws."""
    return STREAM.draw(5, matrix_size(x), offset, x.device) if rounding.kind == "stochastic" else None


def check_random_bits(rows: int, columns: int, offset: tuple[int, int], width: int, device: str) -> int:
    draw = STREAM.draw(3, (rows, columns), offset, device)
    return differing(philox.random_bits(draw, rows, columns, width), kernel_philox.random_bits(draw, rows, columns, width))


def check_round(x: Tensor, name: str, how: str, saturate: bool, offset: tuple[int, int] = (0, 0)) -> int:
    format, rule = Format.parse(name), Rounding.parse(how)
    draw = draw_for(x, rule, offset)
    expected = rounding.round_to(x, format, rule, saturate, draw)
    return differing(expected, kernel_rounding.round_to(x, format, rule, saturate, draw))


def check_quantize(
    x: Tensor, cast: Cast, axis: int, offset: tuple[int, int] = (0, 0), container: str = "", amax: Tensor | None = None
) -> int:
    """Codes, scales, the way back and the round trip without codes."""
    draw = draw_for(x, cast.round, offset)
    stored = Format.parse(container) if container else cast.element
    expected = quantize.quantize(x, cast, axis, draw, amax, stored)
    wrong = sum(map(differing, expected, kernel_quantize.quantize(x, cast, axis, draw, amax, stored)))
    if not container:
        shape = tuple(x.shape)
        wrong += differing(
            quantize.dequantize(*expected, cast, shape, axis, x.dtype),
            kernel_quantize.dequantize(*expected, cast, shape, axis, x.dtype),
        )
        wrong += differing(
            quantize.fake_quantize(x, cast, axis, draw, amax), kernel_quantize.fake_quantize(x, cast, axis, draw, amax)
        )
    return wrong


def check_amax(x: Tensor) -> int:
    return differing(quantize.amax(x), kernel_quantize.amax(x))


def check_both(x: Tensor, cast: Cast, offset: tuple[int, int] = (0, 0), container: str = "", amax: Tensor | None = None) -> int:
    draw = draw_for(x, cast.round, offset)
    stored = Format.parse(container) if container else cast.element
    return sum(
        map(
            differing,
            quantize.quantize_both(x, cast, draw, amax, stored),
            kernel_quantize.quantize_both(x, cast, draw, amax, stored),
        )
    )
