"""Examine and test this machine: `dither doctor`, or `python -m dither.tools.doctor` where its packages are not installed."""

import functools
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.console import print_result, print_table, print_text
from dither.errors import UserError
from dither.ops.backend import describe
from dither.ops.reference import matmul, rounding
from dither.ops.reference.matmul import Operand
from dither.ops.reference.scales import stored_scale
from dither.ops.storage import pack, storage_dtype
from dither.spec import Cast
from dither.spec.engines import TRIED, VERIFIABLE, Engine
from dither.spec.formats import TABLE, Format
from dither.spec.gpus import Gpu
from dither.tools.recommend import Advice, advice_here, cpu_here, gpus_here
from dither.tools.self_test import (
    ELEMENTS,
    KNOWN_ANSWERS,
    BitCheck,
    SelfTest,
    best_device,
    differing_bits,
    run_self_test,
)
from dither.versions import has_triton, versions

M, N, K = 256, 256, 512
"""Small, but several 128 x 128 blocks, so that scales in a wrong order show. cuBLAS needs K / 128 to be a multiple of 4."""


@dataclass(frozen=True)
class Product:
    """The outcome of trying one kind of matrix product."""

    name: str
    passed: bool
    note: str
    """Why it does not run, what is wrong with its result, or torch's warning."""


def products(device: str) -> tuple[Product, ...]:
    """Try every kind of product on `device`. A product runs if torch computes it and the result is correct."""
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
    except Exception as problem:  # any failure is a result here: its first line is reported
        return Product(name, False, first_sentence(problem))
    # bfloat16 results are accurate to 2^-9; a misplaced scale is off by a half or more.
    if not error < 0.02:
        return Product(name, False, f"It ran, but its result is wrong by {error:.2g} of the largest number.")
    # torch warns when it falls back to a slower path.
    return Product(name, True, first_sentence(said[0].message) if said else "")


def first_sentence(problem: Exception | Warning | str) -> str:
    """Return the first sentence of an error or a warning, without torch's advice and stack of C++ functions.

    >>> first_sentence(NotImplementedError("Could not run 'aten::mm' with arguments from the 'CPU' backend. Maybe"))
    "Could not run 'aten::mm' with arguments from the 'CPU' backend."
    """
    lines = str(problem).strip().splitlines()
    sentence, end, _ = lines[0].partition(". ") if lines else (type(problem).__name__, "", "")
    return sentence + end.strip()


def _operands() -> tuple[Tensor, Tensor]:
    """Return a_MK and b_NK of small integers, which every format represents exactly."""
    generator = torch.Generator().manual_seed(1)
    a_MK = torch.randint(-3, 4, (M, K), generator=generator).float()
    return a_MK, torch.randint(-3, 4, (N, K), generator=generator).float()


