"""Compiles every kernel for an H200 (sm_90) on a machine that has no GPU. Run as a program: it must not see the interpreter.

Operations are called as usual, on CPU tensors, with a driver that names an sm_90 target and a launcher that stops after
compiling. Prints one line per kernel, which test_kernels_build.py reads. `--first` compiles only the first variant of each
kernel: a variant takes about a second if Triton's cache does not have it, and there are hundreds. `--ada` compiles for sm_89,
the oldest GPUs whose own instructions kernels use.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import dither
from dither import Cast, Stream
from dither.ops.reference import adamw as masters
from dither.ops.reference import weight_codes
from dither.ops.reference.adamw import Piece, zero_state
from dither.ops.reference.sampling import DTYPES
from dither.ops.triton import adamw, levels, loss, matmul, mx_fp8, philox, quantize, rounding, sampling, scales, transforms
from dither.ops.triton import loss as loss_codes
from dither.ops.triton import quantize as transposing
from dither.ops.triton.quantize_128 import CASTS as IN_SQUARES
from dither.spec import NOISES, Rounding
from dither.spec.engines import held_by_bf16
from dither.spec.formats import Format
from dither.spec.optimizer import Update
from dither.spec.random import Draw


class Driver:
    """As much of a Triton driver as compiling for a compute capability asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: dict[str, list[object]] = {}


def compile_only(first: bool, capability: tuple[int, int] = (9, 0)) -> None:
    """From here on a kernel launch compiles and does nothing else; nothing at all if only the first variant is wanted."""
    triton.runtime.driver.set_active(Driver(capability))
    torch.version.cuda = "13.0"
    torch.cuda.get_device_capability = lambda device=None: capability  # type: ignore[assignment]
    torch.cuda.current_device = lambda: None  # type: ignore[assignment, return-value]  # where CPU tensors are
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        if first and self.__name__ in compiled:
            return compiled[self.__name__][0]
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.setdefault(self.__name__, []).append(kernel)
        return kernel

    JITFunction.run = warm_up  # type: ignore[method-assign]
    CompiledKernel.__getitem__ = lambda self, grid: lambda *args: None  # type: ignore[method-assign]


CASTS = [
    "e2m1 tile(128) fp32 stochastic(16)",
    "e4m3 tile(128)",
    "e5m2 tile(128) pow2",
    "e2m1 tile(16) nvfp4 stochastic(16)",
    "e3m2 tile(32) pow2_ceil stochastic(8)",
    "e3m4 row",
    "int8 tensor",
    "e4m3 tensor delayed(16)",
    "e5m2 tensor delayed(16)",
    "e2m1 block(128)",
    "e2m1 tile(32) quest",
    "e2m1 block(16) quest",
    "e2m1 tile(16) eden(128) stochastic(16)",
    *("int4-g32", "int4-g128", "q4_0", "q8_0"),
    "fp16 block(32) fp32 stochastic(16)",
    "bf16 stochastic(16)",
]


