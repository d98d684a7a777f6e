"""One FP8 product for q, k, v and one for gate, up, compared with a product per weight, at the sizes of `benchmarks/linear.py`.

    PYTHONPATH=src python3 benchmarks/merged.py

Times are medians of replays of captured graphs, in microseconds per block. "apart" is a product per weight with tensor scales.
"merged" is one product with tensor scales, for which all parts must share a scale. "rows" is one product that keeps a scale
per part: row scales, of which those of a part are equal. For dX the parts lie along the axis that is summed over, where no
FP8 product takes different scales, so there is no such column; "apart" includes the addition of the parts.
"""

import argparse

import torch
from linear import MODELS, micros

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, rows: bool = False, fast: bool = False):
    """Return a function that computes A B^T with scales per tensor or per row."""
    scales = [torch.ones((len(x), 1) if rows else (), device="cuda") for x in (a, b)]
    right = scales[1].T if rows else scales[1]
    return lambda: torch._scaled_mm(a, b.T, scales[0], right, out_dtype=dtype, use_fast_accum=fast)


def compare(m: int, k: int, sizes: list[int]) -> list[tuple[str, float, float, float | None]]:
    """Return (product, apart, merged, rows) in microseconds for weights [N, K] with N in `sizes` and the same input [M, K]."""
    bf16, fp32, total = torch.bfloat16, torch.float32, sum(sizes)
    x, xt = codes(m, k, E4M3), codes(k, m, E4M3)
    w, wt = codes(total, k, E4M3), codes(k, total, E4M3)
    dy, dyt = codes(m, total, E5M2), codes(total, m, E5M2)
    apart = [product(x, part, bf16, fast=True) for part in w.split(sizes)]
    forward = micros(lambda: [run() for run in apart])
    merged, rows = micros(product(x, w, bf16, fast=True)), micros(product(x, w, bf16, rows=True, fast=True))
    lines = [("y", forward, merged, rows)]
    grads = [product(a.contiguous(), b.contiguous(), bf16) for a, b in zip(dy.split(sizes, 1), wt.split(sizes, 1), strict=True)]

    def added() -> torch.Tensor:
        first, *others = [run() for run in grads]
        for other in others:
            first += other
        return first

    lines.append(("dX", micros(added), micros(product(dy, wt, bf16)), None))
    weights = [product(part, xt, fp32) for part in dyt.split(sizes)]
    merged, rows = micros(product(dyt, xt, fp32)), micros(product(dyt, xt, fp32, rows=True))
    lines.append(("dW", micros(lambda: [run() for run in weights]), merged, rows))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    for model in parser.parse_args().models:
        width, ffn, batch = MODELS[model]
        keys = width // 4 if model == "8B" else width
        for name, sizes in (("q, k, v", [width, keys, keys]), ("gate, up", [ffn, ffn])):
            for which, apart, merged, rows in compare(batch * 2048, width, sizes):
                shown = "-" if rows is None else f"{rows:.1f} ({apart / rows:.3f})"
                times = f"apart {apart:>8.1f}   merged {merged:>8.1f} ({apart / merged:.3f})   rows {shown}"
                print(f"{model:<6}{name:<10}{which:<4}{times}", flush=True)


if __name__ == "__main__":
    main()
