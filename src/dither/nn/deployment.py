"""Number formats from learned bitwidths, and casts of trained weights.

`effective_precision` reads the bitwidths of a model's sampled layers. `plan_from_bitwidths` turns them into a Plan with one
weight format per layer. `deploy` casts trained weights by a plan, `deploy_blocks` casts each block to a format of its own, and
both measure the loss before and after. Blocks at the edges count by the number of their weights.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn.convert import _reasons
from dither.nn.linear import Linear
from dither.nn.sites import Site, find_sites
from dither.ops import quantize
from dither.ops.reference.sampling import block_amax
from dither.spec import Cast, Granularity, LayerPrecision, Plan, Sampling
from dither.spec.bitwidths import DEPLOYABLE, VARIANCE, capacity, deployable
from dither.spec.formats import Format

Evaluate = Callable[[nn.Module], float]
"""A function (model) -> loss, which is called with the model in eval mode."""


BIN = 0.25
"""Width of the bins of a distribution of b_t, in bits."""


# Learned bitwidths -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnedBitwidths:
    """The bitwidths b_t of one layer, or of several together. Blocks are weighted by their number of weights."""

    name: str
    weights: int
    mean: float
    min: float
    max: float
    histogram: Mapping[int, float]
    """Fraction of weights by b_t, rounded up."""
    formats: Mapping[str, float]
    """Fraction of weights by the narrowest format that carries their b_t."""
    deviation: float = 0.0
    """Standard deviation of b_t over weights."""
    bins: Mapping[float, float] = field(default_factory=dict)
    """Fraction of weights by b_t in bins of `BIN` bits, by the lower end of each bin, which belongs to it."""

    @property
    def bits(self) -> float:
        """Return the bits per weight if each block has its own format, without scales."""
        return sum(Format.parse(name).bits * share for name, share in self.formats.items())


@dataclass(frozen=True)
class EffectivePrecision:
    """The bitwidths that a model has learned, per layer and in total. Prints as a table."""

    layers: tuple[LearnedBitwidths, ...]
    total: LearnedBitwidths
    """All layers together."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"layers": [dict(vars(layer)) for layer in self.layers], "total": dict(vars(self.total))}

    def __rich__(self) -> Table:
        formats, steps = list(self.total.formats), list(self.total.histogram)
        table = Table("layer", "weights", "mean", "min", "max", *(f"<= {b}" for b in steps), *formats, box=box.SIMPLE_HEAD)
        for row in (*self.layers, self.total):
            numbers = (f"{number:.2f}" for number in (row.mean, row.min, row.max))
            shares = [*(row.histogram.get(b, 0.0) for b in steps), *(row.formats.get(name, 0.0) for name in formats)]
            table.add_row(row.name, f"{row.weights:,}", *numbers, *(f"{share:.0%}" if share else "" for share in shares))
        return table

    def __str__(self) -> str:
        return _printed(self)


def effective_precision(model: nn.Module, *, formats: Sequence[str] = DEPLOYABLE, slack: float = 0.0) -> EffectivePrecision:
    """Return the learned bitwidths of a model's sampled layers: mean, extremes, histogram, and formats that carry them.

    Args:
        model: A model with sampled layers.
        formats: The formats to choose from.
        slack: Bits by which b_t may exceed the capacity of a format: guidance moves b_t toward b_target, and not quite there.

    >>> import dither, torch
    >>> from dither.spec import Sampling
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    >>> _ = dither.convert(model, dither.Plan().with_sampling(Sampling(b_init=5, b_target=3)))
    >>> with torch.no_grad():  # as if they had learned
    ...     _ = model[0].bitwidth.copy_(torch.tensor([[0.0, 1.0]]))
    >>> print(effective_precision(model))
    layer   weights   mean   min    max    <= 3   <= 5   e2m1   e4m3
    ──────────────────────────────────────────────────────────────────
    0       2,048     4.00   3.00   5.00   50%    50%    50%    50%
    2       2,048     5.00   5.00   5.00          100%          100%
    total   4,096     4.50   3.00   5.00   25%    75%    25%    75%
    """
    learned = [(name, *_learned(name, layer)) for name, layer in _sampled(model).items()]
    layers = tuple(_summary(name, b_t, counts, formats, slack) for name, b_t, counts in learned)
    every = torch.cat([b_t for _, b_t, _ in learned]), torch.cat([counts for *_, counts in learned])
    return EffectivePrecision(layers, _summary("total", *every, formats, slack))


