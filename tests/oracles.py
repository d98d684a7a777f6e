"""Expected results from other people's code: ml_dtypes, gfloat, randomgen, and plain numpy and fractions.

Nothing here imports dither: a test that takes its expectation from this file compares two independent implementations.
"""

import functools
import itertools
import math
import re
from fractions import Fraction

import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import randomgen
from gfloat import Domain, FormatInfo, RoundMode

# Formats --------------------------------------------------------------------------------------------------------------

ML_DTYPES = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "int8": np.int8,
    "int4": ml_dtypes.int4,
}
"""Our names, and the numpy types that have the same codes."""

_GFLOAT = {
    "fp32": gf.format_info_binary32,
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
    "e4m3": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e3m2": gf.format_info_ocp_e3m2,
    "e2m3": gf.format_info_ocp_e2m3,
    "e2m1": gf.format_info_ocp_e2m1,
    "e8m0": gf.format_info_ocp_e8m0,
}

INTEGERS = {"int8": 127, "int4": 7, "int3": 3, "int2": 1}
"""Symmetric integer formats and their largest value."""


def gfloat_format(name: str) -> FormatInfo:
    """gfloat's description of a format: its own where it has one, else eXmY built from its fields.

    IEEE-like (Inf, and NaN in all other codes of the top exponent) from 8 bits on; finite in every code below that. `fn` has
    the top code as NaN, `fnuz` that of -0.
    """
    if name in _GFLOAT:
        return _GFLOAT[name]
    e, m, b, kind = re.fullmatch(r"e(\d+)m(\d+)(?:b(\d+))?(fn|fnuz)?", name).groups()
    e, m = int(e), int(m)
    ieee = kind is None and 1 + e + m >= 8
    return FormatInfo(
        name,
        1 + e + m,
        m + 1,
        bias=2 ** (e - 1) - (kind != "fnuz") if b is None else int(b),
        is_signed=True,
        domain=Domain.Extended if ieee else Domain.Finite,
        has_nz=kind != "fnuz",
        num_high_nans=2**m - 1 if ieee else int(kind == "fn"),
        has_subnormals=True,
        is_twos_complement=False,
    )


def decode(name: str, codes: np.ndarray) -> np.ndarray:
    """float64 values of codes, by gfloat; symmetric integers by arithmetic, the code beyond the range being NaN."""
    if name in INTEGERS:
        top = INTEGERS[name] + 1
        values = codes.astype(np.float64)
        values = np.where(values >= top, values - 2 * top, values)
        return np.where(values == -top, np.nan, values)
    return gfloat.decode_ndarray(gfloat_format(name), codes.astype(np.int64))


def encode(name: str, values: np.ndarray) -> np.ndarray:
    """int64 codes of values of the format (NaN only where it has one), by gfloat or two's complement."""
    if name in INTEGERS:
        return values.astype(np.int64) & (2 * INTEGERS[name] + 1)
    return gfloat.encode_ndarray(gfloat_format(name), values.astype(np.float64)).astype(np.int64)


@functools.cache
def finite_values(name: str) -> np.ndarray:
    """Every finite value of a format once, ascending, float64."""
    bits = int(name[3:]) if name in INTEGERS else gfloat_format(name).k
    values = decode(name, np.arange(2**bits))
    return np.unique(values[np.isfinite(values)] + 0.0)


# Inputs ---------------------------------------------------------------------------------------------------------------


