"""Gaussian weight sampling (GaussWS): a weight plus random noise of the size of a rounding error to b_t bits.

    w_hat = w + R * (max_block|w| * 2^(1 - b_t))

There is one b_t per B x B block; blocks at the edges may be smaller. R is drawn by coordinates, so that backward draws it again
instead of storing it. Every step is integer arithmetic or an exactly rounded float32 operation, in a fixed order.
"""

import torch
from torch import Tensor

from dither.ops import storage
from dither.ops.reference import philox, rounding
from dither.spec import Rounding
from dither.spec.formats import TABLE, Format
from dither.spec.random import Draw

DTYPES = {storage.DTYPES[name]: TABLE[name] for name in ("fp32", "bf16", "fp16", "e4m3", "e5m2")}
"""Dtypes of sampled weights."""

ROUNDED_NORMAL = (291, 3)
"""|R| is at least 1, or 2, if ten random bits are below these: P(|R| = 1) = 288/1024 and P(|R| = 2) = 3/1024 (Eq. 8)."""

ROUNDED_NORMAL_EXACT = (681419127, 5797768, 1231)
"""The same for 31 bits: 2^31 P(|N(0, 1)| >= 2k - 1) for k = 1, 2, 3, rounded to integers; it is 0 for k = 4."""

POW2 = tuple(
    map(float.fromhex, ("0x1.62e43p-1", "0x1.ebfbdcp-3", "0x1.c6aee8p-5", "0x1.3b2d4cp-7", "0x1.5f3e52p-10", "0x1.41fbbcp-13"))
)
"""Coefficients of 2^f = 1 + f (c1 + f (c2 + ...)) for |f| <= 1/2: minimax in the relative error, 2.0e-9, then rounded to
float32."""

LN2 = float.fromhex("0x1.62e43p-1")
"""ln 2 as a float32."""


def width(kind: str) -> int:
    """Return the number of random bits that one element draws."""
    return 32 if kind == "rounded_normal_exact" else 16


def noise_of(bits: Tensor, kind: str) -> Tensor:
    """Return float32 R for int32 `bits`, whose low `width(kind)` bits are random.

    - rounded_normal: bit 15 is the sign and bits 5 to 14 are u: |R| is 2 if u < 3, 1 if 3 <= u < 291, else 0.
    - rounded_normal_exact: bit 31 is the sign and bits 0 to 30 are u, compared with `ROUNDED_NORMAL_EXACT`: round(N(0, 1) / 2).
    - uniform: (2 h + 1) / 2^17 - 1/2 of all 16 bits h, rounded to the nearest BF16 number.
    - none: 0.
    """
    if kind == "none":
        return torch.zeros_like(bits, dtype=torch.float32)
    if kind == "uniform":
        centred = (2 * bits + 1 - (1 << 16)).float() * 2.0**-17
        return rounding.round_values(centred, TABLE["bf16"], Rounding("nearest"), True, None)
    if kind == "rounded_normal":
        u, negative = bits >> 5 & 0x3FF, bits & 0x8000 != 0
        magnitude = _count_above(u, ROUNDED_NORMAL)
    else:
        u, negative = bits & 0x7FFFFFFF, bits < 0
        magnitude = _count_above(u, ROUNDED_NORMAL_EXACT)
    return torch.where(negative & (magnitude > 0), -magnitude, magnitude)


def _count_above(u: Tensor, thresholds: tuple[int, ...]) -> Tensor:
    """Return the number of thresholds above u, float32."""
    return sum(((u < t).float() for t in thresholds), torch.zeros_like(u, dtype=torch.float32))


def noise(draw: Draw, rows: int, columns: int, kind: str) -> Tensor:
    """Return R for each element by its coordinates, float32[rows, columns]."""
    return noise_of(philox.random_bits(draw, rows, columns, width(kind)), kind)


def packed_noise(draw: Draw, rows: int, columns: int, kind: str) -> Tensor:
    """Return R in 4 bits, eight elements per word, int32[rows, ceil(columns / 8)], for the kinds whose R is an integer.

    A code has |R| in the lower three bits and the sign on top; the first element is lowest. Example: R = 1, -2, 0, ... is the
    word 0x...0A1.
    """
    r = noise(draw, rows, columns, kind).to(torch.int64)
    codes = torch.nn.functional.pad(r.abs() | (r < 0).long() << 3, (0, -columns % 8))
    words = (codes.reshape(rows, -1, 8) << torch.arange(0, 32, 4, device=r.device)).sum(-1)
    return words.to(torch.int32)  # keeps the low 32 bits


