"""Evenly spaced rows of a weight that stand for all of them, the same rows for any sharding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.nn.tensor_parallel import local
from dither.optim.shards import Shard, as_matrix, shards
from dither.random import Stream
from dither.snip.update_rules import UpdateRule


@dataclass(frozen=True)
class SampledRows:
    """Every `every`-th row of a weight, of those that this rank holds."""

    every: int
    parts: tuple[Shard, ...]
    """Matrices of this rank's shard."""
    factor: float
    """Factor by which norms of these rows are multiplied to stand for all: the root of the ratio of their numbers."""

    @classmethod
    def of(cls, weight: Tensor, most: int | None) -> "SampledRows":
        """Return about `most` rows of a weight, at most twice as many, or all of its rows if `most` is None.

        >>> rows = SampledRows.of(torch.zeros(1000, 4), 256)
        >>> rows.every, rows.take(torch.arange(1000).view(-1, 1))[:3].tolist()
        (3, [[0], [3], [6]])
        """
        count = math.prod(weight.shape[:-1])
        every = 1 if most is None else max(1, count // most)
        return cls(every, tuple(shards(weight)), math.sqrt(count / math.ceil(count / every)) if count else 1.0)

    def take(self, x: Tensor) -> Tensor:
        """Return these rows of a tensor in the shape of this rank's shard: a view, or a copy if there are several matrices."""
        if self.every == 1:
            return x
        found = [as_matrix(x)[part.start + self._first(part) : part.end : self.every] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found) if found else as_matrix(x)[:0]

    def rule(self, rule: UpdateRule) -> UpdateRule:
        """Return the update rule of these rows."""
        return rule if self.every == 1 else rule.whole(lambda x: self.take(x))

    def signs(self, stream: Stream, weight: Tensor) -> Tensor:
        """Return random signs for these rows, the same for any sharding: float32."""
        found = torch.empty_like(self.take(local(weight)), dtype=torch.float32)
        begin = 0
        for part in self.parts:
            first = self._first(part)
            count = len(range(part.start + first, part.end, self.every))
            rows = as_matrix(found)[begin : begin + count]
            bits = stream.bits(0, rows.shape, ((part.row + first) // self.every, part.column), width=8, device=weight.device)
            rows.copy_((bits & 1) * 2 - 1)
            begin += count
        return found

    def _first(self, part: Shard) -> int:
        return -part.row % self.every
