"""Batches in an order that is a pure function of the seed and the step: nothing else is state.

The tokens are cut into W windows of T + 1, each beginning with the last of the one before: T inputs and T targets. Sequence
i of the batch of B at a step is number g = step * B + i of the run, so it belongs to epoch g // W and is the window

    permutation of that epoch (g % W)

whatever the number of ranks and micro-batches that share the batch. The permutation is a Feistel network over a grid of
rows x columns that is just large enough, keyed by Philox, so it takes no memory and no time to start anywhere.
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
from dither.random import Stream
from dither.reference.philox import philox4x32

ROUNDS = 8
"""Of the Feistel network; four already pass for random, after Luby and Rackoff, where the round function does."""


BLOCK = 4096
"""Sequences whose order is computed at once: that takes hardly longer than one batch, and serves many."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a step, with their place in the whole batch, from which their random bits follow."""

    tokens: Tensor
    """int64[b, T + 1]"""
    step: int
    first: int
    """Number of the first sequence within the batch of all ranks."""

    @property
    def inputs(self) -> Tensor:
        """int64[b, T]"""
        return self.tokens[:, :-1].contiguous()

    @property
    def targets(self) -> Tensor:
        """int64[b, T]: what follows each input."""
        return self.tokens[:, 1:].contiguous()

    def split(self, count: int) -> tuple["Batch", ...]:
        """`count` micro-batches of equal size, sharing memory."""
        size = _share(len(self.tokens), count, "micro-batches")
        starts = range(0, len(self.tokens), size)
        return tuple(replace(self, tokens=self.tokens[at : at + size], first=self.first + at) for at in starts)

    def pin(self) -> "Batch":
        """A copy in page-locked memory, from which a GPU copies while the CPU goes on."""
        return replace(self, tokens=self.tokens.pin_memory())

    def to(self, device: torch.device | str) -> "Batch":
        """On a device; from page-locked memory the copy is queued in the current CUDA stream, and nobody waits."""
        return replace(self, tokens=self.tokens.to(device, non_blocking=self.tokens.is_pinned()))


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
    """T: inputs in a sequence, and targets."""
    batch_size: int
    """B: sequences in a step, over all ranks and micro-batches."""
    seed: int = 0

    def __init__(self, tokens: Tokens, sequence: int, batch: int, seed: int = 0) -> None:
        for name, value in (("tokens", tokens), ("sequence", sequence), ("batch_size", batch), ("seed", seed)):
            object.__setattr__(self, name, value)
        _check_windows(tokens, sequence, batch)
        Stream(seed, "data", "order")  # which checks the seed

    @property
    def windows(self) -> int:
        """W: sequences in an epoch."""
        return (len(self.tokens) - 1) // self.sequence

    def epoch(self, step: int) -> float:
        """How often every window has been seen when a step begins."""
        return step * self.batch_size / self.windows

    def order(self, step: int) -> Tensor:
        """int64[B]: the windows of the batch at a step; window w begins with token w * T."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 32:
            raise UserError(f"A step is an integer from 0 to 2^32 - 1, not {step!r}.")
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        first, last = start // BLOCK, (stop - 1) // BLOCK
        key = Stream(self.seed, "data", "order").key
        blocks = torch.cat([_block(block, self.windows, key) for block in range(first, last + 1)])
        return blocks[start - first * BLOCK : stop - first * BLOCK]

    def batch(self, step: int, rank: int = 0, world: int = 1, micro: tuple[int, int] = (0, 1)) -> Batch:
        """The sequences of a step that fall to one of `world` data-parallel ranks, or part i of n of them, `micro=(i, n)`.

        Ranks have contiguous shares of the batch, and parts contiguous shares of those, all of the same size.
        """
        share = _share(self.batch_size, world, "ranks")
        size = _share(share, micro[1], "micro-batches")
        for what, at, of in (("rank", rank, world), ("micro-batch", *micro)):
            if not 0 <= at < of:
                raise UserError(f"A {what} of {of} is one of 0 to {of - 1}, not {at!r}.")
        first = rank * share + micro[0] * size
        return Batch(_read(self.tokens, self.order(step)[first : first + size], self.sequence), step, first)


def held_out(tokens: Tokens, sequence: int, count: int | None = None) -> Batch:
    """`count` windows, evenly spread over the tokens, the same in every evaluation; None takes all there are.

    `tokens.bytes_of(batch.targets)` says how many bytes the loss over them is about.
    """
    windows = _check_windows(tokens, sequence, 1 if count is None else count)
    count = windows if count is None else count
    return Batch(_read(tokens, torch.arange(count) * windows // count, sequence), 0, 0)


@functools.lru_cache(maxsize=2)
def _block(block: int, windows: int, key: int) -> Tensor:
    """int64[BLOCK]: the windows of so many neighbours in a run."""
    number = torch.arange(block * BLOCK, (block + 1) * BLOCK)
    return permuted(number % windows, windows, number // windows, key)


def permuted(place: Tensor, size: int, epoch: Tensor, key: int) -> Tensor:
    """int64: where each place from 0 to size - 1 goes in the permutation of an epoch.

    A number is row * columns + column. A round moves the column by a random function of the row, or the row by one of the
    column, around the edge: each can be undone, so the whole is a bijection of the grid. A place that lands past `size`,
    which is in the last of the rows, goes through again until it does not; that keeps it a bijection of what is wanted.
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
            # 63 bits: the remainder's bias is the modulus over 2^63, which is nothing.
            moved = (low | (high & 0x7FFFFFFF) << 32) % modulus
            if i % 2 == 0:
                column = (column + moved) % columns
            else:
                row = (row + moved) % rows
        result[outside] = row * columns + column
        outside = result >= size
    return result


