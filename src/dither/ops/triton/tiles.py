"""The work of one program of a casting kernel on its tile: load, scale, round, and store codes and scales.

Legend:

    x              a tile [P, Q], float32: P lines of Q elements along the axis that is cast
    ROWS, COLUMNS  the tile in memory; P, Q = COLUMNS, ROWS if ALONG_ROWS (the tile is transposed), else ROWS, COLUMNS
    GP, GQ         lines and elements per line of a group that shares a scale
    F, C           format that values are rounded to, and format of the stored codes
    H              rounding of the values (`rounding.RoundingConstants`)
    S              scaling (`scales.Scaling`)
    E or SCALE, W  format of stored block scales (E4M3, nvfp4 only) and their rounding
    A, RUN         arrangement of a thread's elements, see `element_coordinates`
    MEASURE        scales come from the groups of this tile; else `amax` is passed in
    PER_LINE       without MEASURE: one `amax` per line, else one for the tensor
    FAKE           store values instead of codes or, in a bool tensor, True where the cast clips nothing
    EVEN           tiles cover the matrix exactly: loads need no mask
    RAGGED         lines end inside a packed byte or word: the rest of it is filled with zeros
    WORDS          stored lines are multiples of 4 bytes, so that 4-bit codes are stored as words
    APART          one register per FP8 code, see `fp8_codes`
"""

import triton
import triton.language as tl

from dither.ops.triton.packing import e2m1_words, store_packed, store_words
from dither.ops.triton.philox import KEY_SHIFT, ROW_SHIFT, program_tile, random_calls, random_elements
from dither.ops.triton.rounding import (
    SIGN,
    as_bits,
    as_float,
    encode,
    round_bits,
    round_code,
    round_code_in,
    round_magnitude,
    widen,
    widen_here,
    with_sign,
)
from dither.ops.triton.scales import group_factors, pow2_factors, quest_exponent, tensor_factor


