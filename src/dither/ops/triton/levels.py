"""Casting by a level that is read on the device, as `dither.ops.reference.levels`: one launch, whichever cast the level names.

A family has up to four casts with groups of the same shape, and codes in one container C. Every program reads the level, a
number from 0 on, and takes the branch that was compiled for that cast: the branch is the same for all threads. Constants with
the digit n belong to the cast of level n; those without one are the same for all.

    F   format of the values          S   kind of scale and its constants      RUN   elements that a thread loads together
    H   rounding                      W   rounding of nvfp4's block scales     A     runs of a thread (A_T: along the rows)
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops import storage
from dither.ops.triton import BoundKernel, native
from dither.ops.triton import quantize as one_cast
from dither.ops.triton.quantize import _quantize_both_kernel, _quantize_kernel, _quantize_once_kernel
from dither.ops.triton.rounding import draw_arguments
from dither.ops.triton.scales import E4M3, _factors_kernel, amax_bits, block_rounding, line_amax_bits, scaling_fields
from dither.spec import Cast, groups
from dither.spec.formats import Format
from dither.spec.groups import GroupLayout
from dither.spec.random import Draw

BY_LEVEL = ("F", "S", "H", "W", "RUN", "A", "A_T")
"""Constants of a kernel that may differ from level to level."""

BRANCHES = 4
"""The most levels that the kernels below choose between."""


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _both_kernel(
    x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, level_ptr, step_ptr, key, row0, column0,
    rows, columns, stride_r, stride_c, out_line, out_t_line,
    C: tl.constexpr, SCALE: tl.constexpr, GQ: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr, EVEN: tl.constexpr,
    RAGGED: tl.constexpr, RAGGED_T: tl.constexpr, WORDS: tl.constexpr, WORDS_T: tl.constexpr, LEVELS: tl.constexpr,
    F0: tl.constexpr, S0: tl.constexpr, H0: tl.constexpr, W0: tl.constexpr, RUN0: tl.constexpr,
    A0: tl.constexpr, A_T0: tl.constexpr,
    F1: tl.constexpr, S1: tl.constexpr, H1: tl.constexpr, W1: tl.constexpr, RUN1: tl.constexpr,
    A1: tl.constexpr, A_T1: tl.constexpr,
    F2: tl.constexpr, S2: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr, RUN2: tl.constexpr,
    A2: tl.constexpr, A_T2: tl.constexpr,
    F3: tl.constexpr, S3: tl.constexpr, H3: tl.constexpr, W3: tl.constexpr, RUN3: tl.constexpr,
    A3: tl.constexpr, A_T3: tl.constexpr,
):  # fmt: skip
    """Both layouts with tiles of 1 x GQ."""
    level = tl.load(level_ptr)
    if level == 0:
        _quantize_both_kernel(
            x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, step_ptr, key, row0, column0, rows, columns, stride_r, stride_c,
            out_line, out_t_line, F0, C, S0, H0, SCALE, W0, GQ, RUN0, LONG, SHORT, A0, A_T0, EVEN, RAGGED, RAGGED_T, WORDS,
            WORDS_T,
        )  # fmt: skip
    if level == 1:
        _quantize_both_kernel(
            x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, step_ptr, key, row0, column0, rows, columns, stride_r, stride_c,
            out_line, out_t_line, F1, C, S1, H1, SCALE, W1, GQ, RUN1, LONG, SHORT, A1, A_T1, EVEN, RAGGED, RAGGED_T, WORDS,
            WORDS_T,
        )  # fmt: skip
    if LEVELS > 2:
        if level == 2:
            _quantize_both_kernel(
                x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, step_ptr, key, row0, column0, rows, columns, stride_r,
                stride_c, out_line, out_t_line, F2, C, S2, H2, SCALE, W2, GQ, RUN2, LONG, SHORT, A2, A_T2, EVEN, RAGGED,
                RAGGED_T, WORDS, WORDS_T,
            )  # fmt: skip
    if LEVELS > 3:
        if level == 3:
            _quantize_both_kernel(
                x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, step_ptr, key, row0, column0, rows, columns, stride_r,
                stride_c, out_line, out_t_line, F3, C, S3, H3, SCALE, W3, GQ, RUN3, LONG, SHORT, A3, A_T3, EVEN, RAGGED,
                RAGGED_T, WORDS, WORDS_T,
            )  # fmt: skip


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _once_kernel(
    x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, amax_ptr, measured_ptr, level_ptr, step_ptr, key, row0, column0,
    rows, columns, stride_r, stride_c, out_line, out_t_line,
    C: tl.constexpr, SCALE: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, WORDS_T: tl.constexpr, LEVELS: tl.constexpr,
    F0: tl.constexpr, S0: tl.constexpr, H0: tl.constexpr, W0: tl.constexpr, RUN0: tl.constexpr, A0: tl.constexpr,
    F1: tl.constexpr, S1: tl.constexpr, H1: tl.constexpr, W1: tl.constexpr, RUN1: tl.constexpr, A1: tl.constexpr,
    F2: tl.constexpr, S2: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr, RUN2: tl.constexpr, A2: tl.constexpr,
    F3: tl.constexpr, S3: tl.constexpr, H3: tl.constexpr, W3: tl.constexpr, RUN3: tl.constexpr, A3: tl.constexpr,
):  # fmt: skip
    """Both layouts with G x G blocks or (G = 0) one scale for the tensor."""
    level = tl.load(level_ptr)
    if level == 0:
        _quantize_once_kernel(
            x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, amax_ptr, measured_ptr, step_ptr, key, row0, column0, rows,
            columns, stride_r, stride_c, out_line, out_t_line, F0, C, S0, H0, SCALE, W0, G, RUN0, ROWS, COLUMNS, A0, EVEN,
            WORDS, WORDS_T,
        )  # fmt: skip
    if level == 1:
        _quantize_once_kernel(
            x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, amax_ptr, measured_ptr, step_ptr, key, row0, column0, rows,
            columns, stride_r, stride_c, out_line, out_t_line, F1, C, S1, H1, SCALE, W1, G, RUN1, ROWS, COLUMNS, A1, EVEN,
            WORDS, WORDS_T,
        )  # fmt: skip
    if LEVELS > 2:
        if level == 2:
            _quantize_once_kernel(
                x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, amax_ptr, measured_ptr, step_ptr, key, row0, column0, rows,
                columns, stride_r, stride_c, out_line, out_t_line, F2, C, S2, H2, SCALE, W2, G, RUN2, ROWS, COLUMNS, A2, EVEN,
                WORDS, WORDS_T,
            )  # fmt: skip
    if LEVELS > 3:
        if level == 3:
            _quantize_once_kernel(
                x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, amax_ptr, measured_ptr, step_ptr, key, row0, column0, rows,
                columns, stride_r, stride_c, out_line, out_t_line, F3, C, S3, H3, SCALE, W3, G, RUN3, ROWS, COLUMNS, A3, EVEN,
                WORDS, WORDS_T,
            )  # fmt: skip


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _one_layout_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, level_ptr, step_ptr, key, row0, column0,
    rows, columns, inner, stride_b, stride_r, stride_c, out_batch, out_line, out_element,
    C: tl.constexpr, SCALE: tl.constexpr, GP: tl.constexpr, GQ: tl.constexpr, ALONG_ROWS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr, MEASURE: tl.constexpr, PER_LINE: tl.constexpr, FAKE: tl.constexpr,
    RAGGED: tl.constexpr, WORDS: tl.constexpr, LEVELS: tl.constexpr,
    F0: tl.constexpr, S0: tl.constexpr, H0: tl.constexpr, W0: tl.constexpr, RUN0: tl.constexpr, A0: tl.constexpr,
    F1: tl.constexpr, S1: tl.constexpr, H1: tl.constexpr, W1: tl.constexpr, RUN1: tl.constexpr, A1: tl.constexpr,
    F2: tl.constexpr, S2: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr, RUN2: tl.constexpr, A2: tl.constexpr,
    F3: tl.constexpr, S3: tl.constexpr, H3: tl.constexpr, W3: tl.constexpr, RUN3: tl.constexpr, A3: tl.constexpr,
):  # fmt: skip
    """One layout, with any groups."""
    level = tl.load(level_ptr)
    if level == 0:
        _quantize_kernel(
            x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner, stride_b,
            stride_r, stride_c, out_batch, out_line, out_element, F0, C, S0, H0, SCALE, W0, GP, GQ, RUN0, ALONG_ROWS, ROWS,
            COLUMNS, A0, EVEN, MEASURE, PER_LINE, FAKE, RAGGED, WORDS,
        )  # fmt: skip
    if level == 1:
        _quantize_kernel(
            x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner, stride_b,
            stride_r, stride_c, out_batch, out_line, out_element, F1, C, S1, H1, SCALE, W1, GP, GQ, RUN1, ALONG_ROWS, ROWS,
            COLUMNS, A1, EVEN, MEASURE, PER_LINE, FAKE, RAGGED, WORDS,
        )  # fmt: skip
    if LEVELS > 2:
        if level == 2:
            _quantize_kernel(
                x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner, stride_b,
                stride_r, stride_c, out_batch, out_line, out_element, F2, C, S2, H2, SCALE, W2, GP, GQ, RUN2, ALONG_ROWS, ROWS,
                COLUMNS, A2, EVEN, MEASURE, PER_LINE, FAKE, RAGGED, WORDS,
            )  # fmt: skip
    if LEVELS > 3:
        if level == 3:
            _quantize_kernel(
                x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner, stride_b,
                stride_r, stride_c, out_batch, out_line, out_element, F3, C, S3, H3, SCALE, W3, GP, GQ, RUN3, ALONG_ROWS, ROWS,
                COLUMNS, A3, EVEN, MEASURE, PER_LINE, FAKE, RAGGED, WORDS,
            )  # fmt: skip


@triton.jit
def _scales_kernel(
    amax_ptr, out_ptr, level_ptr, n,
    E: tl.constexpr, MULTIPLY: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    S0: tl.constexpr, W0: tl.constexpr, S1: tl.constexpr, W1: tl.constexpr,
    S2: tl.constexpr, W2: tl.constexpr, S3: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """Scales of rows, or of the tensor, from their largest magnitudes."""
    level = tl.load(level_ptr)
    if level == 0:
        _factors_kernel(amax_ptr, out_ptr, n, S0, E, W0, MULTIPLY, NATIVE, BLOCK)
    if level == 1:
        _factors_kernel(amax_ptr, out_ptr, n, S1, E, W1, MULTIPLY, NATIVE, BLOCK)
    if LEVELS > 2:
        if level == 2:
            _factors_kernel(amax_ptr, out_ptr, n, S2, E, W2, MULTIPLY, NATIVE, BLOCK)
    if LEVELS > 3:
        if level == 3:
            _factors_kernel(amax_ptr, out_ptr, n, S3, E, W3, MULTIPLY, NATIVE, BLOCK)


def quantize(
    x: Tensor,
    casts: tuple[Cast, ...],
    level: Tensor,
    axis: int,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of `x` by the cast `casts[level]`, their scales, and an empty tensor; `level` is int32[1] on the device.

    They are written into `out`, if it is given: codes and scales of an earlier call with such an x.
    """
    place = groups.known_layout(tuple(x.shape), casts[0], axis)
    values, scale = out or storage.known_empty_outputs(x, casts[0], axis, container)
    _launch(x, casts, level, place, draw, given_amax, container, values, scale)
    return values, scale, x.new_empty(0, dtype=torch.float32)


