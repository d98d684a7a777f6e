"""What this machine is, which matrix products it runs, and whether it computes the bits that Dither defines.

The work behind `dither doctor`. It needs only torch, so that a machine without the command line's packages can run it:
`python -m dither.doctor`. Everything here returns plain data; `print_report` alone prints.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dither.advice.machine import advice_here
from dither.advice.recommendation import Advice
from dither.devices import describe
from dither.devices import version as version
from dither.engines import TRIED, VERIFIABLE, Engine
from dither.errors import UserError
from dither.formats import TABLE, Format
from dither.grouping import storage_dtype
from dither.precision import Cast, Rounding
from dither.random import Draw, Stream
from dither.reference import matmul, packing, philox, quantize, rounding
from dither.reference.matmul import Operand
from dither.reference.scaling import stored_scale

ELEMENTS = 1900
"""How many elements each cast of the self-test gets: one program of most kernels, so that the interpreter is quick."""

SMALLEST = 512
"""Fewer elements would not hold all the special rows of `sample`."""

SCALINGS = (
    "none none",
    "tensor fp32",
    "tensor delayed(16)",
    "row fp32",
    "block(32) fp32",
    "tile(128) fp32",
    "tile(32) pow2",
    "tile(32) pow2_ceil",
    "block(16) nvfp4",
    "tile(16) nvfp4",
)
"""Every granularity and scale kind at least once."""

KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""(counter, key, words) of Philox4x32-10, as Random123 publishes them."""


@dataclass(frozen=True)
class Device:
    """One place where tensors can live."""

    name: str
    model: str
    capability: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Product:
    """One kind of matrix product, tried on a small example."""

    name: str
    runs: bool
    note: str
    """Why it does not run, what is wrong with its result, or what torch warns of."""


@dataclass(frozen=True)
class UnitsCheck:
    """Native matrix units, held against the reference."""

    name: str
    """As `dither.engines.VERIFIABLE` has it."""
    passed: bool
    note: str
    """How many bits differ, or why nothing could be compared."""


@dataclass(frozen=True)
class Check:
    """One operation of the self-test; the counts are None where nothing was compared."""

    group: str
    """The format, or `random bits`: checks of a group share a line."""
    what: str
    elements: int
    kernel: int | None
    """Bits in which the kernel differs from the reference."""
    devices: int | None
    """Bits in which the reference on the GPU differs from the reference on the CPU."""


