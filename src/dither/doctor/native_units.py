"""Compare the native matrix units of a GPU with the reference, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.doctor.self_test import differing_bits
from dither.doctor.torch_products import first_line
from dither.engines import VERIFIABLE, Engine
from dither.grouping import storage_dtype
from dither.precision import Cast
from dither.reference import matmul, packing, rounding
from dither.reference.matmul import Operand
from dither.reference.scaling import stored_scale
from dither.versions import has_triton

GROUPED = tuple((f"e4m3 {a}(128)", f"e4m3 {b}(128)") for a in ("tile", "block") for b in ("block", "tile"))
"""All pairs of tiles and blocks. In fp8-block-2d tiles come first, or blocks where weights are stored transposed."""

UNITS: dict[str, tuple[Engine, tuple[tuple[str, str], ...]]] = {
    "fp8-tensor": (Engine("fp8", "tensor"), (("e4m3 tensor", "e4m3 tensor"), ("e5m2 tensor", "e4m3 tensor"))),
    "fp8-row": (Engine("fp8", "row"), (("e4m3 row", "e4m3 row"), ("e5m2 row", "e4m3 row"))),
    "fp8-group": (Engine("fp8", "group"), GROUPED),
    "mxfp8": (Engine("mxfp8"), (("e4m3 tile(32) pow2", "e4m3 tile(32) pow2"),)),
    "mxfp4": (Engine("mxfp4"), (("e2m1 tile(32) pow2", "e2m1 tile(32) pow2"),)),
    "nvfp4": (Engine("nvfp4"), (("nvfp4", "e2m1 block(16) nvfp4"), ("nvfp4", "nvfp4"))),
}
"""The engine that each name enables, and pairs of casts that it must multiply."""

UNIT_SIZES = ((304, 384, 512), (160, 304, 1408))
"""(P, Q, L): several blocks along each dimension, partial blocks, and a count of groups of 128 that is not a multiple of 4."""


@dataclass(frozen=True)
class UnitsCheck:
    """The comparison of one kind of native matrix units with the reference."""

    name: str
    """A name from `dither.engines.VERIFIABLE`."""
    passed: bool
    note: str
    """The number of differing bits, or why nothing could be compared."""


def units_checks(device: str) -> tuple[UnitsCheck, ...]:
    """Compare every kind of native units with the reference, bit for bit, on numbers whose sums are exact."""
    if not has_triton():
        return tuple(UnitsCheck(name, False, "not run: Triton is not installed") for name in VERIFIABLE)
    from dither.kernels.matmul import product_on

    return tuple(units_check(name, device, product_on) for name in VERIFIABLE)


def units_check(name: str, device: str, product_on: Callable[..., Tensor]) -> UnitsCheck:
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
        return UnitsCheck(name, False, first_line(problem))
    return UnitsCheck(name, different == 0, f"{different:,} bits differ in {compared:,} results")


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
