"""AdamW and Adam-mini, as in `dither.reference.adamw`, many tensors a launch and one pass over memory.

A table in device memory says where each tensor's numbers lie; a program looks up which tensor its tile belongs to. A tile is
a line of N elements in memory order. Where rows are whole numbers of Philox blocks (and of state blocks) a tile may run over
their ends, so that no lane is idle; other tensors take `FLAT = False`, where the numbering pads rows to whole blocks.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.adam_update import BITS, CONSTANTS, HYPER, ODD_FACTOR, Piece, Update
from dither.kernels import Launch, dynamic, native
from dither.kernels.philox import random_calls, random_elements
from dither.kernels.rounding import (
    QUIET_NAN,
    How,
    as_bits,
    as_float,
    decode,
    encode,
    fields,
    round_bits,
    widen,
)
from dither.kernels.scaling import Scaling, group_factors, scaling_fields
from dither.precision import Cast
from dither.reference.adamw import FORMATS, UNIT

N, TILES, WARPS, REGISTERS = 1024, 8, 4, 64
"""Elements of a tile, tiles of a program, and what it may use: the best of a sweep over 16 tensors of 4096 x 4096."""

ODD = tl.constexpr(ODD_FACTOR)
LANES = tl.constexpr(128 // BITS)
"""How many neighbours one Philox call serves."""

COLUMNS = tl.constexpr(16)
"""Columns of the tables of tensors and of constants.

Of a tensor: 0 to 2 the addresses of w, m and v; 3 and 4 those of their scales, or Adam-mini's run and share; 5 that of
master or remainder; 6 and 7 the keys of weight and moments; 9 Adam-mini's lead; 10 elements; 11 columns; 12 and 13 row and
column in the whole parameter; 14 its row of constants; 15 its first program. Of constants: as `dither.adam_update.CONSTANTS`.
"""

HYPER_COLUMNS = tl.constexpr(len(HYPER))
"""Columns of the table of hyperparameters, as `dither.adam_update.HYPER`."""

ADDRESSES = 64
"""How many addresses one launch writes."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}
INTEGERS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}


