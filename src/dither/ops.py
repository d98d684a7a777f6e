"""The operations, by device: Triton kernels on CUDA, the reference elsewhere, or what `backend=` says.

Each is registered with torch (`torch.ops.dither.*`), so that `torch.compile` keeps one graph and the bits stay the same.
The functions here check their arguments and say what is wrong with them; the operators below them do not look again.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dither import layout
from dither.errors import UserError
from dither.formats import Format
from dither.precision import Cast, Rounding
from dither.random import Draw, Stream, check_backend, matrix_size
from dither.reference import sampling, scaling
from dither.reference.matmul import Operand

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

BLOCKS = (16, 32, 64, 128)
"""How wide the blocks of sampled weights may be."""


@dataclass(frozen=True)
class Quantized:
    """A tensor in few bits: codes, scales, and what is needed to read them.

    `values` has the tensor's shape, with 4-bit codes two to a byte and 6-bit codes four to three bytes along `axis`.
    `scale` has one entry a group, in the order of the tensor's dimensions: multiply codes by it (and by `tensor_scale`,
    which nvfp4 has) to get numbers back. The memory of codes runs along `axis`, as the product over that axis wants it.
    """

    values: Tensor
    scale: Tensor | None
    cast: Cast
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype
    tensor_scale: Tensor | None = None
    measured: Tensor | None = None
    """The largest magnitude of the tensor, 0-d, that `quantize_both` finds on its way when scaling is delayed."""

    def dequantize(self, dtype: torch.dtype | None = None, *, backend: str = "auto") -> Tensor:
        """The numbers, in the original tensor's shape and in `dtype` (its own, unless said otherwise).

        >>> import dither, torch
        >>> dither.quantize(torch.tensor([1.0, 2.0, 4.0, -12.0]), "e2m1 tile(4)").dequantize()
        tensor([  1.,   2.,   4., -12.])
        """
        dtype = dtype or self.dtype
        if dtype not in INPUT_DTYPES:
            raise UserError(f"Numbers come back as float32, bfloat16 or float16, not as {dtype}.")
        empty = self.values.new_empty(0, dtype=torch.float32)
        numbers: Tensor = _dequantize_op(
            _bytes(self.values),
            empty if self.scale is None else _bytes(self.scale),
            empty if self.tensor_scale is None else self.tensor_scale,
            str(self.cast),
            list(self.shape),
            self.axis,
            dtype,
            check_backend(backend),
        )
        return numbers


def _bytes(x: Tensor) -> Tensor:
    """float8 as uint8: as an operator's input the former fails in torch's own checks, which compare it."""
    return x.view(torch.uint8) if x.is_floating_point() and x.itemsize == 1 else x


def round_to(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest",
    *,
    saturate: bool = True,
    stream: Stream | None = None,
    step: int | Tensor = 0,
    offset: tuple[int, int] = (0, 0),
    backend: str = "auto",
) -> Tensor:
    """`x` (any shape; float32, bfloat16 or float16) rounded to values of `format`, as float32, which holds them all exactly.

    Finite overflow goes to the largest value, or with `saturate=False` to Inf, or NaN, where the format has one. NaN stays
    NaN, and Inf stays Inf (NaN in a format without Inf). Stochastic rounding draws from `stream` at `step`.

    >>> import dither, torch
    >>> dither.round_to(torch.tensor([0.3, 2.6, 100.0]), "e2m1")
    tensor([0.5000, 3.0000, 6.0000])
    """
    cast = _unscaled(format, rounding)
    _check_tensor(x, "round_to")
    draw = _draw(x, cast, stream, step, offset)
    result: Tensor = _round_to_op(x, cast.format, rounding, saturate, *_draw_arguments(draw), check_backend(backend))
    _check_result(x, cast, result, inf_passes=cast.element.inf and not saturate)
    return result


def quantize(
    x: Tensor,
    cast: Cast | str,
    *,
    axis: int = -1,
    stream: Stream | None = None,
    step: int | Tensor = 0,
    offset: tuple[int, int] = (0, 0),
    amax: Tensor | None = None,
    backend: str = "auto",
) -> Quantized:
    """Codes of `x` and their scales, in real storage.

    `x` has any shape and strides and is float32, bfloat16 or float16. `axis` is the one that rows and tiles run along: the
    contraction axis of the product that will use the result. Stochastic casts draw from `stream` at `step`, where `offset`
    is the row and column of x's first element in the whole tensor. `amax` (0-d float32) replaces the measured largest
    magnitude of the tensor, for delayed scaling or for a tensor that is spread over several devices.

    A group with a NaN in it has the scale NaN and reads back as NaN, all of it. Codes have no gradient; `fake_quantize` has.

    >>> import dither, torch
    >>> q = dither.quantize(torch.tensor([[1.0, 2.0, 4.0, -12.0]]), "e2m1 tile(4)")
    >>> q.values, q.scale
    (tensor([[ 33, 244]], dtype=torch.uint8), tensor([[2.]]))
    """
    cast, axis, draw = _prepare("quantize", x, cast, axis, stream, step, offset, amax)
    arguments = _draw_arguments(draw)
    values, scale, tensor_scale = _quantize_op(x.detach(), str(cast), axis, amax, "", *arguments, check_backend(backend))
    _check_scales(x, cast, scale, measured=amax is None)
    return Quantized(
        values,
        scale if cast.group.kind != "none" else None,
        cast,
        tuple(x.shape),
        axis,
        x.dtype,
        tensor_scale if cast.scaling.kind == "nvfp4" else None,
    )


def fake_quantize(
    x: Tensor,
    cast: Cast | str,
    *,
    axis: int = -1,
    stream: Stream | None = None,
    step: int | Tensor = 0,
    offset: tuple[int, int] = (0, 0),
    amax: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`quantize(x, ...).dequantize()` in one pass that stores no codes: same bits, shape and dtype of `x`.

    The gradient is straight-through: that of the result is passed on to `x` unchanged.

    >>> import dither, torch
    >>> dither.fake_quantize(torch.tensor([0.1, 0.5, 1.3, 6.0]), "e2m1")
    tensor([0.0000, 0.5000, 1.5000, 6.0000])
    """
    cast, axis, draw = _prepare("fake_quantize", x, cast, axis, stream, step, offset, amax)
    result: Tensor = _fake_quantize_op(x, str(cast), axis, amax, *_draw_arguments(draw), check_backend(backend))
    _check_result(x, cast, result, inf_passes=False)
    return result


