"""Test whether the kernels and every device compute the bits that the reference defines."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dither.ops.reference import philox, quantize, rounding
from dither.spec import Cast, Rounding
from dither.spec.formats import TABLE, Format
from dither.spec.random import Draw, Stream
from dither.versions import has_triton

ELEMENTS = 1900
"""Default number of elements per cast of the self-test: one program of most kernels, so that the interpreter is fast."""

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
"""(counter, key, output) of Philox4x32-10, as published by Random123."""


def best_device() -> str:
    """Return "cuda" if torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class BitCheck:
    """The result of one operation of the self-test. A count is None if nothing was compared."""

    group: str
    """The format, or "random bits". Checks of a group are summed in one row of the table."""
    what: str
    elements: int
    kernel: int | None
    """Bits in which the kernel differs from the reference."""
    devices: int | None
    """Bits in which the reference on the GPU differs from the reference on the CPU."""


@dataclass(frozen=True)
class SelfTest:
    """The results of the self-test."""

    checks: tuple[BitCheck, ...]
    kernels: str
    """The place where the kernels ran, or the reason why they did not."""
    devices: str
    """The devices that were compared, or the reason why none were."""
    wrong_answers: int
    """The number of known answers of Philox that some device gets wrong."""
    failure: str = ""
    """Why the comparison ended early, or ""."""

    @property
    def differing(self) -> int:
        """The number of bits that differ in either comparison."""
        return sum((check.kernel or 0) + (check.devices or 0) for check in self.checks)

    @property
    def passed(self) -> bool:
        """True if everything that could be compared agrees."""
        return not (self.differing or self.wrong_answers or self.failure)


@dataclass(frozen=True)
class Implementation:
    """The modules of `dither.ops.reference` or `dither.ops.triton`, which have the same functions."""

    philox: Any
    rounding: Any
    quantize: Any


@dataclass(frozen=True)
class Operation:
    """An operation of the self-test, which either implementation can run on any device."""

    group: str
    what: str
    elements: int
    run: Callable[[Implementation, str], Sequence[Tensor]]


REFERENCE = Implementation(philox, rounding, quantize)
STREAM = Stream(2024, "doctor", "x")
STEP = 5


def run_self_test(elements: int = ELEMENTS) -> SelfTest:
    """Compare the kernels with the reference, and the CPU with the GPU, bit for bit.

    Args:
        elements: The number of elements per cast. The run time is proportional to it.
    """
    device, failure = best_device(), ""
    compared = f"CPU against {torch.cuda.get_device_name()}" if device == "cuda" else "not run: there is no GPU"
    if not has_triton():
        where = "not run: Triton is not installed"
        found = compare_operations(operations(elements), device, None)
    elif device == "cuda":
        kernels = load_kernels()
        from dither.ops.triton import interpreted

        where = "in Triton's interpreter, because TRITON_INTERPRET is set" if interpreted() else "on the GPU"
        found = compare_operations(operations(elements), device, kernels)
    else:
        where = "in Triton's interpreter on the CPU, since there is no GPU"
        found, failure = interpreted_checks(elements)
    wrong = max(wrong_answers("cpu"), wrong_answers(device))
    return SelfTest(tuple(found), where, compared, wrong, failure)


def wrong_answers(device: str) -> int:
    """Return the number of known answers of Philox that `device` gets wrong."""
    wrong = 0
    for counter, (low, high), words in KNOWN_ANSWERS:
        c0, c1, c2, c3 = (torch.tensor(c, dtype=torch.int64, device=device) for c in counter)
        got = philox.philox4x32((c0, c1, c2, c3), low | high << 32)
        wrong += tuple(int(word) for word in got) != words
    return wrong


def load_kernels() -> Implementation:
    """Import the kernels, which need Triton."""
    from dither.ops.triton import philox, quantize, rounding

    return Implementation(philox, rounding, quantize)


def casts() -> list[Cast]:
    """Return casts of every format with every granularity and scale that it supports, in both roundings."""
    found = []
    for element in TABLE.values():
        for scaling in SCALINGS:
            # Formats with float32's range have no scale, wide ones no nvfp4, and those without NaN no delayed scaling.
            if not element.signed or (scaling != "none none" and element.exponent_bits == 8):
                continue
            if ("nvfp4" in scaling and element.bits > 8) or ("delayed" in scaling and not element.nan):
                continue
            bits = min(16, 30 - element.mantissa_bits)
            found += [Cast.parse(f"{element} {scaling} {how}") for how in ("nearest", f"stochastic({bits})")]
    return found


