"""Reference against kernel, one body for every device: `tests/test_pairs.py` (interpreter) and `tests/gpu/` run it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from types import ModuleType

import torch
from torch import Tensor

from dither import Cast, Stream, UserError
from dither.ops.reference import adamw, loss, mx_fp8, philox, quantize, rounding, sampling, transforms, weight_codes
from dither.ops.reference import adamw as masters
from dither.ops.reference.adamw import Piece
from dither.ops.triton import adamw as kernel_adamw
from dither.ops.triton import mx_fp8 as kernel_mx_fp8
from dither.ops.triton import philox as kernel_philox
from dither.ops.triton import quantize as kernel_quantize
from dither.ops.triton import rounding as kernel_rounding
from dither.ops.triton import sampling as kernel_sampling
from dither.ops.triton import transforms as kernel_transforms
from dither.spec import Rounding, Transform, levels
from dither.spec.formats import TABLE, Format
from dither.spec.optimizer import BLOCKS, MAPS, MASTERS, WHOLE, Update
from dither.spec.random import Draw, matrix_size

STREAM = Stream(2024, "pairs", "x")
FORMATS = [name for name in TABLE if name != "e8m0"]
SCALINGS = [
    "none none",
    "tensor fp32",
    "row fp32",
    "block(32) fp32",
    "tile(128) fp32",
    "tile(32) pow2",
    "tile(32) pow2_ceil",
    "block(16) nvfp4",
    "tile(16) nvfp4",
]
ROUNDINGS = ["nearest", "stochastic(16)"]
RULES = [
    "e2m1 tile(32) pow2_round",
    "e2m1 tile(32) pow2_rtz stochastic(16)",
    "e4m3 block(16) pow2_round",
    "e2m1 tile(16) four_over_six",
    "e2m1 tile(16) nvfp4_fixed(0.001)",
    "e2m1 block(16) four_over_six",
    "e2m1 tile(32) quest",
    "e2m1 block(16) quest",
    "e2m1 tile(16) eden(128) stochastic(16)",
    "e2m1 tile(32) eden(32) stochastic(8)",
    "e4m3 tensor static(0.0123)",
    "e5m2 tensor static(3) stochastic(8)",
    *("int4-g32", "int4-g128", "int8 tile(64) bf16", "q4_0", "q8_0"),
]
"""Scale rules for which SCALINGS, times all formats, would be too many."""


def casts(formats: list[str] = FORMATS, scalings: list[str] = SCALINGS, roundings: list[str] = ROUNDINGS) -> list[Cast]:
    """Every valid combination."""
    found = []
    for name in formats:
        for scaling in scalings:
            for how in roundings:
                bits = min(16, 30 - Format.parse(name).mantissa_bits)
                try:
                    found.append(Cast.parse(f"{name} {scaling} {how.replace('16', str(bits))}"))
                except UserError:  # fp32 takes no scale, nvfp4 only small formats
                    assert name in ("fp32", "bf16", "fp16")
                    assert scaling != "none none"
    return found


def as_integers(x: Tensor) -> Tensor:
    """Raw bits, with one NaN for all: a product's NaN has no agreed sign or payload."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in any bit; shapes, dtypes and strides must agree."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.stride() == b.stride() or not a.numel()
    return int((as_integers(a) != as_integers(b).to(a.device)).sum())


def hard_values(rows: int, columns: int, dtype: torch.dtype, seed: int, device: str) -> Tensor:
    """Numbers of every size, with zeros, subnormals, powers of two and their neighbours; all finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    scale = torch.randint(-12, 12, (rows, 1), generator=generator)
    x = torch.ldexp(x, scale)
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0.0
    powers = torch.ldexp(torch.ones(columns), torch.randint(-10, 10, (columns,), generator=generator))
    x[0] = torch.nextafter(powers, torch.tensor(torch.inf))
    x[rows // 2] = powers
    x[-1] = torch.nextafter(powers, torch.tensor(0.0))
    if rows > 4:
        x[1] *= 1e-38  # subnormal groups
        x[2] *= 1e37 if dtype != torch.float16 else 1.0
        x[3] = 0.0
    finite = torch.finfo(dtype).max
    return x.clamp(-finite, finite).to(dtype).to(device)


LIKE_FP8 = (
    Format.floating("e4m3finite", 4, 3),
    Format.floating("e4m3ieee", 4, 3, inf=True, nan=True),
    Format.floating("e5m2finite", 5, 2),
)
"""Formats of 8 bits that have the fields of torch's, and other largest values: 480, 240 and 114688."""