def bitwidth_range(model: nn.Module) -> tuple[float, float, float]:
    """Return mean, smallest and largest learned bitwidth of a model: those of `effective_precision`, without its histograms.

    It waits for the device once, however many layers there are, so that a loop may log it often. Sharded bitwidths are
    gathered, so all ranks call it.

    >>> import dither, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    >>> _ = dither.convert(model, dither.Plan().with_sampling(Sampling(b_init=5, b_target=3)))
    >>> with torch.no_grad():  # as if they had learned
    ...     _ = model[0].bitwidth.copy_(torch.tensor([[0.0, 1.0]]))
    >>> bitwidth_range(model)
    (4.5, 3.0, 5.0)
    """
    found, weights = [], 0
    for layer in _sampled(model).values():
        assert layer.precision.sampling is not None
        b_t = layer.bitwidths().double()
        rows, columns = (_lengths(size, layer.precision.sampling.block, b_t.device) for size in layer.weight.shape)
        found.append(torch.stack((rows @ b_t @ columns, *b_t.aminmax())))
        weights += layer.weight.numel()
    sums, low, high = torch.stack([numbers.to(found[0].device) for numbers in found]).unbind(1)
    total, least, most = torch.stack((sums.sum(), low.min(), high.max())).tolist()
    return total / weights, least, most


def _sampled(model: nn.Module) -> dict[str, Linear]:
    """Return the layers whose weights are sampled, by name."""
    modules = model.named_modules()
    layers = {name: module for name, module in modules if isinstance(module, Linear) and module.precision.sampling}
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layer with learned bitwidths: "
            "convert it with dither.convert(model, plan.with_sampling(Sampling()))."
        )
    return layers


def _learned(name: str, layer: Linear) -> tuple[Tensor, Tensor]:
    """Return b_t and the number of weights of each block: two flat float64 tensors on the CPU."""
    sampling = layer.precision.sampling
    assert sampling is not None
    b_t = layer.bitwidths().double().cpu()
    if not bool(((b_t >= 0) & b_t.isfinite()).all()):
        raise UserError(f"The layer {name!r} has learned a bitwidth that is negative or not finite: {b_t.min().item():g}.")
    rows, columns = (_lengths(size, sampling.block) for size in layer.weight.shape)
    return b_t.flatten(), torch.outer(rows, columns).flatten()


def _lengths(size: int, block: int, device: torch.device | None = None) -> Tensor:
    """Return the lengths of the blocks of a dimension, in float64."""
    starts = torch.arange(0, size, block, dtype=torch.float64, device=device)
    return (size - starts).clamp(max=block)


def _distinct(values: Tensor) -> list[float]:
    """Return the values that occur, in ascending order."""
    found: list[float] = torch.unique(values).tolist()
    return found


def _summary(name: str, b_t: Tensor, counts: Tensor, formats: Sequence[str], slack: float) -> LearnedBitwidths:
    shares = counts / counts.sum()
    steps = {int(b): shares[b_t.ceil() == b].sum().item() for b in _distinct(b_t.ceil())}
    chosen, candidates = _narrowest(b_t, formats, slack)
    by_format = {candidates[int(index)]: shares[chosen == index].sum().item() for index in _distinct(chosen)}
    extremes = b_t.min().item(), b_t.max().item()
    mean = (b_t * shares).sum().item()
    deviation = math.sqrt(((b_t - mean).square() * shares).sum().item())
    low = (b_t / BIN).floor() * BIN
    bins = {b: shares[low == b].sum().item() for b in _distinct(low)}
    return LearnedBitwidths(name, int(counts.sum()), mean, *extremes, steps, by_format, deviation, bins)


