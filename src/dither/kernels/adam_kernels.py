"""The kernels of AdamW and Adam-mini: one pass over memory, many tensors per launch; see `dither.reference.adamw`.

Tables in device memory say where each tensor lies (`dither.kernels.adam_tables`). A program looks up the piece that its tiles
belong to. A tile is TILE elements in memory order. The one-letter constants are listed in `dither.kernels.adam_elements`.
"""

import triton
import triton.language as tl

from dither.kernels.adam_elements import (
    LANES,
    coordinates,
    first_place,
    joined_masters,
    load_codes,
    moved_weights,
    next_place,
    quotient,
    random_bits,
    second_random_bits,
    split_masters,
    square_root,
    square_roots,
    store_codes,
    store_rounded,
)
from dither.kernels.adam_tables import (
    BETA1,
    BETA2,
    COLUMNS,
    CONSTANTS_ROW,
    DECAY,
    ELEMENTS,
    EPS,
    EXTRA_ADDRESS,
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
from dither.kernels.rounding import widen


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
    E_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    S_TYPE: tl.constexpr,
    S_STORE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Update w, m, v and extra in place with one AdamW step; nothing is written if `skip` is 1.

        g = grad * scale
        m = beta1 * m + rest1 * g                                  rest1 = 1 - beta1
        v = beta2 * v + rest2 * g * g                              rest2 = 1 - beta2
        w = decay * w - step_size * 2^48 m / (sqrt(v) * root + eps)

    step_size = 2^-48 lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t), decay = 1 - lr * weight_decay. The update reads m and v
    before they are rounded. Example, first step, beta1 = 0.9, beta2 = 0.999, lr = 0.001, no decay, g = 2: m = 0.2, v = 0.004,
    root = 31.6, so w moves by 0.001 * 10 * 0.2 / (0.0632 * 31.6) = 0.001.

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
    blocks_end = (elements // columns) * tl.cdiv(columns, GROUP)

    # Everything above is loaded once per program, and shared by its TILES tiles.
    first_row, first_column = first_place((program - first) * TILES * TILE, columns)
    for tile in range(TILES):
        e0 = ((program - first) * TILES + tile) * TILE
        offset, inside, row, column = coordinates(
            e0, elements, columns, row0, column0, first_row, first_column, GROUP, TILE, FLAT
        )
        first_row, first_column = next_place(first_row, first_column, columns, TILE)
        base = e0 if FLAT else e0 * 0
        w_ptr = w_start + base
        m_ptr = m_start + base
        v_ptr = v_start + base
        extra_ptr = extra_start + base
        w = widen(tl.load(w_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
        g = widen(tl.load(g_start + base + offset, mask=inside, other=0.0), WH.NATIVE) * scale
        extra = w
        low = offset
        if MODE == "split" or MODE == "split24":
            low = tl.load(extra_ptr + offset, mask=inside, other=0)
        elif MODE != "plain":
            extra = widen(tl.load(extra_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
        if KIND == "whole":
            m = widen(tl.load(m_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
            v = widen(tl.load(v_ptr + offset, mask=inside, other=0.0), WH.NATIVE)
        else:
            blocks = e0 // GROUP + tl.arange(0, TILE // GROUP)
            blocks_inside = blocks < blocks_end
            m = load_codes(
                m_ptr, offset, inside, m_scale, blocks, blocks_inside, tables_ptr, F, KIND, True, GROUP, TILE, WH.NATIVE
            )
            v = load_codes(
                v_ptr, offset, inside, v_scale, blocks, blocks_inside, tables_ptr, F, KIND, False, GROUP, TILE, WH.NATIVE
            )
        if MODE == "split" or MODE == "split24":
            extra = joined_masters(w, low, v, MODE)
            v = tl.abs(v)

        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * (g * g)
        if KIND == "dynamic8" or KIND == "codes":  # these leave no registers for eight roots at a time
            deviation = square_root(v, WH.NATIVE)
        else:
            deviation = square_roots(v, WH.NATIVE)
        direction = quotient(m, deviation * root + eps, WH.NATIVE)
        if KIND == "companded8":
            v = deviation
        w, extra = moved_weights(w, extra, direction, decay, shrink, step_size, W, WH, MODE)
        random = offset
        if WH.KIND == "stochastic":
            random = random_bits(w_key, step, row, column, TILE, FLAT)
        if MODE == "split" or MODE == "split24":
            upper, low, v = split_masters(w, v, MODE)
            tl.store(w_ptr.to(tl.pointer_type(W_STORE)) + offset, (upper >> 16).to(tl.int16), mask=inside)
            tl.store(extra_ptr + offset, low, mask=inside)
        else:
            store_rounded(w_ptr.to(tl.pointer_type(W_STORE)), offset, w, random, inside, W, WH)
        if MODE == "master":
            tl.store(extra_ptr + offset, extra, mask=inside)
        elif MODE == "kahan":
            store_rounded(extra_ptr.to(tl.pointer_type(W_STORE)), offset, extra, random, inside, W, WH)
        if FH.KIND == "stochastic":
            random = random_bits(state_key, step, row, column, TILE, FLAT)
        if KIND == "whole":
            store_rounded(m_ptr.to(tl.pointer_type(S_STORE)), offset, m, random, inside, F, FH)
            store_rounded(v_ptr.to(tl.pointer_type(S_STORE)), offset, v, second_random_bits(random), inside, F, FH)
        else:
            store_codes(
                m_ptr,
                offset,
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
            store_codes(
                v_ptr,
                offset,
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
    E_TYPE: tl.constexpr,
    G_TYPE: tl.constexpr,
    S_TYPE: tl.constexpr,
    S_STORE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    MOVED: tl.constexpr,
    TILE: tl.constexpr,
):
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
