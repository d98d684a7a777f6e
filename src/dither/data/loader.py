"""Batches in an order that is a pure function of the seed and the step: there is no other state.

The tokens are divided into W windows of T + 1, each beginning with the last token of the previous one: T inputs and T targets.
Sequence i of the batch of B sequences at a step has the number g = step * B + i in the run, so it is in epoch g // W and is the
window

    permutation of that epoch (g % W)

independent of the number of ranks and micro-batches. The permutation is a Feistel network, keyed by Philox, over the smallest
grid of rows x columns that holds W numbers. It needs no memory, and any step can be computed directly.
"""

import functools
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from dither.data.tokens import Tokens
from dither.errors import UserError
from dither.ops.reference.loss import IGNORE
from dither.ops.reference.philox import philox4x32
from dither.spec.random import Stream

ROUNDS = 8
"""Rounds of the Feistel network. Four are indistinguishable from random if the round function is (Luby and Rackoff)."""


BLOCK = 4096
"""Sequences whose order is computed at once: it takes hardly longer than one batch and is reused for many."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a step, with their position in the batch of all ranks, which determines their random bits."""

    tokens: Tensor
    """int64[b, T + 1]"""
    step: int
    first: int
    """Number of the first sequence within the batch of all ranks."""
    counted: Tensor | None = None
    """bool[b, T + 1]: tokens that count as targets; None if all do."""
    total: int = 0
    """Number of targets that count in the batch of all ranks; 0 if all do."""

    @property
    def inputs(self) -> Tensor:
        """The inputs: int64[b, T]."""
        return self.tokens[:, :-1].contiguous()

    @property
    def targets(self) -> Tensor:
        """The token after each input, or -100 if it does not count: int64[b, T].

        If none counts, the first is kept, since the mean over no targets is undefined; `weight` is then 0.
        """
        targets = self.tokens[:, 1:].contiguous()
        if self.counted is None:
            return targets
        counted = self.counted[:, 1:].contiguous()
        kept = counted.flatten()
        kept = torch.cat((kept[:1] | ~kept.any(), kept[1:]))
        return targets.where(kept.view_as(counted), IGNORE)

    @property
    def weight(self) -> Tensor | None:
        """The share of these sequences in the mean loss over the batch of all ranks, 0-d; None if all tokens count alike."""
        return None if self.counted is None else self.counted[:, 1:].sum() / max(self.total, 1)

    def split(self, count: int) -> tuple["Batch", ...]:
        """Return `count` micro-batches of equal size, which share memory."""
        size = _share(len(self.tokens), count, "micro-batches")
        starts = range(0, len(self.tokens), size)
        return tuple(replace(self.rows(at, at + size), first=self.first + at) for at in starts)

    def rows(self, start: int, stop: int) -> "Batch":
        """Return some of the sequences, which share memory; their share in the mean loss stays as it is."""
        counted = None if self.counted is None else self.counted[start:stop]
        return replace(self, tokens=self.tokens[start:stop], counted=counted)

    def part(self, rank: int, world: int) -> "Batch":
        """Return the sequences of one rank, as evenly as possible; the first ranks have one more."""
        size, more = divmod(len(self.tokens), world)
        start = rank * size + min(rank, more)
        return self.rows(start, start + size + (rank < more))

    def pin(self) -> "Batch":
        """Return a copy in pinned memory, from which a GPU copies asynchronously."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            counted=None if self.counted is None else self.counted.pin_memory(),
        )

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device. A copy from pinned memory is asynchronous, in the current CUDA stream."""
        counted = None if self.counted is None else self.counted.to(device, non_blocking=self.counted.is_pinned())
        return replace(self, tokens=self.tokens.to(device, non_blocking=self.tokens.is_pinned()), counted=counted)


