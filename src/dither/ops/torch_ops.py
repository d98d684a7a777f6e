"""The operators `torch.ops.dither.*`: Triton kernels on CUDA, the reference elsewhere, or the given `backend`.

Each operator is one node in a graph of `torch.compile`, so compiled code computes the same bits. Operators check for NaN only
if the result could not show it; `dither.ops` checks all other arguments.

Some operators make codes in backward. Their argument `after`, a gradient, is not read: it makes a compiler run the operator
after it, and so in backward. Otherwise it would run in forward, and save the result.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.ops import storage
from dither.ops.backend import implementation
from dither.ops.reference.loss import gradients_like
from dither.ops.reference.matmul import Operand
from dither.ops.reference.sampling import LN2, pow2, to_dtype
from dither.ops.reference.transforms import padded_shape
from dither.spec import Cast, Transform, groups, registry
from dither.spec.formats import Format
from dither.spec.random import Draw


def _draw_of(key: int, step: Tensor | None, row: int, column: int) -> Draw | None:
    return None if step is None else Draw(key, step, row, column)


@registry.cached
def _casts(text: str) -> tuple[Cast, ...]:
    """Return the casts of a text with bars between them."""
    return tuple(map(Cast.parse, text.split("|")))


def _container(name: str, cast: Cast) -> Format:
    return Format.parse(name) if name else cast.element


LIBRARY = torch.library.Library("dither", "FRAGMENT")  # type: ignore[no-untyped-call]


Register = Callable[[Callable[..., Any]], Any]
"""A decorator that registers a function as an operator, and returns the operator."""


def operator(fake: Callable[..., Any], *, mutates: tuple[str, ...] = (), tags: Any = torch.Tag.pt2_compliant_tag) -> Register:
    """Return a decorator that registers a function `_NAME_op` without a gradient as `torch.ops.dither.NAME`.

    `fake` returns empty results for tensors without data, from those arguments of the operator that it names. The operator
    changes the arguments named `mutates`. torch.library.custom_op would add 80 us per call, more than the kernels of a layer.
    """

    def register(function: Callable[..., Any]) -> Any:
        name = _name_of(function)
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        LIBRARY.define(name + schema, tags=tags)  # type: ignore[no-untyped-call]
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"dither::{name}", _by_name(fake, function), lib=LIBRARY)
        return getattr(torch.ops.dither, name)

    return register


def custom_operator(fake: Callable[..., Any]) -> Register:
    """Do the same by torch.library.custom_op: backward through the operator runs its formula, or raises without one."""

    def register(function: Callable[..., Any]) -> Any:
        custom = torch.library.custom_op(f"dither::{_name_of(function)}", function, mutates_args=())
        custom.register_fake(_by_name(fake, function))
        return custom

    return register


def _name_of(function: Callable[..., Any]) -> str:
    return function.__name__.removeprefix("_").removesuffix("_op")


def _by_name(fake: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the arguments of `function` that passes on those that `fake` names."""
    names, wanted = (tuple(inspect.signature(each).parameters) for each in (function, fake))

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return fake(*(given[name] for name in wanted))

    return call


def check_finite(x: Tensor, cast: Cast, nan_passes: bool, inf_passes: bool) -> None:
    """Raise if `x` holds a NaN or Inf that may not pass; the message has the position of the first one."""
    wrong = torch.zeros_like(x, dtype=torch.bool)
    if not nan_passes:
        wrong |= x.isnan()
    if not inf_passes:
        wrong |= x.isinf()
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        value = x[first].item()
        reason = f"{cast.element} has no NaN" if value != value else "a scaled or saturating cast cannot hold an infinity"
        raise UserError(
            f"The tensor of shape {tuple(x.shape)} holds {int(wrong.sum())} value(s) that {str(cast)!r} cannot represent, "
            f"the first {value} at {list(first)}: {reason}."
        )


def _check_hidden_nan(x: Tensor, cast: Cast, amax: Tensor | None) -> None:
    """Check `x` for NaN if neither the codes nor a measured scale can hold one. Compiled code checks too."""
    if not cast.element.nan and (cast.group.kind == "none" or (cast.group.kind == "tensor" and amax is not None)):
        check_finite(x, cast, nan_passes=False, inf_passes=False)


