"""Benchmarks of single operations: casts, sampled weights, cross entropy, optimizer steps and linear layers.

Casts, sampling and optimizers must move bytes: their limit is a copy of as many, each input and output once. Linear layers must
multiply: their limit is the rate of one large product on the same matrix units. On a GPU the kernels are called without checks
and dispatch; on a CPU the reference is timed, and peers are not compiled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.models import PRESETS, Llama
from dither.models.causal import cross_entropy
from dither.nn.linear import Linear
from dither.nn.step import step_context
from dither.ops.backend import implementation
from dither.optim import AdamMini, AdamW, Role, roles
from dither.spec import NOISES, Cast
from dither.spec.formats import TABLE
from dither.spec.random import Stream
from dither.spec.recipes import recipe
from dither.tools.bench import (
    Bench,
    Case,
    Row,
    Work,
    copy_limit,
    measured_peer,
    median_ms,
    product_limit,
    queued_ms,
    seconds_of,
    wall_ms,
)

SUITE = "kernels"


def cases(bench: Bench) -> Iterator[Case]:
    """Yield all benchmarks of operations."""
    for family in (_casts, _samples, _losses, _optimizers, _layers):
        yield from (Case(SUITE, name, partial(measure, name)) for name, measure in family(bench))


Family = Iterator[tuple[str, Callable[[str], Row]]]


def _compiled(bench: Bench, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile of a peer on a GPU. On a CPU compiling takes longer than all else."""
    return torch.compile(function, dynamic=False) if bench.cuda else function


def _size(*tensors: Tensor | None) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)


# Casts --------------------------------------------------------------------------------------------------------------------

CASTS = [
    ("e4m3 tile(128) fp32 nearest", "one layout"),
    ("e4m3 tile(128) fp32 nearest", "both layouts"),
    ("e2m1 tile(128) fp32 nearest", "one layout"),
    ("e2m1 tile(128) fp32 nearest", "both layouts as e4m3"),
    ("e2m1 tile(128) fp32 stochastic(16)", "one layout"),
    ("e2m1 tile(128) fp32 stochastic(16)", "both layouts"),
    ("e2m1 tile(128) fp32 stochastic(16)", "both layouts as e4m3"),
    ("e2m1 tile(32) pow2_ceil stochastic(16)", "one layout"),
    ("e2m1 tile(32) pow2_ceil stochastic(16)", "both layouts"),
    ("e2m1 tile(16) nvfp4 stochastic(16)", "one layout"),
    ("e4m3 tile(32) pow2 nearest", "one layout"),
    ("e4m3 tile(32) pow2 nearest", "both layouts"),
    ("e4m3 row fp32 nearest", "one layout"),
    ("e4m3 row fp32 nearest", "both layouts"),
    ("e4m3 tensor fp32 nearest", "one layout"),
    ("e4m3 tensor fp32 nearest", "both layouts"),
    ("e4m3 tensor delayed(16) nearest", "one layout"),
    ("e4m3 tensor delayed(16) nearest", "both layouts"),
    ("e5m2 tensor delayed(16) nearest", "both layouts"),
    ("e4m3 block(128) fp32 nearest", "one layout"),
    ("e4m3 block(128) fp32 nearest", "both layouts"),
    ("e2m1 block(128) fp32 nearest", "both layouts as e4m3"),
]
"""Casts, and whether their codes go to one layout or to both, in their own storage or as those of e4m3."""

APART = ("e4m3 tile(128)", "e4m3 block(128)")
"""The two casts of the input of fp8-block-2d, one layout each."""


def _casts(bench: Bench) -> Family:
    (n,) = bench.sizes([8192], [128])
    yield f"cast {APART[0]} and {APART[1]}, one layout each, {n} x {n}", partial(_apart, bench, n)
    for text, layouts in CASTS[::7] if bench.quick else CASTS:
        yield f"cast {text}, {layouts}, {n} x {n}", partial(_cast, bench, n, Cast.parse(text), layouts)