def calls() -> Iterator[str]:
    """Every kernel, in the variants that differ in more than a number."""
    x = torch.randn(256, 384, dtype=torch.bfloat16)
    stream = Stream(0, "build", "x")
    draw, inside = (stream.draw(1, (256, 384), offset, "cpu") for offset in ((0, 0), (0, 3)))
    for width in (8, 16, 32):
        philox.random_bits(draw, 256, 384, width)
        philox.random_bits(inside, 256, 384, width)
        yield f"random_bits {width}"
    for number, cast in enumerate(map(Cast.parse, CASTS)):  # the one with most code first
        mine = draw if cast.round.kind == "stochastic" else None
        axis = number % 2
        amax = torch.ones(()) if cast.scaling.kind == "delayed" else None
        values, scale, tensor = quantize.quantize(x, cast, axis, mine, amax, cast.element)
        quantize.fake_quantize(x, cast, 1 - axis, mine, amax)
        quantize.dequantize(values, scale, tensor, cast, (256, 384), axis, torch.bfloat16)
        if not cast.scaling.two_level:
            container = cast.element if cast.element.bits >= 8 else Format.parse("e4m3")
            quantize.quantize_both(x, cast, mine, amax, container)
        if held_by_bf16(cast):
            quantize.quantize_values(x, cast, (1, 0), mine, None)
        yield str(cast)
    for text in ("nvfp4", "e2m1 block(16) nvfp4", "mxfp4", "mxfp8"):
        cast, amax = Cast.parse(text), torch.ones(())
        values, scale, _ = quantize.quantize(torch.zeros(64, 512), cast, 1, None, amax, cast.element)
        quantize.dequantize(values, scale, torch.empty(0), cast, (64, 512), 1, torch.bfloat16)
        yield f"words of {text}"
    quantize.unclipped(x, Cast.parse("e2m1 tile(32) quest"), 1)
    yield "masks of clipped elements"
    for along, across in IN_SQUARES:
        for dtype in (torch.bfloat16, torch.float32):
            quantize.quantize_apart(x.to(dtype), along, across)
        yield f"both layouts by {along} and {across}"
    cast = Cast.parse("e2m1 tile(128) fp32 stochastic(16)")
    quantize.quantize_both(x, cast, draw, None, cast.element)
    quantize.quantize(x[:, :381], cast, 1, inside, None, cast.element)
    moved = Draw(stream.key, torch.zeros(2, dtype=torch.int64))
    quantize.quantize_both(x, cast, moved, None, cast.element)
    yield "packed words, both layouts, a shard that begins inside a Philox block, rows that only the device knows"
    for format, how in (("e4m3", "nearest"), ("e2m1", "stochastic(16)"), ("int8", "toward_zero"), ("fp16", "stochastic(16)")):
        for saturate in (True, False):
            mine = draw if how.startswith("stochastic") else None
            rounding.round_to(x, Format.parse(format), Rounding.parse(how), saturate, mine)
        yield f"round_to {format} {how}"
    transposing.transposed(torch.zeros(256, 384, dtype=torch.float8_e4m3fn))
    transposing.transposed(torch.zeros(100, 33))
    scales.tensor_factors(torch.ones(()), Cast.parse("e4m3 tensor"))
    yield "transposed codes and scales, factors of a tensor"
    for transform, place in (("hadamard(16)", None), ("hadamard(128,redrawn)", moved.step.new_zeros(3))):
        for axis in (0, 1):
            transforms.transform(x, Cast.parse(f"mxfp4 nearest {transform}").transforming, axis, place)
            for text in (
                "nvfp4 stochastic(16)",
                "mxfp4 nearest",
                "mxfp8 nearest",
                "e2m1 tile(16) four_over_six nearest",
                "e2m1 tile(32) quest",
                "e2m1 tile(16) eden(128) stochastic(16)",
            ):
                cast = Cast.parse(f"{text} {transform}")
                mine = moved if cast.round.bits else None
                transforms.quantize(x, cast, axis, mine, place, cast.element)
                transforms.quantize_values(x, cast, axis, mine, place)
                if axis == 0 and held_by_bf16(cast):
                    for container in (None, cast.element):
                        transforms.quantize_with_values(x, cast, mine, place, None, container)
        yield transform
    for text in ("nvfp4", "mxfp4", "mxfp8"):
        transforms.quantize_with_values(x, Cast.parse(text), None, None, None, Cast.parse(text).element)
        yield f"numbers and codes of {text}"
    yield from level_calls()
    yield from product_calls()
    yield from sampling_calls()
    yield from loss_calls()
    yield from optimizer_calls()


