"""Tile shapes and warps of the kernels on the GPU, to choose defaults from. Speeds are relative to a copy of as many bytes.

    PYTHONPATH=src python3 benchmarks/sweep.py                   # all kernels
    PYTHONPATH=src python3 benchmarks/sweep.py casts sampling    # or loss, codes

Each shape must give the bits of the default, which is marked; forward losses of other tiles may have other bits. `dither bench
kernels` times the defaults beside their peers.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dither import Cast
from dither.ops.reference.loss import largest_gradient
from dither.ops.triton import loss, multiprocessors, quantize, quantize_128, sampling, scales
from dither.tools.bench import copy_limit, median_ms
from dither.tools.bench_kernels import cast_call, loss_inputs, matrix, sample_inputs

CUDA = torch.device("cuda")

SQUARES = [(8, 8, 64), (8, 8, 80), (8, 8, None), (4, 8, 80), (4, 16, 64), (4, 16, 56), (16, 4, None)]
DRAWN = [
    *((128, 64, 4, 8, 4, registers) for registers in (None, 128, 112, 96)),
    (128, 64, 8, 8, 4, 128),
    (128, 128, 4, 8, 8, 128),
    (128, 128, 4, 8, 8, 112),
    (128, 32, 4, 4, 4, None),
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
CASTS = [
    ("e2m1 tile(128) fp32 stochastic(16)", "one layout", "_tile_shape", [(8, 1024, 4, 4), (8, 1024, 8, 4), (64, 128, 4, 4)]),
    ("e2m1 tile(128) fp32 stochastic(16)", "both layouts", "_both_shape", DRAWN),
    ("e2m1 tile(128) fp32 stochastic(16)", "both layouts as e4m3", "_both_shape", DRAWN),
    ("e4m3 tensor delayed(16) nearest", "both layouts", "_once_shape", ONCE),
    ("e5m2 tensor delayed(16) nearest", "both layouts", "_once_shape", ONCE),
    ("e2m1 block(128) fp32 nearest", "both layouts as e4m3", "_once_shape", BLOCKS),
]
"""A cast, its layouts, the function in `dither.ops.triton.quantize` that chooses a shape, and what it might answer."""

AMAX = [(4096, 1024, 4), (8192, 1024, 4), (8192, 2048, 8), (16384, 2048, 8), (16384, 1024, 4)]
"""Elements of a tile, maxima kept, warps."""

TILES = [
    (block, warps) for block in (1024, 2048, 4096, 8192, 16384) for warps in (2, 4, 8, 16) if 256 <= block // warps <= 2048
]
"""Logits and warps of a program's tile. The bounds that `dither.ops.reference.loss` states hold from 4096 logits on."""

CODES = {
    "tensor": [
        *((64, 128, 1, 4, 8), (64, 128, 8, 4, 8), (64, 128, 4, 4, 4), (128, 64, 4, 4, 8), (128, 128, 4, 4, 16)),
        *((32, 128, 4, 4, 4), (32, 128, 8, 4, 4), (64, 64, 4, 4, 4)),
    ],
    "tile": [(128, 32, 4, 16, 4), (128, 64, 4, 16, 8), (128, 32, 4, 8, 4), (128, 64, 4, 8, 8), (128, 64, 4, 8, 4)],
}


def casts() -> None:
    """Try shapes of the casts of a matrix."""
    x = matrix(8192, 8192, CUDA, torch.bfloat16)
    for text, layouts, name, shapes in CASTS:
        run = cast_call(x, Cast.parse(text), layouts)
        print(f"{text}, {layouts} ({name})")
        try_shapes(quantize, name, shapes, run, (x, *run()))
    for along, across in quantize_128.CASTS:
        run = partial(quantize.quantize_apart, x, along, across)
        print(f"{along}, {across} (quantize_128._shape)")
        try_shapes(quantize_128, "_shape", SQUARES, run, (x, *run()))
    dense = [(1, n, wide, k * multiprocessors(x.device), warps) for n, wide, warps in AMAX for k in (2, 4, 8, 16)]
    print("amax (_amax_shape)")
    try_shapes(scales, "_amax_shape", dense, lambda: (quantize.amax(x),), (x,))