def quantize_both(
    x: Tensor,
    casts: tuple[Cast, ...],
    level: Tensor,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrix `x` along axis 1 and along axis 0 by the cast `casts[level]`, and an empty tensor.

    They are written into `out`, if it is given: codes and scales of an earlier call with such an x.
    """
    along = out[:2] if out else storage.known_empty_outputs(x, casts[0], 1, container)
    across = out[2:] if out else storage.known_empty_outputs(x, casts[0], 0, container)
    nothing = torch.empty(0, device=x.device)
    kind = casts[0].group.kind
    if kind == "row":
        for axis, (values, scale) in ((1, along), (0, across)):
            place = groups.known_layout(tuple(x.shape), casts[0], axis)
            _launch(x, casts, level, place, draw, None, container, values, scale)
        return (*along, *across, nothing)
    drawn = tuple(one_cast._drawn(cast, draw if cast.round.kind == "stochastic" else None) for cast in casts)
    launch = _both_launch(tuple(x.shape), x.stride(), x.dtype, x.device, casts, container, drawn, along[1].dtype)
    if kind == "tile":
        if launch is not None:
            launch(x, *along, *across, level, *draw_arguments(draw))
        return (*along, *across, nothing)
    amax = nothing
    if kind == "tensor":
        amax = amax_bits(x) if given_amax is None else given_amax
    if launch is not None:
        launch(x, *along, *across, amax, nothing, level, *draw_arguments(draw))
    elif kind == "tensor":
        for scale in (along[1], across[1]):
            _store_scales(amax.view(torch.int32), one_cast._bits(scale), casts, level)
    return (*along, *across, nothing)


KERNELS = {_quantize_both_kernel: _both_kernel, _quantize_once_kernel: _once_kernel, _quantize_kernel: _one_layout_kernel}
"""The kernel that chooses by level, for each that casts by one cast."""


def _merged(launches: tuple[BoundKernel, ...]) -> BoundKernel:
    """Return one launch for launches of a kernel that differ in constants by level, and in nothing else."""
    first = launches[0]
    shared = {name: value for name, value in first.constants.items() if name not in BY_LEVEL}
    for each in launches[1:]:
        same = {name: value for name, value in each.constants.items() if name not in BY_LEVEL}
        assert (each.kernel, each.programs, each.numbers, same) == (first.kernel, first.programs, first.numbers, shared)
    constants = {**shared, "LEVELS": len(launches)}
    for index in range(BRANCHES):  # branches beyond the last level are not compiled
        of_level = launches[min(index, len(launches) - 1)].constants
        constants |= {f"{name}{index}": of_level[name] for name in BY_LEVEL if name in of_level}
    registers = [each.options.get("maxnreg") for each in launches]
    options = {**first.options, "maxnreg": None if None in registers else max(filter(None, registers))}
    return BoundKernel(KERNELS[first.kernel], first.programs, first.numbers, constants, bits=first.bits, **options)


@functools.lru_cache(maxsize=4096)
def _both_launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    casts: tuple[Cast, ...],
    container: Format,
    drawn: tuple[tuple[bool, bool, bool], ...],
    scales: torch.dtype,
) -> BoundKernel | None:
    each = [
        one_cast._both_launch(shape, stride, dtype, device, cast, container, bits, scales)
        for cast, bits in zip(casts, drawn, strict=True)
    ]
    return None if each[0] is None else _merged(tuple(launch for launch in each if launch is not None))


def _launch(
    x: Tensor,
    casts: tuple[Cast, ...],
    level: Tensor,
    place: GroupLayout,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: Tensor,
    scale: Tensor,
) -> None:
    """Fill codes and scales of one layout."""
    kind = casts[0].group.kind
    x_BRC = place.matrices(x)
    unused = line_amax = x.new_empty(0, dtype=torch.float32)
    measure = kind in ("tile", "block") or (
        kind == "row" and not place.along_rows and 0 < place.columns <= one_cast.LONGEST_ROW
    )
    if not measure:
        if given_amax is not None:
            line_amax = given_amax.view(torch.int32)
        else:
            line_amax = amax_bits(x) if kind == "tensor" else line_amax_bits(x_BRC, place.along_rows)
        _store_scales(line_amax, one_cast._bits(scale), casts, level)
    if x.numel():
        drawn = tuple(one_cast._drawn(cast, draw if cast.round.kind == "stochastic" else None) for cast in casts)
        dtypes = x.dtype, scale.dtype, out.dtype
        launch = _one_launch(place, x_BRC.stride(), dtypes, x.device, casts, container, drawn, measure)
        launch(x_BRC, out, scale, line_amax, unused, level, *draw_arguments(draw))


@functools.lru_cache(maxsize=4096)
def _one_launch(
    place: GroupLayout,
    stride: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
    casts: tuple[Cast, ...],
    container: Format,
    drawn: tuple[tuple[bool, bool, bool], ...],
    measure: bool,
) -> BoundKernel:
    """Return the kernel for one layout, for any level; dtypes are those of x, of its scales and of the codes."""
    return _merged(
        tuple(
            one_cast._one_launch(place, stride, dtypes, device, cast, container, bits, measure, None)
            for cast, bits in zip(casts, drawn, strict=True)
        )
    )


def _store_scales(amax: Tensor, out: Tensor, casts: tuple[Cast, ...], level: Tensor) -> None:
    if not amax.numel():
        return
    constants: dict[str, Any] = {}
    for index in range(BRANCHES):
        cast = casts[min(index, len(casts) - 1)]
        constants |= {f"S{index}": scaling_fields(cast), f"W{index}": block_rounding(cast)}
    _scales_kernel[(triton.cdiv(amax.numel(), 256),)](
        amax,
        out,
        level,
        amax.numel(),
        E=E4M3,
        MULTIPLY=False,
        NATIVE=native(amax.device),
        BLOCK=256,
        LEVELS=len(casts),
        **constants,
    )
