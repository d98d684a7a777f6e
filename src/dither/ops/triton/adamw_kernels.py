"""The kernels of AdamW, Adam-mini and Muon: one pass over memory, many tensors per launch; see `dither.ops.reference.adamw`.

Tables in device memory say where each tensor lies (`ops.triton.adamw_tables`). A program looks up the piece that its tiles
belong to. A tile is TILE elements in memory order.

Legend:

    w, g, m, v     weights, gradients, first and second moments of a tile, float32[TILE]
    extra          the float32 master weights, or Kahan's remainder; w itself in MODE "plain"; in memory, the low bits of
                   masters that are split (`dither.ops.reference.adamw`)
    offset         int[TILE]: where the elements lie in memory, counted from the tile's base
    inside         bool[TILE]: False for lanes beyond the end of the tensor
    row, column    coordinates in the whole parameter, by which random bits are drawn
    W, WH          format of the weights (`rounding.Fields`) and their rounding (`rounding.RoundingConstants`)
    F, FH, S       format of the states, their rounding, and the scaling of 8-bit states (`scales.Scaling`)
    H              a rounding in general: WH or FH
    MODE           how weights are kept: "plain", "kahan", with masters: "master" (float32), "split" or "split24"; or as "codes"
    BLOCK          width of the squares that share a scale, if weights are codes; 0 if a tensor has one scale
    RULE           what a pass does: "adamw"; or one half of Muon: "momentum" or "nesterov" before its orthogonalization, "move"
                   after it
    MEASURES       a pass stores nothing but the largest magnitudes of groups: if weights are codes, it comes before the pass
                   that rounds them
    FEEDS          what the rounding of a weight loses is subtracted from its first moment (error feedback)
    G, GH          format of the gradients, and rounding to nearest, for those that Muon overwrites
    KIND           how moments are kept: "whole" (fp32, bf16), "codes" (8-bit formats), "dynamic8", "companded8" or "dynamic4"
    place          int[TILE]: where the codes of moments lie in memory: `offset`, or the byte of two neighbours ("dynamic4")
    GROUP          neighbours in a row that share the scale of a state in few bits
    W_TYPE, G_TYPE, S_TYPE    types of weights, gradients and states in memory; E_TYPE that of `extra`
    W_STORE, G_STORE, S_STORE    integers of the size of weights, gradients and states, as which they are stored
    TILE, TILES    elements of a tile, and tiles of a program
    FLAT           rows are whole Philox blocks (and whole groups), so tiles run over the ends of rows and no lane is idle
    ALIGNED        all addresses are multiples of 16 bytes
    NATIVE         the GPU's own instructions may be used
"""

import triton
import triton.language as tl