class Prefetch:
    """The batches of steps `start`, `start` + 1, ... up to `stop`, read ahead by a thread; exactly `loader.batch(step)`.

    On CUDA the thread reads into page-locked memory, and the copy is queued when a batch is asked for. An error is raised at
    the step it belongs to. Close it, or use it in a `with` statement.

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
            raise UserError(f"Reading ahead takes a depth of 1 or more batches, not {depth!r}.")
        self.loader, self.rank, self.world, self.stop = loader, rank, world, stop
        self.device, self.step, self.closed = torch.device(device), start, False
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise UserError(f"Batches cannot go to {str(device)!r}: torch finds no CUDA device here.")
            # The caller's choice, which the thread would not know.
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
            raise UserError("These batches were closed: make a new Prefetch that starts at the step you need.")
        if not self._ahead:
            raise StopIteration
        self._submit()
        return self._ahead.popleft().result().to(self.device)

    def close(self) -> None:
        """Ends the thread, after the batch that it is reading; closing twice is closing once."""
        self.closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _read(tokens: Tokens, windows: Tensor, sequence: int) -> Tensor:
    """int64[len(windows), T + 1]"""
    return torch.from_numpy(np.stack([tokens.read(window * sequence, sequence + 1) for window in windows.tolist()]))


def _share(size: int, count: int, what: str) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or size % count:
        raise UserError(f"A batch of {size} sequences cannot be shared evenly by {count!r} {what}: choose a divisor of {size}.")
    return size // count


def _check_windows(tokens: Tokens, sequence: int, count: int) -> int:
    """How many windows there are, which must be `count` or more."""
    for what, value in (("sequence", sequence), ("number of sequences", count)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 30:
            raise UserError(f"A {what} is an integer from 1 to 2^30 - 1, not {value!r}.")
    if len(tokens) < count * sequence + 1:
        raise UserError(
            f"There are {len(tokens):,} {tokens.name}, but {count:,} sequences of {sequence:,} need {count * sequence + 1:,}: "
            "give more text, or ask for fewer or shorter sequences."
        )
    return (len(tokens) - 1) // sequence