@triton.jit
def maximum(a, b):
    """Return the larger of two numbers, or NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(magnitude, NATIVE: tl.constexpr):
    """Return the bits of the largest magnitude of each group along axes 1 and 3; NaN counts as larger than any number."""
    if NATIVE:
        return as_bits(tl.reduce(tl.reduce(magnitude, 3, maximum), 1, maximum))
    else:
        # Bits of magnitudes have the same order. The interpreter runs custom reductions one element at a time.
        return tl.max(tl.max(as_bits(magnitude), axis=3), axis=1)


@triton.jit
def element_coordinates(
    n, N: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, RUN: tl.constexpr, ALONG_ROWS: tl.constexpr
):
    """Return (row, column) in the tile of the n-th element that is loaded.

    A tile is loaded as one line of N elements. Every version of Triton divides it among threads alike: each thread gets a run
    of 16 bytes (RUN elements), threads side by side, in A rounds. This function decides which elements a round brings.
    Along the columns, a round brings each thread's next run: it holds A * RUN neighbours, so that few threads share a group and
    the work on its scale. Along the rows, a round brings the next rows, so that a thread stores A transposed codes at once.

    Example along the columns, N = 32, COLUMNS = 16, RUN = 4, A = 2: n = 0 to 3 are columns 0 to 3 of row 0, n = 16 to 19 (the
    same thread's second round) are columns 4 to 7.
    """
    # Each term is one division and one remainder of n itself: so Triton sees that runs are contiguous.
    again = n // (N // A)
    if ALONG_ROWS:
        return n // COLUMNS % (N // A // COLUMNS) * A + again, n % COLUMNS
    else:
        run = n // RUN % (N // A // RUN) * A + again
        return run // (COLUMNS // RUN), run % (COLUMNS // RUN) * RUN + n % RUN


@triton.jit
def as_lines(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, RUN: tl.constexpr, ALONG_ROWS: tl.constexpr):
    """Return elements in the order of loading, [N], as a tile [ROWS, COLUMNS], or (ALONG_ROWS) as its transpose."""
    if ALONG_ROWS:
        return tl.reshape(tl.permute(tl.reshape(x, [A, ROWS // A, COLUMNS]), (2, 1, 0)), [COLUMNS, ROWS])
    else:
        return tl.reshape(tl.permute(tl.reshape(x, [A, ROWS * COLUMNS // (A * RUN), RUN]), (1, 0, 2)), [ROWS, COLUMNS])


@triton.jit
def by_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr):
    """Return elements that were loaded by rows, [N], as a tile [ROWS, COLUMNS]."""
    return tl.reshape(tl.permute(tl.reshape(x, [A, ROWS // A, COLUMNS]), (1, 0, 2)), [ROWS, COLUMNS])


@triton.jit
def from_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr):
    """Return a tile [ROWS, COLUMNS] in the order of loading by rows, [N]: the inverse of `by_rows`."""
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS // A, A, COLUMNS]), (1, 0, 2)), [ROWS * COLUMNS])


@triton.jit
def tile_places(
    first_row, first_column, rows, columns, line,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, RUN: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """Return (offsets, masks) to store a tile of a matrix in the order of loading, so that nothing changes threads."""
    N: tl.constexpr = ROWS * COLUMNS
    row, column = element_coordinates(tl.arange(0, N), N, COLUMNS, A, RUN, BY_ROWS)
    at = first_row * line + first_column + row.to(tl.int64) * line + column
    return at, (first_row + row < rows) & (first_column + column < columns)


@triton.jit
def spread(groups, P: tl.constexpr, Q: tl.constexpr, GP: tl.constexpr, GQ: tl.constexpr):
    """Repeat one value per group, [P / GP, Q / GQ], to one per element, [P, Q]."""
    wide = tl.broadcast_to(groups[:, None, :, None], [P // GP, GP, Q // GQ, GQ])
    return tl.reshape(wide, [P, Q])


@triton.jit
def restored(value, restore, tensor, DTYPE: tl.constexpr, SCALED: tl.constexpr, TWO_LEVEL: tl.constexpr, NATIVE: tl.constexpr):
    """Return value * restore * tensor as DTYPE; finite overflow saturates at its largest number."""
    product = value
    if SCALED:
        product = product * restore
    if TWO_LEVEL:
        product = product * tensor
    bits = as_bits(product)
    # The bits of the largest finite number.
    LIMIT: tl.constexpr = 0x477FE000 if DTYPE == tl.float16 else 0x7F7F0000 if DTYPE == tl.bfloat16 else 0x7F7FFFFF
    magnitude = bits & 0x7FFFFFFF
    infinite = (as_bits(value) & 0x7FFFFFFF) == 0x7F800000
    stopped = tl.where((magnitude > 0x7F800000) | infinite, magnitude, tl.minimum(magnitude, LIMIT))
    if DTYPE == tl.bfloat16 and not NATIVE:
        # On the bits: Triton's interpreter truncates, and flushes subnormal numbers. NaN stays as it is.
        nearest = (stopped + 0x7FFF + ((stopped >> 16) & 1)) & -65536
        stopped = tl.where(magnitude > 0x7F800000, magnitude, nearest)
        return ((stopped | (bits & -0x80000000)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return as_float(stopped | (bits & -0x80000000)).to(DTYPE)


SATURATED_BF16 = tl.constexpr("cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;")


@triton.jit
def saturated(product, DTYPE: tl.constexpr):
    """Return products of finite values or NaN as DTYPE, as `restored` does, by the GPU's own instructions."""
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(SATURATED_BF16, "=r,f,f", [product], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        LIMIT: tl.constexpr = 65504.0 if DTYPE == tl.float16 else 2.0**127 * (2.0 - 2.0**-23)
        below = tl.minimum(product, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(below, -LIMIT, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def scaled_bits(x, multiply, S: tl.constexpr, MEASURE: tl.constexpr):
    """Return the bits of |x * multiply|. With MEASURE, `multiply` comes from the groups of x, and nothing overflows."""
    magnitude = tl.abs(x)
    if S.KIND == "none":
        return as_bits(magnitude)
    y = as_bits(magnitude * multiply)
    if not MEASURE or S.STORED == "e4m3":
        # `amax` was passed in: a finite product may overflow, and then saturates.
        y = tl.where((y == 0x7F800000) & (as_bits(magnitude) < 0x7F800000), 0x7F7FFFFF, y)
    return y


@triton.jit
def squared_error(
    x, multiply, restore,
    F: tl.constexpr, S: tl.constexpr, H: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, GP: tl.constexpr, GQ: tl.constexpr,
):  # fmt: skip
    """Return the squared error of each group, as `reference.scales.least_error` does: integers, so that any order will do."""
    y = scaled_bits(x, spread(multiply, P, Q, GP, GQ), S, True)
    difference = tl.abs(as_float(y) - as_float(round_bits(y, y, y, F, H, True)))
    units = tl.where(difference < 2.0, difference * 1024.0 + 0.5, 2048.0)
    units = tl.where(difference == difference, units, 0.0).to(tl.int32)
    squares = tl.reshape(units * units, [P // GP, GP, Q // GQ, GQ])
    return tl.sum(tl.sum(squares, axis=3), axis=1).to(tl.float32) * (restore * restore)


@triton.jit
def span_sums(x, P: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, GQ: tl.constexpr):
    """Return the sums of each N values of the lines of x [P, Q], [P, Q / N]: neighbours are added until one number remains.

    Groups of GQ are split, which moves nothing where a group lies in one thread. Later, each reduction adds two numbers. So no
    order is left to the compiler.
    """
    for i in tl.static_range(7):  # N is at most 128
        if GQ >> i > 1:
            a, b = tl.split(tl.reshape(x, [P, Q >> (i + 1), 2]))
            x = a + b
        elif N >> i > 1:
            x = tl.sum(tl.reshape(x, [P, Q >> (i + 1), 2]), axis=2)
    return x


@triton.jit
def first_of_groups(x, P: tl.constexpr, Q: tl.constexpr, GQ: tl.constexpr):
    """Return the first value of each GQ values of the lines of x [P, Q], [P, Q / GQ]."""
    for i in tl.static_range(7):  # GQ is at most 128
        if GQ >> i > 1:
            x, _ = tl.split(tl.reshape(x, [P, Q >> (i + 1), 2]))
    return x


@triton.jit
def eden_scale(
    x, random, multiply, restore,
    F: tl.constexpr, S: tl.constexpr, H: tl.constexpr, E: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    GQ: tl.constexpr,
):  # fmt: skip
    """Return the scales [P, Q / GQ], corrected and rounded by H as in `reference.scales.eden_factors`."""
    N: tl.constexpr = S.SPAN
    bits = scaled_bits(x, spread(multiply, P, Q, 1, GQ), S, True)
    y, q = as_float(bits), as_float(round_bits(bits, bits, bits, F, W, True))
    squares, projections = span_sums(y * y, P, Q, N, GQ), span_sums(y * q, P, Q, N, GQ)
    correction = tl.where(projections == 0.0, 1.0, tl.div_rn(squares, projections))
    wanted = as_bits(tl.reshape(tl.reshape(restore, [P, Q // N, N // GQ]) * correction[:, :, None], [P, Q // GQ]))
    scale = as_float(round_bits(wanted, wanted, first_of_groups(random, P, Q, GQ), E, H, True))
    return tl.where(scale < 2.0**-9, 2.0**-9, scale)


@triton.jit
def tile_factors(
    x, random, amax, tensor,
    F: tl.constexpr, S: tl.constexpr, H: tl.constexpr, E: tl.constexpr, W: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    GP: tl.constexpr, GQ: tl.constexpr, MEASURE: tl.constexpr,
):  # fmt: skip
    """Return what `scales.group_factors` does, also for scalings that read the values x [P, Q] of the groups.

    Only eden reads the random bits.
    """
    if S.KIND == "quest":
        exponent = quest_exponent(tl.reshape(x, [P // GP, GP, Q // GQ, GQ]), amax)
        multiply, restore, stored = pow2_factors(exponent, amax)
    else:
        multiply, restore, stored = group_factors(amax, tensor, S, E, W, MEASURE, H.NATIVE)
    if S.KIND == "four_over_six":
        multiply_4, restore_4, stored_4 = group_factors(amax, tensor, S, E, W, MEASURE, H.NATIVE, 1.5)
        six = squared_error(x, multiply, restore, F, S, H, P, Q, GP, GQ)
        four = squared_error(x, multiply_4, restore_4, F, S, H, P, Q, GP, GQ)
        multiply = tl.where(four < six, multiply_4, multiply)
        restore = tl.where(four < six, restore_4, restore)
        stored = tl.where(four < six, stored_4, stored)
    if S.KIND == "eden":
        tl.static_assert(GP == 1 and Q % S.SPAN == 0, "the values that share a correction lie in one line of the tile")
        restore = eden_scale(x, random, multiply, restore, F, S, H, E, W, P, Q, GQ)
        stored = encode(as_bits(restore), E)
    return multiply, restore, stored


@triton.jit
def limited(y, F: tl.constexpr):
    """Return the bits y, clamped to the format's largest magnitude. The unsigned comparison also clamps NaN of either sign."""
    return tl.minimum(y.to(tl.uint32, bitcast=True), F.MAX_BITS).to(tl.int32, bitcast=True)


E4M3_PAIR = tl.constexpr(
    "{ .reg .b16 t; .reg .b32 u; cvt.rn.satfinite.e4m3x2.f32 t, $3, $2; "
    "cvt.u32.u16 u, t; and.b32 $0, u, 255; shr.u32 $1, u, 8; }"
)
E5M2_PAIR = tl.constexpr(E4M3_PAIR.value.replace("e4m3", "e5m2"))


@triton.jit
def fp8_codes(value, E4M3: tl.constexpr, APART: tl.constexpr):
    """Return FP8 codes by the GPU's own conversions.

    One conversion makes two codes, the halves of a register. APART moves each to its own register (int32): where Triton 3.6
    stores halves across rows, three of eight codes came out wrong on an H200, those shifted out of the upper half in 16 bits.
    """
    if APART:
        ptx: tl.constexpr = E4M3_PAIR if E4M3 else E5M2_PAIR
        return tl.inline_asm_elementwise(ptx, "=r,=r,f,f", [value], dtype=tl.int32, is_pure=True, pack=2)
    elif E4M3:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return value.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def native_codes(x, multiply, F: tl.constexpr, GROUPED: tl.constexpr, APART: tl.constexpr):
    """Return E4M3 or E5M2 codes of x * multiply by the GPU's own conversions.

    They round and saturate as the reference does, but turn an infinity into a number; this restores it.
    """
    product = x * multiply
    if F.FP8 == "e4m3":
        if not GROUPED:
            product += x * 0.0  # adds NaN where x is infinite, else 0
        return fp8_codes(product, True, APART)
    else:
        code = fp8_codes(product, False, APART)
        if not GROUPED:
            infinite = (tl.abs(x) == float("inf")) & (product == product)
            code = tl.where(infinite, ((as_bits(x) >> 24) & 0x80 | 0x7C).to(code.dtype), code)
        return code


@triton.jit
def tile_codes(
    x, multiply, random,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, MEASURE: tl.constexpr, APART: tl.constexpr = False,
):  # fmt: skip
    """Return codes in C of x * multiply, rounded to F by H."""
    # A measured scale is NaN if anything in the group is not finite. So the products of a group are all finite or all NaN.
    GROUPED: tl.constexpr = MEASURE and S.KIND != "none"
    FP8: tl.constexpr = F == C and F.FP8 != "" and S.KIND != "none"
    if FP8 and H.NATIVE and H.KIND == "nearest":
        return native_codes(x, multiply, F, GROUPED, APART)
    else:
        sign = as_bits(x)
        y = scaled_bits(x, multiply, S, MEASURE)
        if GROUPED and F == C and not F.HAS_NAN:
            return with_sign(round_code(limited(y, F), random, F, H), sign, F)
        elif GROUPED and not F.HAS_NAN and not F.INTEGER and C.FP8 == "e4m3" and H.NATIVE:
            # FP4 or FP6 values as FP8 codes: the conversion is exact. Adding y * 0 makes a group with NaN all NaN.
            value = as_float(round_magnitude(limited(y, F), random, F, H)) + as_float(y) * 0.0
            return fp8_codes(as_float(as_bits(value) | (sign & SIGN)), True, APART)
        elif GROUPED and not F.HAS_NAN and not F.INTEGER and C.HAS_NAN:
            code = with_sign(round_code_in(limited(y, F), random, F, C, H), sign, C)
            return tl.where(y > 0x7F800000, C.NAN_CODE, code)
        else:
            return encode(round_bits(y, sign, random, F, H, True), C)


@triton.jit
def store_scales(
    scale_ptr, stored, line0, first, lines, length,
    P: tl.constexpr, Q: tl.constexpr, GP: tl.constexpr, GQ: tl.constexpr, LINES_INNERMOST: tl.constexpr,
):  # fmt: skip
    """Store the scales [P / GP, Q / GQ] of the groups from element `first` of line `line0` on."""
    group_line = line0 // GP + tl.arange(0, P // GP)
    group = first // GQ + tl.arange(0, Q // GQ)
    groups = (length + GQ - 1) // GQ
    inside = (group_line < (lines + GP - 1) // GP)[:, None] & (group < groups)[None, :]
    offset = group_line[:, None] * groups + group[None, :]
    if LINES_INNERMOST:
        offset = group[None, :] * lines + group_line[:, None]
    tl.store(scale_ptr + offset, stored.to(scale_ptr.dtype.element_ty), mask=inside)


@triton.jit
def cast_tile(
    x, random, amax, tensor, out_ptr, scale_ptr, line0, first, lines, length, stride_line, stride_element,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, E: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr, GP: tl.constexpr, GQ: tl.constexpr, MEASURE: tl.constexpr, FAKE: tl.constexpr, RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Cast x [P, Q] and store codes (or values, if FAKE) and scales.

    x holds the elements from `first` on of the lines from `line0` on. `amax` has the bits for the groups unless MEASURE. Scales
    are stored only if they are measured here.
    """
    R: tl.constexpr = W if S.KIND == "eden" else H  # the rounding of values
    line = line0 + tl.arange(0, P)
    multiply, restore = x, x
    if S.KIND != "none":
        if MEASURE:
            amax = largest(tl.reshape(tl.abs(x), [P // GP, GP, Q // GQ, GQ]), H.NATIVE)
        multiply, restore, stored = tile_factors(x, random, amax, tensor, F, S, H, E, W, P, Q, GP, GQ, MEASURE)
        if MEASURE and not FAKE:
            innermost: tl.constexpr = S.KIND == "fp32" and GP == 1 and GQ == 128  # as GroupLayout.lines_innermost says
            store_scales(scale_ptr, stored, line0, first, lines, length, P, Q, GP, GQ, innermost)
        multiply = spread(multiply, P, Q, GP, GQ)
        restore = spread(restore, P, Q, GP, GQ)
    if FAKE:
        y = scaled_bits(x, multiply, S, MEASURE)
        if out_ptr.dtype.element_ty == tl.int1:
            result = y.to(tl.uint32, bitcast=True) <= F.MAX_BITS  # False for NaN of either sign
        else:
            value = as_float(round_bits(y, as_bits(x), random, F, R, True))
            result = restored(value, restore, tensor, out_ptr.dtype.element_ty, S.KIND != "none", S.STORED == "e4m3", H.NATIVE)
        at = first + tl.arange(0, Q)
        inside = (line < lines)[:, None] & (at < length)[None, :]
        tl.store(out_ptr + line[:, None] * stride_line + at[None, :] * stride_element, result, mask=inside)
    elif (
        # E2M1 in its own storage with 16 random bits: eight codes at a time.
        F == C and F.BITS == 4 and not F.INTEGER and MEASURE and S.KIND != "none" and H.NATIVE and R.BITS == 16 and WORDS
        and not RAGGED
    ):  # fmt: skip
        words = e2m1_words(limited(scaled_bits(x, multiply, S, MEASURE), F), as_bits(x), random, F, P, Q)
        store_words(out_ptr, words, line, first, lines, stride_line, Q)
    else:
        code = tile_codes(x, multiply, random, F, C, S, R, MEASURE)
        if RAGGED:
            code = tl.where(((first + tl.arange(0, Q)) < length)[None, :], code, 0)
        store_packed(out_ptr, code, line, first, lines, stride_line, C.BITS, WORDS, P, Q)


@triton.jit
def tile_values(
    x, random, tensor,
    DTYPE: tl.constexpr, F: tl.constexpr, S: tl.constexpr, H: tl.constexpr, E: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr, GP: tl.constexpr, GQ: tl.constexpr,
):  # fmt: skip
    """Return x [P, Q] rounded to F, times the scales of its groups of GP x GQ, as DTYPE. The tensor's scale is left out."""
    R: tl.constexpr = W if S.KIND == "eden" else H  # the rounding of values
    amax = largest(tl.reshape(tl.abs(x), [P // GP, GP, Q // GQ, GQ]), H.NATIVE)
    multiply, restore, _ = tile_factors(x, random, amax, tensor, F, S, H, E, W, P, Q, GP, GQ, True)
    if H.NATIVE and S.STORED == "e4m3":
        restore += tensor * 0.0  # a lost tensor has no numbers, not even in groups of zeros, whose scale is 1
    multiply, restore = spread(multiply, P, Q, GP, GQ), spread(restore, P, Q, GP, GQ)
    if F.FP8 == "e4m3" and H.NATIVE and H.KIND == "nearest" and S.STORED != "e4m3":
        value = (x * multiply).to(tl.float8e4nv).to(tl.float32)  # it saturates, and NaN stays NaN
    elif H.NATIVE and not F.HAS_NAN and not F.INTEGER:
        # The factor of a group with a NaN is NaN, and makes all of its numbers NaN.
        magnitude = round_magnitude(limited(as_bits(tl.abs(x) * multiply), F), random, F, R)
        value = as_float(magnitude | (as_bits(x) & SIGN))
    else:
        value = as_float(round_bits(scaled_bits(x, multiply, S, True), as_bits(x), random, F, R, True))
    if H.NATIVE and S.STORED == "e4m3":
        return (value * restore).to(DTYPE)  # at most 6 * 448
    elif H.NATIVE:
        return saturated(value * restore, DTYPE)
    else:
        return restored(value, restore, 1.0, DTYPE, True, False, H.NATIVE)


@triton.jit
def load_tile(
    x_ptr, step_ptr, key, top, left, rows, columns, inner, stride_r, stride_c,
    H: tl.constexpr, RUN: tl.constexpr, BY_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr,
    EVEN: tl.constexpr, HERE: tl.constexpr,
):  # fmt: skip
    """Return the tile at x_ptr as one line [ROWS * COLUMNS] (see `element_coordinates`) and its random bits.

    Elements beyond `rows` and `columns` are zero. `top` and `left` are the coordinates of the first element in the whole
    tensor, where the rows of the matrix are `inner` apart. HERE keeps x in the threads that loaded it, see `widen_here`.
    """
    N: tl.constexpr = ROWS * COLUMNS
    row, column = element_coordinates(tl.arange(0, N), N, COLUMNS, A, RUN, BY_ROWS)
    pointers = x_ptr + row.to(tl.int64) * stride_r + column * stride_c
    if EVEN:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(row < rows) & (column < columns), other=0.0)
    x = widen_here(x, H.NATIVE) if HERE else widen(x, H.NATIVE)
    random = as_bits(x)
    if H.KIND == "stochastic":
        step = tl.load(step_ptr).to(tl.uint32)
        if H.MOVED:
            top += tl.load(step_ptr + ROW_SHIFT)
            key += tl.load(step_ptr + KEY_SHIFT)
        top, left = top.to(tl.uint32), left.to(tl.uint32)
        if H.ALIGNED:
            E: tl.constexpr = 128 // H.WIDTH
            row, column = element_coordinates(tl.arange(0, N // E) * E, N, COLUMNS, A, RUN, BY_ROWS)
            random = random_calls(key, step, top + (row * inner).to(tl.uint32), left + column.to(tl.uint32), N // E, H.WIDTH)
        else:
            random = random_elements(key, step, top + (row * inner).to(tl.uint32), left + column.to(tl.uint32), H.WIDTH)
    return x, random


@triton.jit
def cast_program(
    program, x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner, stride_b,
    stride_r, stride_c, out_batch, out_line, out_element,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, GP: tl.constexpr,
    GQ: tl.constexpr, RUN: tl.constexpr, ALONG_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr,
    EVEN: tl.constexpr, MEASURE: tl.constexpr, PER_LINE: tl.constexpr, FAKE: tl.constexpr, RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Load tile number `program`, draw its random bits, and cast it along its columns or (ALONG_ROWS) transposed."""
    batch, first_row, first_column = program_tile(program, rows, columns, ROWS, COLUMNS)
    # Matrix b of a batch begins at row (b // inner) * rows * inner + b % inner, and takes every inner-th row from there.
    x, random = load_tile(
        x_ptr + batch * stride_b + first_row * stride_r + first_column * stride_c, step_ptr, key,
        row0 + (batch // inner) * rows * inner + batch % inner + first_row * inner, column0 + first_column,
        rows - first_row, columns - first_column, inner, stride_r, stride_c, H, RUN, ALONG_ROWS, ROWS, COLUMNS, A, EVEN,
        False,
    )  # fmt: skip
    tensor = 1.0
    if S.STORED == "e4m3":
        tensor = tensor_factor(tl.load(tensor_ptr), S)
    P: tl.constexpr = COLUMNS if ALONG_ROWS else ROWS
    Q: tl.constexpr = ROWS if ALONG_ROWS else COLUMNS
    x, random = as_lines(x, ROWS, COLUMNS, A, RUN, ALONG_ROWS), as_lines(random, ROWS, COLUMNS, A, RUN, ALONG_ROWS)
    first_line, first, lines, length = first_row, first_column, rows, columns
    if ALONG_ROWS:
        first_line, first, lines, length = first_column, first_row, columns, rows
    amax = tl.full([1, 1], 0, tl.int32)
    if not MEASURE and S.KIND != "none":
        if PER_LINE:
            line = first_line + tl.arange(0, P)
            amax = tl.load(amax_ptr + batch * lines + line, mask=line < lines, other=0)[:, None]
        else:
            amax += tl.load(amax_ptr)
    groups = ((lines + GP - 1) // GP) * ((length + GQ - 1) // GQ)
    cast_tile(
        x, random, amax, tensor, out_ptr + batch * out_batch, scale_ptr + batch * groups, first_line, first, lines, length,
        out_line, out_element, F, C, S, H, SCALE, W, P, Q, GP, GQ, MEASURE, FAKE, RAGGED, WORDS,
    )  # fmt: skip