def block_bitwidths(model: nn.Module, most: int = 32) -> dict[str, Any]:
    """Return the b_t of the blocks of each sampled layer as rows of plain numbers, for a heat map.

    A layer with more than `most` rows or columns of blocks is reduced to that many cells, each the mean of several blocks.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 64))
    >>> _ = dither.convert(model, dither.Plan().with_sampling(Sampling(b_init=5, b_target=3)))
    >>> with torch.no_grad():  # as if they had learned
    ...     _ = model[0].bitwidth.copy_(torch.tensor([[0.0, 1.0, 0.5, 0.5], [0.0, 1.0, 0.5, 0.5]]))
    >>> block_bitwidths(model), block_bitwidths(model, most=2)["0"]["values"]
    ({'0': {'blocks': [2, 4], 'values': [[3.0, 5.0, 4.0, 4.0], [3.0, 5.0, 4.0, 4.0]]}}, [[4.0, 4.0], [4.0, 4.0]])
    """
    found = {}
    for name, layer in _sampled(model).items():
        b_t = layer.bitwidths().detach().double().cpu()
        rows, columns = b_t.shape
        small = torch.nn.functional.adaptive_avg_pool2d(b_t[None], (min(rows, most), min(columns, most)))[0]
        values = [[round(value, 3) for value in row] for row in small.tolist()]
        found[name] = {"blocks": [rows, columns], "values": values}
    return found


def _narrowest(b_t: Tensor, formats: Sequence[str], slack: float) -> tuple[Tensor, list[str]]:
    """Return the index of the narrowest format that carries each b_t less `slack`, and the formats."""
    b_t = _less(b_t, slack)
    deployable(b_t.max().item(), formats)  # raises if none carries it
    candidates: list[str] = []
    for element in sorted(map(Format.parse, formats), key=lambda element: element.bits):
        if not candidates or capacity(element) > capacity(candidates[-1]):
            candidates.append(element.name)
    return torch.bucketize(b_t, torch.tensor([capacity(name) for name in candidates], dtype=b_t.dtype)), candidates


def _less(b_t: Tensor, slack: float) -> Tensor:
    if not isinstance(slack, int | float) or not 0 <= slack < math.inf:
        raise UserError(f"slack= is a non-negative number of bits, such as 0.05, not {slack!r}.")
    return (b_t - slack).clamp(min=0)


# Plans ----------------------------------------------------------------------------------------------------------------


def plan_from_bitwidths(
    model: nn.Module,
    *,
    granularity: str = "block(32)",
    scale: str = "fp32",
    quantile: float = 1.0,
    slack: float = 0.0,
    rule: Literal["table", "noise"] = "table",
    formats: Sequence[str] = DEPLOYABLE,
) -> Plan:
    """Return a plan that casts the weight of each sampled layer to the narrowest of `formats` that its bitwidths allow.

    Layers without bitwidths are left alone. A plan has one format per layer; see `deploy_blocks` for one format per block.

    Args:
        model: A model with sampled layers.
        granularity: Granularity of the casts.
        scale: Scale of the casts.
        quantile: For the rule "table": the fraction of a layer's weights whose b_t the format must carry.
        slack: For the rule "table": bits by which b_t may exceed the capacity of a format.
        rule: "table", the paper's Table 2, or "noise": the mean square error of the cast is at most that of the noise in
            training.
        formats: The formats to choose from.

    >>> import dither, torch
    >>> from dither.spec import Sampling
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    >>> _ = dither.convert(model, dither.Plan().with_sampling(Sampling(b_init=4, b_target=3)))
    >>> print(plan_from_bitwidths(model).for_layer("0"))
    weight e3m2 block(32) fp32 nearest
    """
    if rule not in ("table", "noise"):
        raise UserError(f"rule= is 'table' (the paper's Table 2) or 'noise' (the noise in training), not {rule!r}.")
    if not isinstance(quantile, int | float) or not 0 < quantile <= 1:
        raise UserError(f"quantile= is a fraction of a layer's weights, above 0 and up to 1, not {quantile!r}.")
    Granularity.parse(granularity)
    rules = []
    for name, layer in _sampled(model).items():
        b_t, counts = _learned(name, layer)
        if rule == "table":
            cast = weight_cast(deployable(_quantile(_less(b_t, slack), counts, quantile), formats).name, granularity, scale)
        else:
            cast = _within_noise(name, layer, b_t, [weight_cast(format, granularity, scale) for format in formats])
        rules.append((name, LayerPrecision(weight=cast)))
    origin = {"origin": "bitwidths", "rule": rule} | ({"quantile": quantile, "slack": slack} if rule == "table" else {})
    return Plan(layers=tuple(rules), provenance=origin)


