"""Sampling weights on the GPU, float32 to bfloat16, compared with torch, a Box-Muller kernel, the plain cast and a copy.

    PYTHONPATH=src python3 benchmarks/sampling.py            # the table: Figure 5 of the GaussWS paper, and the gradients
    PYTHONPATH=src python3 benchmarks/sampling.py --sweep    # warps of both kernels, to choose from

A sampled weight must be read and written once, 6 bytes per element, and so must its gradients, bfloat16 to float32. "share" is
the bandwidth of these bytes over that of a copy of as many, in the same run; "of cast" is the speed relative to
`w.to(bfloat16)`.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from quantize import median_ms, try_shapes
from torch import Tensor

from dither import Stream
from dither.ops.triton import sampling as kernels
from dither.ops.triton.sampling import RUN, amax_of, block_runs, block_scale, load_runs, program_block, run_words, store_runs
from dither.spec import NOISES

SHAPES = [(2048, 8192), (4096, 4096), (8192, 8192), (16384, 16384)]
BLOCK = 32
STREAM = Stream(0, "sample", "w")


@triton.jit(do_not_specialize=["key"])
def _box_muller_kernel(
    w_ptr, b_t_ptr, out_ptr, step_ptr, key, rows, columns, reciprocal, B: tl.constexpr, NATIVE: tl.constexpr
):
    """Sample with the paper's other noise: round(N(0, 1) / 2), two normal numbers from two uniform ones of 32 bits."""
    block, first_row, first_column = program_block(columns, reciprocal, B)
    row, column = block_runs(first_row, first_column, B)
    x = load_runs(w_ptr, row, column, rows, columns, columns, True)
    scale = block_scale(amax_of(x, B, NATIVE), tl.load(b_t_ptr + block))
    step = tl.load(step_ptr).to(tl.uint32)
    words = run_words(key, step, row.to(tl.uint32), column.to(tl.uint32), "rounded_normal_exact").to(tl.uint32, bitcast=True)
    first, second = tl.split(tl.reshape(words, [B * B // RUN, RUN // 2, 2]))
    radius = tl.sqrt(-2.0 * tl.log((first.to(tl.float32) + 1.0) * 2.0**-32))
    angle = second.to(tl.float32) * (6.283185307179586 * 2.0**-32)
    normal = tl.reshape(tl.join(radius * tl.cos(angle), radius * tl.sin(angle)), [B * B // RUN, RUN])
    x += tl.floor(normal * 0.5 + 0.5) * scale
    store_runs(out_ptr, x.to(tl.bfloat16), row, column, rows, columns, True)


def box_muller(w: Tensor, b_t: Tensor) -> Tensor:
    """Return w_hat by the kernel above; w has whole tiles."""
    out, draw = torch.empty_like(w, dtype=torch.bfloat16), STREAM.draw(1, tuple(w.shape), (0, 0), w.device)
    (rows, columns), across = w.shape, w.shape[1] // BLOCK
    _box_muller_kernel[(rows // BLOCK * across,)](
        w, b_t, out, draw.step, draw.key, rows, columns, 2**31 // across, B=BLOCK, NATIVE=True, num_warps=kernels._warps(BLOCK)
    )
    return out


def plain(w: Tensor, b_t: Tensor, uniform: bool) -> Tensor:
    """Return the same in torch, as in the paper's baseline."""
    squares = w.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = squares.abs().amax((1, 3), keepdim=True) * torch.exp2(1 - b_t)[:, None, :, None]
    r = torch.rand_like(w, dtype=torch.bfloat16) - 0.5 if uniform else (torch.randn_like(w) / 2).round()
    return (squares + r.view_as(squares) * scale).to(torch.bfloat16).view_as(w)


def inputs(shape: tuple[int, int]) -> tuple[Tensor, Tensor, float]:
    """Return a weight, its bitwidths, and the time of a copy of 6 bytes per element in milliseconds."""
    torch.manual_seed(0)
    w = torch.randn(shape, device="cuda")
    b_t = 4 + 2 * torch.rand(shape[0] // BLOCK, shape[1] // BLOCK, device="cuda")
    octets = torch.empty(3 * w.numel(), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(octets)
    return w, b_t, median_ms(lambda: target.copy_(octets))


def table() -> None:
    """Print all methods and shapes."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, float32 to bfloat16")
    print(f"{'shape':<15}{'':<36}{'us':>9}{'10^9/s':>9}{'share':>8}{'of cast':>9}")
    for shape in SHAPES:
        w, b_t, copy = inputs(shape)
        narrow, wide = w.to(torch.bfloat16), torch.empty_like(w)
        # Timed functions, and the bytes per element that must move.
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "plain cast": (partial(w.to, torch.bfloat16), 6),
            **{kind: (forward(w, b_t, kind), 6) for kind in NOISES},
            "Box-Muller, Triton": (partial(box_muller, w, b_t), 6),
            "torch": (partial(plain, w, b_t, False), 6),
            "torch.compile": (partial(torch.compile(plain, dynamic=False), w, b_t, False), 6),
            "torch.compile, uniform": (partial(torch.compile(plain, dynamic=False), w, b_t, True), 6),
            "plain cast of the gradient": (partial(wide.copy_, narrow), 6),
            "gradients of w and b_t": (backward(narrow, b_t, torch.float32), 6),
            "gradient of b_t alone": (backward(narrow, b_t, torch.bfloat16), 2),
        }
        times = {"copy": (copy, 6), **{what: (median_ms(run), moved) for what, (run, moved) in ways.items()}}
        for what, (ms, moved) in times.items():
            rate, share = w.numel() / ms / 1e6, copy * moved / 6 / ms
            name, of_cast = f"{shape[0]} x {shape[1]}", times["plain cast"][0] / ms
            print(f"{name:<15}{what:<36}{ms * 1e3:>9.1f}{rate:>9.0f}{share:>8.3f}{of_cast:>9.3f}", flush=True)


def forward(w: Tensor, b_t: Tensor, kind: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that calls the kernel without checks and dispatch."""
    draw = STREAM.draw(1, tuple(w.shape), (0, 0), w.device)
    return lambda: kernels.sample(w, b_t, draw, kind, BLOCK, torch.bfloat16)


def backward(grad: Tensor, b_t: Tensor, dtype: torch.dtype) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return the same for the gradients; with the gradient's own `dtype`, only that of b_t is computed."""
    draw, amax = STREAM.draw(1, tuple(grad.shape), (0, 0), grad.device), torch.ones_like(b_t)
    return lambda: kernels.sample_backward(grad, amax, b_t, draw, "rounded_normal", BLOCK, dtype)


def sweep() -> None:
    """Print the speed by warps of a program relative to a copy, at two shapes, best first; all must give the same bits."""
    for shape in (SHAPES[1], SHAPES[2]):
        w, b_t, copy = inputs(shape)
        print(f"{shape}, float32 to bfloat16 (_warps)")
        try_shapes(kernels, "_warps", [1, 2, 4], forward(w, b_t, "rounded_normal"), copy)
        for dtype, least in ((torch.float32, copy), (torch.bfloat16, copy / 3)):
            print(f"{shape}, gradients, bfloat16 to {dtype} (_warps)")
            try_shapes(kernels, "_warps", [1, 2, 4], backward(w.to(torch.bfloat16), b_t, dtype), least)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    (sweep if parser.parse_args().sweep else table)()
