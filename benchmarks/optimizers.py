"""One optimizer step on the GPU, compared with torch's fused AdamW, torchao's, bitsandbytes', and a copy.

    PYTHONPATH=src python3 benchmarks/optimizers.py                      # ours and torch's
    PYTHONPATH=src python3 benchmarks/optimizers.py --peers FOLDER       # and those of packages unpacked in FOLDER
    PYTHONPATH=src python3 benchmarks/optimizers.py --lists 1b           # the tensors of a 1B Llama, many of them small

"must move" counts what a step has to read and write of weights, gradients and states, in bytes per parameter; "share" is the
bandwidth of these bytes over that of a copy in the same run. Times are those of consecutive steps, in which the host prepares
one step while the device works on another, as in training; and medians of single calls of `step()`, from an idle device to an
idle device. Gradients exist already. Dither's optimizers run with `nonfinite="unchecked"`, since the peers do not check
gradients, and again with "skip", which reads gradients twice, with clipping. Memory is the additional memory of a step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import goals
import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

import dither
from dither.models import PRESETS, Llama
from dither.optim import AdamMini, AdamW, Role, roles

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """An optimizer, the dtype of its parameters, and the bytes per parameter that a step must move."""

    name: str
    dtype: torch.dtype
    moves: float
    make: Callable[[Named, dict[str, Role]], Any]


def adamw(**options: Any) -> Callable[[Named, dict[str, Role]], Any]:
    return lambda named, _: AdamW(named, lr=1e-4, **{"nonfinite": "unchecked", **options})


def mini(**options: Any) -> Callable[[Named, dict[str, Role]], Any]:
    return lambda named, known: AdamMini(named, known, lr=1e-4, nonfinite="unchecked", **options)


def fused(named: Named, _: dict[str, Role]) -> Any:
    return torch.optim.AdamW([p for _, p in named], lr=1e-4, fused=True)


def torchao_adamw(named: Named, _: dict[str, Role]) -> Any:
    from torchao.optim import _AdamW

    return _AdamW([p for _, p in named], lr=1e-4, bf16_stochastic_round=True)


def torchao_8bit(named: Named, _: dict[str, Role]) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit([p for _, p in named], lr=1e-4, bf16_stochastic_round=True)


def bitsandbytes_8bit(named: Named, _: dict[str, Role]) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit([p for _, p in named], lr=1e-4)


BLOCKS = 2 * 2 * 4 / 128
"""Bytes a parameter of two float32 scales for 128 elements, read and written."""

CASES = [
    Case("torch fused, fp32", torch.float32, 28, fused),
    Case("torch fused, bf16 nearest", torch.bfloat16, 14, fused),
    Case("dither, fp32", torch.float32, 28, adamw()),
    Case("dither, bf16 stochastic", torch.bfloat16, 14, adamw()),
    Case("  and clipped, checked", torch.bfloat16, 16, adamw(max_norm=1.0, nonfinite="skip")),
    Case("dither, bf16 nearest", torch.bfloat16, 14, adamw(weights="nearest", state_rounding="nearest")),
    Case("dither, bf16 Kahan", torch.bfloat16, 18, adamw(weights="kahan")),
    Case("dither, bf16 with fp32 masters", torch.bfloat16, 28, adamw(master="fp32", states="fp32")),
    Case("dither, bf16 with split masters", torch.bfloat16, 26, adamw(master="split", states="fp32")),
    Case("dither, bf16 with 24-bit masters", torch.bfloat16, 16, adamw(master="split24")),
    Case("dither, bf16, dynamic8 states", torch.bfloat16, 10 + BLOCKS, adamw(states="dynamic8")),
    Case("dither, bf16, companded8 states", torch.bfloat16, 10 + BLOCKS, adamw(states="companded8")),
    Case("dither, bf16, companded8, blocks of 32", torch.bfloat16, 10 + 4 * BLOCKS, adamw(states="companded8", block=32)),
    Case("dither, bf16, e4m3 states", torch.bfloat16, 10 + BLOCKS, adamw(states="e4m3")),
    Case("dither Adam-mini, bf16 stochastic", torch.bfloat16, 10, mini()),
]
PEERS = [
    Case("torchao _AdamW, bf16 stochastic", torch.bfloat16, 14, torchao_adamw),
    Case("torchao AdamW8bit, bf16 stochastic", torch.bfloat16, 10, torchao_8bit),
    Case("bitsandbytes AdamW8bit, bf16", torch.bfloat16, 10, bitsandbytes_8bit),
]


def tensors(which: str, dtype: torch.dtype) -> tuple[Named, dict[str, Role]]:
    """Return parameters with gradients, and their roles: 64 square matrices, or those of a Llama."""
    if which == "squares":
        named = [(f"w{i}", torch.randn(4096, 4096, device="cuda").mul_(0.02).to(dtype)) for i in range(64)]
        known = {name: Role.rows_each(1) for name, _ in named}
    else:
        with torch.device("meta"):
            model = Llama(PRESETS[f"llama-{which}"])
        known = roles(model)
        named = [
            (name, torch.empty(p.shape, dtype=dtype, device="cuda").normal_(0, 0.02)) for name, p in model.named_parameters()
        ]
    for _, p in named:
        p.requires_grad_()
        p.grad = torch.randn_like(p).mul_(1e-3)
    return named, known


def queued_ms(step: Callable[[], Any], repeats: int) -> float:
    """Return the time that a step adds if the device has work before and after it, as after a backward pass."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def idle_ms(step: Callable[[], Any], repeats: int) -> float:
    """Return the median time of whole calls from an idle device to an idle device, host time included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Return bytes per second, read plus written, of the faster of two ways to copy 1 GiB."""
    a = torch.ones(2**29, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    with torch.cuda.stream(torch.cuda.Stream()):
        best = min(do_bench_cudagraph(lambda: b.copy_(a), rep=50), do_bench_cudagraph(lambda: torch.neg(a, out=b), rep=50))
    return 2 * a.numel() * a.itemsize / best * 1e3


def measure(case: Case, which: str, bandwidth: float, repeats: int) -> str:
    named, known = tensors(which, case.dtype)
    count = sum(p.numel() for _, p in named)
    optimizer = case.make(named, known)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    lying = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    from_idle, ms = idle_ms(optimizer.step, repeats), queued_ms(optimizer.step, repeats)
    beyond = torch.cuda.max_memory_allocated() - lying
    share = count * case.moves / ms * 1e3 / bandwidth
    resident = lying / count
    goal = goals.against(share, goals.OPTIMIZERS.get(case.name))
    times = f"{ms:.2f} | {from_idle:.2f} | {case.moves:g} | {share:.3f} | {goal}"
    return f"| {case.name} | {times} | {resident:.2f} | {beyond / 2**20:.1f} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peers", help="a folder with torchao and bitsandbytes unpacked")
    arguments.add_argument(
        "--lists", default="squares,1b", help="lists of tensors: squares, or a size of Llama (134m, 1b, ...)"
    )
    arguments.add_argument("--only", default="", help="only optimizers whose name contains this")
    arguments.add_argument("--repeats", type=int, default=20)
    given = arguments.parse_args()
    if given.peers:
        sys.path.insert(0, given.peers)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, dither {dither.__version__}")
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    for which in given.lists.split(","):
        columns = "ms | ms from idle | must move, B/param | share of copy | goal | resident B/param | MiB needed"
        print(f"\n{which}\n\n| optimizer | {columns} |\n|---|---|---|---|---|---|---|---|")
        for case in [*CASES, *(PEERS if given.peers else [])]:
            if given.only in case.name:
                try:
                    print(measure(case, which, bandwidth, given.repeats), flush=True)
                except Exception as error:  # a peer that fails is a line of the table
                    print(
                        f"| {case.name} | {type(error).__name__}: {str(error).splitlines()[-1][:100] if str(error) else ''} |"
                    )
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