def operations(elements: int) -> list[Operation]:
    """Return the operations of the self-test, with about `elements` elements each."""
    # An odd number of columns gives partial groups; the number of rows is about an eighth of it.
    columns = math.isqrt(8 * elements) | 1
    rows = -(-elements // columns)
    size = rows * columns
    found = []
    for width in (8, 16, 32):
        for offset in ((0, 0), (3, 5)):
            run = functools.partial(_random_bits, rows, columns, width, offset)
            found.append(Operation("random bits", f"{width} bits at offset {offset}", size, run))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for index, cast in enumerate(casts()):
        dtype = dtypes[index % 3]
        # Casts come in pairs, one per rounding. One cast of each pair, alternately, also runs fake_quantize.
        fake = index % 4 in (0, 3)
        run = functools.partial(_cast, cast, rows, columns, dtype, index, fake)
        found.append(Operation(cast.format, f"{cast}, from {str(dtype).removeprefix('torch.')}", size, run))
    for element in TABLE.values():
        if element.signed:
            for how in ("nearest", f"stochastic({min(16, 30 - element.mantissa_bits)})"):
                run = functools.partial(_round, element, Rounding.parse(how), rows, columns)
                found.append(Operation(element.name, f"round_to {element} {how}, not saturating", size, run))
    return found


def compare_operations(todo: Sequence[Operation], device: str, kernels: Implementation | None) -> list[BitCheck]:
    """Run every operation with the reference and the kernels on `device`; on a GPU also with the reference on the CPU."""
    found = []
    for operation in todo:
        expected = operation.run(REFERENCE, device)
        kernel = None if kernels is None else differing_bits(expected, operation.run(kernels, device))
        across = None if device == "cpu" else differing_bits(operation.run(REFERENCE, "cpu"), expected)
        found.append(BitCheck(operation.group, operation.what, operation.elements, kernel, across))
    return found


def differing_bits(expected: Sequence[Tensor], got: Sequence[Tensor]) -> int:
    """Return the number of differing bits of tensors on any devices: all bits if shapes or dtypes differ. All NaN are equal.

    >>> differing_bits([torch.tensor(1.0)], [torch.tensor(1.5)])
    1
    """
    return sum(_differing_bits(a, b) for a, b in zip(expected, got, strict=True))


def _differing_bits(a: Tensor, b: Tensor) -> int:
    if a.shape != b.shape or a.dtype != b.dtype:
        return 8 * max(a.numel() * a.itemsize, b.numel() * b.itemsize, 1)
    octets = _octets(a) ^ _octets(b).to(a.device)
    octets = octets[octets != 0].int()
    return sum(int((octets >> bit & 1).sum()) for bit in range(8))


def _octets(x: Tensor) -> Tensor:
    """Return the raw bytes, with one bit pattern for every NaN: sign and payload differ between machines."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.contiguous().reshape(-1).view(torch.uint8)


def sample(rows: int, columns: int, dtype: torch.dtype, seed: int, special: bool) -> Tensor:
    """Return numbers of many magnitudes: zeros, powers of two, their neighbours, subnormals; if `special`, a NaN and an Inf."""
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
    """Quantize and dequantize; run fake_quantize if `fake`, and quantize_both for long tiles and delayed scales."""
    # With one scale for the whole tensor a NaN would leave nothing to compare. Without a scale, or with one from earlier
    # steps, the codes must be able to represent it.
    whole = cast.scaling.two_level or (cast.group.kind == "tensor" and cast.scaling.kind != "delayed")
    special = not whole and (cast.group.kind in ("row", "block", "tile") or cast.element.nan)
    x = sample(rows, columns, dtype, seed, special).to(device)
    draw = _draw(rows, columns, cast.round, (3, 8), device)
    # Delayed scaling gets a small amax, so that some values are clipped.
    amax = torch.tensor(3.0, device=device) if cast.scaling.kind == "delayed" else None
    module = implementation.quantize
    codes = module.quantize(x, cast, 1, draw, amax, cast.element)
    results = [*codes, module.dequantize(*codes, cast, (rows, columns), 1, dtype)]
    if fake:
        results.append(module.fake_quantize(x, cast, 1, draw, amax))
    if cast.granularity == "tile(128)" or cast.scaling.kind == "delayed":
        results += module.quantize_both(x, cast, draw, amax, cast.element)
    return results


def interpreted_checks(elements: int) -> tuple[list[BitCheck], str]:
    """Compare on the CPU, with the kernels in Triton's interpreter. Return the checks, and why it ended early or "".

    Triton chooses its interpreter when it is imported, so this starts other processes: one per core, at most four.
    """
    workers = min(os.cpu_count() or 1, 4)
    command = [sys.executable, "-m", "dither.tools.self_test", str(elements)]
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
            found += [BitCheck(**check) for check in json.loads(output)]
    return found, failure


def main(elements: str, share: str) -> None:
    """Compare a share of the operations, such as 0/2, on the CPU, and print the checks as JSON."""
    index, count = map(int, share.split("/"))
    torch.set_num_threads(1)  # the other cores work on other shares
    # In pairs, because stochastic casts, which take longer, alternate with others.
    todo = [each for number, each in enumerate(operations(int(elements))) if number // 2 % count == index]
    print(json.dumps([asdict(check) for check in compare_operations(todo, "cpu", load_kernels())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
