"""Casts with scales on the GPU, compared with a copy and with `torch.compile` of the same cast.

    PYTHONPATH=src python3 benchmarks/quantize.py            # the table
    PYTHONPATH=src python3 benchmarks/quantize.py --sweep    # tile shapes and warps of the kernel, to choose defaults from

A cast must read its input once and write codes and scales once. "share" is the bandwidth of these bytes over that of a
copy of the same input in the same run, counted as bytes read plus bytes written. Prints a Markdown table.
"""

import argparse
import functools
import time

import goals
import torch
import triton
from torch import Tensor
from triton.testing import do_bench_cudagraph

from dither import Cast, Stream
from dither.ops.triton import loss, multiprocessors, quantize_128, sampling, scales
from dither.ops.triton import loss as loss_codes
from dither.ops.triton import quantize as kernels
from dither.spec.formats import TABLE

CASES = [
    ("e4m3 tile(128) fp32 nearest", "one"),
    ("e4m3 tile(128) fp32 nearest", "both"),
    ("e2m1 tile(128) fp32 nearest", "one"),
    ("e2m1 tile(128) fp32 nearest", "both as e4m3"),
    ("e2m1 tile(128) fp32 stochastic(16)", "one"),
    ("e2m1 tile(128) fp32 stochastic(16)", "both"),
    ("e2m1 tile(128) fp32 stochastic(16)", "both as e4m3"),
    ("e2m1 tile(32) pow2_ceil stochastic(16)", "one"),
    ("e2m1 tile(32) pow2_ceil stochastic(16)", "both"),
    ("e2m1 tile(16) nvfp4 stochastic(16)", "one"),
    ("e2m1 tile(128) fp32 stochastic(8)", "one"),
    ("e4m3 tile(32) pow2 nearest", "one"),
    ("e4m3 tile(32) pow2 nearest", "both"),
    ("e4m3 row fp32 nearest", "one"),
    ("e4m3 row fp32 nearest", "both"),
    ("e4m3 tensor fp32 nearest", "one"),
    ("e4m3 tensor fp32 nearest", "both"),
    ("e4m3 tensor delayed(16) nearest", "one"),
    ("e4m3 tensor delayed(16) nearest", "both"),
    ("e5m2 tensor delayed(16) nearest", "both"),
    ("e4m3 block(128) fp32 nearest", "one"),
    ("e4m3 block(128) fp32 nearest", "both"),
    ("e2m1 block(128) fp32 nearest", "both as e4m3"),
]
"""A cast, and whether its codes go to one layout or to both, in their own storage or as those of e4m3."""


def median_ms(function) -> float:
    """Return the median time on the device of a captured graph, without the host's time."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(function, rep=50, return_mode="median")


def host_us(function) -> float:
    """Return the host's time of a call in microseconds."""
    function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        function()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e4