def quantize_both(
    x: Tensor,
    cast: Cast | str,
    *,
    stream: Stream | None = None,
    step: int | Tensor = 0,
    offset: tuple[int, int] = (0, 0),
    amax: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Quantized, Quantized]:
    """Codes of the matrix `x` along its columns and along its rows, as the products that sum over either axis need them.

    Equal to `quantize(x, cast, axis=-1)` and `quantize(x, cast, axis=0)`; `x` is [M, K] and `cast` is any but nvfp4.
    The second result's `values` are [M, K] like x's, and `values.T` is contiguous. `x` is read once where that is enough:
    rows need more, and so does a whole tensor unless `amax` is given. With delayed scaling `measured` is x's own magnitude.

    >>> import dither, torch
    >>> cast = dither.Cast("e4m3", "tensor", "delayed(16)")
    >>> history = dither.AmaxHistory.empty(cast)
    >>> along, across = dither.quantize_both(torch.randn(4, 8), cast, amax=history.amax(cast))
    >>> along.values.is_contiguous(), across.values.T.is_contiguous()
    (True, True)
    >>> history = history.push(along.measured)
    """
    _check_tensor(x, "quantize_both")
    if x.dim() != 2:
        raise UserError(
            f"quantize_both takes a matrix, not a tensor of shape {tuple(x.shape)}; flatten its leading dimensions first."
        )
    cast, _, draw = _prepare("quantize_both", x, cast, -1, stream, step, offset, amax)
    if cast.scaling.kind == "nvfp4":
        raise UserError(f"quantize_both does not take {str(cast)!r}: nvfp4 scales each axis by itself, so quantize twice.")
    arguments = _draw_arguments(draw)
    *outputs, largest = _quantize_both_op(x.detach(), str(cast), amax, "", *arguments, check_backend(backend))
    values, scale, values_t, scale_t = outputs
    _check_scales(x, cast, scale, measured=amax is None)
    scaled, delayed = cast.group.kind != "none", cast.scaling.kind == "delayed"
    along, across = (
        Quantized(codes, found if scaled else None, cast, tuple(x.shape), axis, x.dtype, None, largest if delayed else None)
        for codes, found, axis in ((values, scale, 1), (values_t, scale_t, 0))
    )
    return along, across


