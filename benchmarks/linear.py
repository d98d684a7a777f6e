"""The parts of a linear layer's step on the GPU: casts and products, compared with the BF16 products that they replace.

    PYTHONPATH=src python3 benchmarks/linear.py                              # every model and recipe
    PYTHONPATH=src python3 benchmarks/linear.py --models 1B --recipes fp8-block fp8-row
    PYTHONPATH=src python3 benchmarks/linear.py --peer FOLDER                # and torchao's float8 layers, from that folder

Prints Markdown tables. Times are medians of replays of captured graphs, in microseconds; products have TFLOP/s in parentheses.
M is the number of tokens of a step, batch * 2048. A layer's step is the work of one micro-batch: x cast for two products,
forward (y), dY cast for two products, input gradient (dx), weight gradient (dw). "sum" adds these. The weight's cast, once per
optimizer step, is not in it. "layer" is the time of `dither.nn.Linear`, forward and backward; the difference to the sum is the
overhead between the parts. "BF16" is nn.Linear with bfloat16 tensors in the same run.
"""

import argparse

import torch
import triton
from torch import Tensor, nn

from dither.nn import functional
from dither.nn.functional import Amax
from dither.nn.linear import Linear
from dither.nn.step import step_context
from dither.spec import LayerPrecision
from dither.spec.recipes import recipe
from dither.tools.bench import median_ms, use_peers
from dither.tools.bench_kernels import layer_step, torchao_layer

MODELS = {  # width, ffn, batch
    "134M": (768, 2048, 24),
    "1B": (2048, 5632, 8),
    "3B": (3072, 8192, 3),
    "8B": (4096, 14336, 4),
}
RECIPES = ["fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "fp8-block-2d", "fp4-block", "mxfp8", "nvfp4"]


def shapes(model: str) -> list[tuple[str, int, int, int]]:
    """Return (name, M, K, N) of the linear layers of a block; layers of the same shape are listed once, with their number."""
    width, ffn, batch = MODELS[model]
    tokens = batch * 2048
    return [
        ("q, k, v, out (4)", tokens, width, width),
        ("gate, up (2)", tokens, width, ffn),
        ("down (1)", tokens, ffn, width),
    ]


def micros(function) -> float:
    """Return the median time on the device in microseconds."""
    return median_ms(function, torch.device("cuda")) * 1e3


def parts(precision: LayerPrecision, m: int, k: int, n: int) -> dict[str, float]:
    """Return the time of each cast and product, and of the whole layer."""
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16) * 1e-3
    w = torch.randn(n, k, device="cuda") / k**0.5
    has = functional.make_settings(precision, gpu=True)
    place = torch.zeros(3, dtype=torch.int64, device="cuda")  # step, rows, key

    def amax(tensor: Tensor, delayed: bool) -> Amax:
        return Amax(tensor.abs().amax().float(), torch.zeros((), device="cuda")) if delayed else Amax()

    def both(tensor: Tensor, casting: functional.Castings):
        known = amax(tensor, casting.along.delayed)
        drawn = place if casting.stochastic else None
        return lambda: functional.cast_operand(tensor, casting, known, drawn, True, True, None, None)

    cast_x, cast_w, cast_dy = both(x, has.input), both(w, has.weight), both(dy, has.grad)
    (x_MK, x_KM), (w_NK, w_KN), (dy_MN, dy_NM) = cast_x(), cast_w(), cast_dy()
    bf16 = torch.bfloat16

    def product(which: str, a, a_casting, b, b_casting, length: int, dtype: torch.dtype):
        return lambda: functional.product(which, a, a_casting, b, b_casting, length, None, dtype, has)

    layer = Linear(k, n, False, "cuda", precision=precision, name="bench")
    x.requires_grad_()
    with torch.autocast("cuda", bf16):
        with step_context(layer, step=0):
            layer_step(layer, x, dy)()
        with step_context(layer, step=1):  # with a history, where scaling is delayed
            whole = micros(layer_step(layer, x, dy))
    return {
        "cast w": micros(cast_w),
        "cast x": micros(cast_x),
        "y": micros(product("forward", x_MK, has.input.along, w_NK, has.weight.along, k, bf16)),
        "cast dy": micros(cast_dy),
        "dx": micros(product("input_grad", dy_MN, has.grad.along, w_KN, has.weight.across, n, bf16)),
        "dw": micros(product("weight_grad", dy_NM, has.grad.across, x_KM, has.input.across, m, torch.float32)),
        "layer": whole,
    }


def bf16_products(m: int, k: int, n: int) -> dict[str, float]:
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    w = layer.weight.detach()
    plain = x.detach()
    return {
        "y": micros(lambda: plain @ w.T),
        "dx": micros(lambda: dy @ w),
        "dw": micros(lambda: dy.T @ plain),
        "layer": micros(layer_step(layer, x, dy)),
    }


def peer(kind: str, m: int, k: int, n: int) -> float:
    """Time forward and backward of a compiled float8 layer of torchao."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    return micros(layer_step(torchao_layer(kind, k, n, torch.device("cuda")), x, dy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--peer", metavar="FOLDER", help="where torchao lies, unpacked")
    arguments = parser.parse_args()
    use_peers(arguments.peer)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for model in arguments.models:
        for name, m, k, n in shapes(model):
            print(f"\n{model}, {name}: M = {m}, K = {k}, N = {n}\n")
            print(f"| | {' | '.join(COLUMNS)} | speed of the layer relative to BF16 |\n|{'---|' * (len(COLUMNS) + 2)}")
            bf16, flop = bf16_products(m, k, n), 2 * m * k * n
            row("BF16", bf16, flop, 1.0)
            for text in arguments.recipes:
                found = parts(recipe(text).default, m, k, n)
                row(f"`{text}`", found, flop, bf16["layer"] / found["layer"])
            for kind in ("tensorwise", "rowwise") if arguments.peer else ():
                whole = peer(kind, m, k, n)
                row(f"torchao, {kind}", {"layer": whole}, flop, bf16["layer"] / whole)


COLUMNS = ("cast w", "cast x", "y", "cast dy", "dx", "dw", "sum", "layer")


def row(label: str, found: dict[str, float], flop: int, ratio: float) -> None:
    """Print one line of a table."""
    if "y" in found:
        found = {**found, "sum": sum(found.get(column, 0.0) for column in COLUMNS[1:6])}
    cells = [f"{found[column]:.0f}" if column in found else "" for column in COLUMNS]
    for column in {"y", "dx", "dw"} & set(found):
        cells[COLUMNS.index(column)] += f" ({flop / found[column] / 1e6:.0f})"
    print(f"| {label} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
