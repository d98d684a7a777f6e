"""One step of Muon on the hidden matrices of a Llama, beside torch's.

    PYTHONPATH=src python3 benchmarks/muon.py                            # the model tiny on a CPU
    PYTHONPATH=src python3 benchmarks/muon.py --device cuda --model llama-1b

Times are medians of whole steps, from an idle device to an idle device. Gradients exist already, in the dtype of the weights.
torch's products are bfloat16 in every row, and so are dither's, but for "fp32 products".
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dither
from dither.models import PRESETS
from dither.models.presets import skeleton
from dither.optim import Muon, muon_groups

Named = list[tuple[str, Tensor]]

CASES: dict[str, tuple[torch.dtype, Callable[[Named], Any]]] = {
    "torch, fp32": (torch.float32, lambda named: torch.optim.Muon([p for _, p in named])),
    "torch, bf16 nearest": (torch.bfloat16, lambda named: torch.optim.Muon([p for _, p in named])),
    "dither, fp32": (torch.float32, lambda named: Muon(named, nonfinite="unchecked")),
    "dither, fp32, fp32 products": (torch.float32, lambda named: Muon(named, nonfinite="unchecked", ns_dtype="fp32")),
    "dither, bf16 stochastic": (torch.bfloat16, lambda named: Muon(named, nonfinite="unchecked")),
    "  and clipped, checked": (torch.bfloat16, lambda named: Muon(named, nonfinite="skip", max_norm=1.0)),
    "dither, bf16, companded8 momentum": (
        torch.bfloat16,
        lambda named: Muon(named, nonfinite="unchecked", states="companded8"),
    ),
}


def median_ms(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="tiny")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    device = torch.device(given.device)
    shapes = [(n, p.shape) for n, p in muon_groups(skeleton(PRESETS[given.model]))[0]["params"]]
    count = sum(shape.numel() for _, shape in shapes)
    print(f"{given.model}: {len(shapes)} matrices, {count / 1e6:.1f}M weights, {device}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}, dither {dither.__version__}\n\n| optimizer | ms |\n|---|---|")
    warnings.simplefilter("ignore")  # of torch's bfloat16 products on a CPU without them
    for name, (dtype, make) in CASES.items():
        given_by = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        named = [(n, torch.randn(shape, **given_by).mul(0.02).to(dtype).requires_grad_()) for n, shape in shapes]
        for _, p in named:
            p.grad = torch.randn(p.shape, **given_by).mul(1e-3).to(dtype)
        print(f"| {name} | {median_ms(make(named).step, device, given.repeats):.1f} |", flush=True)


if __name__ == "__main__":
    main()