@dataclass(frozen=True)
class AmaxHistory:
    """The state of delayed scaling: the largest magnitudes of past steps, newest first, float32[history].

    It is never changed in place.

    >>> import dither, torch
    >>> cast = dither.Cast("e4m3", "tensor", "delayed(16)")
    >>> history = dither.AmaxHistory.empty(cast)
    >>> x = torch.randn(4, 4)
    >>> q = dither.quantize(x, cast, amax=history.amax(cast))
    >>> history = history.push(dither.amax(x))
    """

    values: Tensor

    @classmethod
    def empty(cls, cast: Cast, device: torch.device | str = "cpu") -> "AmaxHistory":
        """The history before the first step, which scales by 1."""
        if cast.scaling.kind != "delayed":
            raise UserError(f"Only a cast with scale='delayed(history)' has a history; {str(cast)!r} has not.")
        return cls(scaling.empty_history(cast.scaling.history, device))

    def amax(self, cast: Cast) -> Tensor:
        """The magnitude (0-d) to scale the next step by."""
        return scaling.delayed_amax(self.values, cast.scaling)

    def push(self, amax: Tensor) -> "AmaxHistory":
        """The history with this step's largest magnitude (0-d; reduce it over the ranks first) in front."""
        if not isinstance(amax, Tensor) or amax.dim() != 0:
            raise UserError(f"A history takes the largest magnitude of a step as a 0-d tensor, not {_described(amax)}.")
        return AmaxHistory(scaling.push_amax(self.values, amax))


def amax(x: Tensor, *, backend: str = "auto") -> Tensor:
    """The largest magnitude in `x`, a 0-d float32 tensor; NaN or Inf where `x` holds one."""
    _check_tensor(x, "amax")
    largest: Tensor = _amax_op(x, check_backend(backend))
    return largest


def sample(
    w: Tensor,
    b_t: Tensor,
    noise: str = "rounded_normal",
    *,
    stream: Stream,
    step: int | Tensor = 0,
    offset: tuple[int, int] = (0, 0),
    block: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """w + R * max_block|w| * 2^(1 - b_t), in `dtype`: the weight as noisy as in b_t bits (Gaussian weight sampling).

    `w` [N, K] is float32, bfloat16 or float16, and `b_t` float32 [ceil(N / block), ceil(K / block)], one for each block.
    `noise` is one of rounded_normal, rounded_normal_exact, uniform and none; R is what `stream` draws at `step`. A shard
    passes the row and column of its first element in the whole parameter as `offset`; it begins where a block does.

    The gradient of w is that of the result. That of b_t draws R again; the largest magnitude counts as constant.

    >>> import dither, torch
    >>> w, b_t = torch.full((2, 4), 3.0), torch.full((1, 1), 4.0)
    >>> dither.ops.sample(w, b_t, stream=dither.Stream(0, "sample", "w"), dtype=torch.float32)  # R * 3 * 2^-3
    tensor([[3.0000, 3.0000, 3.0000, 2.6250],
            [3.0000, 3.0000, 3.0000, 3.0000]])
    """
    _check_tensor(w, "sample")
    if w.dim() != 2:
        raise UserError(f"sample takes a matrix, not a tensor of shape {tuple(w.shape)}.")
    _check_noise(noise)
    if block not in BLOCKS:
        raise UserError(f"Blocks of sampled weights are 16, 32, 64 or 128 wide, not {block!r}.")
    rows, columns = w.shape
    size = sampling.block_count(rows, columns, block)
    if not isinstance(b_t, Tensor) or b_t.dtype != torch.float32 or b_t.shape != size or b_t.device != w.device:
        raise UserError(
            f"The bitwidths of a {rows} x {columns} weight in blocks of {block} are a float32 tensor of shape {size} "
            f"on {w.device}, not {_described(b_t)}."
        )
    if dtype not in sampling.DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in sampling.DTYPES)
        raise UserError(f"Sampled weights are stored as one of {names}, not as {dtype}.")
    if dtype.itemsize == 1 and torch.is_grad_enabled() and (w.requires_grad or b_t.requires_grad):
        raise UserError(f"A gradient of {dtype} would itself be {dtype}: sample under torch.no_grad(), or to bfloat16.")
    draw = _stream(stream, "sample").draw(step, (rows, columns), offset, w.device)
    w_hat: Tensor = _sample_op(w, b_t, *_draw_arguments(draw), noise, block, dtype, check_backend(backend))[0]
    return w_hat


