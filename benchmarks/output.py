"""The three products of an output layer with an odd vocabulary size, for three layouts of the logits.

    PYTHONPATH=src python3 benchmarks/output.py            # GPT-2: 32768 tokens, 768 inputs, vocabulary 50257, in bfloat16

"side by side": contiguous rows of 50257 numbers. "aligned": rows begin at multiples of 64, as in `dither.nn.output`.
"padded": products with a vocabulary of 50304, of a weight with rows of zeros, and of gradients copied into rows that end in
zeros; the times include the copies. TFLOP/s count a vocabulary of 50257.
"""

import argparse

import torch
from quantize import median_ms
from torch.nn import functional


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--words", type=int, default=50257)
    arguments = parser.parse_args()
    N, D, V = arguments.tokens, arguments.inputs, arguments.words
    padded = -(-V // 64) * 64
    x, weight, rows = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((N, D), (V, D), (N, padded)))
    side = rows[:, :V].contiguous()
    out, view = torch.empty_like(side), torch.empty_like(rows)
    wide = functional.pad(weight, (0, 0, 0, padded - V))

    def pad() -> torch.Tensor:
        return functional.pad(rows[:, :V], (0, padded - V))

    ways = {
        "side by side": (
            lambda: torch.mm(x, weight.T, out=out),
            lambda: side @ weight,
            lambda: side.T @ x,
        ),
        "aligned": (
            lambda: torch.mm(x, weight.T, out=view[:, :V]),
            lambda: rows[:, :V] @ weight,
            lambda: rows[:, :V].T @ x,
        ),
        "padded": (
            lambda: torch.mm(x, functional.pad(weight, (0, 0, 0, padded - V)).T, out=view),
            lambda: pad() @ wide,
            lambda: pad().T @ x,
        ),
        "of 50304 words": (lambda: torch.mm(x, wide.T, out=view), lambda: rows @ wide, lambda: rows.T @ x),
    }
    print(f"{'':<16}{'logits ms':>11}{'TFLOP/s':>9}{'input grad ms':>15}{'TFLOP/s':>9}{'weight grad ms':>16}{'TFLOP/s':>9}")
    for name, products in ways.items():
        times = [median_ms(product) for product in products]
        rates = [2 * N * D * V / ms / 1e9 for ms in times]
        cells = "".join(f"{ms:>{width}.3f}{rate:>9.0f}" for ms, rate, width in zip(times, rates, (11, 15, 16), strict=True))
        print(f"{name:<16}{cells}", flush=True)


if __name__ == "__main__":
    main()
