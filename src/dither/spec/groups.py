"""The layout of scale groups in a tensor, and the storage of codes.

Every cast works on matrices: a tensor is viewed as x_BRC, a batch of B matrices in its own memory order, and its groups
run along the columns (axis -1), along the rows (any other axis), or are square blocks. In codes and scales, the quantized
axis is innermost in memory, as matrix products need it, even if the groups are the same along any axis. Scales that FP8 units
read are an exception, see `lines_innermost`.

    x [3, 5, 8], axis=-1, tile(4)    x_BRC [1, 15, 8]    codes [15, 8]        scales [15, 2]
    x [3, 5, 8], axis=1,  tile(4)    x_BRC [3, 5, 8]     codes [3, 8, 5]      scales [3, 8, 2]
    x [3, 5, 8], axis=-1, block(4)   x_BRC [3, 5, 8]     codes [3, 5, 8]      scales [3, 2, 2]
    x [3, 5, 8], axis=1,  tensor     x_BRC [3, 5, 8]     codes [3, 8, 5]      scales [1, 1]

Results are views in the order of x's dimensions, with the quantized one shortened (values [3, 5, 8], scales [3, 2, 8]).
"""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dither.errors import UserError
from dither.spec import Cast
from dither.spec.formats import Format

if TYPE_CHECKING:
    from torch import Tensor

PACKED_BITS = (4, 6)
"""Widths of packed formats: two 4-bit codes per byte, low nibble first; four 6-bit codes per 3 bytes, little endian."""


def packed_length(n: int, format: Format) -> int:
    """Return the number of storage elements that hold `n` codes in a row.

    >>> packed_length(5, Format.parse("e2m1")), packed_length(5, Format.parse("e2m3")), packed_length(5, Format.parse("e4m3"))
    (3, 6, 5)
    """
    if format.bits == 4:
        return (n + 1) // 2
    if format.bits == 6:
        return (n + 3) // 4 * 3
    return n


@dataclass(frozen=True)
class GroupLayout:
    """The matrices of one (shape, cast, axis); `rows`, `columns` and `batch` are those of x_BRC."""

    shape: tuple[int, ...]
    axis: int
    """The quantized axis, counted from the front."""
    along_rows: bool
    """True if groups run down the rows of x_BRC; codes are then stored transposed."""
    batch: int
    rows: int
    columns: int
    inner: int
    """Number of interleaved matrices: the product of the dimensions between the quantized axis and the last."""
    group: tuple[int, int]
    """Group size in (other, quantized) direction; 0 stands for the whole extent."""

    @property
    def lines(self) -> tuple[int, int]:
        """Return (number of lines, their length). A line runs along the quantized axis."""
        return (self.columns, self.rows) if self.along_rows else (self.rows, self.columns)

    @property
    def groups(self) -> tuple[int, int]:
        """Return the number of groups of a matrix in (other, quantized) direction."""
        (lines, length), (p, q) = self.lines, self.group
        return -(-lines // p) if p else 1, -(-length // q) if q else 1

    def matrices(self, x: "Tensor") -> "Tensor":
        """Return x_BRC: a view of `x`, or a copy if its strides do not allow a view."""
        if self.inner == 1:
            return x.reshape(self.batch, self.rows, self.columns)
        outer = math.prod(self.shape[: self.axis])
        return (
            x.reshape(outer, self.rows, self.inner, self.columns).transpose(1, 2).reshape(self.batch, self.rows, self.columns)
        )

    def restore(self, x_BRC: "Tensor") -> "Tensor":
        """Return values in the shape of the original tensor, the inverse of `matrices`."""
        if self.inner == 1:
            return x_BRC.reshape(self.shape)
        outer = math.prod(self.shape[: self.axis])
        return x_BRC.reshape(outer, self.inner, self.rows, self.columns).transpose(1, 2).reshape(self.shape)

    def expose(self, lines: "Tensor") -> "Tensor":
        """Return a view of codes or scales, stored as [B, other, quantized], in the order of the original dimensions."""
        rest = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        if self.keeps_matrices:
            rest = (*self.shape[:-2], lines.shape[-2])
        exposed = lines.reshape(*rest, lines.shape[-1])
        return exposed.movedim(-1, self.axis) if self.along_rows else exposed

    def collect(self, exposed: "Tensor") -> "Tensor":
        """Return codes or scales as [B, other, quantized], the inverse of `expose`."""
        if self.along_rows:
            exposed = exposed.movedim(self.axis, -1)
        other = exposed.shape[-2] if self.keeps_matrices else self.lines[0]
        return exposed.reshape(self.batch, other, exposed.shape[-1])

    @property
    def keeps_matrices(self) -> bool:
        """Return True if the last two dimensions are not merged with the leading ones, as square blocks need."""
        return self.group[0] > 1 and len(self.shape) >= 2


def checked_axis(shape: tuple[int, ...], axis: int) -> int:
    """Return `axis` counted from the front; raise if a tensor of `shape` does not have it. A scalar has one axis."""
    ndim = max(len(shape), 1)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise UserError(f"An axis is an integer, not {axis!r}.")
    if not -ndim <= axis < ndim:
        raise UserError(f"axis={axis} does not exist in a tensor of shape {tuple(shape)}: it goes from {-ndim} to {ndim - 1}.")
    return axis % ndim


def layout_of(shape: tuple[int, ...], cast: Cast, axis: int) -> GroupLayout:
    """Return the layout of a tensor of `shape` under `cast` along `axis`. Scalars and vectors count as one row."""
    axis, ndim = checked_axis(shape, axis), max(len(shape), 1)
    columns = shape[-1] if shape else 1
    kind, n = cast.group.kind, cast.group.size
    group = {"none": (1, 0), "tensor": (0, 0), "row": (1, 0), "tile": (1, n), "block": (n, n)}[kind]
    if kind == "block" and axis != ndim - 2:  # blocks are in the last two dimensions: no other axis can be innermost
        rows = shape[-2] if len(shape) >= 2 else 1
        return GroupLayout(shape, ndim - 1, False, math.prod(shape[:-2]), rows, columns, 1, group)
    if axis == ndim - 1:
        return GroupLayout(shape, axis, False, 1, math.prod(shape[:-1]), columns, 1, group)
    inner = math.prod(shape[axis + 1 : -1])
    return GroupLayout(shape, axis, True, math.prod(shape[:axis]) * inner, shape[axis], columns, inner, group)


@functools.lru_cache(maxsize=4096)
def known_layout(shape: tuple[int, ...], cast: Cast, axis: int) -> GroupLayout:
    """Return the same from a cache, for use inside operators, where sizes are plain integers."""
    return layout_of(shape, cast, axis)


def values_layout(shape: tuple[int, ...], cast: Cast, axis: int) -> GroupLayout:
    """Return the layout of a result without codes, which depends on the axis only if the groups do."""
    return layout_of(shape, cast, axis if cast.group.kind in ("row", "tile") else -1)


def lines_innermost(cast: Cast) -> bool:
    """Return True if scales of adjacent lines are contiguous: float32 scales of tiles of 128, as FP8 units read them."""
    return cast.group.kind == "tile" and cast.group.size == 128 and cast.scaling.storage == "fp32"


def expose_scale(scale: "Tensor", cast: Cast, layout: GroupLayout) -> "Tensor":
    """Return scales [B, P, Q] in the order of the tensor's dimensions. One scale per tensor is 0-d, no scale is [0]."""
    if cast.group.kind == "none":
        return scale
    return scale.reshape(()) if cast.group.kind == "tensor" else layout.expose(scale)