@dataclass(frozen=True)
class Loader:
    """The batches of a run.

    >>> import numpy as np
    >>> from dither.data import BYTES, Loader, Tokens
    >>> tokens = Tokens((np.arange(101, dtype="<u2"),), BYTES)
    >>> loader = Loader(tokens, sequence=4, batch=2, seed=0)
    >>> loader.windows, loader.batch(0).inputs.tolist()
    (25, [[24, 25, 26, 27], [76, 77, 78, 79]])
    >>> loader.batch(0, rank=1, world=2).targets.tolist()  # the second of two ranks has the second sequence
    [[77, 78, 79, 80]]
    """

    tokens: Tokens
    sequence: int
    """T: inputs per sequence, and targets."""
    batch_size: int
    """B: sequences per step, over all ranks and micro-batches."""
    seed: int = 0

    def __init__(self, tokens: Tokens, sequence: int, batch: int, seed: int = 0) -> None:
        for name, value in (("tokens", tokens), ("sequence", sequence), ("batch_size", batch), ("seed", seed)):
            object.__setattr__(self, name, value)
        _check_windows(tokens, sequence, batch)
        Stream(seed, "data", "order")  # which checks the seed

    @property
    def windows(self) -> int:
        """W: sequences per epoch."""
        return (len(self.tokens) - 1) // self.sequence

    def order(self, step: int) -> Tensor:
        """Return the windows of the batch at a step: int64[B]. Window w begins with token w * T."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 32:
            raise UserError(f"A step is an integer from 0 to 2^32 - 1, not {step!r}.")
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        first, last = start // BLOCK, (stop - 1) // BLOCK
        key = Stream(self.seed, "data", "order").key
        blocks = torch.cat([_block(block, self.windows, key) for block in range(first, last + 1)])
        return blocks[start - first * BLOCK : stop - first * BLOCK]

    def batch(self, step: int, rank: int = 0, world: int = 1, micro: tuple[int, int] = (0, 1)) -> Batch:
        """Return the sequences of a step for one of `world` data-parallel ranks, or micro-batch i of n of them, `micro=(i, n)`.

        Ranks have contiguous shares of the batch, and micro-batches contiguous shares of those, all of the same size.
        """
        share = _share(self.batch_size, world, "ranks")
        size = _share(share, micro[1], "micro-batches")
        for what, at, of in (("rank", rank, world), ("micro-batch", *micro)):
            if not 0 <= at < of:
                raise UserError(f"A {what} of {of} is one of 0 to {of - 1}, not {at!r}.")
        first = rank * share + micro[0] * size
        order = self.order(step)
        tokens = _read(self.tokens, order[first : first + size], self.sequence)
        if self.tokens.counted is None:
            return Batch(tokens, step, first)
        # All ranks read which tokens of the whole batch count: their number is the divisor of everyone's loss.
        counted = _read_counted(self.tokens, order, self.sequence)
        return Batch(tokens, step, first, counted[first : first + size], int(counted[:, 1:].sum()))


def held_out(tokens: Tokens, sequence: int, count: int | None = None) -> Batch:
    """Return `count` windows, evenly spaced over the tokens, the same in every evaluation; None means all.

    `tokens.bytes_of(batch.targets)` is the number of bytes of their text.
    """
    windows = _check_windows(tokens, sequence, 1 if count is None else count)
    count = windows if count is None else count
    chosen = torch.arange(count) * windows // count
    if tokens.counted is None:
        return Batch(_read(tokens, chosen, sequence), 0, 0)
    counted = _read_counted(tokens, chosen, sequence)
    return Batch(_read(tokens, chosen, sequence), 0, 0, counted, int(counted[:, 1:].sum()))


@functools.lru_cache(maxsize=2)
def _block(block: int, windows: int, key: int) -> Tensor:
    """Return the windows of `BLOCK` consecutive sequences of a run: int64[BLOCK]."""
    number = torch.arange(block * BLOCK, (block + 1) * BLOCK)
    return permuted(number % windows, windows, number // windows, key)


def permuted(place: Tensor, size: int, epoch: Tensor, key: int) -> Tensor:
    """Return the image of each number from 0 to size - 1 under the permutation of an epoch, int64.

    A number is row * columns + column. A round adds a random function of the row to the column, or of the column to the row,
    modulo their sizes. Each round is invertible, so the network is a bijection of the grid. A result of `size` or more goes
    through the network again until it is below `size`, which makes it a bijection of 0 to size - 1.
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    result, outside = place.clone(), torch.ones_like(place, dtype=torch.bool)
    while outside.any():
        row, column = result[outside] // columns, result[outside] % columns
        zero = torch.zeros_like(row)
        for i in range(ROUNDS):
            source, modulus = (row, columns) if i % 2 == 0 else (column, rows)
            low, high, _, _ = philox4x32((source, zero + i, epoch[outside], zero), key)
            # 63 bits: the bias of the remainder is modulus / 2^63, which is negligible.
            moved = (low | (high & 0x7FFFFFFF) << 32) % modulus
            if i % 2 == 0:
                column = (column + moved) % columns
            else:
                row = (row + moved) % rows
        result[outside] = row * columns + column
        outside = result >= size
    return result