def cast_call(x: Tensor, cast: Cast, layouts: str) -> Callable[[], tuple[Tensor | None, ...]]:
    """Return a function that casts a matrix by the kernel, or on a CPU by the reference, without checks and dispatch."""
    kernels: Any = implementation("quantize", x.device, "auto", cast)
    draw = Stream(0, "bench", "x").draw(1, (len(x), x.shape[1]), (0, 0), x.device) if cast.round.kind == "stochastic" else None
    amax = torch.ones((), device=x.device) if cast.scaling.kind == "delayed" else None
    if layouts == "one layout":
        return lambda: kernels.quantize(x, cast, 1, draw, amax, cast.element)
    container = TABLE["e4m3"] if layouts.endswith("e4m3") else cast.element
    return lambda: kernels.quantize_both(x, cast, draw, amax, container)


def _cast(bench: Bench, n: int, cast: Cast, layouts: str, name: str) -> Row:
    x = matrix(n, n, bench.device, torch.bfloat16)
    work, timer = cast_call(x, cast, layouts), partial(median_ms, device=bench.device, quick=bench.quick)
    plain = str(cast).startswith("e4m3") and str(cast).endswith("fp32 nearest") and cast.group.kind != "block"
    peers = (
        [measured_peer("torch", lambda: partial(_compiled(bench, plain_cast), x, cast), timer)]
        if plain and layouts == "one layout"
        else []
    )
    limit = copy_limit(_size(x, *work()), bench.device)
    return Row(suite=SUITE, name=name, ms=timer(work), peers=tuple(peers), limit=limit)


def _apart(bench: Bench, n: int, name: str) -> Row:
    x = matrix(n, n, bench.device, torch.bfloat16)
    along, across = map(Cast.parse, APART)
    kernels: Any = implementation("quantize", x.device, "auto", along)
    work = partial(kernels.quantize_apart, x, along, across)
    limit = copy_limit(_size(x, *work()), bench.device)
    return Row(suite=SUITE, name=name, ms=median_ms(work, bench.device, quick=bench.quick), limit=limit)


