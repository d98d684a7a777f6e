"""Weights sampled with normal noise by Box-Muller, the paper's other noise, beside `rounded_normal` and a copy, on the GPU.

    PYTHONPATH=src python3 benchmarks/sampling.py

`dither bench kernels` has the noises of the library. "share" is that of a copy of as many bytes: 6 per element.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.triton import sampling as kernels
from dither.ops.triton.sampling import RUN, amax_of, block_runs, block_scale, load_runs, program_block, run_words, store_runs
from dither.spec.random import Draw
from dither.tools.bench import copy_limit, median_ms
from dither.tools.bench_kernels import BLOCK, sample_inputs

CUDA = torch.device("cuda")


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


def box_muller(w: Tensor, b_t: Tensor, draw: Draw) -> Tensor:
    """Return w_hat by the kernel above; w has whole tiles."""
    out = torch.empty_like(w, dtype=torch.bfloat16)
    (rows, columns), across = w.shape, w.shape[1] // BLOCK
    _box_muller_kernel[(rows // BLOCK * across,)](
        w, b_t, out, draw.step, draw.key, rows, columns, 2**31 // across, B=BLOCK, NATIVE=True, num_warps=kernels._warps(BLOCK)
    )
    return out


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, float32 to bfloat16")
    print(f"{'size':<8}{'':<22}{'us':>9}{'10^9/s':>9}{'share':>8}")
    for n in (2048, 4096, 8192, 16384):
        w, b_t, draw = sample_inputs(n, CUDA)
        ways = {
            "rounded_normal": partial(kernels.sample, w, b_t, draw, "rounded_normal", BLOCK, torch.bfloat16),
            "Box-Muller, Triton": partial(box_muller, w, b_t, draw),
        }
        for name, run in ways.items():
            ms = median_ms(run, CUDA)
            share = copy_limit(6 * w.numel(), CUDA).ms / ms
            print(f"{n:<8}{name:<22}{ms * 1e3:>9.1f}{w.numel() / ms / 1e6:>9.0f}{share:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