def bytes_moved(x: Tensor, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes that must move: the input once and the outputs once."""
    return sum(t.numel() * t.itemsize for t in (x, *outputs))


def compiled_cast(cast: Cast):
    """Cast to nearest FP8 in tiles with plain torch, as a user would write it."""
    n, largest = cast.group.size, cast.element.max

    @torch.compile
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        tiles = x.float().unflatten(-1, (-1, n))
        scale = largest / tiles.abs().amax(-1, keepdim=True).clamp(min=2.0**-126)
        return (tiles * scale).to(torch.float8_e4m3fn).flatten(-2), (1 / scale).squeeze(-1)

    return run


def call(x: Tensor, cast: Cast, layouts: str, stream: Stream):
    """Return a function that calls the kernel without checks and dispatch."""
    draw = stream.draw(1, tuple(x.shape), (0, 0), x.device) if cast.round.kind == "stochastic" else None
    amax = torch.ones((), device=x.device) if cast.scaling.kind == "delayed" else None
    if layouts == "one":
        return lambda: kernels.quantize(x, cast, 1, draw, amax, cast.element)
    container = TABLE["e4m3"] if layouts == "both as e4m3" else cast.element
    return lambda: kernels.quantize_both(x, cast, draw, amax, container)


def prepare(size: int) -> tuple[Tensor, float]:
    """Return the input, and the bandwidth of a copy of it in bytes per millisecond."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(x)
    copy = median_ms(lambda: target.copy_(x))
    bandwidth = 2 * x.numel() * x.itemsize / copy
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, bfloat16 {size} x {size}")
    print(f"copy: {copy * 1e3:.1f} us, {bandwidth / 1e9:.2f} TB/s\n")
    return x, bandwidth


def table(size: int) -> None:
    """Print all cases at size x size."""
    x, bandwidth = prepare(size)
    stream = Stream(0, "bench", "x")
    columns = ("cast", "layouts", "time, us", "bandwidth, TB/s", "share of copy", "goal", "host, us", "torch.compile, us")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")

    def line(what: str, layouts: str, run, outputs: tuple[Tensor, ...], peer: str = "") -> None:
        ms = median_ms(run)
        rate = bytes_moved(x, outputs) / ms
        goal = goals.against(rate / bandwidth, goals.BOTH_LAYOUTS.get(what)) if layouts == "both" else ""
        cells = (f"{ms * 1e3:.1f}", f"{rate / 1e9:.2f}", f"{rate / bandwidth:.3f}", goal, f"{host_us(run):.1f}", peer)
        print(f"| {what} | {layouts} | {' | '.join(cells)} |", flush=True)

    line("amax", "", lambda: kernels.amax(x), ())
    tiles, blocks = Cast.parse("e4m3 tile(128)"), Cast.parse("e4m3 block(128)")

    def apart() -> tuple[Tensor, ...]:
        return kernels.quantize_apart(x, tiles, blocks)

    line("e4m3 tile(128), e4m3 block(128), the input of fp8-block-2d", "one each", apart, apart())
    for text, layouts in CASES:
        cast = Cast.parse(text)
        run = call(x, cast, layouts, stream)
        peer = ""
        if text == "e4m3 tile(128) fp32 nearest" and layouts == "one":
            peer = f"{median_ms(functools.partial(compiled_cast(cast), x)) * 1e3:.1f}"
        line(text, layouts, run, run(), peer)


SQUARES = [(8, 8, 64), (8, 8, 80), (8, 8, None), (4, 8, 80), (4, 16, 64), (4, 16, 56), (16, 4, None)]
DRAWN = [
    *((128, 64, 4, 8, 4, registers, compact) for registers in (None, 128, 112, 96) for compact in (False, True)),
    (128, 64, 8, 8, 4, 128, False),
    (128, 128, 4, 8, 8, 128, False),
    (128, 128, 4, 8, 8, 112, False),
    (128, 32, 4, 4, 4, None, False),
]
ONCE = [
    *((64, 128, 8, 4, registers) for registers in (None, 96, 80)),
    *((128, 128, 8, 8, registers) for registers in (None, 96, 80)),
    (64, 128, 4, 8, None),
    (128, 128, 4, 16, None),
    (32, 128, 4, 4, None),
    (64, 64, 4, 4, None),
    (64, 256, 8, 8, None),
    (128, 64, 8, 4, None),
]
BLOCKS = [shape for shape in ONCE if shape[0] == shape[1] == 128]
SWEEPS = [
    ("e2m1 tile(128) fp32 stochastic(16)", "one", "_tile_shape", [(8, 1024, 4, 4), (8, 1024, 8, 4), (64, 128, 4, 4)]),
    ("e2m1 tile(128) fp32 stochastic(16)", "both", "_both_shape", DRAWN),
    ("e2m1 tile(128) fp32 stochastic(16)", "both as e4m3", "_both_shape", DRAWN),
    ("e4m3 tensor delayed(16) nearest", "both", "_once_shape", ONCE),
    ("e5m2 tensor delayed(16) nearest", "both", "_once_shape", ONCE),
    ("e2m1 block(128) fp32 nearest", "both as e4m3", "_once_shape", BLOCKS),
]
"""A cast, its layouts, the function in `dither.ops.triton.quantize` that chooses a shape, and what it might answer."""


def sweep(size: int) -> None:
    """Print shapes and warps for the cases with targets, best first; each must give the bits of the default (marked)."""
    x, bandwidth = prepare(size)
    stream = Stream(0, "bench", "x")
    for text, layouts, name, shapes in SWEEPS:
        run = call(x, Cast.parse(text), layouts, stream)
        print(f"{text}, {layouts} ({name})")
        try_shapes(kernels, name, shapes, run, bytes_moved(x, run()) / bandwidth)
    for along, across in quantize_128.CASTS:
        run = functools.partial(kernels.quantize_apart, x, along, across)
        print(f"{along}, {across} (squares._shape)")
        try_shapes(quantize_128, "_shape", SQUARES, run, bytes_moved(x, run()) / bandwidth)
    dense = [(1, n, wide, k * multiprocessors(x.device), warps) for n, wide, warps in AMAX for k in (2, 4, 8, 16)]
    print("amax (_amax_shape)")
    try_shapes(scales, "_amax_shape", dense, lambda: (kernels.amax(x),), bytes_moved(x, ()) / bandwidth)


AMAX = [(4096, 1024, 4), (8192, 1024, 4), (8192, 2048, 8), (16384, 2048, 8), (16384, 1024, 4)]
"""Elements of a tile, maxima kept, warps."""


def octets(x: Tensor) -> Tensor:
    """Return the raw bytes of tensors."""
    return x.reshape(-1).view(torch.uint8)


def forget_launches() -> None:
    """Clear the cache of launches, which are stored with their shape."""
    casts = (kernels._one_launch, kernels._both_launch, quantize_128._launch)
    for kept in (*casts, scales._amax_launch, sampling._launch, loss._launch, loss_codes._launch):
        kept.cache_clear()


def try_shapes(module, name: str, shapes: list[tuple], run, least: float) -> None:
    """Time `run` with each shape in place of that of module.name; `least` is the time of a copy in milliseconds."""
    default, expected, results = getattr(module, name), run(), []
    results.append((least / median_ms(run), "default", True))
    for shape in shapes:
        setattr(module, name, lambda *_, chosen=shape: chosen)
        forget_launches()
        same = all(map(torch.equal, map(octets, expected), map(octets, run())))
        results.append((least / median_ms(run), shape, same))
    setattr(module, name, default)
    forget_launches()
    for share, shape, same in sorted(results, key=lambda result: -result[0]):
        print(f"  {share:.3f}  {shape}{'' if same else '  WRONG BITS'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    (sweep if arguments.sweep else table)(arguments.size)
