"""The tables in device memory that the optimizer's kernels read: one row per piece, one per row of constants.

A launch updates many tensors. Its kernel finds the row of the tensor that a program works on, and in it addresses, sizes and
random keys. Every column has a name here; the host fills a row by these names, and kernels load by them.

    piece table       int64[pieces, 16]         the columns below, filled by `piece_row`
    constants         float32[rows, 16]         `dither.spec.optimizer.CONSTANTS`, filled by `prepare`
    hyperparameters   float64[rows, 7]          `dither.spec.optimizer.HYPER`, filled by the optimizer
    gradients         int64[pieces, padded]     the address of each piece's gradient, filled by `PieceTable.point`
    owner             int32[programs]           the row of the piece table that each program works on

Triton compiles a module's globals into kernels only if they are `tl.constexpr`; the host reads their `.value`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference.adamw import Piece
from dither.ops.triton import BoundKernel
from dither.spec.optimizer import CONSTANTS, HYPER

ROW = tl.constexpr(16)
"""Columns of the piece table and of the table of constants: a row of constants is one 64-byte access."""

# The piece table.
W_ADDRESS = tl.constexpr(0)
M_ADDRESS = tl.constexpr(1)
V_ADDRESS = tl.constexpr(2)
M_SCALE_ADDRESS = tl.constexpr(3)
"""AdamW with 8-bit states: the address of the first moment's scales. Adam-mini uses the column for `RUN_ROWS`."""
V_SCALE_ADDRESS = tl.constexpr(4)
"""AdamW with 8-bit states: the address of the second moment's scales. Adam-mini uses the column for `RUN_ELEMENTS`."""
RUN_ROWS = tl.constexpr(3)
"""Adam-mini: how many rows share one second moment."""
RUN_ELEMENTS = tl.constexpr(4)
"""Adam-mini: how many elements of the whole parameter share one second moment."""
EXTRA_ADDRESS = tl.constexpr(5)
"""The address of the float32 master weights, of Kahan's remainder, or of the scales of a weight in codes; 0 for none."""
W_KEY = tl.constexpr(6)
STATE_KEY = tl.constexpr(7)
AMAX_ADDRESS = tl.constexpr(8)
"""A weight in codes: the address of the largest magnitudes of its groups after the step, int32 bits of float32."""
LEAD_ROWS = tl.constexpr(9)
"""Adam-mini: how many rows of the first run lie before this piece, on another shard."""
ELEMENTS = tl.constexpr(10)
COLUMNS = tl.constexpr(11)
FIRST_ROW = tl.constexpr(12)
"""The row of the piece's first element in the whole parameter; random bits are drawn by coordinates there."""
FIRST_COLUMN = tl.constexpr(13)
CONSTANTS_ROW = tl.constexpr(14)
FIRST_PROGRAM = tl.constexpr(15)

# The table of constants.
SCALE = tl.constexpr(CONSTANTS.index("scale"))
BETA1 = tl.constexpr(CONSTANTS.index("beta1"))
REST1 = tl.constexpr(CONSTANTS.index("rest1"))
BETA2 = tl.constexpr(CONSTANTS.index("beta2"))
REST2 = tl.constexpr(CONSTANTS.index("rest2"))
DECAY = tl.constexpr(CONSTANTS.index("decay"))
SHRINK = tl.constexpr(CONSTANTS.index("shrink"))
SIZE = tl.constexpr(CONSTANTS.index("size"))
ROOT = tl.constexpr(CONSTANTS.index("root"))
EPS = tl.constexpr(CONSTANTS.index("eps"))
FEEDBACK = tl.constexpr(CONSTANTS.index("feedback"))

# The table of hyperparameters.
HYPER_ROW = tl.constexpr(len(HYPER))
HYPER_LR = tl.constexpr(HYPER.index("lr"))
HYPER_BETA1 = tl.constexpr(HYPER.index("beta1"))
HYPER_BETA2 = tl.constexpr(HYPER.index("beta2"))
HYPER_EPS = tl.constexpr(HYPER.index("eps"))
HYPER_WEIGHT_DECAY = tl.constexpr(HYPER.index("weight_decay"))
HYPER_ACTIVE = tl.constexpr(HYPER.index("active"))
HYPER_SIGN = tl.constexpr(HYPER.index("sign"))

ADDRESSES = 64
"""Number of addresses that one launch of `_write_kernel` writes."""


@triton.jit
def piece_field(table_ptr, piece, COLUMN: tl.constexpr, MULTIPLE: tl.constexpr = 1):
    """Load a column of a piece's row, int64, known to be a multiple of MULTIPLE.

    Triton attaches the hint to the operation that computes a value and drops it from the result of a call, so
    `tl.multiple_of` has to stand here, beside the load.
    """
    value = tl.load(table_ptr + piece * ROW + COLUMN)
    if MULTIPLE > 1:
        value = tl.multiple_of(value, MULTIPLE)
    return value