def weights() -> None:
    """Try warps of the programs that sample weights, and of those of their gradients."""
    for n in (4096, 8192):
        w, b_t, draw = sample_inputs(n, CUDA)
        narrow, amax = w.to(torch.bfloat16), torch.ones_like(b_t)
        print(f"{n} x {n}, float32 to bfloat16 (_warps)")
        run = partial(sampling.sample, w, b_t, draw, "rounded_normal", 32, torch.bfloat16)
        try_shapes(sampling, "_warps", [1, 2, 4], run, (w, narrow))
        # With the gradient's own dtype, only the gradient of b_t is computed.
        for dtype, moved in ((torch.float32, (w, narrow)), (torch.bfloat16, (narrow,))):
            print(f"{n} x {n}, gradients, bfloat16 to {dtype} (_warps)")
            run = partial(sampling.sample_backward, narrow, amax, b_t, draw, "rounded_normal", 32, dtype)
            try_shapes(sampling, "_warps", [1, 2, 4], run, moved)


def losses() -> None:
    """Try tiles of cross entropy."""
    for shape in ((8192, 32000), (8192, 128256), (8192, 50257)):
        logits, targets = loss_inputs(*shape, CUDA)
        _, parts = loss.forward(logits, targets)
        rows = torch.full((shape[0],), 1 / shape[0], device="cuda")
        print(f"{shape}, forward (_forward_shape)")
        try_shapes(loss, "_forward_shape", TILES, partial(loss.forward, logits, targets), (logits,))
        print(f"{shape}, backward (_backward_shape)")
        run = partial(loss.backward, logits, targets, parts, rows)
        try_shapes(loss, "_backward_shape", TILES, lambda run=run: (run(),), (logits, logits))


def codes() -> None:
    """Try tiles of the backward pass of cross entropy that writes codes."""
    logits, targets = loss_inputs(16384, 32000, CUDA)
    _, parts = loss.forward(logits, targets)
    rows = torch.full((len(logits),), 1 / len(logits), device="cuda")
    for text in ("e5m2 tensor", "e4m3 tile(128)"):
        cast = Cast.parse(text)
        out = torch.ops.dither.empty_gradient_codes(logits, str(cast))
        given = (logits, targets, parts, rows, largest_gradient(rows), cast, 0, out)
        print(f"16384 x 32000, {text} (_{cast.group.kind}_shape)")
        run = lambda given=given: loss.backward_codes(*given)[:1]  # noqa: E731
        try_shapes(loss, f"_{cast.group.kind}_shape", CODES[cast.group.kind], run, (logits, logits))


SWEEPS: dict[str, Callable[[], None]] = {"casts": casts, "sampling": weights, "loss": losses, "codes": codes}


def octets(x: Tensor) -> Tensor:
    """Return the raw bytes of tensors."""
    return x.reshape(-1).view(torch.uint8)


def forget_launches() -> None:
    """Clear the cache of launches, which are stored with their shape."""
    kept = (quantize._one_launch, quantize._both_launch, quantize_128._launch, scales._amax_launch, sampling._launch)
    for cache in (*kept, loss._launch, loss._launch_codes):
        cache.cache_clear()


def try_shapes(module, name: str, shapes: list, run, moved: tuple[Tensor, ...]) -> None:
    """Time `run` with each shape in place of that of module.name, best first; `moved` are the tensors that must move."""
    default, expected, results = getattr(module, name), run(), []
    least = copy_limit(sum(tensor.nbytes for tensor in moved if tensor is not None), CUDA).ms
    results.append((least / median_ms(run, CUDA), "default", True))
    for shape in shapes:
        setattr(module, name, lambda *_, chosen=shape: chosen)
        forget_launches()
        same = all(map(torch.equal, map(octets, expected), map(octets, run())))
        results.append((least / median_ms(run, CUDA), shape, same))
    setattr(module, name, default)
    forget_launches()
    for share, shape, same in sorted(results, key=lambda result: -result[0]):
        print(f"  {share:.3f}  {shape}{'' if same else '  WRONG BITS'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNELS", help=", ".join(SWEEPS))
    for chosen in parser.parse_args().kernels or SWEEPS:
        SWEEPS[chosen]()
