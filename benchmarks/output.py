"""The three products of an output layer with an odd vocabulary size, for three layouts of the logits.

    PYTHONPATH=src python3 benchmarks/output.py            # GPT-2: 32768 tokens, 768 inputs, vocabulary 50257, in bfloat16
    PYTHONPATH=src python3 benchmarks/output.py --fp8      # output layer and loss, forward and backward, in BF16 and in FP8

"side by side": contiguous rows of 50257 numbers. "aligned": rows begin at multiples of 64, as in `aligned_linear`.
"padded": products with a vocabulary of 50304, of a weight with rows of zeros, and of gradients copied into rows that end in
zeros; the times include the copies. TFLOP/s count a vocabulary of 50257.

--fp8 times the output layer with its loss at the sizes of `dither bench train`. "apart" casts the BF16 gradient of the logits,
"fused" writes its codes in the backward pass of the loss. "peak" is the memory allocated besides the inputs and the weight's
codes. Below are the kernels of the backward pass alone.
"""

import argparse
from functools import partial

import torch
from torch.nn import functional

import dither
from dither.models.causal import cross_entropy, output_loss
from dither.nn import Linear, step_context
from dither.nn.linear import Output
from dither.ops.reference.loss import largest_gradient
from dither.ops.triton import loss as kernels
from dither.ops.triton import quantize
from dither.spec import Cast
from dither.tools import bench
from dither.tools.bench_kernels import loss_inputs

median_ms = partial(bench.median_ms, device=torch.device("cuda"))

SIZES = {"134M": (49152, 768, 32000), "1B": (16384, 2048, 32000), "8B": (8192, 4096, 32000), "8B, 128k": (8192, 4096, 128256)}
"""Tokens, inputs and vocabulary."""


def fp8() -> None:
    """Print the time and the peak memory of the output layer with its loss."""
    print(f"{'':<10}{'':<22}{'forward ms':>11}{'both ms':>9}{'peak MiB':>10}")
    for name, (N, D, V) in SIZES.items():
        x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(V, (N,), device="cuda")
        for recipe in (None, "fp8-current", "fp8-block"):
            with torch.device("cuda"):
                plain = Output(D, V).bfloat16()
            layer = plain if recipe is None else Linear.adopt(plain, dither.recipe(recipe).default, name="lm_head")

            def apart(layer=layer, x=x, targets=targets) -> torch.Tensor:
                return cross_entropy(layer(x), targets)

            def fused(layer=layer, x=x, targets=targets) -> torch.Tensor:
                return output_loss(layer, x, targets)

            for way, loss in ({"apart": apart} if recipe is None else {"apart": apart, "fused": fused}).items():
                with step_context(layer, step=0):
                    run = lambda loss=loss, layer=layer, x=x: torch.autograd.grad(loss(), [x, layer.weight])  # noqa: E731
                    run()
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    run()
                    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                    both = median_ms(run)
                    with torch.no_grad():
                        forward = median_ms(loss)
                shown = f"{recipe or 'BF16'}, {way}"
                print(f"{name:<10}{shown:<22}{forward:>11.3f}{both:>9.3f}{peak:>10.0f}", flush=True)


def codes() -> None:
    """Print the time of the codes alone, relative to a copy of the logits."""
    for N, V in ((16384, 32000), (8192, 128256)):
        logits, targets = loss_inputs(N, V, torch.device("cuda"))
        copy = torch.empty_like(logits)
        base = median_ms(lambda a=copy, b=logits: a.copy_(b))
        _, parts = kernels.forward(logits, targets)
        weights = torch.full((N,), 1 / N, device="cuda")
        amax = largest_gradient(weights)
        for text in ("e5m2 tensor", "e4m3 tile(128)"):
            cast = Cast.parse(text)
            out = torch.ops.dither.empty_gradient_codes(logits, str(cast))

            def run(out=out, cast=cast, given=(logits, targets, parts, weights, amax)) -> tuple[torch.Tensor, ...]:
                return kernels.backward_codes(*given, cast, 0, out)[:1]

            def two(cast=cast, given=(logits, targets, parts, weights), amax=amax) -> None:
                grads = kernels.backward(*given)
                quantize.quantize_both(grads, cast, None, amax if cast.group.kind == "tensor" else None, cast.element)

            ms, apart = median_ms(run), median_ms(two)
            print(f"{N} x {V}, {text}: {ms:.3f} ms, {base / ms:.3f} of a copy; separately {apart:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--words", type=int, default=50257)
    parser.add_argument("--fp8", action="store_true", help="the layer with its loss, in BF16 and in FP8")
    arguments = parser.parse_args()
    if arguments.fp8:
        codes()
        fp8()
        return
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
