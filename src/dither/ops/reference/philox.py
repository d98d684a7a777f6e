"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) by coordinates."""

import torch
from torch import Tensor

from dither.spec.random import Draw

LOW32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
PARTS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
"""Dtypes as which words are read, by their bits."""


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words per counter. Words are int64 tensors that hold 32-bit values.

    Ten rounds of (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)); between rounds the key
    grows by the Weyl constants. A zero counter and key give 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    """
    c0, c1, c2, c3 = counter
    for number in range(ROUNDS):
        k0, k1 = (key + number * WEYL[0]) & LOW32, (key >> 32) + number * WEYL[1] & LOW32
        # Wrapped 64-bit products still hold all 64 bits of the unsigned ones. The upper halves of c1 and c3 are masked later.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32 ^ c1 ^ k0) & LOW32, second, (first >> 32 ^ c3 ^ k1) & LOW32, first
    return c0, c1 & LOW32, c2, c3 & LOW32


def random_bits(draw: Draw, rows: int, columns: int, width: int) -> Tensor:
    """Return `width` random bits per element by its coordinates, int32[rows, columns]; see `dither.spec.random`.

    Example, width 16, column 11: block 11 // 8 = 1 of the row, bits 48 to 63, which is the upper half of its second word.
    """
    device = draw.step.device
    lanes = 128 // width
    first = draw.column // lanes
    blocks = torch.arange(first, (draw.column + columns - 1) // lanes + 1, device=device)
    row = torch.arange(draw.row, draw.row + rows, device=device)[:, None]
    step = draw.step
    key: int | Tensor = draw.key
    if step.dim() == 1:
        step, row, key = step[0], row + step[1], step[2] + key
    zero = torch.zeros((), dtype=torch.int64, device=device)
    four = philox4x32((blocks, row & LOW32, step & LOW32, zero), key)
    # int64 -> int32 keeps the low 32 bits, whose halves and quarters lie in memory from the lowest on.
    words = torch.stack([word.to(torch.int32).expand(rows, blocks.numel()) for word in four], dim=-1)
    start = draw.column - first * lanes
    elements = words.view(PARTS[width]).view(rows, blocks.numel() * lanes)[:, start : start + columns]
    return elements.contiguous() if width == 32 else elements.to(torch.int32) & (1 << width) - 1