def all_bfloat16() -> np.ndarray:
    """The 65,536 BF16 numbers as float32, NaN payloads included."""
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def all_float16() -> np.ndarray:
    """The 65,536 FP16 numbers as float32."""
    with np.errstate(invalid="ignore"):
        return np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def float32_patterns(count: int, seed: int) -> np.ndarray:
    """Random float32 bit patterns: every exponent as likely as any other, so most formats overflow and underflow."""
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def widen(x: np.ndarray) -> np.ndarray:
    """float64 of the same numbers; numpy warns where a signalling NaN is among them."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.float64)


# Rounding -------------------------------------------------------------------------------------------------------------


def round_gfloat(
    name: str,
    x: np.ndarray,
    mode: RoundMode = RoundMode.TiesToEven,
    *,
    saturate: bool = True,
    srbits: np.ndarray | None = None,
    srnumbits: int = 0,
) -> np.ndarray:
    """float64 results of gfloat for float32 `x`: computed in float64, where each of its steps is exact."""
    return gfloat.round_ndarray(gfloat_format(name), widen(x), mode, saturate, srbits, srnumbits)


def round_ml(name: str, x: np.ndarray) -> np.ndarray:
    """float64 results of casting float32 `x` by ml_dtypes, which never saturates, and back."""
    with np.errstate(over="ignore", invalid="ignore"):
        return widen(x.astype(ML_DTYPES[name]))


def round_integer(name: str, x: np.ndarray) -> np.ndarray:
    """Nearest, ties to even, clipped to the symmetric range; an integer has no -0.0."""
    return np.clip(np.rint(widen(x)), -INTEGERS[name], INTEGERS[name]) + 0.0


def neighbours(name: str, x: Fraction) -> tuple[Fraction, Fraction]:
    """The values of the format around |x|: (largest not above, smallest not below); beyond the largest: that, twice."""
    values = [Fraction(v) for v in finite_values(name) if v >= 0]
    below = max(v for v in values if v <= abs(x))
    above = min((v for v in values if v >= abs(x)), default=below)
    return below, above


def nearest(name: str, x: Fraction) -> Fraction:
    """Nearest value, ties to the even code, saturating: the definition, by search."""
    values = [Fraction(v) for v in finite_values(name) if v >= 0]
    below, above = neighbours(name, x)
    low, high = abs(x) - below, above - abs(x)
    even = below if values.index(below) % 2 == 0 else above  # codes of the non-negative values are 0, 1, 2, ...
    return (below if low < high else above if high < low else even) * (-1 if x < 0 else 1)


# Comparing ------------------------------------------------------------------------------------------------------------


def mismatches(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where two arrays of numbers differ: NaN equals NaN, and -0.0 differs from 0.0."""
    got, expected = widen(got), widen(expected)
    same = (got == expected) & (np.signbit(got) == np.signbit(expected))
    return ~(same | (np.isnan(got) & np.isnan(expected)))


# Scales ---------------------------------------------------------------------------------------------------------------


def floor_log2(x: Fraction) -> int:
    """floor(log2(x)) by exact comparison with powers of two."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def mx_exponent(amax: float, largest: float) -> int:
    """The OCP MX rule: floor(log2 amax) - emax, within E8M0's -127..127."""
    return min(max(floor_log2(Fraction(amax)) - floor_log2(Fraction(largest)), -127), 127)


def mx_ceil_exponent(amax: float, largest: float) -> int:
    """The smallest E8M0 exponent e with amax <= largest * 2^e."""
    exponent = max(mx_exponent(amax, largest) - 2, -127)  # surely clips, unless it is the lowest there is
    while Fraction(amax) > Fraction(largest) * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def mx_round_exponent(amax: float, largest: float) -> int:
    """The exponent of the power of two nearest to amax / largest, ties up, within E8M0's range."""
    wanted = Fraction(amax) / Fraction(largest)
    exponent = floor_log2(wanted)
    return min(max(exponent + (wanted >= Fraction(3, 2) * Fraction(2) ** exponent), -127), 127)


def mx_rtz_exponent(amax: float, largest: float) -> int:
    """The exponent of amax / largest rounded down to a power of two, within E8M0's range."""
    return min(max(floor_log2(Fraction(amax) / Fraction(largest)), -127), 127)