from dither.ops.triton import state_maps, weight_codes
from dither.ops.triton.adamw_tables import (
    AMAX_ADDRESS,
    BETA1,
    BETA2,
    COLUMNS,
    CONSTANTS_ROW,
    DECAY,
    ELEMENTS,
    EPS,
    EXTRA_ADDRESS,
    FEEDBACK,
    FIRST_COLUMN,
    FIRST_PROGRAM,
    FIRST_ROW,
    LEAD_ROWS,
    M_ADDRESS,
    M_SCALE_ADDRESS,
    REST1,
    REST2,
    ROOT,
    ROW,
    RUN_ELEMENTS,
    RUN_ROWS,
    SCALE,
    SHRINK,
    SIZE,
    STATE_KEY,
    V_ADDRESS,
    V_SCALE_ADDRESS,
    W_ADDRESS,
    W_KEY,
    piece_field,
    piece_pointer,
)
from dither.ops.triton.philox import random_calls, random_elements
from dither.ops.triton.rounding import QUIET_NAN, as_bits, as_float, decode, encode, round_bits, widen
from dither.ops.triton.scales import group_factors
from dither.ops.triton.tiles import native_codes
from dither.spec.optimizer import BITS, ODD_FACTOR

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
    state, place, inside, scale, blocks, blocks_inside, tables_ptr,
    F: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Load a moment in few bits as float32: value(code) * scale of its block, squared if it is a companded second moment."""
    stored = tl.load(state + place, mask=inside, other=0)
    codes = stored.to(tl.int32)
    factor = tl.load(scale + blocks, mask=blocks_inside, other=1.0)
    if KIND == "dynamic4":  # of two neighbours, the first is the upper half of a byte
        codes = (codes >> (4 - 4 * (tl.arange(0, TILE) % 2))) & 15
    if KIND == "dynamic8" or KIND == "dynamic4":
        values = state_maps.decode(codes, tables_ptr, SIGNED, KIND == "dynamic4")
    elif KIND != "companded8" and NATIVE and F.FP8 == "e4m3":
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND != "companded8" and NATIVE and F.FP8 == "e5m2":
        values = stored.to(tl.float8e5, bitcast=True).to(tl.float32)
    elif KIND != "companded8":
        values = decode(codes, F)
    elif SIGNED:
        values = state_maps.first_values(codes, NATIVE)
    else:
        values = codes.to(tl.float32)
    moment = values * _spread(factor, GROUP, TILE)
    if KIND == "companded8" and not SIGNED:
        moment = moment * moment
    return moment


@triton.jit
def store_codes(
    state, place, inside, scale, blocks, blocks_inside, value, random, tables_ptr,
    F: tl.constexpr, H: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Round a float32 moment to codes and store them with one scale per block.

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
            power = state_maps.power_of_two(amax)
            # At least 2^-100, so that zeros have the code 0; others are at least 2^-30.
            codes = state_maps.first_codes(
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
            multiply = state_maps.divide(most, tl.maximum(largest, 2.0**-80), H.NATIVE)
            codes = state_maps.second_codes(value, _spread(multiply, GROUP, TILE))
            restore = state_maps.divide(largest, most, H.NATIVE)
    else:
        multiply, restore, _ = group_factors(amax, 1.0, S, F, H, True, H.NATIVE)
        factor = _spread(multiply, GROUP, TILE)
        if KIND == "dynamic8" or KIND == "dynamic4":
            codes = state_maps.encode(value * factor, tables_ptr, SIGNED, KIND == "dynamic4")
        elif H.NATIVE and H.KIND == "nearest" and F.FP8 != "":
            codes = native_codes(value, factor, F, True, True)
        else:
            y = as_bits(value * factor)
            codes = encode(round_bits(y, y, random, F, H, True), F)
    if KIND == "dynamic4":
        if not SIGNED:  # codes of second moments have no zero, so that the scale says it
            restore = tl.where(amax == 0, 0.0, restore)
        upper, lower = tl.split(tl.reshape(codes if FLAT else tl.where(inside, codes, 0), [TILE // 2, 2]))
        byte, _ = tl.split(tl.reshape(place, [TILE // 2, 2]))
        first_inside, _ = tl.split(tl.reshape(inside, [TILE // 2, 2]))
        tl.store(state + byte, (upper * 16 + lower).to(tl.uint8), mask=first_inside)
    else:
        tl.store(state + place, codes.to(tl.uint8), mask=inside)
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
    e0, size, columns, row0, column0, first_row, first_column,
    GROUP: tl.constexpr, TILE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
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
def paired(e0, offset, columns, GROUP: tl.constexpr, TILE: tl.constexpr, FLAT: tl.constexpr):
    """Return the byte of each element where two neighbours in a row share one, counted as `offset` is, see `coordinates`.

    Example: rows of 5 have 3 bytes each, and elements 0 to 4 of row 1 are in the bytes 3, 3, 4, 4 and 5.
    """
    if FLAT:
        return offset // 2
    else:
        pitch = tl.cdiv(columns, GROUP) * GROUP
        e = e0 + tl.arange(0, TILE)
        row = e // pitch
        return row * tl.cdiv(columns, 2) + (e - row * pitch) // 2


@triton.jit
def random_bits(key, step, row, column, TILE: tl.constexpr, FLAT: tl.constexpr):
    """Return 16 random bits per element, int32[TILE]."""
    if FLAT:
        return random_calls(key, step, row, column, TILE // LANES, 16)
    else:
        return random_elements(key, step, row, column, 16)


@triton.jit
def wide_random_bits(key, step, row, column, TILE: tl.constexpr, FLAT: tl.constexpr):
    """Return 32 random bits per element, int32[TILE]; `row` and `column` are those of `coordinates`."""
    if FLAT:  # two calls in place of one
        row = tl.reshape(tl.broadcast_to(row[:, None], [TILE // LANES, 2]), [TILE // 4])
        column = tl.reshape(column[:, None] + (tl.arange(0, 2) * 4)[None, :].to(tl.uint32), [TILE // 4])
        return random_calls(key, step, row, column, TILE // 4, 32)
    else:
        return random_elements(key, step, row, column, 32)


@triton.jit
def second_random_bits(random):
    """Return the bits for the second moment from those for the first: an odd factor modulo 2^16 permutes them."""
    return (random * ODD) & 0xFFFF


@triton.jit
def _adamw_kernel(
    table_ptr, grads_ptr, owner_ptr, constants_ptr, step_ptr, skip_ptr, tables_ptr,
    W: tl.constexpr, WH: tl.constexpr, MODE: tl.constexpr, F: tl.constexpr, FH: tl.constexpr, S: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, W_TYPE: tl.constexpr, W_STORE: tl.constexpr, E_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr, S_TYPE: tl.constexpr, S_STORE: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, FEEDS: tl.constexpr, RULE: tl.constexpr, MEASURES: tl.constexpr, G: tl.constexpr, GH: tl.constexpr,
    G_STORE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update w, m, v and extra in place with one AdamW step; nothing is written if `skip` is 1.

        g = grad * scale
        m = beta1 * m + rest1 * g                                  rest1 = 1 - beta1
        v = beta2 * v + rest2 * g * g                              rest2 = 1 - beta2
        w = decay * w - step_size * 2^48 m / (sqrt(v) * root + eps)
        m = m - feedback * ((w - rounded w) * (sqrt(v) * root + eps))          if FEEDS

    step_size = 2^-48 lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t), decay = 1 - lr * weight_decay. The update reads m and v
    before they are rounded. Example, first step, beta1 = 0.9, beta2 = 0.999, lr = 0.001, no decay, g = 2: m = 0.2, v = 0.004,
    root = 31.6, so w moves by 0.001 * 10 * 0.2 / (0.0632 * 31.6) = 0.001.

    Muon takes two passes, between which what the first one leaves in place of the gradient is orthogonalized:

        "momentum"    m = beta2 * m + rest2 * g;  grad = m, or with "nesterov" grad = beta2 * m + rest2 * g
        "move"        w = decay * w - step_size * 2^48 grad

    tables_ptr: the tables of the dynamic 8-bit map, or None.
    """
    if tl.load(skip_ptr) != 0:
        return
    program = tl.program_id(0)
    piece = tl.load(owner_ptr + program)
    step = tl.load(step_ptr).to(tl.uint32)
    # If FLAT, eight neighbours are all inside or all outside. The compiler, told so, loads eight at once.
    elements = piece_field(table_ptr, piece, ELEMENTS, LANES if FLAT else 1)
    columns = piece_field(table_ptr, piece, COLUMNS)
    row0 = piece_field(table_ptr, piece, FIRST_ROW)
    column0 = piece_field(table_ptr, piece, FIRST_COLUMN)
    first = piece_field(table_ptr, piece, FIRST_PROGRAM)
    constants = constants_ptr + piece_field(table_ptr, piece, CONSTANTS_ROW) * ROW
    scale = tl.load(constants + SCALE)
    beta1 = tl.load(constants + BETA1)
    rest1 = tl.load(constants + REST1)
    beta2 = tl.load(constants + BETA2)
    rest2 = tl.load(constants + REST2)
    decay = tl.load(constants + DECAY)
    shrink = tl.load(constants + SHRINK)
    step_size = tl.load(constants + SIZE)
    root = tl.load(constants + ROOT)
    eps = tl.load(constants + EPS)
    w_key = piece_field(table_ptr, piece, W_KEY)
    state_key = piece_field(table_ptr, piece, STATE_KEY)
    w_start = piece_pointer(table_ptr, piece, W_ADDRESS, W_TYPE, ALIGNED)
    m_start = piece_pointer(table_ptr, piece, M_ADDRESS, S_TYPE, ALIGNED)
    v_start = piece_pointer(table_ptr, piece, V_ADDRESS, S_TYPE, ALIGNED)
    extra_start = piece_pointer(table_ptr, piece, EXTRA_ADDRESS, E_TYPE, ALIGNED)
    g_start = tl.load(grads_ptr + piece).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_start = tl.multiple_of(g_start, 16)

    m_scale = piece_pointer(table_ptr, piece, M_SCALE_ADDRESS, tl.float32, False)
    v_scale = piece_pointer(table_ptr, piece, V_SCALE_ADDRESS, tl.float32, False)
    amax_ptr = piece_pointer(table_ptr, piece, AMAX_ADDRESS, tl.int32, False)
    blocks_end = (elements // columns) * tl.cdiv(columns, GROUP)

    # Everything above is loaded once per program, and shared by its TILES tiles.
    ADAMW: tl.constexpr = RULE == "adamw"
    first_row, first_column = first_place((program - first) * TILES * TILE, columns)
    for tile in range(TILES):
        e0 = ((program - first) * TILES + tile) * TILE
        offset, inside, row, column = coordinates(
            e0, elements, columns, row0, column0, first_row, first_column, GROUP, TILE, FLAT
        )
        first_row, first_column = next_place(first_row, first_column, columns, TILE)
        base = e0 if FLAT else e0 * 0
        w_ptr = w_start + base
        place = offset
        if KIND == "dynamic4":
            place = paired(e0, offset, columns, GROUP, TILE, FLAT)
            m_ptr = m_start + base // 2
            v_ptr = v_start + base // 2
        else:
            m_ptr = m_start + base
            v_ptr = v_start + base
        extra_ptr = extra_start + base
        low = offset
        if ADAMW or RULE == "move":
            if MODE == "codes":
                groups, groups_inside = weight_codes.groups_of(e0, elements, columns, BLOCK, GROUP, TILE, FLAT)
                w = weight_codes.load_weights(w_ptr, offset, inside, extra_start, groups, groups_inside, W, TILE)
            else:
                w = widen(tl.load(w_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
            extra = w
            v = w  # of Muon, which has no second moments
        g = widen(tl.load(g_start + base + offset, mask=inside, other=0.0), WH.NATIVE)
        if RULE != "move":
            g = g * scale
        if ADAMW or RULE == "move":
            if MODE == "split" or MODE == "split24":
                low = tl.load(extra_ptr + offset, mask=inside, other=0)
            elif MODE != "plain" and MODE != "codes":
                extra = widen(tl.load(extra_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
        if KIND != "whole":
            blocks = e0 // GROUP + tl.arange(0, TILE // GROUP)
            blocks_inside = blocks < blocks_end
        if RULE != "move":
            if KIND == "whole":
                m = widen(tl.load(m_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
            else:
                m = load_codes(
                    m_ptr, place, inside, m_scale, blocks, blocks_inside, tables_ptr, F, KIND, True, GROUP, TILE, WH.NATIVE
                )
        if ADAMW:
            if KIND == "whole":
                v = widen(tl.load(v_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
            else:
                v = load_codes(
                    v_ptr, place, inside, v_scale, blocks, blocks_inside, tables_ptr, F, KIND, False, GROUP, TILE, WH.NATIVE
                )
        if ADAMW or RULE == "move":
            if MODE == "split" or MODE == "split24":
                extra = joined_masters(w, low, v, MODE)
                v = tl.abs(v)

        random = offset
        if ADAMW:
            m = beta1 * m + rest1 * g
            v = beta2 * v + rest2 * (g * g)
            if KIND == "dynamic8" or KIND == "dynamic4" or KIND == "codes":  # these leave no registers for eight roots
                deviation = square_root(v, WH.NATIVE)
            else:
                deviation = square_roots(v, WH.NATIVE)
            divisor = deviation * root + eps
            direction = quotient(m, divisor, WH.NATIVE)
            if KIND == "companded8":
                v = deviation
        elif RULE == "move":
            direction = g * 2.0**48
        else:
            m = beta2 * m + rest2 * g
            along = beta2 * m + rest2 * g if RULE == "nesterov" else m
            store_rounded((g_start + base).to(tl.pointer_type(G_STORE)), offset, along, random, inside, G, GH)
        if ADAMW or RULE == "move":
            w, extra = moved_weights(w, extra, direction, decay, shrink, step_size, W, WH, MODE)
            if MEASURES:
                weight_codes.keep_largest(amax_ptr, w, inside, groups, groups_inside, BLOCK, TILE)
            elif WH.KIND == "stochastic":
                if MODE == "codes":
                    random = wide_random_bits(w_key, step, row, column, TILE, FLAT)
                else:
                    random = random_bits(w_key, step, row, column, TILE, FLAT)
            if MEASURES:
                pass
            elif MODE == "codes":
                kept = weight_codes.store_weights(
                    w_ptr, offset, inside, amax_ptr, groups, groups_inside, w, random, W, WH, TILE
                )
            elif MODE == "split" or MODE == "split24":
                upper, low, v = split_masters(w, v, MODE)
                tl.store(w_ptr.to(tl.pointer_type(W_STORE)) + offset, (upper >> 16).to(tl.int16), mask=inside)
                tl.store(extra_ptr + offset, low, mask=inside)
            else:
                store_rounded(w_ptr.to(tl.pointer_type(W_STORE)), offset, w, random, inside, W, WH)
                kept = rounded(w, random, W, WH)
            if FEEDS:
                m = m - (w - kept) * divisor * tl.load(constants + FEEDBACK)
            if MODE == "master":
                tl.store(extra_ptr + offset, extra, mask=inside)
            elif MODE == "kahan":
                store_rounded(extra_ptr.to(tl.pointer_type(W_STORE)), offset, extra, random, inside, W, WH)
        if RULE != "move" and not MEASURES:
            if FH.KIND == "stochastic":
                random = random_bits(state_key, step, row, column, TILE, FLAT)
            if KIND == "whole":
                store_rounded(m_ptr.to(tl.pointer_type(S_STORE)), offset, m, random, inside, F, FH)
            else:
                store_codes(
                    m_ptr,
                    place,
                    inside,
                    m_scale,
                    blocks,
                    blocks_inside,
                    m,
                    random,
                    tables_ptr,
                    F,
                    FH,
                    S,
                    KIND,
                    True,
                    GROUP,
                    TILE,
                    FLAT,
                )
        if ADAMW and not MEASURES:
            if KIND == "whole":
                store_rounded(v_ptr.to(tl.pointer_type(S_STORE)), offset, v, second_random_bits(random), inside, F, FH)
            else:
                store_codes(
                    v_ptr,
                    place,
                    inside,
                    v_scale,
                    blocks,
                    blocks_inside,
                    v,
                    second_random_bits(random),
                    tables_ptr,
                    F,
                    FH,
                    S,
                    KIND,
                    False,
                    GROUP,
                    TILE,
                    FLAT,
                )


@triton.jit
def _weight_scales_kernel(table_ptr, skip_ptr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Store the scales of a weight in codes after a step, one program per piece; nothing is written if `skip` is 1."""
    if tl.load(skip_ptr) != 0:
        return
    piece = tl.program_id(0)
    columns = piece_field(table_ptr, piece, COLUMNS)
    count = columns * 0 + 1
    if BLOCK:
        count = tl.cdiv(piece_field(table_ptr, piece, ELEMENTS) // columns, BLOCK) * tl.cdiv(columns, BLOCK)
    scale_ptr = piece_pointer(table_ptr, piece, EXTRA_ADDRESS, tl.float32, False)
    weight_codes.store_scales(scale_ptr, piece_pointer(table_ptr, piece, AMAX_ADDRESS, tl.int32, False), count, TILE)


@triton.jit
def _squares_kernel(
    table_ptr, grads_ptr, owner_ptr, out_ptr,
    G_TYPE: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the sum of g^2 over each program's tile in `out_ptr`, float64[programs]."""
    program = tl.program_id(0)
    piece = tl.load(owner_ptr + program)
    elements = piece_field(table_ptr, piece, ELEMENTS, LANES if ALIGNED else 1)
    e0 = (program - piece_field(table_ptr, piece, FIRST_PROGRAM)) * TILE
    g_ptr = tl.load(grads_ptr + piece).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    offset = tl.arange(0, TILE)
    g = widen(tl.load(g_ptr + e0 + offset, mask=e0 + offset < elements, other=0.0), NATIVE).to(tl.float64)
    tl.store(out_ptr + program, tl.sum(g * g))


@triton.jit
def _run_of(table_ptr, piece, run, elements, columns):
    """Return (first element, end) of a piece's run number `run`, in memory order; a shard may hold a part of its first run.

    Example: runs of 4 rows, 1 row of the first on another shard: run 0 is rows 0 to 3 of the piece, run 1 rows 3 to 7.
    """
    length = piece_field(table_ptr, piece, RUN_ROWS)
    lead = piece_field(table_ptr, piece, LEAD_ROWS)
    start = tl.maximum((run * length - lead) * columns, 0)
    return start, tl.minimum(((run + 1) * length - lead) * columns, elements)


@triton.jit
def _run_squares(g_ptr, start, end, NATIVE: tl.constexpr, TILE: tl.constexpr):
    """Return the sum of g^2 over the elements from `start` to `end`, float64."""
    total = tl.zeros([TILE], tl.float64)
    for at in range(start, end, TILE):
        offset = at + tl.arange(0, TILE)
        g = widen(tl.load(g_ptr + offset, mask=offset < end, other=0.0), NATIVE).to(tl.float64)
        total = tl.fma(g, g, total)  # a square is exact in float64, fused or not
    return tl.sum(total)


@triton.jit
def _run_squares_kernel(
    table_ptr, grads_ptr, owner_ptr, sums_ptr, G_TYPE: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr
):
    """Store the sum of g^2 over each run in `sums_ptr`, float64[programs]: one program per run."""
    program = tl.program_id(0)
    piece = tl.load(owner_ptr + program)
    elements = piece_field(table_ptr, piece, ELEMENTS)
    columns = piece_field(table_ptr, piece, COLUMNS)
    run = program - piece_field(table_ptr, piece, FIRST_PROGRAM)
    start, end = _run_of(table_ptr, piece, run, elements, columns)
    g_ptr = tl.load(grads_ptr + piece).to(tl.pointer_type(G_TYPE))
    tl.store(sums_ptr + program, _run_squares(g_ptr, start, end, NATIVE, TILE))


@triton.jit
def _mini_kernel(
    table_ptr, grads_ptr, owner_ptr, constants_ptr, step_ptr, skip_ptr,
    W: tl.constexpr, WH: tl.constexpr, MODE: tl.constexpr, F: tl.constexpr, FH: tl.constexpr, W_TYPE: tl.constexpr,
    W_STORE: tl.constexpr, E_TYPE: tl.constexpr, G_TYPE: tl.constexpr, S_TYPE: tl.constexpr, S_STORE: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, MOVED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update w, m, v and extra in place with one Adam-mini step, one program per run.

    As `_adamw_kernel`, with one v per run: v = beta2 * v + rest2 * mean(g * g). The gradients of a run are read twice, the
    second time from a cache. MOVED says that v already is the one after this step.
    """
    if tl.load(skip_ptr) != 0:
        return
    program = tl.program_id(0)
    piece = tl.load(owner_ptr + program)
    step = tl.load(step_ptr).to(tl.uint32)
    elements = piece_field(table_ptr, piece, ELEMENTS, LANES if FLAT else 1)
    columns = piece_field(table_ptr, piece, COLUMNS, LANES if FLAT else 1)
    row0 = piece_field(table_ptr, piece, FIRST_ROW)
    column0 = piece_field(table_ptr, piece, FIRST_COLUMN)
    constants = constants_ptr + piece_field(table_ptr, piece, CONSTANTS_ROW) * ROW
    run = program - piece_field(table_ptr, piece, FIRST_PROGRAM)
    start, end = _run_of(table_ptr, piece, run, elements, columns)
    w_ptr = piece_pointer(table_ptr, piece, W_ADDRESS, W_TYPE, ALIGNED)
    m_ptr = piece_pointer(table_ptr, piece, M_ADDRESS, S_TYPE, ALIGNED)
    v_ptr = piece_pointer(table_ptr, piece, V_ADDRESS, tl.float32, False) + run
    extra_ptr = piece_pointer(table_ptr, piece, EXTRA_ADDRESS, E_TYPE, ALIGNED)
    g_ptr = tl.load(grads_ptr + piece).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    scale = tl.load(constants + SCALE)
    v = tl.load(v_ptr)
    if not MOVED:
        run_elements = piece_field(table_ptr, piece, RUN_ELEMENTS)
        mean = _run_squares(g_ptr, start, end, WH.NATIVE, TILE) / run_elements.to(tl.float64)
        factor = scale.to(tl.float64)
        v = tl.load(constants + BETA2) * v + tl.load(constants + REST2) * (mean * (factor * factor)).to(tl.float32)
        tl.store(v_ptr, v)
    denominator = square_root(v, WH.NATIVE) * tl.load(constants + ROOT) + tl.load(constants + EPS)
    w_key = piece_field(table_ptr, piece, W_KEY)
    state_key = piece_field(table_ptr, piece, STATE_KEY)
    beta1 = tl.load(constants + BETA1)
    rest1 = tl.load(constants + REST1)
    decay = tl.load(constants + DECAY)
    shrink = tl.load(constants + SHRINK)
    step_size = tl.load(constants + SIZE)
    first_row, first_column = first_place(start, columns)
    for at in range(start, end, TILE):
        offset, inside, row, column = coordinates(at, end, columns, row0, column0, first_row, first_column, 1, TILE, FLAT)
        first_row, first_column = next_place(first_row, first_column, columns, TILE)
        base = at if FLAT else at * 0
        w = widen(tl.load(w_ptr + base + offset, mask=inside, other=0.0), WH.NATIVE)
        g = widen(tl.load(g_ptr + base + offset, mask=inside, other=0.0), WH.NATIVE) * scale
        m = widen(tl.load(m_ptr + base + offset, mask=inside, other=0.0), WH.NATIVE)
        extra = w
        if MODE == "split24":
            extra = joined_masters(w, tl.load(extra_ptr + base + offset, mask=inside, other=0), w, MODE)
        elif MODE != "plain":
            extra = widen(tl.load(extra_ptr + base + offset, mask=inside, other=0.0), WH.NATIVE)
        m = beta1 * m + rest1 * g
        direction = quotient(m, tl.zeros_like(m) + denominator, WH.NATIVE)
        w, extra = moved_weights(w, extra, direction, decay, shrink, step_size, W, WH, MODE)
        random = offset
        if WH.KIND == "stochastic":
            random = random_bits(w_key, step, row, column, TILE, FLAT)
        if MODE == "split24":
            upper, low, _ = split_masters(w, w, MODE)
            tl.store(w_ptr.to(tl.pointer_type(W_STORE)) + base + offset, (upper >> 16).to(tl.int16), mask=inside)
            tl.store(extra_ptr + base + offset, low, mask=inside)
        else:
            store_rounded(w_ptr.to(tl.pointer_type(W_STORE)) + base, offset, w, random, inside, W, WH)
        if MODE == "master":
            tl.store(extra_ptr + base + offset, extra, mask=inside)
        elif MODE == "kahan":
            store_rounded(extra_ptr.to(tl.pointer_type(W_STORE)) + base, offset, extra, random, inside, W, WH)
        if FH.KIND == "stochastic":
            random = random_bits(state_key, step, row, column, TILE, FLAT)
        store_rounded(m_ptr.to(tl.pointer_type(S_STORE)) + base, offset, m, random, inside, F, FH)