@triton.jit
def piece_pointer(table_ptr, piece, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a column of a piece's row as a pointer to TYPE; ALIGNED says that it is a multiple of 16 bytes."""
    pointer = piece_field(table_ptr, piece, COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def piece_row(piece: Piece, first_program: int) -> list[int]:
    """Return the row of the piece table for a piece whose programs begin at number `first_program`."""
    row = [0] * int(ROW.value)
    row[W_ADDRESS.value] = piece.w.data_ptr()
    row[M_ADDRESS.value] = piece.m.data_ptr()
    row[V_ADDRESS.value] = piece.v.data_ptr()
    if piece.run > 0:
        row[RUN_ROWS.value] = piece.run
        row[RUN_ELEMENTS.value] = piece.share
    else:
        row[M_SCALE_ADDRESS.value] = _address(piece.m_scale)
        row[V_SCALE_ADDRESS.value] = _address(piece.v_scale)
    row[EXTRA_ADDRESS.value] = _address(piece.extra)
    row[W_KEY.value], row[STATE_KEY.value] = piece.keys
    row[LEAD_ROWS.value] = piece.lead
    row[ELEMENTS.value] = piece.w.numel()
    row[COLUMNS.value] = piece.w.shape[1]
    row[FIRST_ROW.value] = piece.row
    row[FIRST_COLUMN.value] = piece.column
    row[CONSTANTS_ROW.value] = piece.constants
    row[FIRST_PROGRAM.value] = first_program
    return row


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@triton.jit
def _write_kernel(out_ptr, addresses):
    """Write a tuple of numbers: as arguments of a launch they need no copy from the host, and a CUDA graph keeps them."""
    for i in tl.static_range(len(addresses)):
        tl.store(out_ptr + i, addresses[i].to(tl.int64))


def _write(out: Tensor, addresses: Sequence[int]) -> None:
    for start in range(0, len(addresses), ADDRESSES):
        part = tuple(addresses[start : start + ADDRESSES])
        _write_kernel[(1,)](out[start:], part + part[-1:] * (ADDRESSES - len(part)), num_warps=1)


class PieceTable:
    """The pieces of one kernel launch and the tables that describe them, on the pieces' device."""

    def __init__(self, pieces: Sequence[Piece], indices: Sequence[int], counts: Sequence[int], flat: bool) -> None:
        """Build the tables.

        indices: the position of each piece among those of its batch, which is that of its gradient.
        counts: how many programs work on each piece.
        flat: tiles run over the ends of rows, and all addresses are multiples of 16 bytes.
        """
        self.indices, self.flat, self.programs = indices, flat, sum(counts)
        table, first_program, first_group = [], 0, 0
        device = pieces[0].w.device
        groups = [0 if piece.extra is None or not piece.coded else piece.extra.numel() for piece in pieces]
        self.amax = torch.zeros(sum(groups), dtype=torch.int32, device=device)
        """The largest magnitudes of the groups of weights in codes."""
        for piece, count, number in zip(pieces, counts, groups, strict=True):
            table.append(piece_row(piece, first_program))
            table[-1][AMAX_ADDRESS.value] = self.amax.data_ptr() + first_group * self.amax.itemsize
            first_program, first_group = first_program + count, first_group + number
        self.rows = torch.tensor(table, dtype=torch.int64).to(device)
        self.owner = torch.repeat_interleave(torch.tensor(counts)).to(device, torch.int32)
        # Padded to whole launches of the kernel that writes it.
        self.grads = torch.empty(-(-len(pieces) // ADDRESSES) * ADDRESSES, dtype=torch.int64, device=device)
        self.written: tuple[int, ...] = ()
        self.captured = False
        self.updates: dict[tuple[str, bool], BoundKernel] = {}
        self.squares: BoundKernel | None = None

    def point(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Write the addresses of the gradients to the device. Return tensors to keep alive until the kernel is launched."""
        mine = [grads[index] for index in self.indices]
        kept = [grad if not self.flat or grad.data_ptr() % 16 == 0 else grad.clone() for grad in mine]
        addresses = tuple(grad.data_ptr() for grad in kept)
        # While a graph is captured the write must be part of it, since the table may change before a replay. A replay changes
        # the table unseen by this object, so from then on every step writes.
        self.captured = self.captured or _capturing(self.grads.device)
        if addresses != self.written or self.captured:
            _write(self.grads, addresses)
            self.written = addresses
        return kept


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