def _plain_product(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = _operands()
    return a_MK.to(device, dtype) @ b_NK.to(device, dtype).t(), a_MK @ b_NK.t()


def _scales(kind: str, lines: int) -> tuple[Tensor, Tensor]:
    """Return scales [groups of lines, groups of K] that differ between neighbours, and the same expanded to [lines, K]."""
    p, q = {"tensor": (lines, K), "row": (1, K), "1x128": (1, 128), "128x128": (128, 128)}[kind]
    exponent = torch.arange(lines // p)[:, None] + torch.arange(K // q)[None, :]
    scale = torch.ldexp(torch.ones(exponent.shape), exponent % 3 - 1)
    return scale, scale.repeat_interleave(p, 0).repeat_interleave(q, 1)


def _fp8_product(kind_a: str, kind_b: str, device: str) -> tuple[Tensor, Tensor]:
    a_MK, b_NK = _operands()
    (scale_a, spread_a), (scale_b, spread_b) = _scales(kind_a, M), _scales(kind_b, N)
    # Consecutive 1x128 scales run along the lines and consecutive 128x128 scales along K. b is transposed.
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
    """Multiply in blocks of 32 with E8M0 scales, or of 16 with E4M3 scales. All scales are 2, so order is irrelevant."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    a_MK, b_NK = _operands()
    element = Format.parse(name)
    dtype = torch.float8_e4m3fn if element.bits == 8 else torch.float4_e2m1fn_x2
    a, b = (pack(rounding.encode(x, element), element).to(device).view(dtype) for x in (a_MK, b_NK))
    if size == 32:
        recipe = ScalingType.BlockWise1x32
        twos = torch.full((M * K // 32,), 128, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    else:
        recipe = ScalingType.BlockWise1x16
        twos = torch.full((M * K // 16,), 0x40, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    swizzle = SwizzleType.SWIZZLE_32_4_4
    got = scaled_mm(a, b.t(), twos, recipe, twos, recipe, swizzle, swizzle)  # M = N, so both use the same scales
    return got, 4 * a_MK @ b_NK.t()


GROUPED = tuple((f"e4m3 {a}(128)", f"e4m3 {b}(128)") for a in ("tile", "block") for b in ("block", "tile"))
"""All pairs of tiles and blocks. In fp8-block-2d tiles come first, or blocks where weights are stored transposed."""

UNITS: dict[str, tuple[Engine, tuple[tuple[str, str], ...]]] = {
    "fp8-tensor": (Engine("fp8", "tensor"), (("e4m3 tensor", "e4m3 tensor"), ("e5m2 tensor", "e4m3 tensor"))),
    "fp8-row": (Engine("fp8", "row"), (("e4m3 row", "e4m3 row"), ("e5m2 row", "e4m3 row"))),
    "fp8-group": (Engine("fp8", "group"), GROUPED),
    "fp8-mxfp4": (Engine("fp8-mxfp4", "group"), (("e2m1 tile(32) pow2", "e2m1 tile(32) pow2"),)),
    "mxfp8": (Engine("mxfp8"), (("e4m3 tile(32) pow2", "e4m3 tile(32) pow2"),)),
    "mxfp4": (Engine("mxfp4"), (("e2m1 tile(32) pow2", "e2m1 tile(32) pow2"),)),
    "nvfp4": (Engine("nvfp4"), (("nvfp4", "e2m1 block(16) nvfp4"), ("nvfp4", "nvfp4"))),
}
"""The engine that each name enables, and pairs of casts that it must multiply."""

UNIT_SIZES = ((304, 384, 512), (160, 304, 1408))
"""(P, Q, L): several blocks along each dimension, partial blocks, and a count of groups of 128 that is not a multiple of 4."""


def units_checks(device: str) -> tuple[Product, ...]:
    """Compare every kind of native units with the reference, bit for bit, on numbers whose sums are exact."""
    if not has_triton():
        return tuple(Product(name, False, "not run: Triton is not installed") for name in VERIFIABLE)
    from dither.ops.triton.matmul import product_on

    return tuple(units_check(name, device, product_on) for name in VERIFIABLE)


def units_check(name: str, device: str, product_on: Callable[..., Tensor]) -> Product:
    """Compare one kind of units with the reference on the CPU: sums of small integers, single products of all codes, NaN.

    Args:
        name: A key of `UNITS`.
        device: The device of the units.
        product_on: The kernel, called as product_on(engine, a, b, bias, dtype).
    """
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
    except Exception as problem:  # any failure is a result here: its first line is reported
        return Product(name, False, first_sentence(problem))
    return Product(name, different == 0, f"{different:,} bits differ in {compared:,} results")


def unit_operand(cast: Cast, rows: int, length: int, kind: str, seed: int) -> Operand:
    """Return an operand [rows, length] whose products are the same in any order of summation.

    Args:
        cast: The cast whose codes and scales the operand has.
        rows: The number of rows.
        length: The number of elements per row.
        kind: "sums": integers up to 2, scaled by 1 or 2, so that a sum has at most 12 bits. "codes": any code. "single": one
            code per row and zeros otherwise, so that a sum has one term. "nan": as "sums", with one scale NaN.
        seed: The seed of the numbers.
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
    values = pack(codes, element).view(storage_dtype(element))
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
    tensor = torch.tensor(0.5) if cast.scaling.two_level else None
    return Operand(values, stored_scale(scale, cast.scaling), tensor, cast, length)


def _moved(x: Operand, device: str) -> Operand:
    tensor = None if x.tensor_scale is None else x.tensor_scale.to(device)
    assert x.scale is not None
    return Operand(x.values.to(device), x.scale.to(device), tensor, x.cast, x.length)


SMALLEST = 512
"""The fewest elements that hold all the special rows of `sample`."""


@dataclass(frozen=True)
class MachineReport:
    """Everything that `dither doctor` prints."""

    versions: tuple[tuple[str, str], ...]
    devices: tuple[Gpu, ...]
    """The CPU, and every GPU that torch finds."""
    products_on: str
    """The device on which the products were tried."""
    products: tuple[Product, ...]
    self_test: SelfTest
    units: tuple[Product, ...] = ()
    """Comparisons of the native matrix units with the reference; empty without a GPU."""
    advice: Advice = Advice((), ())  # noqa: RUF009 (frozen)
    """Recommended precisions for this machine."""

    @property
    def verified(self) -> tuple[str, ...]:
        """The native units with no differing bit."""
        return tuple(check.name for check in self.units if check.passed)

    @property
    def exit_code(self) -> int:
        """0 when all bits agree, 1 when any differ."""
        return 0 if self.self_test.passed else 1


def examine(elements: int = ELEMENTS) -> MachineReport:
    """Examine and test this machine, with `elements` elements per cast."""
    if elements < SMALLEST:
        raise UserError(f"The self-test takes {SMALLEST} elements per cast or more, not {elements}.")
    on = best_device()
    # The products come last: one that crashes the GPU must not affect the self-test.
    tested = run_self_test(elements)
    units = units_checks(on) if on == "cuda" else ()
    return MachineReport(versions(), (cpu_here(), *gpus_here()), on, products(on), tested, units, advice_here())


def print_report(report: MachineReport) -> None:
    """Print the whole report."""
    print_table("Versions", ("name", "version"), report.versions)
    print()
    rows = []
    for index, device in enumerate(report.devices, -1):
        name, model, capability = "cpu", f"{platform.machine()}, {os.cpu_count()} cores", "-"
        if device.capability is not None:
            name, model, capability = f"cuda:{index}", device.name, "{}.{}".format(*device.capability)
        rows.append((name, model, capability, f"{device.memory / 2**30:.1f} GiB"))
    print_table("Devices", ("name", "model", "capability", "memory"), rows, right=[3])
    print()
    print_table(
        f"Matrix products that torch runs on {report.products_on}",
        ("product", "runs", "note"),
        [(p.name, "yes" if p.passed else "no", p.note) for p in report.products],
    )
    if report.products_on == "cpu":
        print("  On a CPU this shows what can be computed, not what is fast.")
    print()
    if report.units:
        _print_units(report)
    _print_self_test(report.self_test)
    if report.advice.rows:
        print()
        print_advice(report.advice)


def print_advice(advice: Advice) -> None:
    """Print the precisions recommended for this machine, and the reasons."""
    header = ("device", "model", "use", "tokens per pass", "GiB")
    print_table("Advice (`dither memory MODEL` shows more)", header, advice.rows, right=[3, 4])
    for note in advice.notes:
        print_text(f"  {note}")


def _print_units(report: MachineReport) -> None:
    here = describe(torch.device(report.products_on))
    known = () if here is None else TRIED.get(here.capability, ())
    print_table(
        f"Native matrix units of {report.products_on} against the reference",
        ("units", "correct", "note", "used"),
        [
            (u.name, "yes" if u.passed else "no", u.note, "always" if u.name in known else "if recorded" if u.passed else "no")
            for u in report.units
        ],
    )
    print_text(
        "  `dither doctor --engines FILE` records those that are correct; convert(engines=FILE) and precision.engines use them."
    )
    print()


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


def _count(checks: Sequence[BitCheck], which: str) -> str:
    """Return the sum of one comparison as text, or "not run"."""
    counts = [getattr(check, which) for check in checks]
    return "not run" if not counts or None in counts else f"{sum(counts):,}"


def run(elements: int = ELEMENTS, engines: str | None = None, *, json: bool = False) -> int:
    """Examine, print, and return the exit code: 0 when all bits agree, 1 when any differ.

    Args:
        elements: The number of elements per cast of the self-test.
        engines: A file in which to record the native units that passed, for this GPU and these versions.
        json: Print JSON.
    """
    if engines is not None and best_device() == "cpu":
        raise UserError("--engines records the native units of a GPU, and torch finds no GPU here.")
    report = examine(elements)
    print_result(report, lambda: print_report(report), json=json)
    if engines is not None:
        record_units(report, engines)
    return report.exit_code


def record_units(report: MachineReport, path: str) -> None:
    """Write the native units that passed to a file, with the machine for which they are valid."""
    here = describe(torch.device(report.products_on), report.verified)
    assert here is not None
    try:
        here.save(path)
    except OSError as error:
        raise UserError(f"{path!r} cannot be written: {error}.") from None
    print(f"Recorded in {path}: {', '.join(here.engines) or 'no native units'}.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run())