@custom_operator(lambda step, rows, columns: step.new_empty((rows, columns), dtype=torch.int32))
def _random_bits_op(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, width: int, backend: str) -> Tensor:
    code = implementation("philox", step.device, backend)
    return code.random_bits(Draw(key, step, row, column), rows, columns, width)  # type: ignore[no-any-return]


@custom_operator(lambda x: x.new_empty(x.shape, dtype=torch.float32))
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
    cast = Cast(format, rounding=rounding)
    code = implementation("rounding", x.device, backend, cast)
    draw = _draw_of(key, step, row, column)
    return code.round_to(x, cast.element, cast.round, saturate, draw)  # type: ignore[no-any-return]


def _empty_transform(x: Tensor, transform: str, axis: int) -> Tensor:
    return x.new_empty(padded_shape(x, Transform.parse(transform), axis), dtype=torch.float32)


@operator(_empty_transform)
def _transform_op(x: Tensor, transform: str, axis: int, place: Tensor | None, after: Tensor | None) -> Tensor:
    """Return the matrix x, transformed along `axis` and padded, in float32; see `reference.transforms`."""
    transforming = Transform.parse(transform)
    code = implementation("transforms", x.device, "auto" if transforming.matrix == "hadamard" else "reference")
    return code.transform(x, transforming, axis, place)  # type: ignore[no-any-return]


def _empty_transformed(x: Tensor, cast: str, transform: str, axis: int, container: str) -> tuple[Tensor, Tensor, Tensor]:
    like, parsed = _empty_transform(x, transform, axis), Cast.parse(cast)
    tensor = x.new_empty(() if parsed.scaling.two_level else (0,), dtype=torch.float32)
    if container == "bf16":
        return like.new_empty(like.shape, dtype=torch.bfloat16), tensor.new_empty(0), tensor
    return *storage.empty_outputs(like, parsed, axis, _container(container, parsed)), tensor


@operator(_empty_transformed)
def _quantize_transformed_op(
    x: Tensor,
    cast: str,
    transform: str,
    axis: int,
    container: str,
    step: Tensor | None,
    row: int,
    column: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of one layout of the matrix x after a transform; numbers without scales for "bf16".

    The cast has tiles of at most 128 values and a kernel, the transform is that of Hadamard.
    """
    parsed = _with_transform(cast, transform)
    code, draw = implementation("transforms", x.device, "auto"), _draw_of(0, step, row, column)
    if container == "bf16":
        values, tensor = code.quantize_values(x, parsed, axis, draw, place)
        return values, tensor.new_empty(0), tensor
    return code.quantize(x, parsed, axis, draw, place, _container(container, parsed))  # type: ignore[no-any-return]


def _empty_with_values(x: Tensor, cast: str, transform: str, container: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    across = _empty_transformed(x, cast, transform, 0, container)
    return x.new_empty(x.shape, dtype=torch.bfloat16), torch.empty_like(across[2]), *across


@operator(_empty_with_values)
def _quantize_with_values_op(
    x: Tensor,
    cast: str,
    transform: str,
    container: str,
    amax: Tensor | None,
    step: Tensor | None,
    row: int,
    column: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `quantize_values` does along axis 1, and what `quantize_transformed` does along axis 0, from one reading.

    The transform may be "none".
    """
    parsed = _with_transform(cast, transform)
    code, draw = implementation("transforms", x.device, "auto"), _draw_of(0, step, row, column)
    stored = None if container == "bf16" else _container(container, parsed)
    return code.quantize_with_values(x, parsed, draw, place, amax, stored)  # type: ignore[no-any-return]


@registry.cached
def _with_transform(cast: str, transform: str) -> Cast:
    return replace(Cast.parse(cast), transform=transform)


@operator(lambda x: x.new_empty(x.shape, dtype=torch.bool))
def _unclipped_op(x: Tensor, cast: str, axis: int) -> Tensor:
    """Return where a cast of the matrix x, whose scales are powers of two, clips nothing; see `reference.quantize`."""
    parsed = Cast.parse(cast)
    return implementation("quantize", x.device, "auto", parsed).unclipped(x, parsed, axis)  # type: ignore[no-any-return]


@custom_operator(lambda x: x.new_empty((), dtype=torch.float32))
def _amax_op(x: Tensor, backend: str) -> Tensor:
    return implementation("quantize", x.device, backend).amax(x)  # type: ignore[no-any-return]


@operator(lambda a, b, dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype))
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
    verified: str = "",
    forward: bool = False,
) -> Tensor:
    """Return A B^T + bias in `dtype`, for A [P, L] and B [Q, L] as `Operand` describes them; the cast "" means uncast."""
    left = _operand(a, a_scale, a_tensor, a_cast, length)
    right = _operand(b, b_scale, b_tensor, b_cast, length)
    code = implementation("matmul", a.device, "auto", left.cast, right.cast)
    options = {"fast": fast, "emulate": emulate, "where": where, "verified": verified, "forward": forward}
    return code.product(left, right, bias, dtype, **options)  # type: ignore[no-any-return]


