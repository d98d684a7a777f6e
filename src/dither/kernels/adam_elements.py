"""Device functions that AdamW's and Adam-mini's kernels share: one element's update, and how it is loaded and stored.

Legend, here and in `dither.kernels.adam_kernels`:

    w, g, m, v     weights, gradients, first and second moments of a tile, float32[TILE]
    extra          the float32 master weights, or Kahan's remainder; w itself in MODE "plain"; in memory, the low bits of
                   masters that are split (`dither.reference.masters`)
    offset         int[TILE]: where the elements lie in memory, counted from the tile's base
    inside         bool[TILE]: False for lanes beyond the end of the tensor
    row, column    coordinates in the whole parameter, by which random bits are drawn
    W, WH          format of the weights (`rounding.Fields`) and their rounding (`rounding.RoundingConstants`)
    F, FH, S       format of the states, their rounding, and the scaling of 8-bit states (`scaling.Scaling`)
    H              a rounding in general: WH or FH
    MODE           how weights are kept: "plain", "kahan", or with masters: "master" (float32), "split" or "split24"
    KIND           how moments are kept: "whole" (fp32, bf16), "codes" (8-bit formats), "dynamic8" or "companded8"
    GROUP          neighbours in a row that share the scale of an 8-bit state
    W_TYPE, G_TYPE, S_TYPE    types of weights, gradients and states in memory; E_TYPE that of `extra`
    W_STORE, S_STORE          integers of the size of weights and states, as which they are stored
    TILE, TILES    elements of a tile, and tiles of a program
    FLAT           rows are whole Philox blocks (and whole groups), so tiles run over the ends of rows and no lane is idle
    ALIGNED        all addresses are multiples of 16 bytes
    NATIVE         the GPU's own instructions may be used
"""

import triton
import triton.language as tl

from dither.adam_update import BITS, ODD_FACTOR
from dither.kernels import companded, dynamic
from dither.kernels.philox import random_calls, random_elements
from dither.kernels.rounding import QUIET_NAN, as_bits, as_float, decode, encode, round_bits
from dither.kernels.scaling import group_factors
from dither.kernels.tiles import native_codes

