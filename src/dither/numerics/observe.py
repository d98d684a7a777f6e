"""Observe the operands of a model's converted layers while it computes, and run passes without side effects.

Hooks are registered only in sampled steps: other steps run the same code as without this module. Numbers stay on the device
until `Observer.lines` combines them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dither.formats import TABLE
from dither.grouping import storage_dtype
from dither.nn import tensor_parallel
from dither.nn.experts import ExpertLinear
from dither.nn.linear import Linear
from dither.nn.operands import autocast_dtype
from dither.numerics.report import OPERANDS
from dither.precision import Cast
from dither.reference import numerics, scaling
from dither.snip.statistics import cut_by_tensor_parallelism

LINE = len(numerics.COUNTS) + 4
"""Number of values per operand: see `dither.reference.numerics.summary`."""

PRODUCT_FORMATS = {storage_dtype(TABLE[name]): name for name in ("fp32", "bf16", "fp16")}


def layers_of(model: nn.Module) -> dict[str, Linear]:
    """Return every converted layer by its name in the model; experts by their names in plans."""
    return {
        module.name if isinstance(module, ExpertLinear) else name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }


@dataclass
class Observer:
    """Collects numbers of layers' operands; `observing` attaches it to a model."""

    layers: Mapping[str, Linear]
    compute: str | None = None
    """Format of operands without a cast; None takes that of autocast or of the tensors."""
    exponents: bool = False
    """Count the exponents of output gradients, for the loss scale."""
    found: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    casts: dict[tuple[str, str], tuple[str, bool]] = field(default_factory=dict)
    """(cast, True if the tensor was in that format already) of each operand."""
    gradients: list[Tensor] = field(default_factory=list)
    """Counts of the exponents of output gradients, float64[256] each."""
    narrow: bool = False
    """True if an output gradient was in FP16 already, so that its smallest numbers have become zero."""

    @torch.no_grad()
    def before(self, name: str, layer: nn.Module, args: Any, named: Any) -> None:
        """Record the input and, at the first call, the weight, which FSDP2 has gathered by then."""
        assert isinstance(layer, Linear)
        # Skip the recomputation of checkpointed blocks in backward.
        if not layer.training or torch._C._current_graph_task_id() != -1:
            return
        x: Tensor = args[0] if args else named["input"]
        product = autocast_dtype(x) or x.dtype
        self._look(name, layer, "input", tensor_parallel.part_of(x.detach()).matrix, product, 1)
        if (name, "weight") not in self.found:
            self._look(
                name, layer, "weight", tensor_parallel.local(layer.weight.detach()), product, 0 if layer.transposed else 1
            )

    def after(self, name: str, layer: nn.Module, _: Any, y: Tensor) -> None:
        """Register a hook that records the gradient of the output."""
        assert isinstance(layer, Linear)
        if layer.training and y.requires_grad:
            y.register_hook(partial(self._gradient, name, layer))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _gradient(self, name: str, layer: Linear, dy: Tensor) -> None:
        dy_MN = tensor_parallel.part_of(dy).matrix
        self._look(name, layer, "grad", dy_MN, dy.dtype, 1)
        if self.exponents:
            self.narrow = self.narrow or dy.dtype == torch.float16
            self.gradients.append(numerics.exponent_counts(dy_MN))

    @torch.no_grad()
    def _look(self, name: str, layer: Linear, operand: str, x: Tensor, product: torch.dtype, axis: int) -> None:
        cast = layer.precision.casts_of(operand)[0]  # in the first of its products, along the observed axis
        came = False
        if cast is None:
            cast = Cast(self.compute or PRODUCT_FORMATS[product])
            came = PRODUCT_FORMATS.get(x.dtype) == cast.format
        elif operand == "input":  # as the layer converts it before its cast
            x = x.to(product)
        given = delayed_amax(layer, operand) if cast.scaling.kind == "delayed" else None
        if given is not None:
            given = torch.where(given > 0, given, x.abs().amax().float())
        self.casts.setdefault((name, operand), (str(cast), came))
        self.found.setdefault((name, operand), []).append(numerics.summary(numerics.cast_counts(x, cast, axis, given)))

    def lines(self, device: torch.device) -> Tensor:
        """Return the numbers of each operand over all calls: float64[layers, 3, 10]."""
        unseen = torch.zeros(LINE, dtype=torch.float64, device=device)
        unseen[-3:] = torch.nan
        keys = [(name, operand) for name in self.layers for operand in OPERANDS]
        each = [
            merged(torch.stack([line.to(device) for line in self.found[key]])) if key in self.found else unseen for key in keys
        ]
        return torch.stack(each).view(len(self.layers), len(OPERANDS), LINE)


def merged(lines: Tensor) -> Tensor:
    """Merge float64[n, ..., 10] into float64[..., 10]: add counts, keep extremes of magnitudes and scales.

    The median scale becomes the median of the medians.
    """
    if len(lines) == 1:
        return lines[0]
    count = len(numerics.COUNTS)
    counts, amax, low, middle, high = torch.split(lines, [count, 1, 1, 1, 1], dim=-1)
    extremes = [
        amax.amax(0),
        low.nan_to_num(nan=torch.inf).amin(0),
        middle.nanmedian(0).values,
        high.nan_to_num(nan=-torch.inf).amax(0),
    ]
    none = middle.isnan().all(0)
    extremes[1:] = [torch.where(none, torch.nan, each) for each in extremes[1:]]
    return torch.cat([counts.sum(0), *extremes], dim=-1)


def delayed_amax(layer: Linear, operand: str) -> Tensor:
    """Return the amax by which a layer's history scales an operand, 0-d; 0 while one of its histories is empty."""
    scales = {
        each: getattr(layer.precision, each).scaling for each in OPERANDS if getattr(layer, f"{each}_history") is not None
    }
    known = {
        each: scaling.delayed_amax(tensor_parallel.local(getattr(layer, f"{each}_history")), scale)
        for each, scale in scales.items()
    }
    full = torch.stack([amax > 0 for amax in known.values()]).all()
    return torch.where(full, known[operand], 0.0)


@contextmanager
def observing(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Let an observer record the forward and backward passes inside the context, without changing their results."""
    parallel, hooks = cut_by_tensor_parallelism(model), []
    for name, layer in observer.layers.items():
        hooks.append(layer.register_forward_pre_hook(partial(observer.before, name), with_kwargs=True))
        # Before the hooks of tensor parallelism, which return the local shard as a plain tensor.
        hooks.append(layer.register_forward_hook(partial(observer.after, name), prepend=parallel))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo the side effects of the passes inside: restore gradients, buffers, generators and the state of layers.

    Compiled blocks run uncompiled inside, and DistributedDataParallel reduces nothing.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    plain = [{key: value for key, value in vars(layer).items() if isinstance(value, bool | int | None)} for layer in layers]
    counts = [layer.draws.counts for layer in layers]
    devices = sorted({parameter.device.index for parameter in parameters if parameter.is_cuda})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        try:
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
            for layer, values, count in zip(layers, plain, counts, strict=True):
                vars(layer).update(values)
                layer.draws.counts = count


def compiled_modules(model: nn.Module) -> Sequence[str]:
    """Return the names of the modules that torch.compile has compiled."""
    whole = [""] if isinstance(model, torch._dynamo.OptimizedModule) else []
    return whole + [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