def _operand(values: Tensor, scale: Tensor | None, tensor: Tensor | None, text: str, length: int) -> Operand:
    if not text:
        return Operand(values, length=length)
    cast = Cast.parse(text).codes
    if cast.group.kind == "none":
        scale = None
    elif scale is not None and scale.dtype != storage.scale_dtype(cast):
        scale = scale.view(storage.scale_dtype(cast))
    return Operand(values, scale, tensor if tensor is not None and tensor.numel() else None, cast, length)


def cast_one(
    x: Tensor,
    text: str,
    axis: int,
    amax: Tensor | None,
    container: str,
    draw: Draw | None,
    backend: str,
    level: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of one layout, written into `out` if it is given.

    With `level`, int32[1], the text has several casts with bars between them, and the level chooses one on the device.
    """
    if level is not None:
        code = implementation("levels", x.device, backend)
        return code.quantize(x, _casts(text), level, axis, draw, amax, Format.parse(container), out)  # type: ignore[no-any-return]
    cast = Cast.parse(text)
    _check_hidden_nan(x, cast, amax)
    code = implementation("quantize", x.device, backend, cast)
    return code.quantize(x, cast, axis, draw, amax, _container(container, cast), out)  # type: ignore[no-any-return]


def cast_both(
    x: Tensor,
    text: str,
    amax: Tensor | None,
    container: str,
    draw: Draw | None,
    backend: str,
    level: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of both layouts, as `cast_one` does. `largest`, 0-d, is raised to the largest magnitude of x."""
    if level is not None:
        code = implementation("levels", x.device, backend)
        return code.quantize_both(x, _casts(text), level, draw, amax, Format.parse(container), out)  # type: ignore[no-any-return]
    cast = Cast.parse(text)
    _check_hidden_nan(x, cast, amax)
    code = implementation("quantize", x.device, backend, cast)
    return code.quantize_both(x, cast, draw, amax, _container(container, cast), out, largest)  # type: ignore[no-any-return]


def _empty_one(x: Tensor, cast: str, axis: int, container: str) -> tuple[Tensor, Tensor, Tensor]:
    parsed = _casts(cast)[0]
    values, scale = storage.empty_outputs(x, parsed, axis, _container(container, parsed))
    return values, scale, x.new_empty(() if parsed.scaling.two_level else (0,), dtype=torch.float32)


def _empty_both(x: Tensor, cast: str, container: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    parsed = _casts(cast)[0]
    stored = _container(container, parsed)
    measured = x.new_empty(() if parsed.scaling.kind == "delayed" else (0,), dtype=torch.float32)
    return (*storage.empty_outputs(x, parsed, 1, stored), *storage.empty_outputs(x, parsed, 0, stored), measured)


@operator(_empty_one)
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
    level: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of one layout; see `cast_one`."""
    return cast_one(x, cast, axis, amax, container, _draw_of(key, step, row, column), backend, level)


def _empty_values(x: Tensor, cast: str, along: bool, across: bool) -> tuple[Tensor, Tensor, Tensor]:
    one, other = (x.new_empty(x.shape if wanted else (0,), dtype=torch.bfloat16) for wanted in (along, across))
    return one, other, x.new_empty(() if Cast.parse(cast).scaling.two_level else (0,), dtype=torch.float32)


@operator(_empty_values)
def _quantize_values_op(
    x: Tensor,
    cast: str,
    along: bool,
    across: bool,
    amax: Tensor | None,
    step: Tensor | None,
    row: int,
    column: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes times the scales of their groups in BF16, [R, C] each, and the scale of the tensor.

    See `reference.quantize`. A layout that is not wanted is empty.
    """
    parsed = Cast.parse(cast)
    code = implementation("quantize", x.device, backend, parsed)
    axes = tuple(axis for axis, wanted in ((1, along), (0, across)) if wanted)
    values, tensor = code.quantize_values(x, parsed, axes, _draw_of(0, step, row, column), amax)
    nothing = x.new_empty(0, dtype=torch.bfloat16)
    return values[0] if along else nothing, values[-1] if across else nothing, tensor


@operator(lambda values, rows, length: values.new_empty((rows, length), dtype=torch.bfloat16))
def _decode_op(values: Tensor, scale: Tensor, cast: str, rows: int, length: int, after: Tensor | None) -> Tensor:
    """Return codes [rows, length] times the scales of their groups, in BF16, which holds them."""
    parsed = Cast.parse(cast)
    code = implementation("quantize", values.device, "auto", parsed)
    scale, nothing = scale.view(storage.scale_dtype(parsed)), scale.new_empty(0, dtype=torch.float32)
    return code.dequantize(values, scale, nothing, parsed, (rows, length), 1, torch.bfloat16)  # type: ignore[no-any-return]


@custom_operator(lambda values, shape, dtype: values.new_empty(shape, dtype=dtype))
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
    parsed = Cast.parse(cast).codes
    code = implementation("quantize", values.device, backend, parsed)
    scale = scale.view(storage.scale_dtype(parsed))
    return code.dequantize(values, scale, tensor_scale, parsed, tuple(shape), axis, dtype)  # type: ignore[no-any-return]


def _empty_like_values(x: Tensor, cast: str, axis: int) -> Tensor:
    layout = groups.values_layout(tuple(x.shape), Cast.parse(cast), axis)
    return layout.restore(torch.empty_like(layout.matrices(x)))


@custom_operator(_empty_like_values)
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
    parsed = Cast.parse(cast)
    code = implementation("quantize", x.device, backend, parsed)
    return code.fake_quantize(x, parsed, axis, _draw_of(key, step, row, column), amax)  # type: ignore[no-any-return]


_fake_quantize_op.register_autograd(lambda ctx, grad: (grad, *[None] * 8))  # straight-through


@operator(_empty_both)
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
    level: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of both layouts; see `cast_both`."""
    return cast_both(x, cast, amax, container, _draw_of(key, step, row, column), backend, level)


@operator(lambda x, cast, container: _empty_both(x, cast, container)[:4], mutates=("largest",))
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
    """Quantize along both axes with delayed scaling, and raise `largest` (0-d) to the largest magnitude of x."""
    return cast_both(x, cast, amax, container, _draw_of(key, step, row, column), backend, largest=largest)[:4]


# Sampled weights -------------------------------------------------------------------------------------------------------


@custom_operator(lambda step, rows, columns: step.new_empty((rows, columns), dtype=torch.float32))
def _noise_op(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, kind: str, backend: str) -> Tensor:
    """Return the noise R of a weight, float32[rows, columns]; see `dither.ops.reference.sampling`."""
    code = implementation("sampling", step.device, backend)
    return code.noise(Draw(key, step, row, column), rows, columns, kind)  # type: ignore[no-any-return]


@custom_operator(lambda step, rows, columns: step.new_empty((rows, (columns + 7) // 8), dtype=torch.int32))
def _packed_noise_op(key: int, step: Tensor, rows: int, columns: int, row: int, column: int, kind: str, backend: str) -> Tensor:
    """Return the same R with 4 bits per value, sign and magnitude: int32[rows, ceil(columns / 8)]."""
    code = implementation("sampling", step.device, backend)
    return code.packed_noise(Draw(key, step, row, column), rows, columns, kind)  # type: ignore[no-any-return]


def _corner(key: int, step: Tensor, row: int, column: int, block: int) -> Draw:
    """Return the draw of a shard; raise unless it begins at a block. Rows that only the device knows do."""
    if row % block or column % block:
        raise UserError(f"A shard of a sampled weight begins at a multiple of its block, {block}, not at {(row, column)}.")
    return Draw(key, step, row, column)


@custom_operator(lambda w, b_t, dtype: (w.new_empty(w.shape, dtype=dtype), torch.empty_like(b_t)))
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
    """Return w_hat [N, K] in `dtype`, and the largest magnitude of each block in float32."""
    code = implementation("sampling", w.device, backend)
    w_hat, amax = code.sample(w, b_t, _corner(key, step, row, column, block), kind, block, dtype)
    # An operator must not return its argument.
    return w_hat.clone() if w_hat is w else w_hat, amax


def sample_into(w: Tensor, b_t: Tensor, step: Tensor, kind: str, block: int, out: tuple[Tensor, Tensor]) -> None:
    """Write the results of `sample` into `out`; the first tensor has the dtype of w_hat."""
    implementation("sampling", w.device, "auto").sample(w, b_t, Draw(0, step), kind, block, out[0].dtype, out)


@operator(lambda w, dtype: w.new_empty(w.shape, dtype=dtype))
def _resample_op(w: Tensor, b_t: Tensor, step: Tensor, kind: str, block: int, dtype: torch.dtype, after: Tensor) -> Tensor:
    """Sample w_hat again in backward. `after`, a gradient, is not read: it keeps a compiler from merging this with forward."""
    w_hat: Tensor = _sample_op(w, b_t, 0, step, 0, 0, kind, block, dtype, "auto")[0]
    return w_hat


@operator(lambda bitwidth: torch.empty_like(bitwidth))
def _bitwidths_op(bitwidth: Tensor, b_init: float, b_target: float, limit: float) -> Tensor:
    """Return b_t. It is an operator because compiled code would fuse the product and the sum, and round only once."""
    return bitwidth.mul(b_init - b_target).add_(b_target).clamp_(max=limit)


@operator(lambda grad, b_t, dtype: (grad.new_empty(grad.shape, dtype=dtype), torch.empty_like(b_t)))
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
    """Return the gradients of w, in `dtype`, and of b_t, from that of w_hat. If dtypes agree, `bitwidth_grad` saves a copy."""
    code = implementation("sampling", grad.device, backend)
    grad_w, grad_b_t = code.sample_backward(grad, amax, b_t, _corner(key, step, row, column, block), kind, block, dtype)
    return grad_w.clone(memory_format=torch.contiguous_format) if grad_w is grad else grad_w, grad_b_t


@operator(lambda b_t: torch.empty_like(b_t))
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
    """Return the gradient of b_t only, for the case that the gradient of w is that of w_hat."""
    code = implementation("sampling", grad.device, backend)
    return code.bitwidth_grad(grad, amax, b_t, _corner(key, step, row, column, block), kind, block)  # type: ignore[no-any-return]


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


def _empty_sample_input(x: Tensor, b_t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[0], b_t.shape[0]), dtype=torch.float32)


# These two are operators, so that compiled code rounds after each operation too.
@custom_operator(_empty_sample_input)
def _sample_input_op(x: Tensor, b_t: Tensor, draw: Tensor, kind: str, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x_hat [M, K], and the largest magnitude of each block, float32[M, ceil(K / block)]."""
    rows, columns = x.shape
    amax = _in_blocks(x.float().abs(), block).amax(dim=2)
    r = torch.ops.dither.noise(0, draw, rows, columns, 0, 0, kind, "auto")
    scale = (amax * pow2(1.0 - b_t)).repeat_interleave(block, dim=1)[:, :columns]
    return to_dtype(torch.where(r == 0, x.float(), x.float() + r * scale), dtype), amax


@custom_operator(lambda b_t: torch.empty_like(b_t))
def _sample_input_backward_op(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Tensor, kind: str, block: int) -> Tensor:
    """Return the gradient of b_t: -ln 2 * 2^(1 - b_t) * the sum over tokens of max_block|x| * sum_block(dL/dx_hat * R)."""
    r = torch.ops.dither.noise(0, draw, *grad.shape, 0, 0, kind, "auto")
    sums = _in_blocks(grad.float() * r, block).sum(dim=2)
    return (amax * sums).sum(dim=0) * pow2(1.0 - b_t) * -LN2


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Return x [M, K], padded with zeros, as [M, ceil(K / block), block]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block))
    return padded.view(x.shape[0], padded.shape[1] // block, block)


def _empty_apart(x: Tensor, along: str, across: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    one, other = Cast.parse(along), Cast.parse(across)
    return (*storage.empty_outputs(x, one, 1, one.element), *storage.empty_outputs(x, other, 0, other.element))


@operator(_empty_apart)
def _quantize_apart_op(x: Tensor, along: str, across: str, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales by `along` along axis 1, and by `across` along axis 0; see `reference.quantize`."""
    casts = Cast.parse(along), Cast.parse(across)
    for cast in casts:
        _check_hidden_nan(x, cast, None)
    code = implementation("quantize", x.device, backend, *casts)
    return code.quantize_apart(x, *casts)  # type: ignore[no-any-return]


@operator(lambda amax: (torch.empty_like(amax), torch.empty_like(amax)))
def _tensor_factors_op(amax: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    """Return (factor that elements are multiplied by, stored scale), 0-d float32 each, of a tensor with one float32 scale."""
    return implementation("scales", amax.device, "auto").tensor_factors(amax, Cast.parse(cast))  # type: ignore[no-any-return]


# In any layout: Inductor would otherwise make a copy of codes that it computes, and compute them again for the product.
@operator(
    lambda codes: codes.new_empty((codes.shape[1], codes.shape[0])),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
def _transposed_op(codes: Tensor, after: Tensor | None) -> Tensor:
    """Return the transpose of a matrix of codes or scales, contiguous."""
    return implementation("quantize", codes.device, "auto").transposed(codes)  # type: ignore[no-any-return]


@operator(lambda exponents: torch.empty_like(exponents, dtype=torch.float32))
def _scales_later_op(exponents: Tensor, after: Tensor) -> Tensor:
    """Return the float32 values of E8M0 scales, which come as uint8."""
    return exponents.view(torch.float8_e8m0fnu).float()


@operator(_empty_one)
def _quantize_later_op(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    container: str,
    step: Tensor | None,
    row: int,
    column: int,
    level: Tensor | None,
    after: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize` does, in backward."""
    return cast_one(x, cast, axis, amax, container, _draw_of(0, step, row, column), "auto", level)


def _empty_losses(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty((2, rows), dtype=torch.float32)


@operator(_empty_losses)
def _cross_entropy_forward_op(logits: Tensor, targets: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return losses [N] of logits [N, V], and the parts of their logsumexp [2, N]; see `dither.ops.reference.loss`."""
    return implementation("loss", logits.device, backend).forward(logits, targets)  # type: ignore[no-any-return]


@operator(lambda logits: gradients_like(logits))
def _cross_entropy_backward_op(logits: Tensor, targets: Tensor, parts: Tensor, weights: Tensor, backend: str) -> Tensor:
    """Return the gradient of the logits, from `weights` [N], the gradient of the losses."""
    return implementation("loss", logits.device, backend).backward(logits, targets, parts, weights)  # type: ignore[no-any-return]


def _empty_gradient_codes(logits: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    parsed = Cast.parse(cast)
    values, scale = storage.empty_outputs(logits, parsed, 0, parsed.element)
    return values.T, scale.T if scale.dim() == 2 else scale


@operator(_empty_gradient_codes)
def _empty_gradient_codes_op(logits: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    """Return memory for the codes [V, N] and scales along the rows of the gradients of logits [N, V], as products read them."""
    return _empty_gradient_codes(logits, cast)


@operator(lambda logits, cast: _empty_one(logits, cast, 1, "")[:2], mutates=("values_t", "scale_t"))
def _cross_entropy_codes_op(
    logits: Tensor,
    targets: Tensor,
    parts: Tensor,
    weights: Tensor,
    amax: Tensor,
    cast: str,
    first: int,
    values_t: Tensor,
    scale_t: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of the gradient of some logits; write those of its transpose to `values_t` and `scale_t`."""
    code, parsed = implementation("loss", logits.device, backend), Cast.parse(cast)
    return code.backward_codes(logits, targets, parts, weights, amax, parsed, first, (values_t, scale_t))  # type: ignore[no-any-return]