def four_over_six(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """NVFP4 values, block scales, and the squared errors for 6 and for 4 of blocks [blocks, n] (float32) that are a tensor.

    Block by block (arXiv 2512.02010): one float32 scale from 256 * 6, E4M3 scales that bring the block's largest magnitude to
    6 or to 4, and the one with the smaller squared error, in float64 here.
    """
    f = np.float32
    tensor = f(np.abs(x).max() / f(256 * 6))
    wanted = np.abs(x).max(axis=1) / f(6) / tensor
    found, errors = [], []
    for wider in (1.0, 1.5):
        scale = np.maximum((wanted * f(wider)).astype(ml_dtypes.float8_e4m3fn).astype(f), f(2.0**-9))
        y = x * (f(1) / tensor / scale)[:, None]
        q = np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(f)
        found.append((q * scale[:, None] * tensor, scale))
        errors.append(((widen(y) - q) ** 2).sum(axis=1) * widen(scale) ** 2)
    four = errors[1] < errors[0]
    values = np.where(four[:, None], found[1][0], found[0][0])
    return values, np.where(four, found[1][1], found[0][1]), np.stack(errors)


def float32(x: Fraction) -> np.float32:
    """The float32 nearest to a rational, ties to even, subnormals included; Inf beyond the range."""
    if x == 0:
        return np.float32(0)
    spacing = Fraction(2) ** (max(floor_log2(abs(x)), -126) - 23)
    value = round(x / spacing) * spacing  # Python rounds a Fraction half to even
    return np.float32(np.inf if value > 0 else -np.inf) if abs(value) >= 2**128 else np.float32(float(value))


def group_slices(shape: tuple[int, ...], granularity: str, size: int, axis: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Every group as (its index among the scales, the flat indices of its elements): a slow loop over elements.

    `none` and `tensor`: one group. `row`: along `axis`. `tile`: runs of `size` along `axis`. `block`: size x size in
    the last two dimensions.
    """
    shape = shape or (1,)
    groups: dict[tuple[int, ...], list[int]] = {}
    for flat, index in enumerate(np.ndindex(*shape)):
        place = list(index)
        if granularity in ("none", "tensor"):
            place = []
        elif granularity == "row":
            place[axis] = 0
        elif granularity == "tile":
            place[axis] //= size
        else:
            for d in {max(len(shape) - 2, 0), len(shape) - 1}:
                place[d] //= size
        groups.setdefault(tuple(place), []).append(flat)
    return [(place, np.array(members)) for place, members in groups.items()]


# A whole cast ---------------------------------------------------------------------------------------------------------


def scale_of(
    amax: np.float32, name: str, kind: str, tensor: np.float32 | None, stochastic: bool
) -> tuple[np.float32, np.float32]:
    """(factor to multiply a group by, factor that brings it back), from its largest magnitude, in float32 steps."""
    f = np.float32
    largest = float(finite_values(name)[-1])
    if amax == 0:
        return (f(1) / tensor if kind == "nvfp4" else f(1)), f(1)
    if kind == "fp32":
        multiply = float32(Fraction(largest) / max(Fraction(float(amax)), Fraction(2) ** -126))
        if multiply > f(2.0**126):  # beyond, the factor back would be subnormal
            return f(2.0**126), f(2.0**-126)
        return multiply, float32(Fraction(float(amax)) / Fraction(largest))
    if kind in ("pow2", "pow2_ceil"):
        exponent = (mx_exponent if kind == "pow2" else mx_ceil_exponent)(float(amax), largest)
        return f(2.0**-exponent), f(2.0**exponent)
    wanted = f(f(amax) / f(largest)) / tensor
    scales = finite_values("e4m3")
    scales = scales[scales > 0]
    if stochastic:
        block = f(min((v for v in scales if v >= wanted), default=448.0))
    else:
        block = f(max(min(round_ml("e4m3", np.array([wanted]))[0] if wanted <= 448 else 448.0, 448.0), scales[0]))
    return (f(1) / tensor) / block, block


def cast_by_loop(
    x: np.ndarray,
    name: str,
    granularity: str,
    size: int,
    kind: str,
    axis: int,
    rounding: str,
    bits: int = 0,
    random: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[tuple[int, ...], float], float | None, np.ndarray]:
    """A cast of float32 `x`, group after group: (values of the format, scale by group, tensor scale, numbers back)."""
    flat, values, back = x.reshape(-1), np.zeros(x.size, np.float64), np.zeros(x.size, np.float32)
    draws = None if random is None else random.reshape(-1)
    scales: dict[tuple[int, ...], float] = {}
    tensor = None
    if kind == "nvfp4":
        amax = np.float32(np.abs(flat).max())
        tensor = np.float32(1) if amax == 0 else max(amax / np.float32(448 * finite_values(name)[-1]), np.float32(2.0**-126))
    for place, members in group_slices(x.shape, granularity, size, axis):
        multiply, restore = np.float32(1), np.float32(1)
        if kind != "none":
            multiply, restore = scale_of(np.abs(flat[members]).max(), name, kind, tensor, rounding == "stochastic")
            scales[place] = float(restore)
        scaled = flat[members] * multiply
        if name in INTEGERS:
            values[members] = round_integer(name, scaled)
        elif rounding == "stochastic":
            values[members] = round_gfloat(name, scaled, RoundMode.StochasticFastest, srbits=draws[members], srnumbits=bits)
        else:
            mode = RoundMode.TiesToEven if rounding == "nearest" else RoundMode.TowardZero
            values[members] = round_gfloat(name, scaled, mode)
        number = values[members].astype(np.float32) * restore
        back[members] = number if tensor is None else number * tensor
    return values.reshape(x.shape), scales, None if tensor is None else float(tensor), back.reshape(x.shape)


def unpack(stored: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of `bits` bits along the last axis of bytes: one long little-endian bit string, read `bits` at a time."""
    out = np.zeros((*stored.shape[:-1], count), np.int64)
    for index in np.ndindex(*stored.shape[:-1]):
        string = int.from_bytes(stored[index].tobytes(), "little")
        out[index] = [string >> bits * i & ((1 << bits) - 1) for i in range(count)]
    return out


# Randomness -----------------------------------------------------------------------------------------------------------


def philox_words(key: int, counter: tuple[int, int, int, int], count: int) -> np.ndarray:
    """uint64[count], 32 bits each: the words of blocks counter, counter + 1, ... by randomgen's Philox4x32-10.

    randomgen takes the four 32-bit counter words as one 128-bit number, least significant first, and adds one to it
    before it makes a block; so it starts one below. Adding one moves the first word, which is our block number.
    """
    number = sum(word << 32 * place for place, word in enumerate(counter))
    generator = randomgen.Philox(counter=(number - 1) % 2**128, key=key % 2**64, number=4, width=32)
    return generator.random_raw(count)


def row_bits(key: int, row: int, step: int, columns: int, width: int) -> np.ndarray:
    """uint64[columns]: the `width` bits that each element of a row draws, read off one long little-endian string."""
    words = philox_words(key, (0, row, step, 0), 4 * math.ceil(columns * width / 128)).astype("<u4")
    return words.view(f"<u{width // 8}")[:columns].astype(np.uint64)


# Optimizers -----------------------------------------------------------------------------------------------------------


@functools.cache
def dynamic_map(signed: bool, decades: int = 7) -> np.ndarray:
    """float32[256], ascending: the values of bitsandbytes' `create_dynamic_map`, each rounded from its exact fraction.

    Its loop, with fractions: decade i has 2^i (without sign 2^(i + 1)) values, the middles between neighbours of
    linspace(0.1, 1), times 10^(i - 6); then 0 and 1. Three decades with sign are the 16 values of torchao's AdamW4bit.
    """
    values = [Fraction(0), Fraction(1)]
    for i in range(decades):
        parts = 2**i if signed else 2 ** (i + 1)
        ends = [Fraction(1, 10) + Fraction(9, 10) * j / parts for j in range(parts + 1)]
        means = [(low + high) / 2 * Fraction(10) ** (i - decades + 1) for low, high in itertools.pairwise(ends)]
        values += [*means, *(-mean for mean in means)] if signed else means
    return np.array([float32(value) for value in sorted(values)])


@functools.cache
def dynamic_values(signed: bool, decades: int = 7) -> np.ndarray:
    """The same as they are decoded: step * (t - first) with float32 constants, which is within two units of the last place."""
    exact, values = dynamic_map(signed, decades), []
    for code in range(len(exact)):
        p = abs(code - 2**decades + 1) if signed else code
        t = p if signed else p + 1
        k = t.bit_length() - 1
        i = k if signed else k - 1
        if p == 0 or i == decades:  # zero and one
            values.append(exact[code])
            continue
        parts = 2**k
        step = float32(Fraction(10) ** (i - decades + 1) * Fraction(9, 10) / parts)
        first = float32(Fraction(parts) * Fraction(8, 9) - Fraction(1, 2))
        values.append(np.sign(exact[code]) * ((np.float32(t) - first) * step))
    return np.array(values, np.float32)


def dynamic_code(x: np.ndarray, signed: bool, decades: int = 7) -> np.ndarray:
    """The codes of the values nearest to `x`, by search."""
    return np.abs(widen(x)[..., None] - widen(dynamic_map(signed, decades))).argmin(-1)


def adamw_constants(
    t: int, lr: float, betas: tuple[float, float], eps: float, decay: float, factor: float = 1.0
) -> dict[str, np.float32]:
    """What step t multiplies by, each a float32: powers by exact fractions, then one rounding for each operation."""
    f = np.float32
    left1, left2 = (f(1.0 - float(Fraction(beta) ** t)) for beta in betas)
    return {
        "scale": f(factor),
        "beta1": f(betas[0]),
        "rest1": f(1 - betas[0]),
        "beta2": f(betas[1]),
        "rest2": f(1 - betas[1]),
        "decay": f(1 - lr * decay),
        "shrink": f(lr * decay),
        "size": f(lr) / left1 * f(2.0**-48),
        "root": f(1) / np.sqrt(left2),
        "eps": f(eps),
        "feedback": f(1 - betas[0]) / f(betas[0]) / (f(lr) / left1),
    }


def adamw_moments(g: np.ndarray, m: np.ndarray, v: np.ndarray, c: dict[str, np.float32]) -> tuple[np.ndarray, np.ndarray]:
    """First and second moment after a step, float32, before they are rounded."""
    g = g * c["scale"]
    return c["beta1"] * m + c["rest1"] * g, c["beta2"] * v + c["rest2"] * (g * g)


def adamw_move(m: np.ndarray, v: np.ndarray, c: dict[str, np.float32]) -> np.ndarray:
    """What a step takes off the weights, beside the decay: numpy's float32 operations are exactly rounded."""
    quotient = (m * np.float32(2.0**48)) / (np.sqrt(v) * c["root"] + c["eps"])
    quotient = np.where(np.abs(quotient) < np.float32(2.0**-100), np.float32(0), quotient)
    quotient = np.where(np.isfinite(v) & np.isfinite(quotient), quotient, np.float32(np.nan))
    return c["size"] * quotient


def stored(x: np.ndarray, name: str, random: np.ndarray | None = None) -> np.ndarray:
    """float32 values of float32 `x` in a format without scales, to nearest or by 16 random bits; overflow is Inf."""
    if name == "fp32":
        return x
    mode = RoundMode.TiesToEven if random is None else RoundMode.StochasticFastest
    bits = {} if random is None else {"srbits": random.astype(np.int64), "srnumbits": 16}
    return round_gfloat(name, x, mode, saturate=False, **bits).astype(np.float32)


def stored_in_blocks(
    x: np.ndarray, name: str, block: int, signed: bool, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, values) of float32 matrix `x` in 8 or 4 bits, block after block of each row."""
    rows, columns = x.shape
    codes, scales = np.zeros(x.shape, np.int64), np.zeros((rows, math.ceil(columns / block)), np.float32)
    values = np.zeros(x.shape, np.float32)
    for row in range(rows):
        for number in range(scales.shape[1]):
            part = slice(number * block, min((number + 1) * block, columns))
            amax = np.abs(x[row, part]).max()
            if name == "dynamic8":
                multiply = np.float32(1) / amax if amax else np.float32(1)
                scales[row, number] = amax or 1
                codes[row, part] = dynamic_code(x[row, part] * multiply, signed)
                numbers = dynamic_values(signed)[codes[row, part]]
            elif name == "dynamic4":
                multiply = np.float32(1) / amax if amax else np.float32(1)
                scales[row, number] = amax or int(signed)
                if signed:
                    codes[row, part] = dynamic_code(x[row, part] * multiply, True, 3)
                    numbers = dynamic_values(True, 3)[codes[row, part]]
                else:  # torchao's linspace(0, 1, 17) without its first value
                    codes[row, part] = np.maximum(np.rint(x[row, part] * multiply * 16) - 1, 0)
                    numbers = np.linspace(0, 1, 17)[1:][codes[row, part]]
            elif name == "companded8":
                codes[row, part], scales[row, number], values[row, part] = companded(x[row, part], signed)
                continue
            else:
                multiply, scales[row, number] = scale_of(amax, name, "fp32", None, False)
                scaled = x[row, part] * multiply
                if name in INTEGERS and random is None:
                    numbers = round_integer(name, scaled)
                elif name in INTEGERS:  # the first 16 bits of the fraction plus the random bits reach 2^16
                    size = np.abs(widen(scaled))
                    up = np.floor((size - np.floor(size)) * 65536) + random[row, part] >= 65536
                    numbers = np.sign(widen(scaled)) * np.minimum(np.floor(size) + up, INTEGERS[name]) + 0.0
                else:
                    mode = RoundMode.TiesToEven if random is None else RoundMode.StochasticFastest
                    bits = {} if random is None else {"srbits": random[row, part].astype(np.int64), "srnumbits": 16}
                    numbers = round_gfloat(name, scaled, mode, **bits)
                codes[row, part] = encode(name, numbers)
            values[row, part] = numbers.astype(np.float32) * scales[row, number]
    if name == "dynamic4":
        codes = np.pad(codes, ((0, 0), (0, columns % 2)))
        codes = codes[:, ::2] * 16 + codes[:, 1::2]
    return codes, scales, values


def companded(x: np.ndarray, signed: bool) -> tuple[np.ndarray, np.float32, np.ndarray]:
    """(codes as bytes, scale, values) of one block of companded states, in exact fractions up to the rounding."""
    if signed:
        amax = np.abs(x).max()
        largest, codes = Fraction(float(amax)), []
        for number in map(Fraction, x.astype(float)):
            share = number / largest if largest else Fraction(0)
            codes.append(round(127 * 2 * share / (1 + abs(share))))
        code = np.array(codes)
        inverse = np.float32(1) / (254 - np.abs(code)).astype(np.float32)
        return code % 256, amax, amax * (code.astype(np.float32) * inverse)
    root = np.sqrt(x)
    multiply = np.float32(255) / root.max() if root.max() else np.float32(0)
    code, scale = np.rint(root * multiply).astype(np.int64), root.max() / np.float32(255)
    return code, scale, (code.astype(np.float32) * scale) ** 2


# Sampled weights ------------------------------------------------------------------------------------------------------


def noise_row(key: int, row: int, step: int, columns: int, kind: str) -> np.ndarray:
    """float64[columns]: R of a row, by the words of randomgen's generator and comparisons of Python integers."""
    if kind == "none":
        return np.zeros(columns)
    found = []
    for bits in map(int, row_bits(key, row, step, columns, 32 if kind == "rounded_normal_exact" else 16)):
        if kind == "uniform":
            found.append(float(np.float32((2 * bits + 1) / 2**17 - 0.5).astype(ml_dtypes.bfloat16)))
        elif kind == "rounded_normal":
            u = bits % 2**15 // 2**5
            found.append((-1.0 if bits >= 2**15 else 1.0) * ((u < 291) + (u < 3)))
        else:
            above = [bits % 2**31 < round(2**31 * math.erfc((2 * k - 1) / math.sqrt(2))) for k in (1, 2, 3, 4)]
            found.append((-1.0 if bits >= 2**31 else 1.0) * sum(above))
    return np.array(found)


def sampled(w: np.ndarray, b_t: np.ndarray, r: np.ndarray, power: np.ndarray, block: int) -> np.ndarray:
    """float32 w + R * (amax * 2^(1 - b_t)), element after element, `power` being 2^(1 - b_t) of each block."""
    out = w.astype(np.float32)
    for i, j in itertools.product(range(b_t.shape[0]), range(b_t.shape[1])):
        rows, columns = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
        scale = np.abs(out[rows, columns]).max() * power[i, j]
        moved = out[rows, columns] + r[rows, columns].astype(np.float32) * scale
        out[rows, columns] = np.where(r[rows, columns] == 0, out[rows, columns], moved)
    return out


def block_total(x: np.ndarray) -> np.float32:
    """The sum of a square block of float32 numbers: pairs of columns three times, then halves of all that is left."""
    rows = [[np.float32(v) for v in line] for line in x]
    for _ in range(3):
        rows = [[a + b for a, b in zip(line[::2], line[1::2], strict=True)] for line in rows]
    line = [number for row in rows for number in row]
    while len(line) > 1:
        half = len(line) // 2
        line = [a + b for a, b in zip(line[:half], line[half:], strict=True)]
    return line[0]
