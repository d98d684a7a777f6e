"""Tokens in a file that are read with checked reads.

A memory map of a file that another process truncates ends the reader with SIGBUS. `pread` returns fewer bytes instead, which is
an error of one sentence.
"""

import os
import weakref
from typing import Any

import numpy as np

from dither.data.tokenizer import Array
from dither.errors import UserError

MOST = 1 << 24
"""Most tokens per read of a whole shard."""


class FileShard:
    """The tokens of an open file, as much like a one-dimensional array as `Tokens` needs.

    Args:
        file: The file, which may be closed afterwards: the shard keeps its own descriptor.
        dtype: The type of a token.
        count: The number of tokens.
        name: The path, for messages.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(np.arange(10, dtype="<u2").tobytes())
    ...     file.flush()
    ...     shard = FileShard(file, np.dtype("<u2"), 10, "train-00000.bin")
    ...     print(len(shard), shard[7:12])
    10 [7 8 9]
    """

    ndim = 1

    def __init__(self, file: Any, dtype: np.dtype[Any], count: int, name: str) -> None:
        self.dtype, self.count, self.name = dtype, count, name
        self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> Array:
        """Return consecutive tokens."""
        start, stop, step = part.indices(self.count)
        if step != 1:
            raise UserError(f"Tokens of a shard are read one after the other, not with a step of {step}.")
        out = np.empty(max(stop - start, 0), self.dtype)
        left, at = out.data.cast("B"), start * self.dtype.itemsize
        while left:
            try:
                count = os.preadv(self._file, [left], at)
            except OSError as error:  # such as a failed disk, or a file that was removed on a network file system
                raise UserError(f"{self.name!r} cannot be read at byte {at:,}: {error.strerror}.") from None
            if not count:
                raise UserError(
                    f"{self.name!r} has {os.fstat(self._file).st_size:,} bytes, and it had "
                    f"{self.count * self.dtype.itemsize:,} when it was opened: another process truncated it, so prepare the "
                    "tokens again and resume with --resume."
                )
            left, at = left[count:], at + count
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all tokens."""
        whole = np.concatenate([self[at : at + MOST] for at in range(0, self.count, MOST)] or [np.empty(0, self.dtype)])
        return whole if dtype is None else whole.astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return np.array, (np.asarray(self),)  # in another process it is an ordinary array