def pow2(x: Tensor) -> Tensor:
    """Return 2^x for float32 `x`, clamped to [-126, 127]: exact for integers, else within 1.23 ulp.

    The nearest integer becomes the exponent; the polynomial `POW2` takes the remainder, which is exact.
    """
    x = x.clamp(-126.0, 127.0)  # NaN stays
    large = x + 1.5 * 2.0**23  # no bits left for a fraction: the adder rounds, and the low bits are the integer
    fraction = x - (large - 1.5 * 2.0**23)
    value = torch.full_like(fraction, POW2[-1])
    for coefficient in POW2[-2::-1]:
        value = value * fraction + coefficient
    value = value * fraction + 1.0
    exponent = large.view(torch.int32) - 0x4B400000
    return torch.where(x.isnan(), x, (value.view(torch.int32) + (exponent << 23)).view(torch.float32))


def block_count(rows: int, columns: int, block: int) -> tuple[int, int]:
    """Return the number of blocks (down, across)."""
    return -(-rows // block), -(-columns // block)


def block_amax(w: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of each block of w [N, K], float32[ceil(N / block), ceil(K / block)]; NaN if it has NaN."""
    return _blocks(w.float().abs(), block).amax(dim=(1, 3))


def sample(
    w: Tensor,
    b_t: Tensor,
    draw: Draw,
    kind: str,
    block: int,
    dtype: torch.dtype,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (w_hat [N, K] in `dtype`, float32 largest magnitudes of the blocks) for w [N, K] and b_t, one float32 per block.

    `out`, if given, is overwritten with both. If R is 0, w_hat is w. Example: w = 3 in a block whose largest magnitude is 4,
    b_t = 5, R = -1: w_hat = 3 - 4 * 2^-4 = 2.75.
    """
    amax = block_amax(w, block)
    x = w.float().contiguous()
    if kind != "none":
        rows, columns = w.shape
        r = noise(draw, rows, columns, kind)
        scale = _spread(block_scale(amax, b_t), block, rows, columns)
        x = x + torch.where(r == 0, -0.0, r) * scale  # adding -0 keeps a weight of -0
    w_hat = to_dtype(x, dtype)
    return (w_hat, amax) if out is None else (out[0].copy_(w_hat), out[1].copy_(amax))


def block_scale(amax: Tensor, b_t: Tensor) -> Tensor:
    """Return amax * 2^(1 - b_t), at most 2^126: the factor of R, in the shape of both.

    The limit keeps 2 R * scale finite, so that a block with an Inf keeps its other numbers where R is 0. A NaN makes its whole
    block NaN.
    """
    return (amax * pow2(1.0 - b_t)).clamp(max=2.0**126)


def sample_backward(
    grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of w (`grad` itself if it has `dtype`) and of b_t, from the gradient of w_hat [N, K].

    dL/dw = dL/dw_hat; dL/db_t = -ln 2 * scale * sum_block(dL/dw_hat * R), with the largest magnitude taken as constant.
    """
    grad_w = grad if grad.dtype == dtype else to_dtype(grad.contiguous(), dtype)
    return grad_w, bitwidth_grad(grad, amax, b_t, draw, kind, block)


def bitwidth_grad(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int) -> Tensor:
    """Return the gradient of b_t alone, float32 in its shape."""
    if kind == "none":
        return torch.zeros_like(b_t)
    P, Q = b_t.shape
    padded = _blocks(grad.float(), block).reshape(P * block, Q * block)
    products = padded * noise(draw, P * block, Q * block, kind)
    return block_sum(products, block) * block_scale(amax, b_t) * -LN2


def block_sum(x: Tensor, block: int) -> Tensor:
    """Return the sums over the blocks of x [P * block, Q * block], float32[P, Q], in an order that every device follows.

    Add neighbouring columns in pairs, three times. Then, with the block in row order, add its first half to its second until
    one number is left. Each addition has two operands.
    """
    rows, columns = x.shape
    for _ in range(3):
        x = x[:, 0::2] + x[:, 1::2]
    x = x.reshape(rows // block, block, columns // block, block // 8).transpose(1, 2).flatten(2)
    while x.shape[2] > 1:
        first, second = x.chunk(2, dim=2)
        x = first + second
    return x.squeeze(2)


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `x` to nearest in `dtype`, ties to even. 16-bit types overflow to Inf, which shows; FP8 saturates, as casts do."""
    if x.dtype == dtype:
        return x
    format: Format = DTYPES[dtype]
    values = rounding.round_values(x.float(), format, Rounding("nearest"), format.bits == 8, None)
    if format.bits == 8:
        return rounding.encode(values, format).to(torch.uint8).view(dtype)
    return values.to(dtype)  # exact


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return x [N, K] as [P, block, Q, block], padded with zeros."""
    P, Q = block_count(x.shape[0], x.shape[1], block)
    padded = torch.nn.functional.pad(x, (0, Q * block - x.shape[1], 0, P * block - x.shape[0]))
    return padded.contiguous().reshape(P, block, Q, block)


def _spread(groups: Tensor, block: int, rows: int, columns: int) -> Tensor:
    """Repeat one value per block to one per element, [rows, columns]."""
    return groups.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
