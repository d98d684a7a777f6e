"""Time casts by a level that is read on the device, and kernels for one cast: milliseconds, and the speed relative to a copy.

PYTHONPATH=src python3 benchmarks/levels.py
"""

import torch

from dither.ops.triton import levels, quantize
from dither.spec import Cast
from dither.spec.formats import Format
from dither.spec.levels import families
from dither.spec.random import Draw

FAMILIES = (
    "e4m3 tile(128)|e2m1 tile(128)",
    "e4m3 tile(128)|e2m1 tile(128) stochastic(16)",
    "e4m3 block(128)|e2m1 block(128)",
    "e4m3 tile(128)|e2m3 tile(128)|e2m1 tile(128) stochastic(16)",
)
SHAPES = ((8192, 2048), (16384, 768), (8192, 8192))


def milliseconds(call, *arguments, repeats: int = 30) -> float:
    for _ in range(5):
        call(*arguments)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call(*arguments)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    print(f"{'shape':>14} {'cast':<36} {'alone ms':>9} {'by level ms':>12} {'ratio':>6} {'of copy':>8}")
    place = torch.tensor([1, 0, 7], device="cuda")
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        # Bytes of a cast to both layouts: 2 read and 2 written per element, as a copy of bfloat16.
        copy = milliseconds(torch.empty_like(x).copy_, x)
        for text in FAMILIES:
            casts = list(map(Cast.parse, text.split("|")))
            family = families(casts)[casts[0]]
            container = Format.parse(family.container)
            for number, cast in enumerate(family.casts):
                level = torch.tensor([number], dtype=torch.int32, device="cuda")
                drawn = Draw(0, place) if cast.round.kind == "stochastic" else None
                any_drawn = Draw(0, place) if "stochastic" in text else None
                alone = milliseconds(quantize.quantize_both, x, cast, drawn, None, container)
                chosen = milliseconds(levels.quantize_both, x, family.casts, level, any_drawn, None, container)
                ratios = f"{chosen / alone:6.3f} {copy / chosen:8.3f}"
                print(f"{rows:>7} x {columns:<5}{cast!s:<36} {alone:9.4f} {chosen:12.4f} {ratios}")


if __name__ == "__main__":
    main()