def level_calls() -> Iterator[str]:
    """Kernels that choose a cast by a level: tiles with random bits, blocks, and rows with a kernel for their scales."""
    x, level = torch.randn(256, 384, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    draw = Stream(0, "build", "x").draw(1, (256, 384), (0, 0), "cpu")
    for text in ("e2m1 tile(128) stochastic(16)|e4m3 tile(128)", "e2m1 block(128)|e4m3 block(128)", "e2m1 row|e4m3 row"):
        casts = tuple(map(Cast.parse, text.split("|")))
        levels.quantize_both(x, casts, level, draw if "stochastic" in text else None, None, Format.parse("e4m3"))
        yield text


def product_calls() -> Iterator[str]:
    """MXFP4 on FP8 units. Groups on 16-bit units: both formats, tiles and blocks, one operand without scales, short steps."""
    for rows, columns in ((256, 512), (200, 336)):
        cast = Cast.parse("mxfp4")
        values, scale, _ = quantize.quantize(torch.zeros(rows, columns), cast, 1, None, None, cast.element)
        unfit = mx_fp8.as_fp8(values, scale, columns)[2]
        mx_fp8.as_fp8(values, scale, columns, blocks=True)
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.zeros(rows, rows, dtype=dtype)
            mx_fp8.replace_unfit(out, (values, scale), unfit, (values, scale), unfit, columns)
    yield "MXFP4 as FP8"
    pairs = [("e4m3 tile(128)", "e4m3 block(128)"), ("e2m1 tile(16)", "e4m3 tile(128)"), ("", "e4m3 block(64)")]
    for a, b in pairs:
        for dtype in (torch.bfloat16, torch.float16):
            sides = []
            for text, rows in ((a, 256), (b, 384)):
                cast = Cast.parse(text) if text else None
                x = torch.zeros(rows, 384, dtype=dtype)
                scale = None if cast is None else quantize.quantize(x, cast, 1, None, None, cast.element)[1]
                sides += [x, scale, cast]
            matmul._grouped_product(*sides)
        yield f"grouped product {a} by {b}"


def sampling_calls() -> Iterator[str]:
    """Each kind of noise, block and result, whole and ragged, with rows and a key that only the device knows."""
    w, step = torch.zeros(256, 384), torch.zeros((), dtype=torch.int64)
    draws = Draw(1, step), Draw(1, step.expand(3), 128, 128)
    for kind in NOISES:
        for draw in draws:
            b_t = torch.zeros(8, 12)
            sampling.noise(draw, 256, 384, kind)
            sampling.sample(w, b_t, draw, kind, 32, torch.bfloat16)
            sampling.sample_backward(w.bfloat16(), b_t, b_t, draw, kind, 32, torch.float32)
        yield f"sample {kind}"
    for dtype in DTYPES:
        sampling.sample(w.bfloat16()[:, :381], b_t, draws[0], "rounded_normal", 32, dtype)
    for dtype in (torch.bfloat16, torch.float16):
        sampling.sample_backward(w[:, :381], b_t, b_t, draws[0], "rounded_normal", 32, dtype)
    for block in (16, 64, 128):
        b_t = torch.zeros(256 // block, 384 // block)
        sampling.sample(w, b_t, draws[0], "rounded_normal", block, torch.bfloat16)
        sampling.bitwidth_grad(w.bfloat16(), b_t, b_t, draws[0], "rounded_normal", block)
    sampling.packed_noise(draws[0], 256, 384, "rounded_normal")
    yield "sample to every type, in every block"


def loss_calls() -> Iterator[str]:
    """Every dtype, rows of whole runs and ragged ones, contiguous and in wider ones."""
    targets = torch.zeros(2, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        wide = torch.zeros(2, 32000, dtype=dtype)
        for logits in (wide, wide[:, :31997], wide[:, :31000], wide[:, :31997].contiguous(), wide[:, :50]):
            _, parts = loss.forward(logits, targets)
            loss.backward(logits, targets, parts, parts[0])
        yield f"cross_entropy {dtype}"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits, targets = torch.zeros(256, 32000, dtype=dtype), torch.zeros(256, dtype=torch.int64)
        parts, weights, amax = torch.zeros(2, 256), torch.zeros(256), torch.zeros(())
        for cast in map(Cast.parse, ("e5m2 tensor", "e4m3 tile(128)", "e4m3 tile(32) pow2_ceil")):
            for part in (logits, logits[:200, :31997]):
                out = torch.ops.dither.empty_gradient_codes(logits[:, : part.shape[1]], str(cast))
                given = (part, targets[: len(part)], parts[:, : len(part)], weights[: len(part)])
                loss_codes.backward_codes(*given, amax, cast, 0, out)
        yield f"codes of the gradient of cross_entropy {dtype}"


UPDATES = [
    (Update("stochastic", "bf16"), torch.bfloat16),
    (Update("stochastic", "bf16", error_feedback=True), torch.bfloat16),
    (Update("nearest", "fp32"), torch.float32),
    (Update("kahan", "dynamic8"), torch.bfloat16),
    (Update("nearest", "e4m3", "stochastic", 128, "fp32"), torch.float16),
    (Update("stochastic", "dynamic8", block=2048), torch.bfloat16),
    (Update("stochastic", "companded8"), torch.bfloat16),
    (Update("stochastic", "dynamic4"), torch.bfloat16),
    (Update("nearest", "fp32", master="split"), torch.bfloat16),
    (Update("nearest", "bf16", master="split24"), torch.bfloat16),
]


def optimizer_calls() -> Iterator[str]:
    """A step of AdamW with whole rows of blocks and with ragged ones, of Muon and of Adam-mini."""
    hyper, count = torch.zeros(2, 7, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    one, scale = torch.ones((), dtype=torch.float64), torch.ones(())
    for squares, loss_scale, max_norm in ((None, None, 0.0), (one, None, 1.0), (one, scale, 0.0)):
        constants, _, skip = adamw.prepare(hyper, count, count[0], squares, loss_scale, loss_scale, max_norm)
    yield "prepare"
    for update, dtype in UPDATES:
        pieces = []
        for columns in (256, 131):
            w = torch.zeros(4, columns, dtype=dtype)
            (m, m_scale), (v, v_scale) = (zero_state((4, columns), update, signed, w.device) for signed in (True, False))
            extra = torch.zeros_like(w) if update.weights == "kahan" else None
            if update.master:
                extra = torch.zeros(w.shape, dtype=masters.LOW.get(update.master, torch.float32))
            pieces.append(Piece(w, m, v, m_scale, v_scale, extra, 0, 0, (1, 2), 0))
        grads = [torch.zeros_like(piece.w) for piece in pieces]
        adamw.Batch(pieces, update).square_sum(grads)
        kinds = {str(update): pieces}
        for block in (0, 128) if update.weights != "kahan" and not update.master and update.states != "fp32" else ():
            kinds[f"{update}, weights in codes, block {block}"] = [
                replace(piece, w=codes, extra=scale, block=block)
                for piece in pieces
                for codes, scale in [weight_codes.encode(piece.w.float(), block, None)]
            ]
        for kind, stored in kinds.items():
            adamw.Batch(stored, update).step(grads, constants, count[0], skip)
            yield f"adamw {kind}"
            if update.master == "split" or update.error_feedback:
                continue
            muon = adamw.MuonBatch([replace(piece, v=piece.m) for piece in stored], update)
            for nesterov in (True, False):
                muon.momentum(grads, constants, count[0], skip, nesterov=nesterov)
            muon.step(grads, constants, count[0], skip)
            yield f"muon {kind}"
        if update.error_feedback:
            continue
        if not update.in_blocks and update.master != "split":
            runs = [replace(piece, v=torch.zeros(2), run=2, share=2 * piece.w.shape[1]) for piece in pieces]
            mini = adamw.MiniBatch(runs, update)
            mini.run_squares(grads)
            for moved in (True, False):
                mini.step(grads, constants, count[0], skip, moved=moved)
            yield f"adam_mini {update.weights} {update.states}"


if __name__ == "__main__":
    assert not dither.ops.triton.interpreted(), "unset TRITON_INTERPRET"
    compile_only("--first" in sys.argv[1:], (8, 9) if "--ada" in sys.argv[1:] else (9, 0))
    for line in calls():
        print(line)
    for name, kernels in compiled.items():
        print(f"compiled {name}: {len(kernels)}")
