"""Casting with scales on the GPU, beside a copy and beside `torch.compile` of the same cast.

    PYTHONPATH=src python3 benchmarks/quantize.py            # the table
    PYTHONPATH=src python3 benchmarks/quantize.py --sweep    # tile shapes and warps of the kernel, to choose defaults from

A cast must read its input once and write codes and scales once. "share" is the bandwidth of these bytes over that of a
copy of the same input in the same run, counted as bytes read plus bytes written.
"""

import argparse
import functools
import time

import torch
import triton
from torch import Tensor
from triton.testing import do_bench_cudagraph

from dither import Cast, Stream
from dither.kernels import quantize as kernels

CASES = [
    ("e4m3 tile(128) fp32 nearest", False),
    ("e4m3 tile(128) fp32 nearest", True),
    ("e2m1 tile(128) fp32 nearest", False),
    ("e2m1 tile(128) fp32 stochastic(16)", False),
    ("e2m1 tile(128) fp32 stochastic(16)", True),
    ("e2m1 tile(32) pow2_ceil stochastic(16)", False),
    ("e2m1 tile(16) nvfp4 stochastic(16)", False),
    ("e2m1 tile(128) fp32 stochastic(8)", False),
    ("e4m3 tile(32) pow2 nearest", False),
    ("e4m3 row fp32 nearest", False),
    ("e4m3 tensor fp32 nearest", False),
    ("e4m3 block(128) fp32 nearest", False),
]


def median_ms(function) -> float:
    """Median time on the device: replays of a captured graph, so that what the host does in between does not count."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(function, rep=50, return_mode="median")


def host_us(function) -> float:
    """Time that the host spends on a call, in microseconds."""
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        function()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e4


def bytes_moved(x: Tensor, outputs: tuple[Tensor, ...]) -> int:
    """What must move: the input once and the outputs once."""
    return sum(t.numel() * t.itemsize for t in (x, *outputs))


def compiled_cast(cast: Cast):
    """The plain-torch version of a nearest FP8 tile cast, as a user would write it."""
    n, largest = cast.group.size, cast.element.max

    @torch.compile
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        tiles = x.float().unflatten(-1, (-1, n))
        scale = largest / tiles.abs().amax(-1, keepdim=True).clamp(min=2.0**-126)
        return (tiles * scale).to(torch.float8_e4m3fn).flatten(-2), (1 / scale).squeeze(-1)

    return run


def call(x: Tensor, cast: Cast, both: bool, stream: Stream):
    """A closure over the kernel itself, without the checks and dispatch around it."""
    draw = stream.draw(1, tuple(x.shape), (0, 0), x.device) if cast.round.kind == "stochastic" else None
    if both:
        return lambda: kernels.quantize_both(x, cast, draw, cast.element)
    return lambda: kernels.quantize(x, cast, 1, draw, None, cast.element)


def table(size: int) -> None:
    """Every case at size x size."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    stream = Stream(0, "bench", "x")
    target = torch.empty_like(x)
    copy = median_ms(lambda: target.copy_(x))
    bandwidth = 2 * x.numel() * x.itemsize / copy
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, bfloat16 {size} x {size}")
    print(f"copy: {copy * 1e3:.1f} us, {bandwidth / 1e9:.2f} TB/s")
    print(f"{'cast':<42}{'layouts':>8}{'us':>9}{'TB/s':>8}{'share':>8}{'host us':>9}{'compile us':>12}")
    for text, both in CASES:
        cast = Cast.parse(text)
        run = call(x, cast, both, stream)
        ms = median_ms(run)
        moved = bytes_moved(x, run())
        peer = ""
        if text == "e4m3 tile(128) fp32 nearest" and not both:
            peer = f"{median_ms(functools.partial(compiled_cast(cast), x)) * 1e3:.1f}"
        print(
            f"{text:<42}{2 if both else 1:>8}{ms * 1e3:>9.1f}{moved / ms / 1e9:>8.2f}{moved / ms / bandwidth:>8.3f}"
            f"{host_us(run):>9.1f}{peer:>12}"
        )


def sweep(size: int) -> None:
    """The cases with targets over tile shapes and warps: the defaults in `_tile_shape` and `_both_shape` come from here."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    stream = Stream(0, "bench", "x")
    target = torch.empty_like(x)
    bandwidth = 2 * x.numel() * x.itemsize / median_ms(lambda: target.copy_(x))
    print(f"copy {bandwidth / 1e9:.2f} TB/s")
    single = [(rows, columns, a, 4) for rows, columns in ((64, 128), (8, 1024)) for a in (2, 4, 8)]
    both = [(128, 64, a, a_t, 4) for a in (4, 8) for a_t in (8, 16)] + [
        (128, 64, 4, 8, 8),
        (128, 128, 8, 8, 8),
        (128, 32, 4, 8, 4),
    ]
    for text, layouts in [("e2m1 tile(128) fp32 stochastic(16)", 1), ("e4m3 tile(128) fp32 nearest", 2)]:
        cast, name = Cast.parse(text), "_both_shape" if layouts == 2 else "_tile_shape"
        default, results = getattr(kernels, name), []
        for shape in both if layouts == 2 else single:
            setattr(kernels, name, lambda *_, chosen=shape: chosen)
            run = call(x, cast, layouts == 2, stream)
            results.append((bytes_moved(x, run()) / median_ms(run) / bandwidth, shape))
        setattr(kernels, name, default)
        print(text, layouts, *(f"{share:.3f}:{shape}" for share, shape in sorted(results, reverse=True)), sep="  ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    (sweep if arguments.sweep else table)(arguments.size)