class Prefetch:
    """An iterator of `loader.batch(step)` for the steps from `start` to `stop` - 1, read ahead by a thread.

    On CUDA the thread reads into pinned memory, and the copy to the device is queued when a batch is requested. An error is
    raised at its own step. Close it, or use it in a `with` statement.

    >>> import numpy as np
    >>> from dither.data import BYTES, Loader, Prefetch, Tokens
    >>> loader = Loader(Tokens((np.arange(101, dtype="<u2"),), BYTES), sequence=4, batch=2)
    >>> with Prefetch(loader, start=3, stop=5) as batches:
    ...     [(batch.step, batch.inputs[0].tolist()) for batch in batches]
    [(3, [44, 45, 46, 47]), (4, [16, 17, 18, 19])]
    """

    def __init__(
        self,
        loader: Loader,
        start: int = 0,
        stop: int | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        depth: int = 2,
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise UserError(f"The depth of reading ahead is at least 1 batch, not {depth!r}.")
        self.loader, self.rank, self.world, self.stop = loader, rank, world, stop
        self.device, self.step, self.closed = torch.device(device), start, False
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise UserError(f"Batches cannot go to {str(device)!r}: torch finds no CUDA device here.")
            # The current device of the caller, which the thread does not know.
            self.device = torch.device("cuda", torch.cuda.current_device()) if self.device.index is None else self.device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dither-data")
        self._ahead = deque[Future[Batch]]()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        if self.stop is None or self.step < self.stop:
            self._ahead.append(self._pool.submit(self._read, self.step))
            self.step += 1

    def _read(self, step: int) -> Batch:
        batch = self.loader.batch(step, self.rank, self.world)
        if self.device.type != "cuda":
            return batch
        with torch.cuda.device(self.device):  # else every process would also open the first GPU
            return batch.pin()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Batch:
        if self.closed:
            raise UserError("This Prefetch is closed: make a new one that starts at the step you need.")
        if not self._ahead:
            raise StopIteration
        self._submit()
        return self._ahead.popleft().result().to(self.device)

    def close(self) -> None:
        """End the thread after the batch that it is reading. Closing twice does no harm."""
        self.closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _read(tokens: Tokens, windows: Tensor, sequence: int) -> Tensor:
    """Return the tokens of windows: int64[len(windows), T + 1]."""
    return torch.from_numpy(np.stack([tokens.read(window * sequence, sequence + 1) for window in windows.tolist()]))


def _read_counted(tokens: Tokens, windows: Tensor, sequence: int) -> Tensor:
    """Return which tokens of windows count: bool[len(windows), T + 1]."""
    marks = [tokens.read_counted(window * sequence, sequence + 1) for window in windows.tolist()]
    return torch.from_numpy(np.stack(marks))


def _share(size: int, count: int, what: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or size % count:
        raise UserError(f"A batch of {size} sequences cannot be shared evenly by {count!r} {what}: choose a divisor of {size}.")
    return size // count


def _check_windows(tokens: Tokens, sequence: int, count: int) -> int:
    """Return the number of windows, or raise a UserError if there are fewer than `count`."""
    for what, value in (("sequence", sequence), ("number of sequences", count)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 30:
            raise UserError(f"A {what} is an integer from 1 to 2^30 - 1, not {value!r}.")
    if len(tokens) < count * sequence + 1:
        raise UserError(
            f"There are {len(tokens):,} {tokens.name}, but {count:,} sequences of {sequence:,} need {count * sequence + 1:,}: "
            "use more text, or fewer or shorter sequences."
        )
    return (len(tokens) - 1) // sequence