@dataclass(frozen=True)
class SelfTest:
    """What was compared, and where."""

    checks: tuple[Check, ...]
    kernels: str
    """Where the kernels ran, or why they did not."""
    devices: str
    """Which devices were compared, or why none were."""
    wrong_answers: int
    """Known answers of Philox that did not come out, on any device."""
    failure: str = ""
    """Why the comparison broke off, if it did."""

    @property
    def differing(self) -> int:
        """All bits that differ, of either comparison."""
        return sum((check.kernel or 0) + (check.devices or 0) for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether everything that could be compared agrees."""
        return not (self.differing or self.wrong_answers or self.failure)


@dataclass(frozen=True)
class Report:
    """Everything that `dither doctor` prints."""

    versions: tuple[tuple[str, str], ...]
    devices: tuple[Device, ...]
    products_on: str
    """The device that the products were tried on."""
    products: tuple[Product, ...]
    self_test: SelfTest
    units: tuple[UnitsCheck, ...] = ()
    """Empty without a GPU."""
    advice: Advice = Advice((), ())  # noqa: RUF009 (frozen)
    """Which precision to use here."""

    @property
    def verified(self) -> tuple[str, ...]:
        """The native units whose every bit was right."""
        return tuple(check.name for check in self.units if check.passed)

    @property
    def exit_code(self) -> int:
        """0 when all bits agree, 1 when any differ."""
        return 0 if self.self_test.passed else 1


def examine(elements: int = ELEMENTS) -> Report:
    """Look at this machine and test it with `elements` elements a cast."""
    if elements < SMALLEST:
        raise UserError(f"The self-test takes {SMALLEST} elements a cast or more, not {elements}.")
    on = best_device()
    # The products come last: one that crashes the GPU must not spoil the self-test.
    tested = self_test(elements)
    units = units_checks(on) if on == "cuda" else ()
    return Report(versions(), devices(), on, products(on), tested, units, advice_here())


# The machine ----------------------------------------------------------------------------------------------------------


def has_triton() -> bool:
    """Whether Triton, which the kernels are written in, is installed."""
    return importlib.util.find_spec("triton") is not None


def best_device() -> str:
    """Where the work is done: the first GPU, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def versions() -> tuple[tuple[str, str], ...]:
    """(name, version) of what the numbers depend on."""
    triton_version = "not installed"
    if has_triton():
        import triton

        triton_version = str(triton.__version__)
    try:
        numpy_version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        numpy_version = "not installed"
    return (
        ("dither", version()),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        ("Triton", triton_version),
        ("numpy", numpy_version),
        ("CUDA", torch.version.cuda or "none: this torch is built without it"),
        ("platform", platform.platform()),
    )


def devices() -> tuple[Device, ...]:
    """The CPU and every GPU that torch sees."""
    memory = 0
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [Device("cpu", f"{platform.machine()}, {os.cpu_count()} cores", "", memory)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append(Device(f"cuda:{index}", properties.name, capability, properties.total_memory))
    return tuple(found)


# Matrix products ------------------------------------------------------------------------------------------------------

M, N, K = 256, 256, 512
"""Small, yet with several 128 x 128 blocks, so that scales in a wrong order show; cuBLAS wants K / 128 in fours."""


def products(device: str) -> tuple[Product, ...]:
    """Try every kind of product on `device`: it runs if torch computes it and the result is right."""
    tries: dict[str, Callable[[str], tuple[Tensor, Tensor]]] = {
        "bf16": functools.partial(_plain_product, torch.bfloat16),
        "fp16": functools.partial(_plain_product, torch.float16),
        "fp8, tensor scales": functools.partial(_fp8_product, "tensor", "tensor"),
        "fp8, row scales": functools.partial(_fp8_product, "row", "row"),
        "fp8, 1x128 times 128x128": functools.partial(_fp8_product, "1x128", "128x128"),
        "fp8, 1x128 times 1x128": functools.partial(_fp8_product, "1x128", "1x128"),
        "MXFP8": functools.partial(_mx_product, "e4m3", 32),
        "MXFP4": functools.partial(_mx_product, "e2m1", 32),
        "NVFP4": functools.partial(_mx_product, "e2m1", 16),
    }
    return tuple(_try(name, run, device) for name, run in tries.items())


def _try(name: str, run: Callable[[str], tuple[Tensor, Tensor]], device: str) -> Product:
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got, expected = run(device)
            error = float((got.cpu().float() - expected).abs().max() / expected.abs().max())
    except Exception as problem:  # whatever stops a product on some machine, its first line is the answer here
        return Product(name, False, _first_line(problem))
    # bfloat16 results are right to 2^-9; a scale in the wrong place is off by half or more.
    if not error < 0.02:
        return Product(name, False, f"It ran, but its result is wrong by {error:.2g} of the largest number.")
    # torch warns when it falls back on something slower.
    return Product(name, True, _first_line(said[0].message) if said else "")


def _first_line(problem: Exception | Warning | str) -> str:
    """What an error or a warning says first, without torch's stack of C++ functions."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def _operands() -> tuple[Tensor, Tensor]:
    """a_MK and b_NK of small integers, which every format holds exactly."""
    generator = torch.Generator().manual_seed(1)
    a_MK = torch.randint(-3, 4, (M, K), generator=generator).float()
    return a_MK, torch.randint(-3, 4, (N, K), generator=generator).float()


def _plain_product(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = _operands()
    return a_MK.to(device, dtype) @ b_NK.to(device, dtype).t(), a_MK @ b_NK.t()


def _scales(kind: str, lines: int) -> tuple[Tensor, Tensor]:
    """(scales [groups of lines, groups of K] that differ between neighbours, the same spread to [lines, K])."""
    p, q = {"tensor": (lines, K), "row": (1, K), "1x128": (1, 128), "128x128": (128, 128)}[kind]
    exponent = torch.arange(lines // p)[:, None] + torch.arange(K // q)[None, :]
    scale = torch.ldexp(torch.ones(exponent.shape), exponent % 3 - 1)
    return scale, scale.repeat_interleave(p, 0).repeat_interleave(q, 1)


def _fp8_product(kind_a: str, kind_b: str, device: str) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = _operands()
    (scale_a, spread_a), (scale_b, spread_b) = _scales(kind_a, M), _scales(kind_b, N)
    # In memory, neighbours of 1x128 scales lie along the lines, those of 128x128 scales along K; b's come transposed.
    if kind_a == "1x128":
        scale_a = scale_a.t().contiguous().t()
    if kind_b == "1x128":
        scale_b = scale_b.t().contiguous().t()
    got = torch._scaled_mm(
        a_MK.to(device).to(torch.float8_e4m3fn),
        b_NK.to(device).to(torch.float8_e4m3fn).t(),
        scale_a=scale_a.to(device),
        scale_b=scale_b.to(device).t(),
        out_dtype=torch.bfloat16,
    )
    return got, (a_MK * spread_a) @ (b_NK * spread_b).t()


def _mx_product(name: str, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Blocks of 32 have E8M0 scales, blocks of 16 E4M3 scales. All scales are 2: their order does not show."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    a_MK, b_NK = _operands()
    element = Format.parse(name)
    dtype = torch.float8_e4m3fn if element.bits == 8 else torch.float4_e2m1fn_x2
    a, b = (packing.pack(rounding.encode(x, element), element).to(device).view(dtype) for x in (a_MK, b_NK))
    if size == 32:
        recipe = ScalingType.BlockWise1x32
        twos = torch.full((M * K // 32,), 128, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    else:
        recipe = ScalingType.BlockWise1x16
        twos = torch.full((M * K // 16,), 0x40, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    swizzle = SwizzleType.SWIZZLE_32_4_4
    got = scaled_mm(a, b.t(), twos, recipe, twos, recipe, swizzle, swizzle)  # M = N, so one tensor serves both
    return got, 4 * a_MK @ b_NK.t()


# Native matrix units ---------------------------------------------------------------------------------------------------

UNITS: dict[str, tuple[Engine, tuple[tuple[str, str], ...]]] = {
    "fp8-tensor": (Engine("fp8", "tensor"), (("e4m3 tensor", "e4m3 tensor"), ("e5m2 tensor", "e4m3 tensor"))),
    "fp8-row": (Engine("fp8", "row"), (("e4m3 row", "e4m3 row"), ("e5m2 row", "e4m3 row"))),
    "fp8-group": (Engine("fp8", "group"), (("e4m3 tile(128)", "e4m3 block(128)"), ("e4m3 tile(128)", "e4m3 tile(128)"))),
    "mxfp8": (Engine("mxfp8"), (("e4m3 tile(32) pow2", "e4m3 tile(32) pow2"),)),
    "mxfp4": (Engine("mxfp4"), (("e2m1 tile(32) pow2", "e2m1 tile(32) pow2"),)),
    "nvfp4": (Engine("nvfp4"), (("nvfp4", "e2m1 block(16) nvfp4"), ("nvfp4", "nvfp4"))),
}
"""The engine that each name switches on, and pairs of casts that it must multiply."""

UNIT_SIZES = ((304, 384, 512), (160, 304, 1408))
"""(P, Q, L): several blocks each way, rows that fill none, and a number of groups of 128 that is no multiple of four."""


def units_checks(device: str) -> tuple[UnitsCheck, ...]:
    """Hold every kind of native units against the reference, bit for bit, on numbers whose sums they must get exactly."""
    if not has_triton():
        return tuple(UnitsCheck(name, False, "not run: Triton is not installed") for name in VERIFIABLE)
    from dither.kernels.matmul import product_on

    return tuple(units_check(name, device, product_on) for name in VERIFIABLE)


def units_check(name: str, device: str, product_on: Callable[..., Tensor]) -> UnitsCheck:
    """Compare one kind of units with the reference on the CPU: sums of small integers, single products of all codes, NaN."""
    engine, pairs = UNITS[name]
    different = compared = 0
    try:
        for casts in pairs:
            for number, size in enumerate(UNIT_SIZES):
                for kind in ("sums", "codes", "nan"):
                    a, b = (
                        unit_operand(
                            Cast.parse(text), rows, size[2], kind if kind != "codes" or side else "single", 2 * number + side
                        )
                        for side, (text, rows) in enumerate(zip(casts, size[:2], strict=True))
                    )
                    for dtype in (torch.float32, torch.bfloat16):
                        expected = matmul.product(a, b, None, dtype, fast=False, emulate=True, where="")
                        got = product_on(engine, _moved(a, device), _moved(b, device), None, dtype)
                        different += differing_bits([expected], [got])
                        compared += expected.numel()
    except Exception as problem:  # whatever stops it on some machine, its first line is the answer here
        return UnitsCheck(name, False, _first_line(problem))
    return UnitsCheck(name, different == 0, f"{different:,} bits differ in {compared:,} results")


def unit_operand(cast: Cast, rows: int, length: int, kind: str, seed: int) -> Operand:
    """An operand [rows, length] whose products have one right result, however units add.

    sums: integers up to 2, scaled by 1 or 2, so that a sum has at most 12 bits. codes: any code; single: one code a row, and
    otherwise zeros, so that a sum has one term. nan: as sums, with one scale lost.
    """
    generator = torch.Generator().manual_seed(seed)
    element = cast.element
    if kind in ("sums", "nan"):
        codes = rounding.encode(torch.randint(-2, 3, (rows, length), generator=generator).float(), element)
    else:
        numbers = torch.tensor(element.values(), dtype=torch.float32)
        drawn = numbers[torch.randint(len(numbers), (rows, length), generator=generator)]
        if kind == "single":
            place = torch.randint(length, (rows, 1), generator=generator)
            drawn = torch.zeros_like(drawn).scatter(1, place, drawn.gather(1, place))
        codes = rounding.encode(drawn, element)
    values = packing.pack(codes, element).view(storage_dtype(element))
    size, group = cast.group.size, cast.group.kind
    shape = {
        "tensor": (),
        "row": (rows, 1),
        "tile": (rows, -(-length // max(size, 1))),
        "block": (-(-rows // max(size, 1)), -(-length // max(size, 1))),
    }[group]
    scale = torch.randint(1, 3, shape, generator=generator).float()
    if kind == "nan":
        scale = scale.clone()
        scale.view(-1)[-1] = torch.nan
    tensor = torch.tensor(0.5) if cast.scaling.kind == "nvfp4" else None
    return Operand(values, stored_scale(scale, cast.scaling), tensor, cast, length)


def _moved(x: Operand, device: str) -> Operand:
    tensor = None if x.tensor_scale is None else x.tensor_scale.to(device)
    assert x.scale is not None
    return Operand(x.values.to(device), x.scale.to(device), tensor, x.cast, x.length)


# The self-test --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Implementation:
    """The modules of `dither.reference` or `dither.kernels`, which have the same functions."""

    philox: Any
    rounding: Any
    quantize: Any


@dataclass(frozen=True)
class Job:
    """An operation that any implementation can run on any device."""

    group: str
    what: str
    elements: int
    run: Callable[[Implementation, str], Sequence[Tensor]]


REFERENCE = Implementation(philox, rounding, quantize)
STREAM = Stream(2024, "doctor", "x")
STEP = 5


def self_test(elements: int = ELEMENTS) -> SelfTest:
    """Hold the kernels against the reference, and the CPU against the GPU, bit for bit."""
    device, failure = best_device(), ""
    compared = f"CPU against {torch.cuda.get_device_name()}" if device == "cuda" else "not run: there is no GPU"
    if not has_triton():
        where = "not run: Triton is not installed"
        found = compare(jobs(elements), device, None)
    elif device == "cuda":
        kernels = load_kernels()
        from dither.kernels import interpreted

        where = "in Triton's interpreter, because TRITON_INTERPRET is set" if interpreted() else "on the GPU"
        found = compare(jobs(elements), device, kernels)
    else:
        where = "in Triton's interpreter on the CPU, since there is no GPU"
        found, failure = interpreted_checks(elements)
    wrong = max(wrong_answers("cpu"), wrong_answers(device))
    return SelfTest(tuple(found), where, compared, wrong, failure)


def wrong_answers(device: str) -> int:
    """How many of Philox's known answers do not come out on `device`."""
    wrong = 0
    for counter, (low, high), words in KNOWN_ANSWERS:
        c0, c1, c2, c3 = (torch.tensor(c, dtype=torch.int64, device=device) for c in counter)
        got = philox.philox4x32((c0, c1, c2, c3), low | high << 32)
        wrong += tuple(int(word) for word in got) != words
    return wrong


def load_kernels() -> Implementation:
    """The kernels, which need Triton."""
    from dither.kernels import philox, quantize, rounding

    return Implementation(philox, rounding, quantize)


def casts() -> list[Cast]:
    """Every format with every granularity and scale that it takes, rounded both ways."""
    found = []
    for element in TABLE.values():
        for scaling in SCALINGS:
            # Formats with float32's range take no scale, wide ones no nvfp4, and those without NaN no delayed scaling.
            if not element.signed or (scaling != "none none" and element.exponent_bits == 8):
                continue
            if ("nvfp4" in scaling and element.bits > 8) or ("delayed" in scaling and not element.nan):
                continue
            bits = min(16, 30 - element.mantissa_bits)
            found += [Cast.parse(f"{element} {scaling} {how}") for how in ("nearest", f"stochastic({bits})")]
    return found


def jobs(elements: int) -> list[Job]:
    """The self-test, in small pieces."""
    # An odd width that leaves ragged edges, and rows about an eighth of it.
    columns = math.isqrt(8 * elements) | 1
    rows = -(-elements // columns)
    size = rows * columns
    found = []
    for width in (8, 16, 32):
        for offset in ((0, 0), (3, 5)):
            run = functools.partial(_random_bits, rows, columns, width, offset)
            found.append(Job("random bits", f"{width} bits at offset {offset}", size, run))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for index, cast in enumerate(casts()):
        dtype = dtypes[index % 3]
        # Casts come in pairs of both roundings; one of each pair also goes the way without codes, by turns.
        fake = index % 4 in (0, 3)
        run = functools.partial(_cast, cast, rows, columns, dtype, index, fake)
        found.append(Job(cast.format, f"{cast}, from {str(dtype).removeprefix('torch.')}", size, run))
    for element in TABLE.values():
        if element.signed:
            for how in ("nearest", f"stochastic({min(16, 30 - element.mantissa_bits)})"):
                run = functools.partial(_round, element, Rounding.parse(how), rows, columns)
                found.append(Job(element.name, f"round_to {element} {how}, not saturating", size, run))
    return found


def compare(todo: Sequence[Job], device: str, kernels: Implementation | None) -> list[Check]:
    """Run every job with reference and kernels on `device`, and with the reference on the CPU, if that is another."""
    found = []
    for job in todo:
        expected = job.run(REFERENCE, device)
        kernel = None if kernels is None else differing_bits(expected, job.run(kernels, device))
        across = None if device == "cpu" else differing_bits(job.run(REFERENCE, "cpu"), expected)
        found.append(Check(job.group, job.what, job.elements, kernel, across))
    return found


def differing_bits(expected: Sequence[Tensor], got: Sequence[Tensor]) -> int:
    """How many bits differ, wherever the tensors live; where shapes or dtypes do, all of them. NaN is NaN."""
    return sum(_differing_bits(a, b) for a, b in zip(expected, got, strict=True))


def _differing_bits(a: Tensor, b: Tensor) -> int:
    if a.shape != b.shape or a.dtype != b.dtype:
        return 8 * max(a.numel() * a.itemsize, b.numel() * b.itemsize, 1)
    octets = _octets(a) ^ _octets(b).to(a.device)
    octets = octets[octets != 0].int()
    return sum(int((octets >> bit & 1).sum()) for bit in range(8))


def _octets(x: Tensor) -> Tensor:
    """The raw bytes. One NaN stands for all: the sign and payload of a product's NaN differ between machines."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().reshape(-1).view(torch.uint8)


def sample(rows: int, columns: int, dtype: torch.dtype, seed: int, special: bool) -> Tensor:
    """Numbers of many sizes: zeros, powers of two and their neighbours, subnormals; if `special`, a NaN and an Inf."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-12, 12, (rows, 1), generator=generator)
    x = torch.ldexp(torch.randn(rows, columns, generator=generator), exponent)
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0.0
    powers = torch.ldexp(torch.ones(columns), torch.randint(-10, 10, (columns,), generator=generator))
    x[0] = torch.nextafter(powers, torch.tensor(torch.inf))
    x[1] = powers
    x[2] = torch.nextafter(powers, torch.tensor(0.0))
    x[3] *= 1e-38
    x[4] = 0.0
    x = x.to(dtype)
    if special:
        x[5, columns // 3], x[6, columns // 2] = torch.nan, -torch.inf
    return x


def _draw(rows: int, columns: int, how: Rounding, offset: tuple[int, int], device: str) -> Draw | None:
    return STREAM.draw(STEP, (rows, columns), offset, device) if how.kind == "stochastic" else None


def _random_bits(
    rows: int, columns: int, width: int, offset: tuple[int, int], implementation: Implementation, device: str
) -> Sequence[Tensor]:
    draw = STREAM.draw(STEP, (rows, columns), offset, device)
    return (implementation.philox.random_bits(draw, rows, columns, width),)


def _round(
    element: Format, how: Rounding, rows: int, columns: int, implementation: Implementation, device: str
) -> Sequence[Tensor]:
    x = sample(rows, columns, torch.float32, 0, special=True).to(device)
    draw = _draw(rows, columns, how, (3, 8), device)
    return (implementation.rounding.round_to(x, element, how, False, draw),)


def _cast(
    cast: Cast,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    seed: int,
    fake: bool,
    implementation: Implementation,
    device: str,
) -> Sequence[Tensor]:
    """Codes and scales, the way back, the round trip without codes if `fake`, both layouts of long tiles, of delayed scales."""
    # One NaN would leave nothing to compare where a scale belongs to the whole tensor; where there is no scale, or one
    # from earlier steps, the codes must be able to hold it.
    whole = cast.scaling.kind == "nvfp4" or (cast.group.kind == "tensor" and cast.scaling.kind != "delayed")
    special = not whole and (cast.group.kind in ("row", "block", "tile") or cast.element.nan)
    x = sample(rows, columns, dtype, seed, special).to(device)
    draw = _draw(rows, columns, cast.round, (3, 8), device)
    # Delayed scaling is given a magnitude, and a small one, so that some values are clipped.
    amax = torch.tensor(3.0, device=device) if cast.scaling.kind == "delayed" else None
    module = implementation.quantize
    codes = module.quantize(x, cast, 1, draw, amax, cast.element)
    results = [*codes, module.dequantize(*codes, cast, (rows, columns), 1, dtype)]
    if fake:
        results.append(module.fake_quantize(x, cast, 1, draw, amax))
    if cast.granularity == "tile(128)" or cast.scaling.kind == "delayed":
        results += module.quantize_both(x, cast, draw, amax, cast.element)
    return results


def interpreted_checks(elements: int) -> tuple[list[Check], str]:
    """The comparison on the CPU with kernels in Triton's interpreter; with it, why it broke off, or nothing.

    Triton chooses its interpreter when it is imported, so this takes other processes: one for each core, at most four.
    """
    workers = min(os.cpu_count() or 1, 4)
    command = [sys.executable, "-m", "dither.doctor", "--interpret", "--elements", str(elements), "--share"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    running = [
        subprocess.Popen(
            [*command, f"{index}/{workers}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(workers)
    ]
    found, failure = [], ""
    for process in running:
        output, errors = process.communicate()
        if process.returncode:
            last = (errors.strip() or "no message").splitlines()[-1]
            failure = f"the interpreter stopped with exit code {process.returncode}: {last}"
        else:
            found += [Check(**check) for check in json.loads(output)]
    return found, failure


# Printing -------------------------------------------------------------------------------------------------------------


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on standard output, drawn on a terminal and plain elsewhere; `right` lists the columns of numbers."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))  # as they are: brackets in an error message are no markup
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"  {'  '.join(cells)}".rstrip())


def print_report(report: Report) -> None:
    """The whole report: versions, devices, products, the self-test and the verdict."""
    print_table("Versions", ("name", "version"), report.versions)
    print()
    print_table(
        "Devices",
        ("name", "model", "capability", "memory"),
        [(d.name, d.model, d.capability or "-", f"{d.memory / 2**30:.1f} GiB") for d in report.devices],
        right=[3],
    )
    print()
    print_table(
        f"Matrix products that torch runs on {report.products_on}",
        ("product", "runs", "note"),
        [(p.name, "yes" if p.runs else "no", p.note) for p in report.products],
    )
    if report.products_on == "cpu":
        print("  On a CPU this says what can be computed, not that it is fast.")
    print()
    if report.units:
        _print_units(report)
    _print_self_test(report.self_test)
    if report.advice.rows:
        print()
        print_advice(report.advice)


def print_advice(advice: Advice) -> None:
    """Print which precision to use on this machine, and why."""
    header = ("device", "model", "use", "tokens in a pass", "GiB")
    print_table("Advice (`dither memory MODEL` says more)", header, advice.rows, right=[3, 4])
    for note in advice.notes:
        print(f"  {note}")


def _print_units(report: Report) -> None:
    here = describe(torch.device(report.products_on))
    known = () if here is None else TRIED.get(here.capability, ())
    print_table(
        f"Native matrix units of {report.products_on} against the reference",
        ("units", "right", "note", "used"),
        [(u.name, "yes" if u.passed else "no", u.note, _when_used(u, u.name in known)) for u in report.units],
    )
    print(
        "  `dither doctor --engines FILE` records those that are right; convert(engines=FILE) and precision.engines use them."
    )
    print()


def _when_used(units: UnitsCheck, known: bool) -> str:
    return "always" if known else "if recorded" if units.passed else "no"


def _print_self_test(test: SelfTest) -> None:
    names = ("random bits", *TABLE)
    groups = {name: [check for check in test.checks if check.group == name] for name in names}
    groups["total"] = list(test.checks)
    rows = []
    for name, members in groups.items():
        if members:
            elements = sum(check.elements for check in members)
            counts = (_count(members, "kernel"), _count(members, "devices"))
            rows.append((name, str(len(members)), f"{elements:,}", *counts))
    print_table(
        "Self-test: differing bits",
        ("format", "operations", "elements", "kernel against reference", "CPU against GPU"),
        rows,
        right=[1, 2, 3, 4],
    )
    for check in test.checks:
        if check.kernel or check.devices:
            counts = (_count([check], "kernel"), _count([check], "devices"))
            print(f"  DIFFERS: {check.what}: kernel against reference {counts[0]}, CPU against GPU {counts[1]}")
    print(f"  Kernels: {test.kernels}.")
    print(f"  Devices: {test.devices}.")
    print(f"  Philox4x32-10: {test.wrong_answers or 'none'} of the {len(KNOWN_ANSWERS)} known answers wrong.")
    if test.failure:
        print(f"FAILED: {test.failure}")
    elif not test.passed:
        print(f"FAILED: {test.differing} bits differ.")
    elif all(check.kernel is None and check.devices is None for check in test.checks):
        print("Nothing is wrong, but no kernel and no second device could be compared here.")
    else:
        print("All bits agree.")


def _count(checks: Sequence[Check], which: str) -> str:
    """The sum of one comparison, or that there was none."""
    counts = [getattr(check, which) for check in checks]
    return "not run" if not counts or None in counts else f"{sum(counts):,}"


def run(elements: int = ELEMENTS, engines: str | None = None) -> int:
    """Examine, print, and return the exit code: 0 when all bits agree, 1 when any differ.

    `engines` is a file to record the native units in that passed, for this GPU and these versions.
    """
    if engines is not None and best_device() == "cpu":
        raise UserError("--engines records the native units of a GPU, and torch sees none here.")
    report = examine(elements)
    print_report(report)
    if engines is not None:
        record_units(report, engines)
    return report.exit_code


def record_units(report: Report, path: str) -> None:
    """Write the native units that passed to a file, with the machine that they count for."""
    here = describe(torch.device(report.products_on), report.verified)
    assert here is not None
    try:
        here.save(path)
    except OSError as error:
        raise UserError(f"{path!r} cannot be written: {error}.") from None
    print(f"Recorded in {path}: {', '.join(here.engines) or 'no native units'}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m dither.doctor`."""
    parser = argparse.ArgumentParser(prog="python -m dither.doctor", description=__doc__)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="elements a cast of the self-test gets")
    parser.add_argument("--engines", help="a file to record the native matrix units in that passed")
    parser.add_argument("--interpret", action="store_true", help="only compare, on the CPU, and print JSON")
    parser.add_argument("--share", default="0/1", help="with --interpret: which part of the work, such as 0/2")
    given = parser.parse_args(arguments)
    if not given.interpret:
        try:
            return run(given.elements, given.engines)
        except UserError as error:
            print(f"dither.doctor: error: {error}", file=sys.stderr)
            return 2
    index, count = map(int, given.share.split("/"))
    torch.set_num_threads(1)  # the other cores have shares of their own
    # By twos, because stochastic casts, which take longer, alternate with others.
    mine = [job for place, job in enumerate(jobs(given.elements)) if place // 2 % count == index]
    print(json.dumps([asdict(check) for check in compare(mine, "cpu", load_kernels())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