@triton.jit
def _pointer(table_ptr, at, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column of a tensor's row; ALIGNED says that it is a multiple of 16 bytes."""
    pointer = tl.load(table_ptr + at * COLUMNS + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _moved(x, random, H: tl.constexpr):
    """Bits of float32 `x` whose upper half is the bfloat16 number that `x` rounds to; overflow is Inf, NaN stays NaN."""
    bits = as_bits(x)
    # Half a unit, or random bits, below the last kept bit; a carry into the exponent is right, up to infinity itself.
    if H.KIND == "stochastic":
        moved = bits + random
    else:
        moved = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x == x, moved, QUIET_NAN)


@triton.jit
def _rounded(x, random, F: tl.constexpr, H: tl.constexpr):
    """Float32 `x` rounded to values of the format, as float32; overflow becomes Inf, NaN stays NaN."""
    if F.M == 23:
        return x
    elif F.BIAS == 127:
        return as_float(_moved(x, random, H) & -65536)
    else:
        bits = as_bits(x)
        return as_float(round_bits(bits, bits, random, F, H, False))


@triton.jit
def _store(pointer, place, x, random, inside, F: tl.constexpr, H: tl.constexpr):
    """Round float32 `x` to the format and store it; the pointer is one to integers of the format's size."""
    if F.M == 23:
        tl.store(pointer + place, as_bits(x), mask=inside)
    elif F.BIAS == 127:
        tl.store(pointer + place, (_moved(x, random, H) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(pointer + place, encode(as_bits(_rounded(x, random, F, H)), F).to(tl.int16), mask=inside)


@triton.jit
def _spread(groups, GROUP: tl.constexpr, TILE: tl.constexpr):
    """One value for each group of neighbours, to one for each element of the tile."""
    return tl.reshape(tl.broadcast_to(groups[:, None], [TILE // GROUP, GROUP]), [TILE])


@triton.jit
def _load_codes(
    state,
    place,
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
):
    """float32 values of an 8-bit moment."""
    codes = tl.load(state + place, mask=inside, other=0).to(tl.int32)
    factor = tl.load(scale + blocks, mask=blocks_inside, other=1.0)
    if KIND == "dynamic8":
        values = dynamic.decode(codes, tables_ptr, SIGNED)
    else:
        values = decode(codes, F)
    return values * _spread(factor, GROUP, TILE)


@triton.jit
def _store_codes(
    state,
    place,
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
):
    """Round float32 values into an 8-bit moment, a scale for each block."""
    bits = tl.where(inside, as_bits(value) & 0x7FFFFFFF, 0)
    amax = tl.max(tl.reshape(bits, [TILE // GROUP, GROUP]), axis=1)
    multiply, restore, _ = group_factors(amax, 1.0, S, F, H, True, H.NATIVE)
    scaled = value * _spread(multiply, GROUP, TILE)
    if KIND == "dynamic8":
        codes = dynamic.encode(scaled, tables_ptr, SIGNED)
    else:
        y = as_bits(scaled)
        codes = encode(round_bits(y, y, random, F, H, True), F)
    tl.store(state + place, codes.to(tl.uint8), mask=inside)
    tl.store(scale + blocks, restore, mask=blocks_inside)


@triton.jit
def _move(w, extra, direction, decay, shrink, size, W: tl.constexpr, WH: tl.constexpr, MODE: tl.constexpr):
    """(weights, master or remainder) after a move along `direction`, both float32 and still to be rounded."""
    move = size * direction
    if MODE == "master":
        master = extra * decay - move
        return master, master
    elif MODE == "kahan":
        change = extra - (shrink * w + move)
        new = w + change
        return new, change - (_rounded(new, new, W, WH) - w)
    else:
        new = w * decay - move
        return new, new


@triton.jit
def _root(v, NATIVE: tl.constexpr):
    """sqrt(v), rounded once, for float32 v >= 0; NaN for infinity.

    The GPU's own sqrt.rn is this sequence for the middle of the range and a branch for the rest of it, and a branch an element
    keeps the elements of a thread from overlapping. Small numbers are scaled instead (0.99 ms against 1.21 ms for a step).
    """
    small = v < 2.0**-100
    scaled = v * tl.where(small, 2.0**48, 1.0)
    if NATIVE:
        # Never of zero, whose inverse root is infinite.
        above = tl.maximum(scaled, 2.0**-102)
        inverse = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [above], dtype=tl.float32, is_pure=True, pack=1
        )
        guess = scaled * inverse
        result = tl.fma(tl.fma(-guess, guess, scaled), inverse * 0.5, guess)
    else:
        result = tl.sqrt_rn(scaled)
        result = tl.where(scaled < float("inf"), result, float("nan"))
    return result * tl.where(small, 2.0**-24, 1.0)


@triton.jit
def _quotient(m, d, NATIVE: tl.constexpr):
    """2^48 m / d, rounded once, for d from 10^-30 to 10^30; 0 below 2^-100, NaN for infinity. As `_root`, without branches."""
    scaled = m * 2.0**48
    if NATIVE:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
        inverse = tl.fma(inverse, tl.fma(-d, inverse, 1.0), inverse)
        result = scaled * inverse
        result = tl.fma(tl.fma(-d, result, scaled), inverse, result)
        result = tl.fma(tl.fma(-d, result, scaled), inverse, result)
    else:
        result = tl.div_rn(scaled, d)
        result = tl.where(tl.abs(result) < float("inf"), result, float("nan"))
    return tl.where(tl.abs(result) < 2.0**-100, 0.0, result)


@triton.jit
def _coordinates(e0, size, columns, row0, column0, GROUP: tl.constexpr, TILE: tl.constexpr, FLAT: tl.constexpr):
    """For the elements from number `e0` on: (place in memory after the tile's base, inside, rows and columns that draw)."""
    if FLAT:
        # A row and column for each Philox call, which begins some rows below the first.
        place = tl.arange(0, TILE)
        first_row = e0 // columns
        call = (tl.arange(0, TILE // LANES) * LANES).to(tl.uint32) + (e0 - first_row * columns).to(tl.uint32)
        wide = columns.to(tl.uint32)
        if columns >= TILE:  # a tile has one row's end at most, and needs no division
            down = (call >= wide).to(tl.uint32)
        else:
            down = call // wide
        row = (row0 + first_row).to(tl.uint32) + down
        column = column0.to(tl.uint32) + (call - down * wide)
        return place, e0 + place < size, row, column
    else:
        pitch = tl.cdiv(columns, GROUP) * GROUP
        e = e0 + tl.arange(0, TILE)
        row = e // pitch
        column = e - row * pitch
        place = row * columns + column
        return place, (column < columns) & (place < size), row0 + row, column0 + column


@triton.jit
def _random(key, step, row, column, TILE: tl.constexpr, FLAT: tl.constexpr):
    """int32[TILE]: 16 random bits for each element."""
    if FLAT:
        return random_calls(key, step, row, column, TILE // LANES, 16)
    else:
        return random_elements(key, step, row, column, 16)


@triton.jit
def _second(random):
    """The bits for the second moment, from those for the first: an odd factor modulo 2^16 only permutes them."""
    return (random * ODD) & 0xFFFF


@triton.jit
def _adamw_kernel(
    table_ptr,
    grads_ptr,
    owner_ptr,
    constants_ptr,
    step_ptr,
    skip_ptr,
    tables_ptr,
    W: tl.constexpr,
    WH: tl.constexpr,
    MODE: tl.constexpr,
    F: tl.constexpr,
    FH: tl.constexpr,
    S: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    W_TYPE: tl.constexpr,
    W_STORE: tl.constexpr,
    G_TYPE: tl.constexpr,
    S_TYPE: tl.constexpr,
    S_STORE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    step = tl.load(step_ptr).to(tl.uint32)
    size = tl.load(table_ptr + tensor * COLUMNS + 10)
    columns = tl.load(table_ptr + tensor * COLUMNS + 11)
    row0 = tl.load(table_ptr + tensor * COLUMNS + 12)
    column0 = tl.load(table_ptr + tensor * COLUMNS + 13)
    first = tl.load(table_ptr + tensor * COLUMNS + 15)
    if FLAT:
        # Eight neighbours are inside or not together: known to the compiler, that makes one load of eight.
        size = tl.multiple_of(size, LANES)
    constants = constants_ptr + tl.load(table_ptr + tensor * COLUMNS + 14) * COLUMNS
    scale = tl.load(constants)
    beta1 = tl.load(constants + 1)
    rest1 = tl.load(constants + 2)
    beta2 = tl.load(constants + 3)
    rest2 = tl.load(constants + 4)
    decay = tl.load(constants + 5)
    shrink = tl.load(constants + 6)
    rate = tl.load(constants + 7)
    root = tl.load(constants + 8)
    eps = tl.load(constants + 9)
    w_key = tl.load(table_ptr + tensor * COLUMNS + 6)
    state_key = tl.load(table_ptr + tensor * COLUMNS + 7)
    w_start = _pointer(table_ptr, tensor, 0, W_TYPE, ALIGNED)
    m_start = _pointer(table_ptr, tensor, 1, S_TYPE, ALIGNED)
    v_start = _pointer(table_ptr, tensor, 2, S_TYPE, ALIGNED)
    extra_start = _pointer(table_ptr, tensor, 5, tl.float32 if MODE == "master" else W_TYPE, ALIGNED)
    g_start = tl.load(grads_ptr + tensor).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_start = tl.multiple_of(g_start, 16)

    m_scale = _pointer(table_ptr, tensor, 3, tl.float32, False)
    v_scale = _pointer(table_ptr, tensor, 4, tl.float32, False)
    blocks_end = (size // columns) * tl.cdiv(columns, GROUP)

    # What is above is the same for all tiles of a program: several of them share its cost.
    for tile in range(TILES):
        e0 = ((program - first) * TILES + tile) * TILE
        place, inside, row, column = _coordinates(e0, size, columns, row0, column0, GROUP, TILE, FLAT)
        base = e0 if FLAT else e0 * 0
        w_ptr = w_start + base
        m_ptr = m_start + base
        v_ptr = v_start + base
        extra_ptr = extra_start + base
        w = widen(tl.load(w_ptr + place, mask=inside, other=0.0), WH.NATIVE)
        g = widen(tl.load(g_start + base + place, mask=inside, other=0.0), WH.NATIVE) * scale
        extra = w
        if MODE != "plain":
            extra = widen(tl.load(extra_ptr + place, mask=inside, other=0.0), WH.NATIVE)
        if KIND == "whole":
            m = widen(tl.load(m_ptr + place, mask=inside, other=0.0), WH.NATIVE)
            v = widen(tl.load(v_ptr + place, mask=inside, other=0.0), WH.NATIVE)
        else:
            blocks = e0 // GROUP + tl.arange(0, TILE // GROUP)
            blocks_inside = blocks < blocks_end
            m = _load_codes(m_ptr, place, inside, m_scale, blocks, blocks_inside, tables_ptr, F, KIND, True, GROUP, TILE)
            v = _load_codes(v_ptr, place, inside, v_scale, blocks, blocks_inside, tables_ptr, F, KIND, False, GROUP, TILE)

        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * (g * g)
        direction = _quotient(m, _root(v, WH.NATIVE) * root + eps, WH.NATIVE)
        w, extra = _move(w, extra, direction, decay, shrink, rate, W, WH, MODE)
        random = place
        if WH.KIND == "stochastic":
            random = _random(w_key, step, row, column, TILE, FLAT)
        _store(w_ptr.to(tl.pointer_type(W_STORE)), place, w, random, inside, W, WH)
        if MODE == "master":
            tl.store(extra_ptr + place, extra, mask=inside)
        elif MODE == "kahan":
            _store(extra_ptr.to(tl.pointer_type(W_STORE)), place, extra, random, inside, W, WH)
        if FH.KIND == "stochastic":
            random = _random(state_key, step, row, column, TILE, FLAT)
        if KIND == "whole":
            _store(m_ptr.to(tl.pointer_type(S_STORE)), place, m, random, inside, F, FH)
            _store(v_ptr.to(tl.pointer_type(S_STORE)), place, v, _second(random), inside, F, FH)
        else:
            _store_codes(
                m_ptr, place, inside, m_scale, blocks, blocks_inside, m, random, tables_ptr, F, FH, S, KIND, True, GROUP, TILE
            )
            _store_codes(
                v_ptr,
                place,
                inside,
                v_scale,
                blocks,
                blocks_inside,
                v,
                _second(random),
                tables_ptr,
                F,
                FH,
                S,
                KIND,
                False,
                GROUP,
                TILE,
            )


@triton.jit
def _squares_kernel(
    table_ptr,
    grads_ptr,
    owner_ptr,
    out_ptr,
    G_TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """float64[programs]: the sum of the squares of each tile of gradients."""
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    size = tl.load(table_ptr + tensor * COLUMNS + 10)
    e0 = (program - tl.load(table_ptr + tensor * COLUMNS + 15)) * TILE
    g_ptr = tl.load(grads_ptr + tensor).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
        size = tl.multiple_of(size, LANES)
    place = tl.arange(0, TILE)
    g = widen(tl.load(g_ptr + e0 + place, mask=e0 + place < size, other=0.0), NATIVE).to(tl.float64)
    tl.store(out_ptr + program, tl.sum(g * g))


@triton.jit
def _power(base, exponent):
    result = base * 0 + 1
    for _ in tl.static_range(32):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit(do_not_specialize=["rows"])
def _prepare_kernel(
    hyper_ptr,
    steps_ptr,
    skipped_ptr,
    squares_ptr,
    loss_scale_ptr,
    found_inf_ptr,
    constants_ptr,
    norm_ptr,
    skip_ptr,
    max_norm,
    rows,
    CLIP: tl.constexpr,
    ROWS: tl.constexpr,
):
    inverse = tl.full((), 1.0, tl.float32)
    if loss_scale_ptr is not None:
        inverse = tl.div_rn(inverse, tl.load(loss_scale_ptr))
    norm = inverse * 0.0
    factor = inverse
    skip = tl.full((), 0, tl.int32)
    if squares_ptr is not None:
        squares = tl.load(squares_ptr)
        skip = (squares - squares != 0.0).to(tl.int32)  # of NaN and infinity that is NaN
        norm = (tl.sqrt(squares) * inverse.to(tl.float64)).to(tl.float32)
        if CLIP:
            quotient = tl.div_rn(max_norm, norm + 1e-6)
            factor = tl.where(quotient > 1.0, 1.0, quotient) * inverse  # NaN stays
    if found_inf_ptr is not None:
        skip = tl.where(tl.load(found_inf_ptr) != 0.0, 1, skip)

    row = tl.arange(0, ROWS)
    inside = row < rows
    hyper = hyper_ptr + row * HYPER_COLUMNS
    lr = tl.load(hyper, mask=inside, other=0.0)
    beta1 = tl.load(hyper + 1, mask=inside, other=0.0)
    beta2 = tl.load(hyper + 2, mask=inside, other=0.0)
    active = tl.load(hyper + 5, mask=inside, other=0.0)
    sound = (lr >= 0.0) & (lr < float("inf")) & (beta1 >= 0.0) & (beta1 < 1.0) & (beta2 >= 0.0) & (beta2 < 1.0)
    skip = tl.maximum(skip, tl.max(tl.where((active != 0.0) & (sound == 0), 1, 0)))
    tl.store(skipped_ptr, tl.load(skipped_ptr) + skip)
    tl.store(norm_ptr, norm)
    tl.store(skip_ptr, skip)

    done = tl.load(steps_ptr + row, mask=inside, other=0)
    done += active.to(tl.int64) * (1 - skip)
    tl.store(steps_ptr + row, done, mask=inside)
    t = tl.maximum(done, 1)
    root = tl.sqrt_rn((1 - _power(beta2, t)).to(tl.float32))
    shrink = lr * tl.load(hyper + 4, mask=inside, other=0.0)
    out = constants_ptr + row * COLUMNS
    tl.store(out, factor * tl.load(hyper + 6, mask=inside, other=1.0).to(tl.float32), mask=inside)
    tl.store(out + 1, beta1.to(tl.float32), mask=inside)
    tl.store(out + 2, (1 - beta1).to(tl.float32), mask=inside)
    tl.store(out + 3, beta2.to(tl.float32), mask=inside)
    tl.store(out + 4, (1 - beta2).to(tl.float32), mask=inside)
    tl.store(out + 5, (1 - shrink).to(tl.float32), mask=inside)
    tl.store(out + 6, shrink.to(tl.float32), mask=inside)
    tl.store(out + 7, tl.div_rn(lr.to(tl.float32), (1 - _power(beta1, t)).to(tl.float32)) * 2.0**-48, mask=inside)
    tl.store(out + 8, tl.div_rn(root * 0.0 + 1.0, root), mask=inside)
    tl.store(out + 9, tl.load(hyper + 3, mask=inside, other=0.0).to(tl.float32), mask=inside)


def prepare(
    hyper: Tensor,
    steps: Tensor,
    skipped: Tensor,
    squares: Tensor | None,
    loss_scale: Tensor | None,
    found_inf: Tensor | None,
    max_norm: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(constants, norm, skip); `steps` of active rows or `skipped` are one more then."""
    rows = hyper.shape[0]
    constants = torch.empty((rows, COLUMNS.value), dtype=torch.float32, device=hyper.device)
    norm = torch.empty((), dtype=torch.float32, device=hyper.device)
    skip = torch.empty((), dtype=torch.int32, device=hyper.device)
    launch = _prepare_launch(rows, float(max_norm))
    launch(hyper, steps, skipped, squares, loss_scale, found_inf, constants, norm, skip)
    return constants[:, : len(CONSTANTS)], norm, skip


@functools.lru_cache(maxsize=64)
def _prepare_launch(rows: int, max_norm: float) -> Launch:
    constants = {"CLIP": bool(max_norm), "ROWS": triton.next_power_of_2(rows)}
    return Launch(_prepare_kernel, 1, (max_norm, rows), constants, num_warps=1, enable_fp_fusion=False)


@triton.jit
def _run_of(table_ptr, tensor, run, size, columns):
    """(first element, end) of a run of rows of a tensor's piece, in memory order."""
    length = tl.load(table_ptr + tensor * COLUMNS + 3)
    lead = tl.load(table_ptr + tensor * COLUMNS + 9)
    start = tl.maximum((run * length - lead) * columns, 0)
    return start, tl.minimum(((run + 1) * length - lead) * columns, size)


@triton.jit
def _run_squares(g_ptr, start, end, NATIVE: tl.constexpr, TILE: tl.constexpr):
    """float64: the sum of the squares of the elements from `start` to `end`."""
    total = tl.zeros([TILE], tl.float64)
    for at in range(start, end, TILE):
        place = at + tl.arange(0, TILE)
        g = widen(tl.load(g_ptr + place, mask=place < end, other=0.0), NATIVE).to(tl.float64)
        total = tl.fma(g, g, total)  # a square is exact in float64, fused or not
    return tl.sum(total)


@triton.jit
def _run_squares_kernel(
    table_ptr, grads_ptr, owner_ptr, sums_ptr, G_TYPE: tl.constexpr, NATIVE: tl.constexpr, TILE: tl.constexpr
):
    """float64[programs]: the sum of squares of each run, a program each."""
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    size = tl.load(table_ptr + tensor * COLUMNS + 10)
    columns = tl.load(table_ptr + tensor * COLUMNS + 11)
    run = program - tl.load(table_ptr + tensor * COLUMNS + 15)
    start, end = _run_of(table_ptr, tensor, run, size, columns)
    g_ptr = tl.load(grads_ptr + tensor).to(tl.pointer_type(G_TYPE))
    tl.store(sums_ptr + program, _run_squares(g_ptr, start, end, NATIVE, TILE))


@triton.jit
def _mini_kernel(
    table_ptr,
    grads_ptr,
    owner_ptr,
    constants_ptr,
    step_ptr,
    skip_ptr,
    W: tl.constexpr,
    WH: tl.constexpr,
    MODE: tl.constexpr,
    F: tl.constexpr,
    FH: tl.constexpr,
    W_TYPE: tl.constexpr,
    W_STORE: tl.constexpr,
    G_TYPE: tl.constexpr,
    S_TYPE: tl.constexpr,
    S_STORE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOVED: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program a run: its gradients are read twice, the second time from a cache."""
    if tl.load(skip_ptr) != 0:
        return
    program = tl.program_id(0)
    tensor = tl.load(owner_ptr + program)
    step = tl.load(step_ptr).to(tl.uint32)
    size = tl.load(table_ptr + tensor * COLUMNS + 10)
    columns = tl.load(table_ptr + tensor * COLUMNS + 11)
    row0 = tl.load(table_ptr + tensor * COLUMNS + 12)
    column0 = tl.load(table_ptr + tensor * COLUMNS + 13)
    constants = constants_ptr + tl.load(table_ptr + tensor * COLUMNS + 14) * COLUMNS
    run = program - tl.load(table_ptr + tensor * COLUMNS + 15)
    if FLAT:
        columns = tl.multiple_of(columns, LANES)
        size = tl.multiple_of(size, LANES)
    start, end = _run_of(table_ptr, tensor, run, size, columns)
    w_ptr = _pointer(table_ptr, tensor, 0, W_TYPE, ALIGNED)
    m_ptr = _pointer(table_ptr, tensor, 1, S_TYPE, ALIGNED)
    v_ptr = _pointer(table_ptr, tensor, 2, tl.float32, False) + run
    extra_ptr = _pointer(table_ptr, tensor, 5, tl.float32 if MODE == "master" else W_TYPE, ALIGNED)
    g_ptr = tl.load(grads_ptr + tensor).to(tl.pointer_type(G_TYPE))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    scale = tl.load(constants)
    v = tl.load(v_ptr)
    if not MOVED:
        share = tl.load(table_ptr + tensor * COLUMNS + 4)
        mean = _run_squares(g_ptr, start, end, WH.NATIVE, TILE) / share.to(tl.float64)
        factor = scale.to(tl.float64)
        v = tl.load(constants + 3) * v + tl.load(constants + 4) * (mean * (factor * factor)).to(tl.float32)
        tl.store(v_ptr, v)
    denominator = _root(v, WH.NATIVE) * tl.load(constants + 8) + tl.load(constants + 9)
    w_key = tl.load(table_ptr + tensor * COLUMNS + 6)
    state_key = tl.load(table_ptr + tensor * COLUMNS + 7)
    beta1 = tl.load(constants + 1)
    rest1 = tl.load(constants + 2)
    decay = tl.load(constants + 5)
    shrink = tl.load(constants + 6)
    rate = tl.load(constants + 7)
    for at in range(start, end, TILE):
        place, inside, row, column = _coordinates(at, end, columns, row0, column0, 1, TILE, FLAT)
        base = at if FLAT else at * 0
        w = widen(tl.load(w_ptr + base + place, mask=inside, other=0.0), WH.NATIVE)
        g = widen(tl.load(g_ptr + base + place, mask=inside, other=0.0), WH.NATIVE) * scale
        m = widen(tl.load(m_ptr + base + place, mask=inside, other=0.0), WH.NATIVE)
        extra = w
        if MODE != "plain":
            extra = widen(tl.load(extra_ptr + base + place, mask=inside, other=0.0), WH.NATIVE)
        m = beta1 * m + rest1 * g
        w, extra = _move(w, extra, _quotient(m, tl.zeros_like(m) + denominator, WH.NATIVE), decay, shrink, rate, W, WH, MODE)
        random = place
        if WH.KIND == "stochastic":
            random = _random(w_key, step, row, column, TILE, FLAT)
        _store(w_ptr.to(tl.pointer_type(W_STORE)) + base, place, w, random, inside, W, WH)
        if MODE == "master":
            tl.store(extra_ptr + base + place, extra, mask=inside)
        elif MODE == "kahan":
            _store(extra_ptr.to(tl.pointer_type(W_STORE)) + base, place, extra, random, inside, W, WH)
        if FH.KIND == "stochastic":
            random = _random(state_key, step, row, column, TILE, FLAT)
        _store(m_ptr.to(tl.pointer_type(S_STORE)) + base, place, m, random, inside, F, FH)


@triton.jit
def _write_kernel(out_ptr, addresses):
    """Write a tuple of numbers: as arguments of a launch they need no copy from the host, and a CUDA graph keeps them."""
    for i in tl.static_range(len(addresses)):
        tl.store(out_ptr + i, addresses[i].to(tl.int64))


def _write(out: Tensor, addresses: Sequence[int]) -> None:
    for start in range(0, len(addresses), ADDRESSES):
        part = tuple(addresses[start : start + ADDRESSES])
        _write_kernel[(1,)](out[start:], part + part[-1:] * (ADDRESSES - len(part)), num_warps=1)


class _Launch:
    """Pieces that one kernel launch takes, and the tables that describe them."""

    def __init__(self, pieces: Sequence[Piece], places: Sequence[int], counts: Sequence[int], flat: bool) -> None:
        self.places, self.flat, self.programs = places, flat, sum(counts)
        rows, first = [], 0
        for piece, count in zip(pieces, counts, strict=True):
            mini = piece.run > 0
            rows.append(
                [
                    piece.w.data_ptr(),
                    piece.m.data_ptr(),
                    piece.v.data_ptr(),
                    piece.run if mini else _address(piece.m_scale),
                    piece.share if mini else _address(piece.v_scale),
                    _address(piece.extra),
                    *piece.keys,
                    0,
                    piece.lead,
                    piece.w.numel(),
                    piece.w.shape[1],
                    piece.row,
                    piece.column,
                    piece.constants,
                    first,
                ]
            )
            first += count
        device = pieces[0].w.device
        self.table = torch.tensor(rows, dtype=torch.int64).to(device)
        self.owner = torch.repeat_interleave(torch.tensor(counts)).to(device, torch.int32)
        # Room for whole launches of the kernel that writes it.
        self.grads = torch.empty(-(-len(pieces) // ADDRESSES) * ADDRESSES, dtype=torch.int64, device=device)
        self.written: tuple[int, ...] = ()
        self.captured = False
        self.update: Launch | None = None
        self.squares: Launch | None = None

    def point(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Tell the device where the gradients lie; returns what must stay alive until the kernel is launched."""
        mine = [grads[place] for place in self.places]
        kept = [grad if not self.flat or grad.data_ptr() % 16 == 0 else grad.clone() for grad in mine]
        addresses = tuple(grad.data_ptr() for grad in kept)
        # While a graph is captured the write must be part of it, since the table may change before a replay; and a replay
        # changes the table without our knowing, so that from then on every step writes.
        self.captured = self.captured or _capturing(self.grads.device)
        if addresses != self.written or self.captured:
            _write(self.grads, addresses)
            self.written = addresses
        return kept


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _aligned(piece: Piece) -> bool:
    tensors = (piece.w, piece.m, piece.extra, None if piece.run else piece.v)
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _is_flat(piece: Piece, group: int) -> bool:
    """Whether tiles may run over the ends of rows: these, and the shard, begin at whole groups."""
    columns = piece.w.shape[1]
    return _aligned(piece) and columns % group == 0 and piece.column % group == 0 and columns < 1 << 31


class Batch:
    """Tensors that one update treats alike, of one dtype; `step` changes them all in place."""

    def __init__(self, pieces: Sequence[Piece], update: Update) -> None:
        self.pieces = tuple(pieces)
        self.update = update
        self.group = update.block if update.in_blocks else LANES.value
        self.tile = max(N, self.group)  # a block lies within a tile
        self.tiles = max(1, N * TILES // self.tile)
        self.launches = []
        for flat in (True, False):
            places = [i for i, piece in enumerate(pieces) if _is_flat(piece, self.group) == flat]
            if places:
                mine = [pieces[i] for i in places]
                self.launches.append(_Launch(mine, places, [self._programs(piece, flat) for piece in mine], flat))

    def _programs(self, piece: Piece, flat: bool) -> int:
        rows, columns = piece.w.shape
        if not flat and self.update.in_blocks:
            columns = -(-columns // self.group) * self.group
        return -(-rows * columns // (self.tile * self.tiles))

    def square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """float64, 0-d: the sum of the squares of the gradients; not finite exactly when one of them is not."""
        parts = []
        for launch in self.launches:
            kept = launch.point(grads)
            out = torch.empty(launch.programs, dtype=torch.float64, device=launch.table.device)
            if launch.squares is None:
                constants = {"G_TYPE": TYPES[kept[0].dtype], "NATIVE": native(out.device)}
                constants |= {"ALIGNED": launch.flat, "TILE": self.tile * self.tiles}
                launch.squares = Launch(
                    _squares_kernel, launch.programs, (), constants, num_warps=WARPS, enable_fp_fusion=False
                )
            launch.squares(launch.table, launch.grads, launch.owner, out)
            parts.append(out.sum())
        return torch.stack(parts).sum()

    def step(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor) -> None:
        """One AdamW step with `grads` (contiguous, of one dtype, the shapes of the weights), unless `skip` is 1."""
        for launch in self.launches:
            kept = launch.point(grads)
            device = launch.table.device
            if launch.update is None:
                launch.update = Launch(
                    _adamw_kernel,
                    launch.programs,
                    (),
                    {
                        "S": _state_scaling(self.update),
                        "KIND": "dynamic8" if self.update.format is None else "codes" if self.update.in_blocks else "whole",
                        "GROUP": self.group if self.update.in_blocks else 1,
                        "FLAT": launch.flat,
                        "TILE": self.tile,
                        "TILES": self.tiles,
                        **_kinds(self.pieces[0], kept[0], self.update, launch.flat, native(device)),
                    },
                    num_warps=WARPS * self.tile // N,
                    maxnreg=REGISTERS,
                    enable_fp_fusion=False,
                )
            tables = dynamic.device_tables(device) if self.update.states == "dynamic8" else None
            launch.update(launch.table, launch.grads, launch.owner, constants, step, skip, tables)


def _kinds(piece: Piece, grad: Tensor, update: Update, aligned: bool, fast: bool) -> dict[str, object]:
    """The compile-time constants that AdamW and Adam-mini share."""
    format = FORMATS[piece.w.dtype]
    mode = "master" if update.master else "kahan" if update.weights == "kahan" and format.bits < 32 else "plain"
    draws = mode == "plain" and update.weights == "stochastic" and format.bits < 32
    states = update.format or UNIT
    return {
        "W": fields(format),
        "WH": How("stochastic", BITS, BITS, True, fast) if draws else How("nearest", 0, 32, True, fast),
        "MODE": mode,
        "F": fields(states),
        "FH": How("stochastic", BITS, BITS, True, fast) if update.draws_states else How("nearest", 0, 32, True, fast),
        "W_TYPE": TYPES[piece.w.dtype],
        "W_STORE": INTEGERS[piece.w.itemsize],
        "G_TYPE": TYPES[grad.dtype],
        "S_TYPE": TYPES[piece.m.dtype],
        "S_STORE": INTEGERS[piece.m.itemsize],
        "ALIGNED": aligned,
    }


@functools.cache
def _state_scaling(update: Update) -> Scaling:
    """How a block's largest magnitude becomes its scale."""
    if update.format is None:
        return Scaling("fp32", 1.0, 0, 0, 1.0, 1.0, 1.0)
    return scaling_fields(Cast(update.states, "tensor", "fp32")) if update.in_blocks else _state_scaling(Update(states="int8"))


class MiniBatch(Batch):
    """The same for Adam-mini: a program for each run of rows that share a second moment."""

    def _programs(self, piece: Piece, flat: bool) -> int:
        return piece.v.numel()

    def square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """float64, 0-d: the sum of the squares of the gradients; a program a run, as the launches here are counted."""
        return torch.stack([self._squares(launch, grads).sum() for launch in self.launches]).sum()

    def run_squares(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """float64[runs] for each piece: the sums of squares over what it holds of each run."""
        sums: list[Tensor] = [grads[0]] * len(grads)
        for launch in self.launches:
            parts = self._squares(launch, grads).split([self.pieces[place].v.numel() for place in launch.places])
            for place, part in zip(launch.places, parts, strict=True):
                sums[place] = part
        return sums

    def _squares(self, launch: _Launch, grads: Sequence[Tensor]) -> Tensor:
        """float64[programs]: the sums of squares of a launch's runs."""
        kept = launch.point(grads)
        out = torch.empty(launch.programs, dtype=torch.float64, device=launch.table.device)
        _run_squares_kernel[(launch.programs,)](
            launch.table,
            launch.grads,
            launch.owner,
            out,
            G_TYPE=TYPES[kept[0].dtype],
            NATIVE=native(out.device),
            TILE=N,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        return out

    def step(self, grads: Sequence[Tensor], constants: Tensor, step: Tensor, skip: Tensor, *, moved: bool = False) -> None:
        """One step, unless `skip` is 1. `moved` says that the second moments are those after the step already."""
        for launch in self.launches:
            kept = launch.point(grads)
            _mini_kernel[(launch.programs,)](
                launch.table,
                launch.grads,
                launch.owner,
                constants,
                step,
                skip,
                FLAT=launch.flat,
                MOVED=moved,
                TILE=N,
                num_warps=WARPS,
                maxnreg=REGISTERS,
                enable_fp_fusion=False,
                **_kinds(self.pieces[0], kept[0], self.update, launch.flat, native(launch.table.device)),
            )