def draw_for(x: Tensor, rounding: Rounding, offset: tuple[int, int]) -> Draw | None:
    """The stream at step 5, if the rounding draws."""
    return STREAM.draw(5, matrix_size(x), offset, x.device) if rounding.kind == "stochastic" else None


def check_random_bits(rows: int, columns: int, offset: tuple[int, int], width: int, device: str) -> int:
    draw = STREAM.draw(3, (rows, columns), offset, device)
    return differing(philox.random_bits(draw, rows, columns, width), kernel_philox.random_bits(draw, rows, columns, width))


def check_round(x: Tensor, name: str, how: str, saturate: bool, offset: tuple[int, int] = (0, 0)) -> int:
    format, rule = Format.parse(name), Rounding.parse(how)
    draw = draw_for(x, rule, offset)
    expected = rounding.round_to(x, format, rule, saturate, draw)
    return differing(expected, kernel_rounding.round_to(x, format, rule, saturate, draw))


def check_quantize(
    x: Tensor, cast: Cast, axis: int, offset: tuple[int, int] = (0, 0), container: str = "", amax: Tensor | None = None
) -> int:
    """Codes, scales, the way back and the round trip without codes."""
    draw = draw_for(x, cast.round, offset)
    stored = Format.parse(container) if container else cast.element
    expected = quantize.quantize(x, cast, axis, draw, amax, stored)
    wrong = sum(map(differing, expected, kernel_quantize.quantize(x, cast, axis, draw, amax, stored)))
    if not container:
        shape = tuple(x.shape)
        wrong += differing(
            quantize.dequantize(*expected, cast, shape, axis, x.dtype),
            kernel_quantize.dequantize(*expected, cast, shape, axis, x.dtype),
        )
        wrong += differing(
            quantize.fake_quantize(x, cast, axis, draw, amax), kernel_quantize.fake_quantize(x, cast, axis, draw, amax)
        )
    return wrong