ODD = tl.constexpr(ODD_FACTOR)
LANES = tl.constexpr(128 // BITS)
"""Number of adjacent elements per Philox call."""


@triton.jit
def _bf16_bits(x, random, H: tl.constexpr):
    """Return int32 bits whose upper half is the bfloat16 number that float32 `x` rounds to. Overflow is Inf, NaN stays NaN.

    Half a unit (or random bits) is added below the last kept bit. A carry into the exponent is right, up to infinity itself.

        x = 1 + 3 * 2^-9 has the bits 0x3F80C000. To nearest: + 0x7FFF -> 0x3F813FFF, upper half 0x3F81 = 1 + 2^-7.
        Stochastically, 16 random bits r: the upper half is 0x3F81 if r >= 0x4000, three times in four.
    """
    bits = as_bits(x)
    if H.NATIVE:
        # A GPU's NaN is 0x7FFFFFFF, whatever its operands were: one instruction in place of a comparison and a selection.
        bits = tl.minimum(bits, QUIET_NAN)
    if H.KIND == "stochastic":
        moved = bits + random
    else:
        moved = bits + 0x7FFF + ((bits >> 16) & 1)
    return moved if H.NATIVE else tl.where(x == x, moved, QUIET_NAN)


@triton.jit
def rounded(x, random, F: tl.constexpr, H: tl.constexpr):
    """Round float32 `x` to values of format F, as float32. Overflow becomes Inf, NaN stays NaN."""
    if F.M == 23:
        return x
    elif F.BIAS == 127:
        return as_float(_bf16_bits(x, random, H) & -65536)
    else:
        bits = as_bits(x)
        return as_float(round_bits(bits, bits, random, F, H, False))


@triton.jit
def store_rounded(pointer, offset, x, random, inside, F: tl.constexpr, H: tl.constexpr):
    """Round float32 `x` to format F and store it. `pointer` points to integers of the format's size."""
    if F.M == 23:
        tl.store(pointer + offset, as_bits(x), mask=inside)
    elif F.BIAS == 127:
        tl.store(pointer + offset, (_bf16_bits(x, random, H) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(pointer + offset, encode(as_bits(rounded(x, random, F, H)), F).to(tl.int16), mask=inside)


@triton.jit
def _spread(groups, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Repeat one value per group, [TILE / GROUP], to one per element, [TILE]."""
    return tl.reshape(tl.broadcast_to(groups[:, None], [TILE // GROUP, GROUP]), [TILE])


@triton.jit
def load_codes(
    state,
    offset,
    inside,
    scale,
    blocks,
    blocks_inside,
    tables_ptr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Load an 8-bit moment as float32: value(code) * scale of its block; a companded second moment is the square of that."""
    stored = tl.load(state + offset, mask=inside, other=0)
    codes = stored.to(tl.int32)
    factor = tl.load(scale + blocks, mask=blocks_inside, other=1.0)
    if KIND == "dynamic8":
        values = dynamic.decode(codes, tables_ptr, SIGNED)
    elif KIND != "companded8" and NATIVE and F.BITS == 8 and F.BIAS == 7:
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND != "companded8" and NATIVE and F.BITS == 8 and F.BIAS == 15:
        values = stored.to(tl.float8e5, bitcast=True).to(tl.float32)
    elif KIND != "companded8":
        values = decode(codes, F)
    elif SIGNED:
        values = companded.first_values(codes, NATIVE)
    else:
        values = codes.to(tl.float32)
    moment = values * _spread(factor, GROUP, TILE)
    if KIND == "companded8" and not SIGNED:
        moment = moment * moment
    return moment


@triton.jit
def store_codes(
    state,
    offset,
    inside,
    scale,
    blocks,
    blocks_inside,
    value,
    random,
    tables_ptr,
    F: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    KIND: tl.constexpr,
    SIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Round a float32 moment to 8-bit codes and store them with one scale per block.

    scale = max|value| / (largest value of the format); code = round(value / scale). `value` is the root of a companded second
    moment.
    """
    bits = as_bits(value)
    if SIGNED or not H.NATIVE:
        bits = bits & 0x7FFFFFFF
    if not FLAT:  # else a block is inside or outside as a whole
        bits = tl.where(inside, bits, 0)
    amax = tl.max(tl.reshape(bits, [TILE // GROUP, GROUP]), axis=1)
    if KIND == "companded8":
        largest = tl.where(amax < 0x7F800000, as_float(amax), float("nan"))
        if SIGNED:
            power = companded.power_of_two(amax)
            # At least 2^-100, so that zeros have the code 0; others are at least 2^-30.
            codes = companded.first_codes(
                value,
                _spread(power, GROUP, TILE),
                _spread(254.0 * power, GROUP, TILE),
                _spread(tl.maximum(largest * power, 2.0**-100), GROUP, TILE),
                H.NATIVE,
            )
            restore = largest
        else:
            # Roots of float32 numbers are 0, or from 2^-75 to 2^64.
            most = tl.full([TILE // GROUP], 255.0, tl.float32)
            multiply = companded.divide(most, tl.maximum(largest, 2.0**-80), H.NATIVE)
            codes = companded.second_codes(value, _spread(multiply, GROUP, TILE))
            restore = companded.divide(largest, most, H.NATIVE)
    else:
        multiply, restore, _ = group_factors(amax, 1.0, S, F, H, True, H.NATIVE)
        factor = _spread(multiply, GROUP, TILE)
        if KIND == "dynamic8":
            codes = dynamic.encode(value * factor, tables_ptr, SIGNED)
        elif H.NATIVE and H.KIND == "nearest" and F.BITS == 8 and (F.BIAS == 7 or F.BIAS == 15):
            codes = native_codes(value, factor, F, True, True)
        else:
            y = as_bits(value * factor)
            codes = encode(round_bits(y, y, random, F, H, True), F)
    tl.store(state + offset, codes.to(tl.uint8), mask=inside)
    tl.store(scale + blocks, restore, mask=blocks_inside)


@triton.jit
def moved_weights(w, extra, direction, decay, shrink, size, W: tl.constexpr, WH: tl.constexpr, MODE: tl.constexpr):
    """Return (weights, master or remainder) after a step of `size` along `direction`: float32, still to be rounded.

        plain     w' = decay * w - size * direction
        master    the same on the float32 master weights, split ones too
        kahan     change = remainder - (shrink * w + size * direction);  w' = w + change;
                  remainder' = change - (rounded(w') - w)

    Example of kahan in bfloat16 (spacing 2^-7 above 1): w = 1, remainder 0, change 2^-9. w' = 1 + 2^-9 rounds to 1, and the
    remainder is 2^-9. After three such steps the change is 3 * 2^-9, w' rounds to 1 + 2^-7, and the remainder is -2^-9.
    """
    move = size * direction
    if MODE == "master" or MODE == "split" or MODE == "split24":
        master = extra * decay - move
        return master, master
    elif MODE == "kahan":
        change = extra - (shrink * w + move)
        new = w + change
        return new, change - (rounded(new, new, W, WH) - w)
    else:
        new = w * decay - move
        return new, new


@triton.jit
def joined_masters(w, low, v, MODE: tl.constexpr):
    """Return float32 masters from the weights, the low bits in memory, and the sign of v if MODE is "split"."""
    bits = as_bits(w)
    if MODE == "split24":
        return as_float(bits + (low.to(tl.int32) << 8))
    else:
        return as_float(bits + low.to(tl.int32) + ((as_bits(v) >> 15) & 0x10000))


@triton.jit
def split_masters(master, v, MODE: tl.constexpr):
    """Return (bits of the weights in the upper half, low bits, v with the sign that marks a tie), see `joined_masters`.

    Example of split: 1 + 2^-8 has the bits 0x3F808000, half a unit above 0x3F80, which is even: low is +2^15, a tie.
    """
    bits = as_bits(master)
    number = master == master
    if MODE == "split24":
        rounded = (bits + 0x7F + ((bits >> 8) & 1)) & -256
        upper = (rounded + 0x8000) & -65536
        low = tl.where(number, (rounded - upper) >> 8, 0).to(tl.int8)
    else:
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        wide = tl.where(number, bits - upper, 0)
        v = tl.where(wide == 0x8000, v * -1.0, v)  # -v is 0 - v in Triton, which has no sign for 0
        low = wide.to(tl.int16)
    return tl.where(number, upper, QUIET_NAN), low, v


@triton.jit
def square_root(v, NATIVE: tl.constexpr):
    """Return sqrt(v), rounded once, for float32 v >= 0; NaN for infinity.

    The GPU's own sqrt.rn is this sequence for the middle of the range and a branch for the rest. A branch per element keeps
    the elements of a thread from overlapping, so small numbers are scaled instead: 0.99 ms against 1.21 ms for a step.
    """
    small = v < 2.0**-100
    scaled = v * tl.where(small, 2.0**48, 1.0)
    if NATIVE:
        # At least 2^-102: the inverse root of zero is infinite.
        above = tl.maximum(scaled, 2.0**-102)
        inverse = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [above], dtype=tl.float32, is_pure=True, pack=1
        )
        guess = scaled * inverse
        result = tl.fma(tl.fma(guess * -1.0, guess, scaled), inverse * 0.5, guess)
    else:
        result = tl.sqrt_rn(scaled)
        result = tl.where(scaled < float("inf"), result, float("nan"))
    return result * tl.where(small, 2.0**-24, 1.0)


def _roots_of_eight() -> str:
    """Return PTX for the roots of eight numbers: `square_root`'s sequence, without its scaling if none is below 2^-100."""
    lines = ["{", ".reg .pred small;", ".reg .f32 least, inverse, half, guess, rest, scaled, factor, above;"]
    lines += ["min.f32 least, $8, $9;", *(f"min.f32 least, least, ${i};" for i in range(10, 16))]
    lines += ["setp.lt.f32 small, least, 0f0D800000;", "@small bra SMALL;"]
    ends = [
        "mul.rn.f32 half, inverse, 0f3F000000;",
        "neg.f32 rest, guess;",
    ]
    for i in range(8):
        lines += [f"rsqrt.approx.ftz.f32 inverse, ${8 + i};", f"mul.rn.f32 guess, ${8 + i}, inverse;", *ends]
        lines += [f"fma.rn.f32 rest, rest, guess, ${8 + i};", f"fma.rn.f32 ${i}, rest, half, guess;"]
    lines += ["bra DONE;", "SMALL:"]
    for i in range(8):
        lines += [f"setp.lt.f32 small, ${8 + i}, 0f0D800000;", "selp.f32 factor, 0f57800000, 0f3F800000, small;"]
        lines += [f"mul.rn.f32 scaled, ${8 + i}, factor;", "max.f32 above, scaled, 0f0C800000;"]
        lines += ["rsqrt.approx.ftz.f32 inverse, above;", "mul.rn.f32 guess, scaled, inverse;", *ends]
        lines += ["fma.rn.f32 rest, rest, guess, scaled;", "fma.rn.f32 guess, rest, half, guess;"]
        lines += ["selp.f32 factor, 0f33800000, 0f3F800000, small;", f"mul.rn.f32 ${i}, guess, factor;"]
    return "\n".join([*lines, "DONE:", "}"])


ROOTS_OF_EIGHT = tl.constexpr(_roots_of_eight())
EIGHT_REGISTERS = tl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))


@triton.jit
def square_roots(v, NATIVE: tl.constexpr):
    """Return `square_root` of a tile with at least eight elements per thread. Eight share one branch for small numbers."""
    if NATIVE:
        return tl.inline_asm_elementwise(ROOTS_OF_EIGHT, EIGHT_REGISTERS, [v], dtype=tl.float32, is_pure=True, pack=8)
    else:
        return square_root(v, NATIVE)


@triton.jit
def quotient(m, d, NATIVE: tl.constexpr):
    """Return 2^48 m / d, rounded once, for d from 10^-30 to 10^30; 0 below 2^-100, NaN for infinity.

    Written without branches, as `square_root`. The factor 2^48 keeps the quotient a normal number for every m; the step's
    `size` holds 2^-48.
    """
    scaled = m * 2.0**48
    if NATIVE:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
        minus = d * -1.0  # -d is 0 - d in Triton, an instruction; this is part of the next one
        inverse = tl.fma(inverse, tl.fma(minus, inverse, 1.0), inverse)
        result = scaled * inverse
        result = tl.fma(tl.fma(minus, result, scaled), inverse, result)
        result = tl.fma(tl.fma(minus, result, scaled), inverse, result)
    else:
        result = tl.div_rn(scaled, d)
        result = tl.where(tl.abs(result) < float("inf"), result, float("nan"))
    return tl.where(tl.abs(result) < 2.0**-100, 0.0, result)


@triton.jit
def first_place(e0, columns):
    """Return (row, column) of element number `e0` in a matrix, uint32; a division, for the first tile of a program."""
    row = e0 // columns
    return row.to(tl.uint32), (e0 - row * columns).to(tl.uint32)


@triton.jit
def next_place(row, column, columns, TILE: tl.constexpr):
    """Return (row, column) of the element TILE further on."""
    wide = columns.to(tl.uint32)
    column += TILE
    if columns >= TILE:  # at most one row's end lies between, and no division is needed
        down = (column >= wide).to(tl.uint32)
    else:
        down = column // wide
    return row + down, column - down * wide


@triton.jit
def coordinates(
    e0,
    size,
    columns,
    row0,
    column0,
    first_row,
    first_column,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Return (offset, inside, row, column) of the elements from number `e0` on; see the legend.

    FLAT gives one row and column per Philox call, [TILE / LANES]; otherwise there is one per element, [TILE], and the
    numbering pads rows to whole groups. `first_row` and `first_column` are the place of `e0`; only FLAT reads them.
    """
    if FLAT:
        # A call's column is counted from the first row's start: it may lie some rows further down.
        offset = tl.arange(0, TILE)
        call = (tl.arange(0, TILE // LANES) * LANES).to(tl.uint32) + first_column
        wide = columns.to(tl.uint32)
        if columns >= TILE:  # a tile has one row's end at most, and needs no division
            down = (call >= wide).to(tl.uint32)
        else:
            down = call // wide
        row = row0.to(tl.uint32) + first_row + down
        column = column0.to(tl.uint32) + (call - down * wide)
        return offset, e0 + offset < size, row, column
    else:
        pitch = tl.cdiv(columns, GROUP) * GROUP
        e = e0 + tl.arange(0, TILE)
        row = e // pitch
        column = e - row * pitch
        offset = row * columns + column
        return offset, (column < columns) & (offset < size), row0 + row, column0 + column


@triton.jit
def random_bits(key, step, row, column, TILE: tl.constexpr, FLAT: tl.constexpr):
    """Return 16 random bits per element, int32[TILE]."""
    if FLAT:
        return random_calls(key, step, row, column, TILE // LANES, 16)
    else:
        return random_elements(key, step, row, column, 16)


@triton.jit
def second_random_bits(random):
    """Return the bits for the second moment from those for the first: an odd factor modulo 2^16 permutes them."""
    return (random * ODD) & 0xFFFF