def plain_cast(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Cast to nearest FP8 with scales per tile, row or tensor in plain torch, as a user would write it."""
    groups = x.float().view(len(x), -1, cast.group.size) if cast.group.kind == "tile" else x.float()
    amax = groups.abs().amax() if cast.group.kind == "tensor" else groups.abs().amax(-1, keepdim=True)
    scale = cast.element.max / amax.clamp(min=2.0**-126)
    return (groups * scale).to(torch.float8_e4m3fn).view_as(x), 1 / scale


def matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    """Return normal random numbers, the same ones for the same size."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(rows, columns, device=device, dtype=dtype).normal_(std=std, generator=generator)


# Sampled weights ----------------------------------------------------------------------------------------------------------

BLOCK = 32
"""Width of the blocks of sampled weights."""


def _samples(bench: Bench) -> Family:
    for n in bench.sizes([4096, 16384], [128]):
        for kind in (noise for noise in NOISES if noise != "none"):
            yield f"sample {kind}, {n} x {n}", partial(_sample, bench, n, kind)
        yield f"gradients of w and b_t, {n} x {n}", partial(_sample_backward, bench, n)


def sample_inputs(n: int, device: torch.device) -> tuple[Tensor, Tensor, Any]:
    """Return a weight, its bitwidths, and the place of its random draws."""
    bitwidths = 4 + 2 * torch.rand(n // BLOCK, n // BLOCK, device=device)
    return matrix(n, n, device, torch.float32), bitwidths, Stream(0, "sample", "w").draw(1, (n, n), (0, 0), device)


def _sample(bench: Bench, n: int, kind: str, name: str) -> Row:
    w, b_t, draw = sample_inputs(n, bench.device)
    kernels: Any = implementation("sampling", bench.device, "auto")
    timer = partial(median_ms, device=bench.device, quick=bench.quick)
    peers = [
        measured_peer("a plain cast", lambda: partial(w.to, torch.bfloat16), timer),
        measured_peer("torch", lambda: partial(_compiled(bench, plain_sample), w, b_t, kind == "uniform"), timer),
    ]
    ms = timer(lambda: kernels.sample(w, b_t, draw, kind, BLOCK, torch.bfloat16))
    return Row(suite=SUITE, name=name, ms=ms, peers=tuple(peers), limit=copy_limit(6 * w.numel(), bench.device))


def _sample_backward(bench: Bench, n: int, name: str) -> Row:
    w, b_t, draw = sample_inputs(n, bench.device)
    grad, amax = w.to(torch.bfloat16), torch.ones_like(b_t)
    kernels: Any = implementation("sampling", bench.device, "auto")
    timer = partial(median_ms, device=bench.device, quick=bench.quick)
    peers = (measured_peer("a plain cast", lambda: partial(w.copy_, grad), timer),)
    ms = timer(lambda: kernels.sample_backward(grad, amax, b_t, draw, "rounded_normal", BLOCK, torch.float32))
    return Row(suite=SUITE, name=name, ms=ms, peers=peers, limit=copy_limit(6 * grad.numel(), bench.device))


def plain_sample(w: Tensor, b_t: Tensor, uniform: bool) -> Tensor:
    """Sample a weight in plain torch, as in the baseline of the GaussWS paper."""
    squares = w.view(len(w) // BLOCK, BLOCK, -1, BLOCK)
    scale = squares.abs().amax((1, 3), keepdim=True) * torch.exp2(1 - b_t)[:, None, :, None]
    r: Tensor = torch.rand_like(w, dtype=torch.bfloat16) - 0.5 if uniform else (torch.randn_like(w) / 2).round()
    sampled: Tensor = (squares + r.view_as(squares) * scale).to(torch.bfloat16).view_as(w)
    return sampled


# Cross entropy ------------------------------------------------------------------------------------------------------------


def _losses(bench: Bench) -> Family:
    for N, V in bench.sizes([(16384, 32000), (8192, 128256)], [(64, 1000)]):
        yield f"cross entropy, forward kernel, {N} x {V}", partial(_loss_kernel, bench, N, V, False)
        yield f"cross entropy, backward kernel, {N} x {V}", partial(_loss_kernel, bench, N, V, True)
        yield f"cross entropy, forward and backward with autograd, {N} x {V}", partial(_loss, bench, N, V)


def loss_inputs(N: int, V: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return logits with a standard deviation of 2, as in a trained model, and targets."""
    return matrix(N, V, device, torch.bfloat16, 2.0), torch.arange(N, device=device) * 7919 % V


def _loss_kernel(bench: Bench, N: int, V: int, backward: bool, name: str) -> Row:
    logits, targets = loss_inputs(N, V, bench.device)
    kernels: Any = implementation("loss", bench.device, "auto")
    _, parts = kernels.forward(logits, targets)
    work = (
        partial(kernels.backward, logits, targets, parts, parts[0]) if backward else partial(kernels.forward, logits, targets)
    )
    limit = copy_limit(_size(logits) * (2 if backward else 1), bench.device)
    return Row(suite=SUITE, name=name, ms=median_ms(work, bench.device, quick=bench.quick), limit=limit)


def _loss(bench: Bench, N: int, V: int, name: str) -> Row:
    logits, targets = loss_inputs(N, V, bench.device)
    leaf, timer = logits.requires_grad_(), partial(wall_ms, device=bench.device, quick=bench.quick)

    def both(loss: Callable[[Tensor, Tensor], Tensor]) -> Work:
        return lambda: torch.autograd.grad(loss(leaf, targets), leaf)

    def plain(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), targets)

    peers = (measured_peer("torch", lambda: both(_compiled(bench, plain)), timer),)
    ms, peak = timer(both(cross_entropy)), seconds_of(both(cross_entropy), bench.device)[1]
    return Row(suite=SUITE, name=name, ms=ms, peers=peers, limit=copy_limit(3 * _size(logits), bench.device), peak_gib=peak)


# Optimizer steps ----------------------------------------------------------------------------------------------------------

Named = list[tuple[str, Tensor]]
Make = Callable[[Named, dict[str, Role]], Any]

SCALES = 2 * 2 * 4 / 128
"""Bytes per parameter of two float32 scales per 128 elements, read and written."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, the dtype of its parameters, and the bytes per parameter that a step must move."""

    name: str
    dtype: torch.dtype
    moves: float
    make: Make
    peers: tuple[str, ...] = ()
    """Names in `PEERS`."""


def _adamw(**options: Any) -> Make:
    # Gradients are not checked, since the peers do not check them.
    return lambda named, _: AdamW(named, lr=1e-4, **{"nonfinite": "unchecked", **options})


def _fused(named: Named, _: dict[str, Role]) -> Any:
    return torch.optim.AdamW([p for _, p in named], lr=1e-4, fused=True)


def _torchao(named: Named, _: dict[str, Role]) -> Any:
    from torchao.optim import _AdamW  # type: ignore[import-not-found]

    return _AdamW([p for _, p in named], lr=1e-4, bf16_stochastic_round=True)


def _torchao_8bit(named: Named, _: dict[str, Role]) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit([p for _, p in named], lr=1e-4, bf16_stochastic_round=True)


def _bitsandbytes_8bit(named: Named, _: dict[str, Role]) -> Any:
    import bitsandbytes  # type: ignore[import-not-found]

    return bitsandbytes.optim.AdamW8bit([p for _, p in named], lr=1e-4)


PEERS: dict[str, Make] = {
    "torch fused": _fused,
    "torchao _AdamW": _torchao,
    "torchao AdamW8bit": _torchao_8bit,
    "bitsandbytes AdamW8bit": _bitsandbytes_8bit,
}
EIGHT_BITS = ("torchao AdamW8bit", "bitsandbytes AdamW8bit")

BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZERS = [
    Optimizer("fp32", FP32, 28, _adamw(), ("torch fused",)),
    Optimizer("bf16 stochastic", BF16, 14, _adamw(), ("torch fused", "torchao _AdamW")),
    Optimizer("bf16 stochastic, clipped and checked", BF16, 16, _adamw(max_norm=1.0, nonfinite="skip")),
    Optimizer("bf16 nearest", BF16, 14, _adamw(weights="nearest", state_rounding="nearest"), ("torch fused",)),
    Optimizer("bf16 Kahan", BF16, 18, _adamw(weights="kahan")),
    Optimizer("bf16 with fp32 masters", BF16, 28, _adamw(master="fp32", states="fp32")),
    Optimizer("bf16 with split masters", BF16, 26, _adamw(master="split", states="fp32")),
    Optimizer("bf16 with 24-bit masters", BF16, 16, _adamw(master="split24")),
    Optimizer("bf16, dynamic8 states", BF16, 10 + SCALES, _adamw(states="dynamic8"), EIGHT_BITS),
    Optimizer("bf16, companded8 states", BF16, 10 + SCALES, _adamw(states="companded8"), EIGHT_BITS),
    Optimizer("bf16, companded8 states, blocks of 32", BF16, 10 + 4 * SCALES, _adamw(states="companded8", block=32)),
    Optimizer("bf16, e4m3 states", BF16, 10 + SCALES, _adamw(states="e4m3"), EIGHT_BITS),
    Optimizer(
        "Adam-mini, bf16 stochastic",
        BF16,
        10,
        lambda named, known: AdamMini(named, known, lr=1e-4, nonfinite="unchecked"),
    ),
]


def _optimizers(bench: Bench) -> Family:
    for which in bench.sizes(["64 x 4096 x 4096", "llama-1b"], ["2 x 64 x 64"]):
        for each in OPTIMIZERS[1::8] if bench.quick else OPTIMIZERS:
            yield f"optimizer, {each.name}, {which}", partial(_optimizer, bench, which, each)


def parameters(which: str, dtype: torch.dtype, device: torch.device) -> tuple[Named, dict[str, Role]]:
    """Return parameters with gradients, and their roles: square matrices, or the parameters of a preset."""
    if " x " in which:
        count, rows, columns = map(int, which.split(" x "))
        shapes = {f"w{i}": torch.Size((rows, columns)) for i in range(count)}
        known = {name: Role.rows_each(1) for name in shapes}
    else:
        with torch.device("meta"):
            model = Llama(PRESETS[which])  # type: ignore[arg-type]
        known, shapes = roles(model), {name: p.shape for name, p in model.named_parameters()}
    named = [(name, torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)) for name, shape in shapes.items()]
    for _, p in named:
        p.requires_grad_()
        p.grad = torch.randn_like(p).mul_(1e-3)
    return named, known


def _optimizer(bench: Bench, which: str, chosen: Optimizer, name: str) -> Row:
    def step(make: Make) -> Work:
        step: Work = make(*parameters(which, chosen.dtype, bench.device)).step
        return step

    timer = partial(queued_ms, device=bench.device, quick=bench.quick)
    ms = timer(step(chosen.make))
    peers = tuple(measured_peer(peer, partial(step, PEERS[peer]), timer) for peer in chosen.peers)
    count = sum(p.numel() for _, p in parameters(which, chosen.dtype, torch.device("meta"))[0])
    return Row(suite=SUITE, name=name, ms=ms, peers=peers, limit=copy_limit(count * chosen.moves, bench.device))


# Linear layers ------------------------------------------------------------------------------------------------------------

RECIPES = ["fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "fp8-block-2d", "fp4-block", "mxfp8", "nvfp4", "int8-row"]
TORCHAO = {"fp8-current": "tensorwise", "fp8-row": "rowwise"}
"""Recipes of torchao's float8 layers with the scales of ours."""


def _layers(bench: Bench) -> Family:
    for M, K, N in bench.sizes([(16384, 2048, 2048), (16384, 2048, 5632)], [(64, 64, 64)]):
        for each in RECIPES[::4] if bench.quick else RECIPES:
            yield f"linear layer, {each}, M = {M}, K = {K}, N = {N}", partial(_layer, bench, each, M, K, N)


def _layer(bench: Bench, recipe_name: str, M: int, K: int, N: int, name: str) -> Row:
    x, dy = matrix(M, K, bench.device, torch.bfloat16).requires_grad_(), matrix(M, N, bench.device, torch.bfloat16, 1e-3)
    timer = partial(median_ms, device=bench.device, quick=bench.quick)
    peers = [
        measured_peer("torch in BF16", lambda: layer_step(nn.Linear(K, N, False, bench.device, torch.bfloat16), x, dy), timer)
    ]
    if recipe_name in TORCHAO:
        kind = TORCHAO[recipe_name]
        peers.append(
            measured_peer(f"torchao {kind}", lambda: layer_step(torchao_layer(kind, K, N, bench.device), x, dy), timer)
        )
    precision = recipe(recipe_name).default
    assert precision is not None
    layer = Linear(K, N, False, str(bench.device), precision=precision, name="bench")
    work = layer_step(layer, x, dy)
    with torch.autocast(bench.device.type, torch.bfloat16):
        with step_context(layer, step=0):
            work()
        with step_context(layer, step=1):  # with a history, where scaling is delayed
            ms = timer(work)
    limit = product_limit(6 * M * K * N, layer.engines(layer.device).values(), bench.device)
    return Row(suite=SUITE, name=name, ms=ms, peers=tuple(peers), limit=limit)


def layer_step(layer: nn.Module, x: Tensor, dy: Tensor) -> Work:
    """Return a function that runs forward and backward of one micro-batch."""
    inputs = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), inputs, dy)


def torchao_layer(kind: str, K: int, N: int, device: torch.device) -> nn.Module:
    """Return a float8 layer of torchao, compiled; its weight is cast in every call."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(kind))
    return torch.compile(model)  # type: ignore[return-value]