def mx_operand(rows: int, columns: int, seed: int, device: str, spread: int = 8) -> tuple[Tensor, Tensor]:
    """MXFP4 codes and scales of groups whose exponents differ; some are zero, and in some rows of 128 they differ by far."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread, (rows, -(-columns // 32)), generator=generator)
    exponents[rows // 2, ::3] -= 17
    x = torch.ldexp(torch.randn(rows, columns, generator=generator), exponents.repeat_interleave(32, 1)[:, :columns])
    x[1, :40], x[2] = 0.0, -0.0
    values, scale, _ = quantize.quantize(x.to(device), Cast.parse("mxfp4"), 1, None, None, Format.parse("e2m1"))
    return values, scale


def check_mx_fp8(rows: int, columns: int, device: str) -> int:
    """Codes, scales and counts, of tiles and of blocks; the layout of scales along the other axis; lost groups."""
    wrong = 0
    for seed, lost in ((1, False), (2, True)):
        values, scale = mx_operand(rows, columns, seed, device)
        if lost:
            scale.view(torch.uint8)[rows // 3, 0] = 255
            scale = scale.T.contiguous().T
        for blocks in (False, True):
            found = [code.as_fp8(values, scale, columns, blocks) for code in (mx_fp8, kernel_mx_fp8)]
            wrong += sum(map(differing, *found))
            assert found[0][2].sum() > 0
    return wrong


def check_replaced(rows: int, columns: int, length: int, device: str) -> int:
    """Blocks of the product that the kernel leaves as they are, or makes anew: integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randint(-3, 4, (n, length), generator=generator).float().to(device) for n in (rows, columns))
    a, b = (quantize.quantize(x, Cast.parse("mxfp4"), 1, None, None, Format.parse("e2m1"))[:2] for x in drawn)
    counts = [torch.arange(-(-n // 128), dtype=torch.int32, device=device) % 2 for n in (rows, columns)]
    found = []
    for code in (mx_fp8, kernel_mx_fp8):
        out = torch.full((rows, columns), -0.5, device=device)
        code.replace_unfit(out, a, counts[0], b, 1 - counts[1], length)
        found.append(out)
    assert 0 < int((found[0] == -0.5).sum()) < rows * columns
    return differing(*found)


def check_transformed(x: Tensor, text: str, axis: int, offset: tuple[int, int] = (0, 0), container: str = "") -> int:
    """Codes and BF16 numbers of one kernel, against the transform and then the cast."""
    cast, place = Cast.parse(text), torch.tensor([5, 0, STREAM.key], device=x.device)
    padded = x.new_empty(1).expand(transforms.padded_shape(x, cast.transforming, axis))
    draw, stored = draw_for(padded, cast.round, offset), Format.parse(container) if container else cast.element
    found = [code.quantize(x, cast, axis, draw, place, stored) for code in (transforms, kernel_transforms)]
    wrong = sum(map(differing, *found))
    if not container:
        found = [code.quantize_values(x, cast, axis, draw, place) for code in (transforms, kernel_transforms)]
        wrong += sum(map(differing, *found))
    return wrong


def check_with_values(x: Tensor, text: str, offset: tuple[int, int] = (0, 0), amax: Tensor | None = None) -> int:
    """Both layouts of one kernel, the second one transformed, as codes and as BF16 numbers."""
    cast, place, wrong = Cast.parse(text), torch.tensor([5, 0, STREAM.key], device=x.device), 0
    draw, amax = draw_for(x, cast.round, offset), amax if cast.scaling.two_level else None
    for container in (None, cast.element):
        found = [code.quantize_with_values(x, cast, draw, place, amax, container) for code in (transforms, kernel_transforms)]
        wrong += sum(map(differing, *found))
    return wrong


def check_transform(x: Tensor, text: str, axis: int) -> int:
    place = torch.tensor([5, 0, STREAM.key], device=x.device)
    found = (code.transform(x, Transform.parse(text), axis, place) for code in (transforms, kernel_transforms))
    return differing(*found)


def check_amax(x: Tensor) -> int:
    return differing(quantize.amax(x), kernel_quantize.amax(x))


def check_both(x: Tensor, cast: Cast, offset: tuple[int, int] = (0, 0), container: str = "", amax: Tensor | None = None) -> int:
    draw = draw_for(x, cast.round, offset)
    stored = Format.parse(container) if container else cast.element
    return sum(
        map(
            differing,
            quantize.quantize_both(x, cast, draw, amax, stored),
            kernel_quantize.quantize_both(x, cast, draw, amax, stored),
        )
    )


def check_values(x: Tensor, cast: Cast, offset: tuple[int, int] = (0, 0), amax: Tensor | None = None) -> int:
    """Codes times the scales of their groups, of one layout and of both, and that they are what codes stand for."""
    draw, wrong = draw_for(x, cast.round, offset), 0
    for axes in ((1,), (0,), (1, 0)):
        (wanted, tensor), (found, tensor_found) = (
            code.quantize_values(x, cast, axes, draw, amax) for code in (quantize, kernel_quantize)
        )
        wrong += differing(tensor, tensor_found) + sum(map(differing, wanted, found))
        for axis, numbers in zip(axes, wanted, strict=True):
            values, scale, outer = quantize.quantize(x, cast, axis, draw, amax, cast.element)
            wrong += differing(outer, tensor)
            one = torch.ones_like(outer)
            decoded = quantize.dequantize(values, scale, one, cast, tuple(x.shape), axis, torch.bfloat16)
            wrong += differing(decoded, numbers)
    return wrong


def check_decoded(rows: int, columns: int, text: str, device: str) -> int:
    """Every code with every scale, those of overflow and NaN too, as BF16 numbers."""
    cast, generator = Cast.parse(text), torch.Generator().manual_seed(4)
    values, scale, nothing = quantize.quantize(torch.zeros(rows, columns), cast, 1, None, None, cast.element)
    values.view(torch.uint8).random_(generator=generator)
    scale.view(torch.uint8).random_(128 if cast.scaling.two_level else 256, generator=generator)
    given = (
        values.to(device),
        scale.to(device),
        nothing[:0].to(device) if nothing.dim() else nothing.new_empty(0, device=device),
    )
    return differing(
        *(code.dequantize(*given, cast, (rows, columns), 1, torch.bfloat16) for code in (quantize, kernel_quantize))
    )


def check_unclipped(x: Tensor, cast: Cast, axis: int) -> int:
    """Masks of clipped elements."""
    found = [code.unclipped(x, cast, axis) for code in (quantize, kernel_quantize)]
    assert 0 < (~found[0]).sum() < x.numel()
    return differing(*found)


def check_apart(x: Tensor, along: Cast, across: Cast) -> int:
    """Two casts, one per layout."""
    found = (code.quantize_apart(x, along, across) for code in (quantize, kernel_quantize))
    return sum(map(differing, *found))


# Levels ---------------------------------------------------------------------------------------------------------------

FAMILIES = (
    "e4m3 tile(128)|e2m1 tile(128) stochastic(16)",
    "e4m3 block(128)|e2m1 block(128)|e3m2 block(128)",
    "e5m2 tensor|e2m1 tensor stochastic(8)",
    "e4m3 row|e2m3 row|e2m1 row|e2m1 row stochastic(16)",
    "e4m3 tile(32) pow2_ceil|e2m1 tile(32) pow2|e2m1 tile(32) pow2_ceil stochastic(16)",
)


def family_of(text: str) -> levels.Family:
    casts = list(map(Cast.parse, text.split("|")))
    found = levels.families(casts)
    assert set(found) == set(casts)
    return found[casts[0]]


def check_level(x: Tensor, text: str, backend: str) -> int:
    """Codes and scales of every level against those of its cast alone, in one layout and in both."""
    family, place, wrong = family_of(text), torch.tensor([3, 16, 5], device=x.device), 0
    for number, cast in enumerate(family.casts):
        level = torch.tensor([number], dtype=torch.int32, device=x.device)
        drawn = place if cast.round.kind == "stochastic" else None
        rest = (None, family.container, 0)
        both = torch.ops.dither.quantize_both(x, str(family), *rest, place, 0, 0, backend, level)
        wrong += sum(map(differing, both, torch.ops.dither.quantize_both(x, str(cast), *rest, drawn, 0, 0, backend)))
        for axis in (0, 1):
            one = torch.ops.dither.quantize(x, str(family), axis, *rest, place, 0, 0, backend, level)
            wrong += sum(map(differing, one, torch.ops.dither.quantize(x, str(cast), axis, *rest, drawn, 0, 0, backend)))
    return wrong


# Sampled weights ------------------------------------------------------------------------------------------------------


def check_noise(rows: int, columns: int, offset: tuple[int, int], kind: str, device: str) -> int:
    """R, and its packed form where it has one."""
    draw = STREAM.draw(3, (rows, columns), offset, device)
    wrong = differing(sampling.noise(draw, rows, columns, kind), kernel_sampling.noise(draw, rows, columns, kind))
    if kind != "uniform":
        packed = (code.packed_noise(draw, rows, columns, kind) for code in (sampling, kernel_sampling))
        wrong += differing(*packed)
    return wrong


def bitwidths(w: Tensor, block: int, special: Sequence[float] = ()) -> Tensor:
    """From 0.5 to 11.5, every third one an integer, `special` ones first."""
    generator = torch.Generator().manual_seed(w.numel())
    b_t = 0.5 + 11 * torch.rand(sampling.block_count(*w.shape, block), generator=generator)
    b_t.view(-1)[::3] = b_t.view(-1)[::3].round()
    b_t.view(-1)[: len(special)] = torch.tensor(special)[: b_t.numel()]
    return b_t.to(w.device)


def check_sample(
    w: Tensor,
    kind: str,
    block: int,
    dtype: torch.dtype,
    offset: tuple[int, int] = (0, 0),
    *,
    moved: bool = False,
    special: Sequence[float] = (),
    also_on_cpu: bool = False,
) -> int:
    """Sampled weights and the blocks' magnitudes, and block_amax by itself."""
    b_t, draw = bitwidths(w, block, special), sampling_draw(w, offset, moved)
    expected = sampling.sample(w, b_t, draw, kind, block, dtype)
    found = kernel_sampling.sample(w, b_t, draw, kind, block, dtype)
    wrong = sum(map(differing, expected, found)) + differing(expected[1], kernel_sampling.block_amax(w, block))
    if also_on_cpu:
        there = replace(draw, step=draw.step.cpu())
        wrong += sum(map(differing, sampling.sample(w.cpu(), b_t.cpu(), there, kind, block, dtype), found))
    return wrong


def check_sample_backward(
    grad: Tensor,
    kind: str,
    block: int,
    dtype: torch.dtype,
    offset: tuple[int, int] = (0, 0),
    *,
    moved: bool = False,
    special: Sequence[float] = (),
    also_on_cpu: bool = False,
) -> int:
    """Gradients of the weight, as `dtype`, and of the bitwidths."""
    b_t, draw = bitwidths(grad, block, special), sampling_draw(grad, offset, moved)
    amax = 3 * bitwidths(grad, block)
    expected = sampling.sample_backward(grad, amax, b_t, draw, kind, block, dtype)
    found = kernel_sampling.sample_backward(grad, amax, b_t, draw, kind, block, dtype)
    wrong = sum(map(differing, expected, found))
    wrong += differing(expected[1], kernel_sampling.bitwidth_grad(grad, amax, b_t, draw, kind, block))
    if also_on_cpu:
        there = replace(draw, step=draw.step.cpu())
        on_cpu = sampling.sample_backward(grad.cpu(), amax.cpu(), b_t.cpu(), there, kind, block, dtype)
        # The gradient comes back as it is where it has the dtype, and the journey to the CPU closes the gaps of a slice.
        wrong += sum(differing(a, b.cpu()) for a, b in zip(on_cpu, found, strict=True))
    return wrong


def sampling_draw(w: Tensor, offset: tuple[int, int], moved: bool) -> Draw:
    """The stream at step 5; `moved` has rows and a part of the key come with the step."""
    draw = STREAM.draw(5, matrix_size(w), offset, w.device)
    return replace(draw, step=torch.tensor([5, 96, 123456789012345], device=w.device)) if moved else draw


# Losses ---------------------------------------------------------------------------------------------------------------


def logits_of(N: int, V: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and weights: rows that are even, peaked, rising, far from zero, and without probability in places.

    Every fifth target does not count, and the first of the rest are the first and the last word.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, V, generator=generator) * torch.tensor([0.01, 1.0, 8.0, 40.0])[torch.arange(N) % 4, None]
    x[1::6] += torch.linspace(-30.0, 30.0, V)  # every block raises the largest logit
    x[2::6] += 1e4
    x[3::6] -= 1e4
    x[4::6][torch.rand(len(x[4::6]), V, generator=generator) < 0.3] = -torch.inf
    targets = torch.randint(V, (N,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])[:N]
    x[torch.arange(N), targets] = x[torch.arange(N), targets].clamp(min=-2e4)
    targets[4::5] = loss.IGNORE
    weights = (torch.rand(N, generator=generator) - 0.3).where(targets != loss.IGNORE, 0.0)
    return x.to(dtype).to(device), targets.to(device), weights.to(device)


def check_cross_entropy(x: Tensor, targets: Tensor, weights: Tensor, code: ModuleType) -> float:
    """The largest error of losses and gradients against float64, over the bounds that `dither.ops.reference.loss` states."""
    u, V = 2.0**-24, x.shape[1]
    row = 3 * math.log(V) + 6 * math.ceil(V / 4096) + 40
    losses, parts = code.forward(x, targets)
    grads = code.backward(x, targets, parts, weights)
    worst = 0.0
    for part in (slice(top, top + 256) for top in range(0, len(x), 256)):  # float64 of many rows would not fit
        counts, place = (targets[part] != loss.IGNORE)[:, None], targets[part, None].clamp(min=0)
        logarithms = x[part].float().double().log_softmax(-1)
        expected = torch.where(counts, -logarithms.gather(-1, place), 0.0).squeeze(-1)
        error = (losses[part] - expected).abs() / (u * (2 * expected + row))
        p, weight = logarithms.exp_(), weights[part, None].double()
        bound = u * weight.abs() * (p * row + 4)
        slopes = p.scatter_add(-1, place, -torch.ones_like(p[:, :1])) * weight
        if x.dtype in (torch.bfloat16, torch.float16):
            limits = torch.finfo(x.dtype)
            bound += (slopes.abs() + bound) * limits.eps / 2 + limits.smallest_normal * limits.eps / 2
        off = torch.where(weight == 0, grads[part].abs().double() * torch.inf, (grads[part] - slopes).abs() / bound)
        # Where nothing may be off, nothing is: 0 / 0, and 0 * Inf.
        off = off.masked_fill((weight == 0) & (grads[part] == 0), 0.0)
        assert not error.isnan().any()
        assert not off.isnan().any()
        worst = max(worst, error.max().item(), off.max().item())
    return worst


# Optimizers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A piece of a parameter: its matrix, where it begins in the whole one, and how far from a multiple of 16 bytes it lies."""

    rows: int
    columns: int
    row: int = 0
    column: int = 0
    shift: int = 0
    run: int = 0
    """Adam-mini: rows that share a second moment, of which `lead` lie before the piece."""
    lead: int = 0
    block: int = -1
    """The weight is codes, one scale per square of this width (0: one scale); -1 if it is not."""


def updates() -> list[Update]:
    """Every way to keep weights and states."""
    states = [(name, how) for name in (*WHOLE, *BLOCKS) for how in ("nearest", "stochastic")]
    states = [pair for pair in states if pair[0] not in ("fp32", *MAPS) or pair[1] == "nearest"]
    kinds = [(weights, "") for weights in ("stochastic", "nearest", "kahan")] + [("nearest", master) for master in MASTERS]
    pairs = [(kind, state) for kind in kinds for state in states if kind[1] != "split" or state[0] in WHOLE]
    found = [Update(weights, name, how, 32, master) for (weights, master), (name, how) in pairs]
    fed = [state for state in states if "fp32" in state or "stochastic" in state]
    pairs = [(weights, *state) for weights in ("stochastic", "nearest") for state in fed]
    return found + [Update(weights, name, how, 32, error_feedback=True) for weights, name, how in pairs]


def name_of(update: Update) -> str:
    weights = f"master {update.master}" if update.master else update.weights + " fed back" * update.error_feedback
    return f"{weights}-{update.states}-{update.state_rounding}"


def _placed(x: Tensor, shift: int) -> Tensor:
    """The same numbers, contiguous, `shift` elements behind an aligned address."""
    room = torch.empty(x.numel() + shift, dtype=x.dtype, device=x.device)[shift:].view(x.shape)
    return room.copy_(x)


Numbers = Callable[[int, int, torch.dtype, int, str], Tensor]
"""Makes a matrix from its rows and columns, dtype, seed and device, as `hard_values` does."""


def pieces_of(
    sizes: Sequence[Size], dtype: torch.dtype, update: Update, seed: int, device: str, numbers: Numbers = hard_values
) -> list[Piece]:
    """Weights of many magnitudes with states of zero; every other piece takes the second row of constants."""
    found = []
    for number, size in enumerate(sizes):
        shape = (size.rows, size.columns)
        w = numbers(*shape, torch.float32, seed + number, device).clamp(-6e4, 6e4).to(dtype)
        m, m_scale = adamw.zero_state(shape, update, True, w.device)
        v, v_scale = adamw.zero_state(shape, update, False, w.device)
        if size.run:
            runs = -(-(size.rows + size.lead) // size.run)
            v, v_scale = torch.zeros(runs, device=w.device), None
        extra = None
        if update.master in masters.LOW:
            extra = numbers(*shape, torch.float32, seed - number, device).view(torch.int32).to(masters.LOW[update.master])
        elif update.master:
            extra = w.float()
        elif update.weights == "kahan" and dtype != torch.float32:
            extra = torch.zeros_like(w)
        if size.block >= 0:
            w, extra = weight_codes.encode(w.float(), size.block, None)
        keys = (Stream(1, "weight", str(number)).key, Stream(1, "moments", str(number)).key)
        place = (size.row, size.column, keys, number % 2, size.run, size.lead, size.run * size.columns)
        held = [None if t is None else _placed(t, size.shift) for t in (w, m, v, m_scale, v_scale, extra)]
        found.append(Piece(*held, *place, max(size.block, 0)))
    return found


def copies(pieces: Sequence[Piece], device: str | None = None) -> list[Piece]:
    """The same pieces in memory of their own, each as far from an aligned address as it was."""

    def moved(x: Tensor) -> Tensor:
        return _placed(x.to(device or x.device), x.storage_offset())

    tensors = [{f.name: getattr(p, f.name) for f in fields(p) if isinstance(getattr(p, f.name), Tensor)} for p in pieces]
    return [replace(p, **{name: moved(x) for name, x in found.items()}) for p, found in zip(pieces, tensors, strict=True)]


def differing_pieces(a: Sequence[Piece], b: Sequence[Piece], update: Update) -> int:
    """Elements of weights and states that differ; where a block's scale is NaN its codes mean nothing."""
    wrong = 0
    for mine, theirs in zip(a, b, strict=True):
        for name in ("w", "extra", "m_scale", "v_scale", "m", "v"):
            x, y = getattr(mine, name), getattr(theirs, name)
            if x is None:
                assert y is None
                continue
            scale = getattr(mine, f"{name}_scale", None)
            if name in ("m", "v") and scale is not None:
                lost = scale.isnan().repeat_interleave(update.block // (2 if update.packed else 1), 1)[:, : x.shape[1]]
                x, y = x.masked_fill(lost, 0), y.masked_fill(lost.to(y.device), 0)
            wrong += differing(x, y)
    return wrong


HYPER_ROWS = [[1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0, 1.0], [3e-3, 0.8, 0.999, 1e-12, 0.0, 1.0, -1.0]]


def gradients_of(
    pieces: Sequence[Piece], dtype: torch.dtype, seed: int, mini: bool, special: Sequence[float], numbers: Numbers = hard_values
) -> list[Tensor]:
    """Hard values, `special` ones among them; for Adam-mini multiples of 2^-4, whose squares add up exactly in any order."""
    found = []
    for number, piece in enumerate(pieces):
        if mini:
            generator = torch.Generator().manual_seed(seed + number)
            grad = (torch.randint(-127, 128, piece.w.shape, generator=generator) / 16).to(piece.w.device, dtype)
        else:
            grad = numbers(*piece.w.shape, torch.float32, seed + number, str(piece.w.device))
            for place, value in enumerate(special):
                grad.view(-1)[place * 7 % grad.numel()] = value
            largest = torch.finfo(dtype).max
            grad = torch.where(grad.isfinite(), grad.clamp(-largest, largest), grad).to(dtype)
        found.append(grad)
    return found


def check_adamw(
    sizes: Sequence[Size],
    dtype: torch.dtype,
    update: Update,
    device: str,
    *,
    grad_dtype: torch.dtype | None = None,
    steps: int = 2,
    special: Sequence[float] = (),
    also_on_cpu: bool = False,
    numbers: Numbers = hard_values,
) -> int:
    """Steps by reference and by kernel, from the same start: how many numbers differ, constants and sums included."""
    mini = bool(sizes[0].run)
    start = pieces_of(sizes, dtype, update, 50, device, numbers)
    runs = [(adamw, device), (kernel_adamw, device)] + ([(adamw, "cpu")] if also_on_cpu else [])
    after, wrong = [], 0
    hyper = torch.tensor(HYPER_ROWS, dtype=torch.float64)
    for code, where in runs:
        pieces = copies(start, where)
        batch = (code.MiniBatch if mini else code.Batch)(pieces, update)
        counted, skipped = torch.zeros(2, dtype=torch.int64, device=where), torch.zeros((), dtype=torch.int64, device=where)
        known = []
        for step in range(steps):
            grads = gradients_of(pieces, grad_dtype or dtype, 90 * step, mini, special, numbers)
            sums = batch.square_sum(grads)
            one = torch.ones((), dtype=torch.float64, device=where) * 7.25  # the sum itself depends on the order of additions
            constants, norm, skip = code.prepare(hyper.to(where), counted, skipped, one, None, None, 1.0)
            batch.step(grads, constants, counted[1], skip)
            known += [constants, norm, skip, counted.clone(), sums]
        after.append((pieces, known))
    for pieces, known in after[1:]:
        wrong += differing_pieces(after[0][0], pieces, update)
        for x, y in zip(after[0][1], known, strict=True):
            if x.dtype == torch.float64:
                torch.testing.assert_close(x.cpu(), y.cpu(), rtol=1e-13, atol=0, equal_nan=True)
                assert x.isfinite().item() == y.isfinite().item()
            else:
                wrong += int((x.cpu() != y.cpu()).sum())
    return wrong


MUON_ROWS = [[1e-2, 0.0, 0.95, 1e-7, 0.1, 1.0, 1.0], [3e-3, 0.0, 0.8, 1e-7, 0.0, 1.0, -1.0]]


def check_muon(sizes: Sequence[Size], update: Update, device: str, *, nesterov: bool) -> int:
    """Both passes of Muon's steps by reference and by kernel, directions included: how many numbers differ."""
    start = pieces_of(sizes, torch.bfloat16, update, 50, device)
    hyper = torch.tensor(MUON_ROWS, dtype=torch.float64, device=device)
    after = []
    for code in (adamw, kernel_adamw):
        pieces, seen = copies(start), []
        batch, count = code.MuonBatch(pieces, update), torch.zeros(3, dtype=torch.int64, device=device)
        for step, dtype in enumerate((torch.bfloat16, torch.bfloat16) if nesterov else (torch.float32,)):
            constants, _, skip = code.prepare(hyper, count[:2], count[2], None, None, None, 0.0)
            # Above 8e37 the factor of a block is subnormal, and the dynamic maps of kernel and reference differ.
            grads = [grad.clamp(-3e37, 3e37) for grad in gradients_of(pieces, dtype, 90 * step, False, ())]
            before = copies(pieces)
            batch.momentum(grads, constants, count[0], skip, nesterov=nesterov)
            assert all(differing(a.w, b.w) == 0 for a, b in zip(pieces, before, strict=True))
            along = [torch.linspace(-1.5, 1.5, grad.numel(), device=device).view_as(grad).to(dtype) for grad in grads]
            batch.step(along, constants, count[0], skip)
            assert any(differing(a.w, b.w) > 0 for a, b in zip(pieces, before, strict=True))
            seen += grads
        after.append((pieces, seen))
    (ours, directions), (theirs, others) = after
    return differing_pieces(ours, theirs, update) + sum(differing(a, b) for a, b in zip(directions, others, strict=True))