def weight_cast(format: str, granularity: str = "block(32)", scale: str = "fp32") -> Cast:
    """Return a cast of weights to `format`, without a scale if the format has float32's range.

    >>> str(weight_cast("e2m1")), str(weight_cast("bf16"))
    ('e2m1 block(32) fp32 nearest', 'bf16 nearest')
    """
    return Cast(format) if Format.parse(format).exponent_bits == 8 else Cast(format, granularity, scale)


def _quantile(b_t: Tensor, counts: Tensor, quantile: float) -> float:
    """Return the smallest b_t that a fraction `quantile` of the weights do not exceed."""
    order = b_t.argsort()
    reached = counts[order].cumsum(0) >= quantile * counts.sum() * (1 - 1e-12)  # sums of shares are not exact
    return b_t[order][reached][0].item()


def _within_noise(name: str, layer: Linear, b_t: Tensor, casts: list[Cast]) -> Cast:
    """Return the narrowest cast whose squared error is at most the expected square of the noise."""
    sampling: Sampling = layer.precision.sampling  # type: ignore[assignment]
    weight = layer.weight.detach()
    rows, columns = (_lengths(size, sampling.block) for size in weight.shape)
    amax = block_amax(weight, sampling.block).double().cpu()
    allowed = (torch.outer(rows, columns) * (amax * torch.exp2(1 - b_t.view(amax.shape))).square()).sum().item()
    allowed *= VARIANCE[sampling.noise]
    for cast in sorted(casts, key=lambda cast: cast.element.bits):
        stored = quantize(weight, cast, axis=0 if layer.transposed else -1).dequantize(torch.float32)
        if (stored - weight.float()).double().square().sum().item() <= allowed:
            return cast
    raise UserError(
        f"No format among {', '.join(cast.format for cast in casts)} has an error within the noise of the layer {name!r} in "
        "training: add a wider format."
    )


# Deployment -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeployedLayer:
    """A layer whose weight was cast."""

    name: str
    weights: int
    formats: Mapping[str, float]
    """Fraction of weights in each format."""
    bits: float
    """Bits per weight as stored, scales included."""
    error: float
    """Norm of the change divided by the norm of the weight."""