def noise(
    size: tuple[int, int],
    kind: str = "rounded_normal",
    *,
    stream: Stream,
    step: int | Tensor = 0,
    offset: tuple[int, int] = (0, 0),
    packed: bool = False,
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> Tensor:
    """The R that `sample` draws for a weight of `size`, to look at: float32, or `packed` eight to an int32.

    Packed, R has 4 bits, |R| in the lower three and its sign on top, and the first of eight neighbours is lowest.

    >>> import dither
    >>> stream = dither.Stream(0, "sample", "w")
    >>> dither.ops.noise((2, 8), stream=stream)
    tensor([[ 0.,  0.,  0., -1.,  0.,  0.,  0.,  0.],
            [ 0.,  0.,  0.,  0., -1.,  0.,  0., -1.]])
    >>> [f"{word & 0xFFFFFFFF:08x}" for word in dither.ops.noise((2, 8), stream=stream, packed=True).flatten().tolist()]
    ['00009000', '90090000']
    """
    _check_noise(kind)
    if packed and kind == "uniform":
        raise UserError("Noise of the kind 'uniform' has no form of 4 bits, as its values are no integers: pass packed=False.")
    draw = _stream(stream, "noise").draw(step, size, offset, device)
    op = _packed_noise_op if packed else _noise_op
    drawn: Tensor = op(draw.key, draw.step, *size, draw.row, draw.column, kind, check_backend(backend))
    return drawn


# Checks at the boundary ------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _parse(text: str) -> Cast:
    """Traced code takes what a string means as given, instead of following the parser."""
    return Cast.parse(text)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unscaled(format: str | Format, rounding: str) -> Cast:
    element = format if isinstance(format, Format) else Format.parse(format)
    if Format.parse(element.name) != element:
        raise UserError(
            f"The format given is called {element.name!r} but differs from the one of that name; "
            "give a name or a row of the table."
        )
    return Cast(element.name, rounding=rounding)


def _check_tensor(x: Tensor, what: str) -> None:
    if not isinstance(x, Tensor):
        raise UserError(f"{what} takes a torch.Tensor, not {type(x).__name__}.")
    if x.dtype not in INPUT_DTYPES:
        hint = "; converting float64 first keeps the rounding single and visible" if x.dtype == torch.float64 else ""
        raise UserError(f"{what} takes float32, bfloat16 or float16, not {x.dtype} (shape {tuple(x.shape)}){hint}.")


def _prepare(
    what: str,
    x: Tensor,
    cast: Cast | str,
    axis: int,
    stream: Stream | None,
    step: int | Tensor,
    offset: tuple[int, int],
    amax: Tensor | None,
) -> tuple[Cast, int, Draw | None]:
    cast = _parse(cast) if isinstance(cast, str) else cast
    if not isinstance(cast, Cast):
        raise UserError(f"{what} takes a Cast or its string, such as 'e4m3 tile(128) fp32', not {cast!r}.")
    _check_tensor(x, what)
    axis = layout.checked_axis(tuple(x.shape), axis)
    if amax is None and cast.scaling.kind == "delayed":
        raise UserError(
            f"The cast {str(cast)!r} scales by earlier steps: pass amax=history.amax(cast), with a dither.AmaxHistory."
        )
    if amax is not None:
        if cast.group.kind != "tensor" and cast.scaling.kind != "nvfp4":
            raise UserError(
                f"amax= is the largest magnitude of a whole tensor, and the cast {str(cast)!r} "
                "scales smaller groups by their own."
            )
        if not isinstance(amax, Tensor) or amax.dim() != 0 or amax.dtype != torch.float32 or amax.device != x.device:
            raise UserError(f"amax= is a 0-d float32 tensor on the device of the input, not {_described(amax)}.")
    return cast, axis, _draw(x, cast, stream, step, offset)


def _check_noise(kind: str) -> None:
    if kind not in sampling.NOISES:
        raise UserError(f"There is no noise {kind!r}: choose one of {', '.join(sampling.NOISES)}.")


def _stream(stream: Stream, what: str) -> Stream:
    if not isinstance(stream, Stream):
        raise UserError(
            f"{what} draws from stream=dither.Stream(seed, purpose, name), so that its bits can be repeated, not {stream!r}."
        )
    return stream


def _described(given: object) -> str:
    """An argument in a few words: a tensor's repr may fill a page."""
    if isinstance(given, Tensor):
        return f"a {given.dtype} tensor of shape {tuple(given.shape)} on {given.device}"
    return repr(given)


def _draw(x: Tensor, cast: Cast, stream: Stream | None, step: int | Tensor, offset: tuple[int, int]) -> Draw | None:
    if cast.round.kind != "stochastic":
        return None
    if not isinstance(stream, Stream):
        raise UserError(
            f"The cast {str(cast)!r} rounds stochastically and needs stream=dither.Stream(seed, purpose, name), "
            f"so that its bits can be repeated; given was {stream!r}."
        )
    return stream.draw(step, matrix_size(x), offset, x.device)


def _check_finite(x: Tensor, cast: Cast, nan_passes: bool, inf_passes: bool) -> None:
    """Raise if `x` holds a NaN or Inf that may not pass; the message says where the first one is."""
    wrong = torch.zeros_like(x, dtype=torch.bool)
    if not nan_passes:
        wrong |= x.isnan()
    if not inf_passes:
        wrong |= x.isinf()
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        value = x[first].item()
        reason = f"{cast.element} has no NaN" if value != value else "an infinity has no place in a scaled or saturating cast"
        raise UserError(
            f"The tensor of shape {tuple(x.shape)} holds {int(wrong.sum())} value(s) that {str(cast)!r} cannot represent, "
            f"the first {value} at {list(first)}: {reason}."
        )


def _check_scales(x: Tensor, cast: Cast, scale: Tensor, measured: bool) -> None:
    """After a cast: look at x again only if a scale is lost (or there is none to tell). Traced code cannot look."""
    if torch.compiler.is_compiling():
        return
    if cast.group.kind == "none" or not measured or _any_nan(scale):
        _check_finite(x, cast, nan_passes=cast.element.nan, inf_passes=False)


def _check_untold(x: Tensor, cast: Cast, amax: Tensor | None) -> None:
    """Codes without NaN and without a scale that was measured have nowhere to keep one, so compiled code looks too."""
    if not cast.element.nan and (cast.group.kind == "none" or (cast.group.kind == "tensor" and amax is not None)):
        _check_finite(x, cast, nan_passes=False, inf_passes=False)


def _check_result(x: Tensor, cast: Cast, result: Tensor, inf_passes: bool) -> None:
    """The same for results in floating point, which show by themselves whether a look at x is due."""
    if not torch.compiler.is_compiling() and not bool(result.isfinite().all()):
        _check_finite(x, cast, nan_passes=cast.element.nan, inf_passes=inf_passes)


def _any_nan(scale: Tensor) -> bool:
    if scale.dtype == torch.float8_e8m0fnu:
        return bool((scale.view(torch.uint8) == 255).any())
    if scale.dtype == torch.float8_e4m3fn:
        return bool((scale.view(torch.uint8) == 127).any())
    return bool(scale.isnan().any())


# Operators -------------------------------------------------------------------------------------------------------------


@functools.cache
def _kernels_exist() -> bool:
    return importlib.util.find_spec("triton") is not None


def _use_kernel(device: torch.device, backend: str) -> bool:
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return False
    if not _kernels_exist():
        raise UserError(
            "The kernels need Triton, which is not installed: install the triton package, or pass backend='reference'."
        )
    if device.type != "cuda":
        from dither.kernels import interpreted

        if not interpreted():
            raise UserError(
                f"Kernels run on CUDA tensors, not on {device.type}; pass backend='reference', or set TRITON_INTERPRET=1 "
                "before importing triton to run them slowly on the CPU."
            )
    return True


def implementation(name: str, device: torch.device, backend: str) -> ModuleType:
    """`dither.kernels.NAME` or `dither.reference.NAME`, which have the same functions."""
    return _module("kernels" if _use_kernel(device, backend) else "reference", name)


@functools.cache
def _module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"dither.{package}.{name}")


