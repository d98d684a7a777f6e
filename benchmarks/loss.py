"""Cross entropy of bfloat16 logits and its gradients on the GPU, compared with torch, softmax in chunks, and a copy.

    PYTHONPATH=src python3 benchmarks/loss.py            # the table
    PYTHONPATH=src python3 benchmarks/loss.py --sweep    # tiles and warps of both kernels, to choose from
    PYTHONPATH=src TRITON_INTERPRET=1 python3 benchmarks/loss.py --device cpu --tiny    # test that the script runs

Forward must read the logits once, 2 bytes each; backward must read them once and write as many gradients, 4 bytes. "share" is
the bandwidth of these bytes over that of a copy of the logits in the same run; "peak" is the memory allocated besides the
logits, gradients included. All methods are timed with autograd and the host's time, as models call them, except for the rows
of kernels alone.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
from quantize import median_ms, try_shapes
from torch import Tensor
from torch.nn import functional

from dither.models.causal import cross_entropy
from dither.ops.reference.loss import IGNORE
from dither.ops.triton import loss as kernels

SHAPES = [(8192, 32000), (16384, 32000), (8192, 128256), (49152, 50257), (49152, 50304)]
TINY = [(8, 300), (4, 5003)]


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as in most training loops."""
    return functional.cross_entropy(logits.float(), targets)


class Chunks(torch.autograd.Function):
    """Softmax in float32 of 4096 rows at a time, forward and again in backward: the method that the kernel replaced."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        total = logits.new_zeros((), dtype=torch.float32)
        for part, chosen in zip(logits.split(4096), targets.split(4096), strict=True):
            logarithms = torch.log_softmax(part, dim=-1, dtype=torch.float32)
            total += functional.nll_loss(logarithms, chosen, ignore_index=IGNORE, reduction="sum")
        return total / (targets != IGNORE).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        counts = (targets != IGNORE)[:, None]
        places, weights = targets[:, None].clamp(min=0), counts * (grad / counts.sum())
        result = torch.empty_like(logits)
        for start in range(0, len(targets), 4096):
            part = slice(start, start + 4096)
            slopes = torch.softmax(logits[part], dim=-1, dtype=torch.float32)
            slopes.scatter_add_(-1, places[part], slopes.new_full((), -1.0).expand_as(places[part]))
            result[part] = slopes.mul_(weights[part])
        return result, None


def chunked(logits: Tensor, targets: Tensor) -> Tensor:
    return Chunks.apply(logits, targets)


def inputs(shape: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    """Return logits with standard deviation 2, as in a trained model, and targets."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=2.0, generator=generator)
    return logits, torch.randint(shape[1], shape[:1], device=device, generator=generator)


def wall_ms(run: Callable[[], object], device: str) -> float:
    """Return the median time of a call, with autograd's time on the host: by events on a GPU, by the clock on a CPU."""
    times = []
    for _ in range(3 if device == "cpu" else 20):
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def passes(function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Return (milliseconds forward, milliseconds backward, MiB at the peak) of a loss."""
    device, leaf = logits.device.type, logits.requires_grad_()
    before, grads = 0, partial(torch.autograd.grad, inputs=leaf, retain_graph=True)
    grads(function(leaf, targets))  # compiles
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    loss = function(leaf, targets)
    found = grads(loss)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else torch.nan
    del found
    return wall_ms(lambda: function(leaf, targets), device), wall_ms(lambda: grads(loss), device), peak


def table(device: str, shapes: list[tuple[int, int]]) -> None:
    """Print all methods and shapes."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, Triton {triton.__version__}, bfloat16")
    print(f"{'shape':<17}{'':<26}{'forward ms':>11}{'share':>7}{'backward ms':>13}{'share':>7}{'peak MiB':>10}")
    for shape in shapes:
        logits, targets = inputs(shape, device)
        target = torch.empty_like(logits)
        copy = wall_ms(lambda a=target, b=logits: a.copy_(b), device)
        del target
        line = f"{shape[0]} x {shape[1]}"
        print(f"{line:<17}{'copy of the logits':<26}{'':>11}{'':>7}{copy:>13.3f}{1:>7.3f}")

        def show(what: str, forward: float, backward: float, peak: str, line: str = line, copy: float = copy) -> None:
            shares = f"{copy / 2 / forward:>7.3f}", f"{copy / backward:>7.3f}"
            print(f"{line:<17}{what:<26}{forward:>11.3f}{shares[0]}{backward:>13.3f}{shares[1]}{peak:>10}", flush=True)

        _, parts = kernels.forward(logits, targets)
        runs = partial(kernels.forward, logits, targets), partial(kernels.backward, logits, targets, parts, parts[0])
        show("the kernels alone", *(median_ms(run) if device == "cuda" else wall_ms(run, device) for run in runs), "")
        ways = {
            "cross_entropy": partial(cross_entropy, backend="kernel"),
            "the reference": partial(cross_entropy, backend="reference"),
            "softmax in chunks": chunked,
            "torch.compile of that": torch.compile(chunked, dynamic=False),
            "torch, of float32 logits": plain,
            "torch.compile of it": torch.compile(plain, dynamic=False),
        }
        for what, function in ways.items():
            try:
                forward, backward, peak = passes(function, logits, targets)
            except torch.OutOfMemoryError:
                print(f"{line:<17}{what:<26}{'out of memory':>11}", flush=True)
                continue
            finally:
                logits = logits.detach()
            show(what, forward, backward, f"{peak:.0f}")


TILES = [
    (block, warps) for block in (1024, 2048, 4096, 8192, 16384) for warps in (2, 4, 8, 16) if 256 <= block // warps <= 2048
]
"""Logits and warps of a program's tile. The bounds that `dither.ops.reference.loss` states hold from 4096 logits on."""


def sweep() -> None:
    """Print the speed of all tiles relative to a copy, best first. Other tiles may give other forward bits."""
    for shape in ((8192, 32000), (8192, 128256), (8192, 50257)):
        logits, targets = inputs(shape, "cuda")
        target = torch.empty_like(logits)
        copy = median_ms(lambda a=target, b=logits: a.copy_(b))
        del target
        _, parts = kernels.forward(logits, targets)
        weights = torch.full((shape[0],), 1 / shape[0], device="cuda")
        print(f"{shape}, forward (_forward_shape)")
        try_shapes(kernels, "_forward_shape", TILES, partial(kernels.forward, logits, targets), copy / 2)
        print(f"{shape}, backward (_backward_shape)")
        run = partial(kernels.backward, logits, targets, parts, weights)
        try_shapes(kernels, "_backward_shape", TILES, lambda run=run: (run(),), copy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that the interpreter can do")
    arguments = parser.parse_args()
    if arguments.sweep:
        sweep()
    else:
        table(arguments.device, TINY if arguments.tiny else SHAPES)
