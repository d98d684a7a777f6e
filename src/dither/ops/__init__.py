"""Public operations on tensors: Triton kernels on CUDA, the reference elsewhere, or the `backend=` that is given.

These functions check their arguments. The operators that they call (`torch.ops.dither.*`, in `torch_ops`) do not check
them again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.errors import UserError
from dither.ops.backend import assume_constant_result
from dither.ops.reference import sampling, transforms
from dither.ops.reference import scales as scaling
from dither.ops.torch_ops import check_finite
from dither.spec import NOISES, Cast, groups
from dither.spec.formats import Format
from dither.spec.random import Draw, check_backend, matrix_size
from dither.spec.random import Stream as Stream

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

BLOCKS = (16, 32, 64, 128)
"""Widths of the blocks of sampled weights."""


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: codes, scales, and what is needed to dequantize them.

    `values` has the tensor's shape; along `axis` two 4-bit codes share one byte and four 6-bit codes share three bytes.
    `scale` has one entry per group, in the order of the tensor's dimensions. A number is its code times the scale (for nvfp4,
    also times `tensor_scale`). Codes are contiguous along `axis`, as the product over that axis needs them.
    """

    values: Tensor
    scale: Tensor | None
    cast: Cast
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype
    tensor_scale: Tensor | None = None
    measured: Tensor | None = None
    """The largest magnitude of the tensor, 0-d, which `quantize_both` measures for delayed scaling."""
    place: Tensor | None = None
    """int64[3], by which the signs of a redrawn transform were drawn."""

    @property
    def bits(self) -> float:
        """Return the bits per value in a file: codes, and scales in as many bits as they need.

        >>> import dither, torch
        >>> [dither.quantize(torch.ones(4, 128), cast).bits for cast in ("mxfp4", "q4_0", "e2m1 tile(32)")]
        [4.25, 4.5, 5.0]
        """
        bits = 8 * self.values.nbytes + (32 if self.tensor_scale is not None else 0)
        if self.scale is not None:
            bits += self.scale.numel() * min(8 * self.scale.itemsize, Format.parse(self.cast.scaling.rule.exported).bits)
        return bits / max(math.prod(self.shape), 1)

    def dequantize(self, dtype: torch.dtype | None = None, *, backend: str = "auto") -> Tensor:
        """Return the numbers in the original tensor's shape, in `dtype` (by default the original dtype).

        >>> import dither, torch
        >>> dither.quantize(torch.tensor([1.0, 2.0, 4.0, -12.0]), "e2m1 tile(4)").dequantize()
        tensor([  1.,   2.,   4., -12.])
        """
        dtype = dtype or self.dtype
        if dtype not in INPUT_DTYPES:
            raise UserError(f"Numbers come back as float32, bfloat16 or float16, not as {dtype}.")
        codes, transforming = (self.values, self.scale, self.tensor_scale), self.cast.transforming
        check_backend(backend)
        if not transforming.size:
            return dequantize_codes(*codes, str(self.cast), self.shape, self.axis, dtype, backend)
        padded = list(self.shape)
        padded[self.axis] = -(-padded[self.axis] // transforming.size) * transforming.size
        transformed = dequantize_codes(*codes, str(self.cast.without_transform), padded, self.axis, torch.float32, backend)
        return _along(
            transformed, self.axis, lambda x: transforms.inverse(x, transforming, 1, self.place, self.shape[self.axis])
        ).to(dtype)


def dequantize_codes(
    values: Tensor,
    scale: Tensor | None,
    tensor_scale: Tensor | None,
    cast: str,
    shape: Sequence[int],
    axis: int,
    dtype: torch.dtype,
    backend: str = "auto",
) -> Tensor:
    """Return the numbers of codes in `dtype`, in the shape of the tensor that was cast along `axis`."""
    empty = values.new_empty(0, dtype=torch.float32)
    scale, tensor_scale = (empty if part is None else part for part in (scale, tensor_scale))
    numbers: Tensor = torch.ops.dither.dequantize(
        _bytes(values), _bytes(scale), tensor_scale, cast, list(shape), axis, dtype, backend
    )
    return numbers


def _bytes(x: Tensor) -> Tensor:
    """View float8 as uint8: torch's checks of operators compare their inputs, which fails for float8."""
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
    """Round `x` to values of `format`. The result is float32, which holds them all exactly.

    NaN stays NaN, and Inf stays Inf (NaN in a format without Inf).

    Args:
        x: A tensor of any shape, float32, bfloat16 or float16.
        format: A Format or its name.
        rounding: nearest, toward_zero or stochastic(bits).
        saturate: Round finite overflow to the largest value; if False, to Inf or NaN, if the format has one.
        stream: The source of random bits for stochastic rounding.
        step: The step at which to draw.
        offset: Row and column of the first element of `x` in the whole tensor.
        backend: auto, reference or kernel.

    >>> import dither, torch
    >>> dither.round_to(torch.tensor([0.3, 2.6, 100.0]), "e2m1")
    tensor([0.5000, 3.0000, 6.0000])
    """
    cast = _unscaled(format, rounding)
    _check_tensor(x, "round_to")
    draw = _draw(x, cast, stream, step, offset)
    result: Tensor = torch.ops.dither.round_to(
        x, cast.format, rounding, saturate, *_draw_arguments(draw), check_backend(backend)
    )
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
    """Quantize `x` to codes and scales in packed storage.

    A group that holds a NaN has the scale NaN, and all of it dequantizes to NaN. Codes have no gradient; the result of
    `fake_quantize` has one.

    Args:
        x: A tensor of any shape and strides, float32, bfloat16 or float16.
        cast: A Cast or its text, such as "e4m3 tile(128)".
        axis: The axis along which rows and tiles run: the contraction axis of the product that will use the result.
        stream: The source of random bits for stochastic casts.
        step: The step at which to draw.
        offset: Row and column of the first element of `x` in the whole tensor.
        amax: 0-d float32, used in place of the tensor's own largest magnitude: for delayed scaling, or for a tensor that is
            sharded over several devices.
        backend: auto, reference or kernel.

    >>> import dither, torch
    >>> q = dither.quantize(torch.tensor([[1.0, 2.0, 4.0, -12.0]]), "e2m1 tile(4)")
    >>> q.values, q.scale
    (tensor([[ 33, 244]], dtype=torch.uint8), tensor([[2.]]))
    """
    cast, axis, draw = _prepare("quantize", x, cast, axis, stream, step, offset, amax)
    options, transformed, place, text = (*_draw_arguments(draw), check_backend(backend)), x.detach(), None, str(cast)
    if cast.transforming.size:
        transformed, place = _transformed(transformed, cast, axis, stream, step)
        text = str(cast.without_transform)
    values, scale, tensor_scale = torch.ops.dither.quantize(transformed, text, axis, amax, "", *options)
    _check_scales(x, cast, scale, measured=amax is None)
    scales = (scale if cast.group.kind != "none" else None, tensor_scale if tensor_scale.dim() == 0 else None)
    return Quantized(values, scales[0], cast, tuple(x.shape), axis, x.dtype, scales[1], place=place)


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
    """Quantize and dequantize `x` in one pass, with the bits, shape and dtype of `quantize(x, ...).dequantize()`.

    The gradient is straight-through: `x` receives the gradient of the result unchanged. See `quantize` for the arguments.

    >>> import dither, torch
    >>> dither.fake_quantize(torch.tensor([0.1, 0.5, 1.3, 6.0]), "e2m1")
    tensor([0.0000, 0.5000, 1.5000, 6.0000])
    """
    cast, axis, draw = _prepare("fake_quantize", x, cast, axis, stream, step, offset, amax)
    if cast.transforming.size:
        options = {"stream": stream, "step": step, "offset": offset, "amax": amax, "backend": backend}
        rounded = quantize(x, cast, axis=axis, **options).dequantize(backend=backend)  # type: ignore[arg-type]
        return x + (rounded - x).detach() if x.requires_grad else rounded
    result: Tensor = torch.ops.dither.fake_quantize(x, str(cast), axis, amax, *_draw_arguments(draw), check_backend(backend))
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
    """Quantize the matrix `x` along both axes, for the products that sum over either one.

    Returns `quantize(x, cast, axis=-1)` and `quantize(x, cast, axis=0)`. The second result's `values` are [M, K] like `x`, and
    `values.T` is contiguous. `x` is read once if possible: scales per row need two passes, and so do scales per tensor unless
    `amax` is given. With delayed scaling, `measured` is the largest magnitude of `x`. The cast has any scale but nvfp4; see
    `quantize` for the other arguments.

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
    if cast.scaling.two_level or cast.transforming.size:
        raise UserError(f"quantize_both does not take {str(cast)!r}: its values differ along each axis; call quantize twice.")
    arguments = _draw_arguments(draw)
    *outputs, largest = torch.ops.dither.quantize_both(x.detach(), str(cast), amax, "", *arguments, check_backend(backend))
    values, scale, values_t, scale_t = outputs
    _check_scales(x, cast, scale, measured=amax is None)
    scaled, delayed = cast.group.kind != "none", cast.scaling.kind == "delayed"
    along, across = (
        Quantized(codes, scales if scaled else None, cast, tuple(x.shape), axis, x.dtype, None, largest if delayed else None)
        for codes, scales, axis in ((values, scale, 1), (values_t, scale_t, 0))
    )
    return along, across


@dataclass(frozen=True)
class AmaxHistory:
    """The state of delayed scaling: the largest magnitudes of past steps, newest first, float32[history].

    A history is immutable: `push` returns a new one.

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
        """Return the history before the first step, which scales by 1."""
        if cast.scaling.kind != "delayed":
            raise UserError(f"Only a cast with scale='delayed(history)' has a history, and {str(cast)!r} is not delayed.")
        return cls(scaling.empty_history(cast.scaling.history, device))

    def amax(self, cast: Cast) -> Tensor:
        """Return the magnitude (0-d) that scales the next step."""
        return scaling.delayed_amax(self.values, cast.scaling)

    def push(self, amax: Tensor) -> "AmaxHistory":
        """Return the history with the largest magnitude of this step in front (0-d; all-reduce it over the ranks first)."""
        if not isinstance(amax, Tensor) or amax.dim() != 0:
            raise UserError(f"A history takes the largest magnitude of a step as a 0-d tensor, not {_described(amax)}.")
        return AmaxHistory(torch.cat([amax.reshape(1), self.values[:-1]]))


def amax(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the largest magnitude in `x`, a 0-d float32 tensor; NaN or Inf if `x` holds one.

    >>> import dither, torch
    >>> dither.amax(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))
    tensor(3.)
    """
    _check_tensor(x, "amax")
    largest: Tensor = torch.ops.dither.amax(x, check_backend(backend))
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
    """Return w + R * max_block|w| * 2^(1 - b_t): the weight with noise as large as in b_t bits (Gaussian weight sampling).

    The gradient of w is that of the result. The gradient of b_t draws R again and treats the largest magnitude as a constant.

    Args:
        w: The weight [N, K], float32, bfloat16 or float16.
        b_t: Bitwidths, float32 [ceil(N / block), ceil(K / block)], one per block.
        noise: Distribution of R: rounded_normal, rounded_normal_exact, uniform or none.
        stream: The source of the random bits of R.
        step: The step at which to draw.
        offset: Row and column of a shard's first element in the whole parameter, at the beginning of a block.
        block: Width of the square blocks: 16, 32, 64 or 128.
        dtype: The dtype of the result.
        backend: auto, reference or kernel.

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
        raise UserError(f"The gradient of a {dtype} result would be {dtype} too: sample under torch.no_grad(), or to bfloat16.")
    draw = _stream(stream, "sample").draw(step, (rows, columns), offset, w.device)
    w_hat: Tensor = torch.ops.dither.sample(w, b_t, *_draw_arguments(draw), noise, block, dtype, check_backend(backend))[0]
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
    """Return the noise R that `sample` draws for a weight of `size`: float32, or `packed` with eight values per int32.

    A packed value has 4 bits, |R| in the lower three and the sign above them. The first of eight neighbours is lowest.

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
        raise UserError("Noise of the kind 'uniform' cannot be packed, because its values are not integers: pass packed=False.")
    draw = _stream(stream, "noise").draw(step, size, offset, device)
    op = torch.ops.dither.packed_noise if packed else torch.ops.dither.noise
    drawn: Tensor = op(draw.key, draw.step, *size, draw.row, draw.column, kind, check_backend(backend))
    return drawn


# Checks at the boundary ------------------------------------------------------------------------------------------------


@assume_constant_result
def _parse(text: str) -> Cast:
    """Parse a cast. torch.compile takes the result as a constant and does not trace the parser."""
    return Cast.parse(text)


@assume_constant_result
def _unscaled(format: str | Format, rounding: str) -> Cast:
    element = format if isinstance(format, Format) else Format.parse(format)
    if Format.parse(element.name) != element:
        raise UserError(
            f"The format {element.name!r} differs from the known format of that name: pass the name, or a Format from "
            "dither.spec.formats.TABLE."
        )
    return Cast(element.name, rounding=rounding)


def _check_tensor(x: Tensor, caller: str) -> None:
    if not isinstance(x, Tensor):
        raise UserError(f"{caller} takes a torch.Tensor, not {type(x).__name__}.")
    if x.dtype not in INPUT_DTYPES:
        hint = "; convert float64 first, so that this rounding is explicit" if x.dtype == torch.float64 else ""
        raise UserError(f"{caller} takes float32, bfloat16 or float16, not {x.dtype} (shape {tuple(x.shape)}){hint}.")


def _prepare(
    caller: str,
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
        raise UserError(f"{caller} takes a Cast or its string, such as 'e4m3 tile(128) fp32', not {cast!r}.")
    _check_tensor(x, caller)
    axis = groups.checked_axis(tuple(x.shape), axis)
    if amax is None and cast.scaling.kind == "delayed":
        raise UserError(
            f"The cast {str(cast)!r} scales by earlier steps: pass amax=history.amax(cast), with a dither.AmaxHistory."
        )
    if amax is not None:
        if cast.group.kind != "tensor" and not cast.scaling.two_level:
            raise UserError(
                f"amax= is the largest magnitude of a whole tensor, and the cast {str(cast)!r} "
                "scales smaller groups: leave amax= out."
            )
        if not isinstance(amax, Tensor) or amax.dim() != 0 or amax.dtype != torch.float32 or amax.device != x.device:
            raise UserError(f"amax= is a 0-d float32 tensor on the device of the input, not {_described(amax)}.")
    return cast, axis, _draw(x, cast, stream, step, offset)


def _check_noise(kind: str) -> None:
    if kind not in NOISES:
        raise UserError(f"There is no noise {kind!r}: choose one of {', '.join(NOISES)}.")


def _stream(stream: Stream, caller: str) -> Stream:
    if not isinstance(stream, Stream):
        raise UserError(
            f"{caller} draws from stream=dither.Stream(seed, purpose, name), so that its bits can be repeated, not {stream!r}."
        )
    return stream


def _described(value: object) -> str:
    """Return a short description of an argument: the repr of a tensor can be long."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return repr(value)


def _draw(x: Tensor, cast: Cast, stream: Stream | None, step: int | Tensor, offset: tuple[int, int]) -> Draw | None:
    if not cast.round.bits and cast.transforming.signs != "redrawn":
        return None
    if not isinstance(stream, Stream):
        raise UserError(
            f"The cast {str(cast)!r} draws random bits and needs stream=dither.Stream(seed, purpose, name), "
            f"so that its bits can be repeated; given was {stream!r}."
        )
    return stream.draw(step, matrix_size(x), offset, x.device) if cast.round.bits else None


def _transformed(x: Tensor, cast: Cast, axis: int, stream: Stream | None, step: int | Tensor) -> tuple[Tensor, Tensor | None]:
    """Return x, transformed along `axis` as `cast` says, and the place of redrawn signs."""
    place = None
    if cast.transforming.signs == "redrawn":
        assert stream is not None
        place = torch.tensor([int(step), 0, stream.key], device=x.device)
    text = str(cast.transforming)
    return _along(x, axis, lambda lines: torch.ops.dither.transform(lines, text, 1, place, None)), place


def _along(x: Tensor, axis: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return x with its lines along `axis`, as a matrix [lines, length], replaced by the result of a function."""
    lines = x.movedim(axis, -1) if x.dim() else x.reshape(1)
    found = function(lines.reshape(-1, lines.shape[-1]))
    found = found.reshape(*lines.shape[:-1], found.shape[1])
    return found.movedim(-1, axis) if x.dim() else found


def _check_scales(x: Tensor, cast: Cast, scale: Tensor, measured: bool) -> None:
    """Check `x` for NaN and Inf after a cast, if a scale is NaN or there is no scale that shows them. Not when compiling."""
    if torch.compiler.is_compiling():
        return
    if cast.group.kind == "none" or not measured or _any_nan(scale):
        check_finite(x, cast, nan_passes=cast.element.nan, inf_passes=False)


def _check_result(x: Tensor, cast: Cast, result: Tensor, inf_passes: bool) -> None:
    """Check `x` for NaN and Inf if a floating-point result holds one."""
    if not torch.compiler.is_compiling() and not bool(result.isfinite().all()):
        check_finite(x, cast, nan_passes=cast.element.nan, inf_passes=inf_passes)


def _any_nan(scale: Tensor) -> bool:
    if scale.dtype == torch.float8_e8m0fnu:
        return bool((scale.view(torch.uint8) == 255).any())
    if scale.dtype == torch.float8_e4m3fn:
        return bool((scale.view(torch.uint8) == 127).any())
    return bool(scale.isnan().any())


def _draw_arguments(draw: Draw | None) -> tuple[int, Tensor | None, int, int]:
    """Return a draw as operator arguments (key, step, row, column)."""
    return (0, None, 0, 0) if draw is None else (draw.key, draw.step, draw.row, draw.column)