def _draw_arguments(draw: Draw | None) -> tuple[int, Tensor | None, int, int]:
    """A draw as operator arguments (key, step, row, column)."""
    return (0, None, 0, 0) if draw is None else (draw.key, draw.step, draw.row, draw.column)


def _draw_of(key: int, step: Tensor | None, row: int, column: int) -> Draw | None:
    return None if step is None else Draw(key, step, row, column)


def _container(name: str, cast: Cast) -> Format:
    return Format.parse(name) if name else cast.element


_LIBRARY = torch.library.Library("dither", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(function: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Any:
    """`torch.ops.dither.NAME` for a function `_NAME_op` that has no gradient and changes the arguments named `mutates`.

    torch.library.custom_op would add 80 us to each call, for gradients and for comparing results with arguments, which is more
    than the kernels of a layer take.
    """
    name = function.__name__.removeprefix("_").removesuffix("_op")
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return getattr(torch.ops.dither, name)


def _fake_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what an operator returns where there is no data."""
    register: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(f"dither::{name}", lib=_LIBRARY)
    return register


@torch.library.custom_op("dither::random_bits", mutates_args=())
def _random_bits_op(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, width: int, backend: str) -> Tensor:
    code = implementation("philox", step.device, backend)
    return code.random_bits(Draw(key, step, row, column), rows, columns, width)  # type: ignore[no-any-return]


@_random_bits_op.register_fake
def _(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, width: int, backend: str) -> Tensor:
    return step.new_empty((rows, columns), dtype=torch.int32)


@torch.library.custom_op("dither::round_to", mutates_args=())
def _round_to_op(
    x: Tensor,
    format: str,
    rounding: str,
    saturate: bool,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> Tensor:
    code = implementation("rounding", x.device, backend)
    draw = _draw_of(key, step, row, column)
    return code.round_to(x, Format.parse(format), Rounding.parse(rounding), saturate, draw)  # type: ignore[no-any-return]


@_round_to_op.register_fake
def _(
    x: Tensor,
    format: str,
    rounding: str,
    saturate: bool,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


@torch.library.custom_op("dither::amax", mutates_args=())
def _amax_op(x: Tensor, backend: str) -> Tensor:
    return implementation("quantize", x.device, backend).amax(x)  # type: ignore[no-any-return]


@_amax_op.register_fake
def _(x: Tensor, backend: str) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@_operator
def _product_op(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor: Tensor | None,
    a_cast: str,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor: Tensor | None,
    b_cast: str,
    length: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
    emulate: bool,
    where: str,
) -> Tensor:
    """A B^T + bias in `dtype`, for A [P, L] and B [Q, L] as `Operand` describes them; an uncast one has the cast ""."""
    code = implementation("matmul", a.device, "auto")
    left = _operand(a, a_scale, a_tensor, a_cast, length)
    right = _operand(b, b_scale, b_tensor, b_cast, length)
    return code.product(left, right, bias, dtype, fast=fast, emulate=emulate, where=where)  # type: ignore[no-any-return]


@_fake_of("product")
def _(
    a: Tensor,
    a_scale: Tensor | None,
    a_tensor: Tensor | None,
    a_cast: str,
    b: Tensor,
    b_scale: Tensor | None,
    b_tensor: Tensor | None,
    b_cast: str,
    length: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
    emulate: bool,
    where: str,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _operand(values: Tensor, scale: Tensor | None, tensor: Tensor | None, text: str, length: int) -> Operand:
    if not text:
        return Operand(values, length=length)
    cast = Cast.parse(text)
    if cast.group.kind == "none":
        scale = None
    elif scale is not None and scale.dtype != layout.scale_dtype(cast):
        scale = scale.view(layout.scale_dtype(cast))
    return Operand(values, scale, tensor if cast.scaling.kind == "nvfp4" else None, cast, length)


@_operator
def _quantize_op(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    container: str,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = Cast.parse(cast)
    _check_untold(x, parsed, amax)
    code = implementation("quantize", x.device, backend)
    draw = _draw_of(key, step, row, column)
    return code.quantize(x, parsed, axis, draw, amax, _container(container, parsed))  # type: ignore[no-any-return]


@_fake_of("quantize")
def _(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    container: str,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = Cast.parse(cast)
    values, scale = layout.empty_outputs(x, parsed, axis, _container(container, parsed))
    return values, scale, x.new_empty(() if parsed.scaling.kind == "nvfp4" else (0,), dtype=torch.float32)


@torch.library.custom_op("dither::dequantize", mutates_args=())
def _dequantize_op(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: str,
    shape: list[int],
    axis: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    parsed = Cast.parse(cast)
    code = implementation("quantize", values.device, backend)
    scale = scale.view(layout.scale_dtype(parsed))
    return code.dequantize(values, scale, tensor_scale, parsed, tuple(shape), axis, dtype)  # type: ignore[no-any-return]


@_dequantize_op.register_fake
def _(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: str,
    shape: list[int],
    axis: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return values.new_empty(shape, dtype=dtype)


@torch.library.custom_op("dither::fake_quantize", mutates_args=())
def _fake_quantize_op(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> Tensor:
    code = implementation("quantize", x.device, backend)
    return code.fake_quantize(x, Cast.parse(cast), axis, _draw_of(key, step, row, column), amax)  # type: ignore[no-any-return]


@_fake_quantize_op.register_fake
def _(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> Tensor:
    place = layout.values_layout(tuple(x.shape), Cast.parse(cast), axis)
    return place.restore(torch.empty_like(place.matrices(x)))


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (grad, *[None] * 8)


_fake_quantize_op.register_autograd(_straight_through)


@_operator
def _quantize_both_op(
    x: Tensor,
    cast: str,
    amax: Tensor | None,
    container: str,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parsed = Cast.parse(cast)
    _check_untold(x, parsed, amax)
    code = implementation("quantize", x.device, backend)
    draw = _draw_of(key, step, row, column)
    return code.quantize_both(x, parsed, draw, amax, _container(container, parsed))  # type: ignore[no-any-return]


@_fake_of("quantize_both")
def _(
    x: Tensor,
    cast: str,
    amax: Tensor | None,
    container: str,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parsed = Cast.parse(cast)
    stored = _container(container, parsed)
    measured = x.new_empty(() if parsed.scaling.kind == "delayed" else (0,), dtype=torch.float32)
    return (*layout.empty_outputs(x, parsed, 1, stored), *layout.empty_outputs(x, parsed, 0, stored), measured)


@functools.partial(_operator, mutates=("largest",))
def _quantize_both_measured_op(
    x: Tensor,
    cast: str,
    amax: Tensor | None,
    container: str,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
    largest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """quantize_both for delayed scaling, which raises `largest` (0-d) to the largest magnitude of x on its way."""
    parsed = Cast.parse(cast)
    _check_untold(x, parsed, amax)
    code = implementation("quantize", x.device, backend)
    draw = _draw_of(key, step, row, column)
    *outputs, _ = code.quantize_both(x, parsed, draw, amax, _container(container, parsed), largest=largest)
    return tuple(outputs)


@_fake_of("quantize_both_measured")
def _(
    x: Tensor,
    cast: str,
    amax: Tensor | None,
    container: str,
    key: int,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
    largest: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parsed = Cast.parse(cast)
    stored = _container(container, parsed)
    return (*layout.empty_outputs(x, parsed, 1, stored), *layout.empty_outputs(x, parsed, 0, stored))


def quantize_both_into(
    x: Tensor,
    cast: str,
    amax: Tensor | None,
    container: str,
    step: Tensor | None,
    largest: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """What these operators do, into memory that is there. It is not one of them: nobody traces it."""
    parsed = Cast.parse(cast)
    _check_untold(x, parsed, amax)
    code = implementation("quantize", x.device, "auto")
    code.quantize_both(x, parsed, _draw_of(0, step, 0, 0), amax, _container(container, parsed), out, largest)


# Sampled weights -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("dither::noise", mutates_args=())
def _noise_op(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, kind: str, backend: str) -> Tensor:
    """float32[rows, columns]: R, what a weight of that size draws; see `dither.reference.sampling`."""
    code = implementation("sampling", step.device, backend)
    return code.noise(Draw(key, step, row, column), rows, columns, kind)  # type: ignore[no-any-return]


@_noise_op.register_fake
def _(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, kind: str, backend: str) -> Tensor:
    return step.new_empty((rows, columns), dtype=torch.float32)


@torch.library.custom_op("dither::packed_noise", mutates_args=())
def _packed_noise_op(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, kind: str, backend: str) -> Tensor:
    """int32[rows, ceil(columns / 8)]: the same R in 4 bits, sign and magnitude."""
    code = implementation("sampling", step.device, backend)
    return code.packed_noise(Draw(key, step, row, column), rows, columns, kind)  # type: ignore[no-any-return]


@_packed_noise_op.register_fake
def _(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, kind: str, backend: str) -> Tensor:
    return step.new_empty((rows, (columns + 7) // 8), dtype=torch.int32)


def _corner(key: int, step: Tensor, row: int, column: int, block: int) -> Draw:
    """The draw of a shard that begins where a block does. Rows that only the device knows are whole blocks too."""
    if row % block or column % block:
        raise UserError(f"A shard of a sampled weight begins where a block of {block} does, not at {(row, column)}.")
    return Draw(key, step, row, column)


@torch.library.custom_op("dither::sample", mutates_args=())
def _sample_op(
    w: Tensor,
    b_t: Tensor,
    key: int,
    step: Tensor,
    row: int,
    column: int,
    kind: str,
    block: int,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(w_hat [N, K] in `dtype`, the largest magnitude of each block in float32)."""
    code = implementation("sampling", w.device, backend)
    w_hat, amax = code.sample(w, b_t, _corner(key, step, row, column, block), kind, block, dtype)
    # An operator's result may not be its argument.
    return w_hat.clone() if w_hat is w else w_hat, amax


@_sample_op.register_fake
def _(
    w: Tensor,
    b_t: Tensor,
    key: int,
    step: Tensor,
    row: int,
    column: int,
    kind: str,
    block: int,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return w.new_empty(w.shape, dtype=dtype), torch.empty_like(b_t)


def sample_into(w: Tensor, b_t: Tensor, step: Tensor, kind: str, block: int, out: tuple[Tensor, Tensor]) -> None:
    """The operator's work on memory that is there, of which the first has the dtype of w_hat."""
    implementation("sampling", w.device, "auto").sample(w, b_t, Draw(0, step), kind, block, out[0].dtype, out)


@_operator
def _resample_op(w: Tensor, b_t: Tensor, step: Tensor, kind: str, block: int, dtype: torch.dtype, after: Tensor) -> Tensor:
    """The same w_hat in the backward pass. `after`, a gradient, is not read: it says that this cannot be done before.

    With `sample` itself a compiler would see two equal calls, make one of them, and keep its result.
    """
    w_hat: Tensor = _sample_op(w, b_t, 0, step, 0, 0, kind, block, dtype, "auto")[0]
    return w_hat


@_fake_of("resample")
def _(w: Tensor, b_t: Tensor, step: Tensor, kind: str, block: int, dtype: torch.dtype, after: Tensor) -> Tensor:
    return w.new_empty(w.shape, dtype=dtype)


@_operator
def _bitwidths_op(bitwidth: Tensor, b_init: float, b_target: float, limit: float) -> Tensor:
    """b_t. As an operator, so that compiled code rounds the product before the sum too: its own code would fuse the two."""
    return bitwidth.mul(b_init - b_target).add_(b_target).clamp_(max=limit)


@_fake_of("bitwidths")
def _(bitwidth: Tensor, b_init: float, b_target: float, limit: float) -> Tensor:
    return torch.empty_like(bitwidth)


@_operator
def _sample_backward_op(
    grad: Tensor,
    amax: Tensor,
    b_t: Tensor,
    key: int,
    step: Tensor,
    row: int,
    column: int,
    kind: str,
    block: int,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(the gradient of w in `dtype`, that of b_t) from that of w_hat; `bitwidth_grad` spares a copy where dtypes agree."""
    code = implementation("sampling", grad.device, backend)
    grad_w, grad_b_t = code.sample_backward(grad, amax, b_t, _corner(key, step, row, column, block), kind, block, dtype)
    return grad_w.clone(memory_format=torch.contiguous_format) if grad_w is grad else grad_w, grad_b_t


@_fake_of("sample_backward")
def _(
    grad: Tensor,
    amax: Tensor,
    b_t: Tensor,
    key: int,
    step: Tensor,
    row: int,
    column: int,
    kind: str,
    block: int,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape, dtype=dtype), torch.empty_like(b_t)


@_operator
def _bitwidth_grad_op(
    grad: Tensor,
    amax: Tensor,
    b_t: Tensor,
    key: int,
    step: Tensor,
    row: int,
    column: int,
    kind: str,
    block: int,
    backend: str,
) -> Tensor:
    """The gradient of b_t alone, for when that of w_hat is that of w."""
    code = implementation("sampling", grad.device, backend)
    return code.bitwidth_grad(grad, amax, b_t, _corner(key, step, row, column, block), kind, block)  # type: ignore[no-any-return]


@_fake_of("bitwidth_grad")
def _(
    grad: Tensor,
    amax: Tensor,
    b_t: Tensor,
    key: int,
    step: Tensor,
    row: int,
    column: int,
    kind: str,
    block: int,
    backend: str,
) -> Tensor:
    return torch.empty_like(b_t)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    w, b_t, ctx.key, step, ctx.row, ctx.column, ctx.kind, ctx.block, _, ctx.backend = inputs
    ctx.dtype = w.dtype
    ctx.save_for_backward(output[1], b_t, step)
    ctx.mark_non_differentiable(output[1])


def _sample_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    amax, b_t, step = ctx.saved_tensors
    rest = (ctx.key, step, ctx.row, ctx.column, ctx.kind, ctx.block)
    if grad.dtype == ctx.dtype:
        grad_w, grad_b_t = grad, _bitwidth_grad_op(grad, amax, b_t, *rest, ctx.backend)
    else:
        grad_w, grad_b_t = _sample_backward_op(grad, amax, b_t, *rest, ctx.dtype, ctx.backend)
    return (grad_w, grad_b_t, *[None] * 8)


_sample_op.register_autograd(_sample_gradients, setup_context=_keep_for_backward)