@dataclass(frozen=True)
class Deployment:
    """Trained weights cast to few bits, with their errors and the loss. Prints as a table."""

    layers: tuple[DeployedLayer, ...]
    weights: Mapping[str, Tensor]
    """The cast weights by the names of their parameters, dequantized to the parameters' dtype."""
    loss_before: float | None
    loss_after: float | None

    @property
    def bits(self) -> float:
        """Return the mean bits per weight of the cast layers."""
        return sum(layer.bits * layer.weights for layer in self.layers) / sum(layer.weights for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype for a file of the deployed model: the narrower of BF16 and FP16 that its formats need, or None.

        Formats of few bits and BF16 are stored in BF16, FP16 in FP16. None, which keeps the dtype of the parameters, stands for
        wider formats, or BF16 and FP16 mixed.
        """
        formats = {name for layer in self.layers for name in layer.formats}
        if any(Format.parse(name).bits > 16 for name in formats) or {"bf16", "fp16"} <= formats:
            return None
        return torch.float16 if "fp16" in formats else torch.bfloat16

    def write(self, model: nn.Module) -> None:
        """Copy the cast weights into a model's parameters, whose dtype does not change.

        `dither.models.save_pretrained` then writes the model in the dtype of the deployment, BF16 for formats of few bits,
        unless its `dtype=` says otherwise. `dither.export` writes the few bits themselves.
        """
        with torch.no_grad():
            for name, weight in self.weights.items():
                model.get_parameter(name).copy_(weight)
        model.deployed_dtype = self.dtype  # type: ignore[assignment]

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict with the cast weights."""
        return {**model.state_dict(), **self.weights}

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the weights as plain values, ready for JSON."""
        losses = {"loss_before": self.loss_before, "loss_after": self.loss_after}
        return {"layers": [dict(vars(layer)) for layer in self.layers], "bits": self.bits, **losses}

    def __rich__(self) -> Table:
        losses = () if self.loss_before is None else (f"loss {self.loss_before:.5f} -> {self.loss_after:.5f}",)
        caption = ", ".join([f"{self.bits:.2f} bits per weight", *losses])
        table = Table(
            "layer", "weights", "formats", "bits", "error", box=box.SIMPLE_HEAD, caption=caption, caption_justify="left"
        )
        for layer in self.layers:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in layer.formats.items())
            table.add_row(layer.name, f"{layer.weights:,}", shares, f"{layer.bits:.2f}", f"{layer.error:.4f}")
        return table

    def __str__(self) -> str:
        return _printed(self)


def deploy(model: nn.Module, plan: Plan, *, evaluate: Evaluate | None = None) -> Deployment:
    """Cast the weights of a model's linear layers by a plan, and measure the loss before and after.

    The model is not changed: `Deployment.write` copies the cast weights into it. Casts of a converted model's products stay in
    use during the evaluation.

    Args:
        model: A trained model.
        plan: A plan, of which only the casts of weights are used. Layers without one are left alone, and so is the output
            layer unless a rule names it.
        evaluate: A function (model) -> loss. It is called twice in eval mode, in which sampled layers have no noise.

    >>> import dither, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    >>> plan = dither.Plan(default=dither.LayerPrecision.of(weight="e2m1 block(32)"))
    >>> x = torch.randn(100, 64)
    >>> deployment = deploy(model, plan, evaluate=lambda model: (model(x) - x).square().mean().item())
    >>> deployment.bits  # 4, and 32 for each 1024 weights
    4.03125
    """
    if not isinstance(plan, Plan):
        raise UserError(f"deploy takes a Plan that casts weights, not {plan!r}; plan_from_bitwidths(model) makes one.")
    cast_weights: dict[str, tuple[DeployedLayer, Tensor]] = {}
    sites = find_sites(model)
    left_alone = _reasons(model, plan, sites, (), ())
    for site in sites:
        precision = plan.for_layer(site.name)
        if site.name not in left_alone and precision is not None and precision.weight is not None:
            parameter, weight, axis = _weight(site)
            codes = quantize(weight, precision.weight, axis=axis)
            stored = [codes.values, codes.scale, codes.tensor_scale]
            bits = 8 * sum(part.numel() * part.itemsize for part in stored if part is not None) / weight.numel()
            formats = {precision.weight.format: 1.0}
            cast_weights[parameter] = _deployed(site.name, weight, codes.dequantize(), formats, bits)
    if not cast_weights:
        raise UserError(
            f"The plan casts no weight of {type(model).__name__}: give its layers a weight such as 'e2m1 block(32)'."
        )
    return _evaluated(model, cast_weights, evaluate)


def deploy_blocks(
    model: nn.Module,
    *,
    formats: Sequence[str] = DEPLOYABLE,
    scale: str = "fp32",
    slack: float = 0.0,
    evaluate: Evaluate | None = None,
) -> Deployment:
    """Cast each block of a sampled layer to the narrowest of `formats` that carries its bitwidth; see `deploy`.

    A block has one scale and an integer number of bits for the index of its format. `slack` is that of `effective_precision`.

    >>> import dither, torch
    >>> from dither.spec import Sampling
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    >>> _ = dither.convert(model, dither.Plan().with_sampling(Sampling(b_init=5, b_target=3)))
    >>> with torch.no_grad():
    ...     _ = model[0].bitwidth.copy_(torch.tensor([[0.0, 1.0]]))
    >>> dict(deploy_blocks(model).layers[0].formats)
    {'e2m1': 0.5, 'e4m3': 0.5}
    """
    cast_weights: dict[str, tuple[DeployedLayer, Tensor]] = {}
    for name, layer in _sampled(model).items():
        b_t, counts = _learned(name, layer)
        block, weight = layer.precision.sampling.block, layer.weight.detach()  # type: ignore[union-attr]
        chosen, candidates = _narrowest(b_t, formats, slack)
        grid = chosen.view(layer.bitwidths().shape).to(weight.device)
        by_weight = grid.repeat_interleave(block, 0)[: weight.shape[0]].repeat_interleave(block, 1)[:, : weight.shape[1]]
        result, shares, bits = torch.empty_like(weight), {}, math.ceil(math.log2(len(candidates))) * len(counts)
        for index in _distinct(chosen):
            cast = weight_cast(candidates[int(index)], f"block({block})", scale)
            result = torch.where(by_weight == index, quantize(weight, cast).dequantize(), result)
            here = counts[chosen == index]
            shares[cast.format] = (here.sum() / counts.sum()).item()
            scales = {"none": 0, "fp32": 32}.get(cast.scaling.kind, 8) * len(here)
            bits += cast.element.bits * int(here.sum()) + scales
        cast_weights[f"{name}.weight"] = _deployed(name, weight, result, shares, bits / weight.numel())
    return _evaluated(model, cast_weights, evaluate)


def _weight(site: Site) -> tuple[str, Tensor, int]:
    """Return the name of a layer's parameter, its weight, and the contraction axis."""
    if site.parameter:  # experts, [experts, out, in] or [experts, in, out]
        axis = 1 if getattr(site.module, "is_transposed", False) else -1
        return site.name, getattr(site.module, site.parameter).detach(), axis
    transposed = getattr(site.module, "transposed", not isinstance(site.module, nn.Linear))
    weight: Tensor = site.module.weight.detach()  # type: ignore[operator]
    return f"{site.name}.weight", weight, 0 if transposed else -1


def _deployed(name: str, old: Tensor, new: Tensor, formats: Mapping[str, float], bits: float) -> tuple[DeployedLayer, Tensor]:
    size = old.float().norm().item()
    error = (new.float() - old.float()).norm().item() / size if size else 0.0
    return DeployedLayer(name, old.numel(), formats, bits, error), new


def _evaluated(
    model: nn.Module, cast_weights: Mapping[str, tuple[DeployedLayer, Tensor]], evaluate: Evaluate | None
) -> Deployment:
    weights = {name: weight for name, (_, weight) in cast_weights.items()}
    before = after = None
    if evaluate is not None:
        with evaluating(model):
            before = float(evaluate(model))
            with replaced(model, weights):
                after = float(evaluate(model))
    return Deployment(tuple(layer for layer, _ in cast_weights.values()), weights, before, after)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients inside the context, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters by name inside the context, and restore them afterwards."""
    old = {name: model.get_parameter(name).data for name in weights}
    try:
        for name, weight in weights.items():
            model.get_parameter(name).data = weight
        yield
    finally:
        for name, data in old.items():
            model.get_parameter(name).data = data


def _printed(table: object) -> str:
    console = Console(file=io.StringIO(), width=1000, color_system=None, highlight=False, markup=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.strip() for line in text.splitlines()).strip("\n")
