"""Learned bitwidths of sampled layers: what they are, and guidance toward their target.

Guidance is weight decay in a parameter group of its own, or a term of the loss. Blocks at the edges of a weight count by the
number of their weights.
"""

import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dither.console import aligned
from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.sampling import BITWIDTHS
from dither.ops.ranks import reduce_shards
from dither.spec import Sampling
from dither.spec.bitwidths import DEPLOYABLE, capacity, deployable
from dither.spec.formats import Format


def _bitwidths(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Sampling]]:
    """Yield (name, parameter, sampling) of every learned bitwidth, each once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for parameter, of in BITWIDTHS.items() if isinstance(module, Linear) else ():
            bitwidth, sampling = getattr(module, parameter), getattr(module.precision, of)
            if sampling is not None and id(bitwidth) not in seen:
                seen.add(id(bitwidth))
                yield f"{name}.{parameter}" if name else parameter, bitwidth, sampling


def sampling_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned bitwidths b_i of a model's sampled weights and inputs: float32, one per block.

    >>> from dither.spec import LayerPrecision
    >>> model = nn.Sequential(Linear(64, 96, precision=LayerPrecision(sampling=Sampling())), nn.ReLU(), nn.Linear(96, 64))
    >>> [tuple(bitwidth.shape) for bitwidth in sampling_parameters(model)]
    [(3, 2)]
    """
    return [bitwidth for _, bitwidth, _ in _bitwidths(model)]


def learned_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that precisions add to a model: bitwidths, and learned clips. They stay float32."""
    return [*sampling_parameters(model), *(clip for _, clip in _clips(model))]


def _clips(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of every learned clip, each once."""
    for name, parameter in model.named_parameters():
        home = model.get_submodule(name.rpartition(".")[0]) if name.rpartition(".")[2] == "clip" else None
        if isinstance(home, Linear):
            yield name, parameter


def bitwidth_loss(model: nn.Module) -> Tensor:
    """Return lambda / n * sum |b_t - b_target|, a 0-d float32 tensor to add to the loss of an optimizer step.

    The sum is over the n blocks of the layers whose guidance has a `BitwidthLoss`, which sets lambda; 0 if there are none.
    With gradient accumulation, add it once per step, or divide it like the rest of the loss.

    >>> from dither.spec import BitwidthLoss, LayerPrecision
    >>> guided = Sampling(b_init=6, b_target=4, guidance=BitwidthLoss(0.1))
    >>> bitwidth_loss(nn.Sequential(Linear(64, 64, precision=LayerPrecision(sampling=guided)))).item()  # 0.1 * |6 - 4|
    0.20000000298023224
    """
    guided = [(bitwidth, sampling) for _, bitwidth, sampling in _bitwidths(model) if sampling.loss]
    if not guided:
        return torch.zeros((), device=next((parameter.device for parameter in model.parameters()), None))
    blocks = sum(bitwidth.numel() for bitwidth, _ in guided)
    # |b_t - b_target| = |b_i| (b_init - b_target): one sum for all with the same factor on the same device.
    alike: dict[Any, list[Tensor]] = {}
    for bitwidth, sampling in guided:
        kept = id(bitwidth) if isinstance(bitwidth, DTensor) else bitwidth.device
        alike.setdefault((sampling.loss * (sampling.b_init - sampling.b_target) / blocks, kept), []).append(bitwidth)
    terms = [factor * _sum_of_magnitudes(members) for (factor, _), members in alike.items()]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _sum_of_magnitudes(bitwidths: list[Tensor]) -> Tensor:
    first = bitwidths[0]
    if isinstance(first, DTensor):
        part = first.to_local().abs().sum()
        total = part.detach().clone()
        reduce_shards(total, first)
        return total + (part - part.detach())  # every rank has the whole sum, and the gradient of its own part
    return torch.cat([bitwidth.flatten() for bitwidth in bitwidths]).abs().sum()


def param_groups(model: nn.Module, *, weight_decay: float = 0.1, bitwidth_lr: float | None = None) -> list[dict[str, Any]]:
    """Return parameter groups for `dither.optim.AdamW` or torch's optimizers: matrices, the rest (no decay), and bitwidths.

    Bitwidths have the decay of their guidance, in one group per rate; learned clips have none. Parameters are (name, parameter)
    pairs; those without requires_grad are left out.

    Args:
        model: The model.
        weight_decay: Weight decay of the matrices.
        bitwidth_lr: Learning rate of the bitwidths; by default that of the optimizer.

    >>> from dither.spec import LayerPrecision, WeightDecay
    >>> sampled = LayerPrecision(sampling=Sampling(guidance=WeightDecay(0.5)))
    >>> model = nn.Sequential(Linear(64, 96, precision=sampled), nn.LayerNorm(96))
    >>> for group in param_groups(model, bitwidth_lr=1e-2):
    ...     print([name for name, _ in group["params"]], group["weight_decay"])
    ['0.weight'] 0.1
    ['0.bias', '1.weight', '1.bias'] 0.0
    ['0.bitwidth'] 0.5
    >>> optimizer = torch.optim.AdamW(param_groups(model), lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"A model is a torch.nn.Module, not {type(model).__name__}.")
    learned = {id(parameter) for parameter in learned_parameters(model)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in learned]
    matrices = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    rest = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    own = {} if bitwidth_lr is None else {"lr": bitwidth_lr}
    return [group for group in groups if group["params"]] + [group | own for group in bitwidth_groups(model)]


def watch_guidance(model: nn.Module) -> None:
    """Warn at the first optimizer step if the weight decay of a model's bitwidths is not that of their guidance."""
    if not sampling_parameters(model):
        return
    reference, checked = weakref.ref(model), False

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal checked
        alive = None if checked else reference()
        if alive is None:
            return
        wanted = {id(bitwidth): (name, guided.decay) for name, bitwidth, guided in _bitwidths(alive)}
        pairs = [(wanted[id(p)], group) for group in optimizer.param_groups for p in group["params"] if id(p) in wanted]
        checked = bool(pairs)
        for (name, decay), group in pairs:
            if group.get("weight_decay", 0.0) != decay:
                warnings.warn(
                    f"The bitwidths {name!r} are optimized with weight_decay={group.get('weight_decay', 0.0):g}, and their "
                    f"guidance asks for {decay:g}: give the optimizer dither.nn.param_groups(model).",
                    stacklevel=4,
                )
                return

    register_optimizer_step_pre_hook(check)


def bitwidth_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of bitwidths and learned clips, one per rate of decay; none if there are neither."""
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, bitwidth, sampling in _bitwidths(model):
        if bitwidth.requires_grad:
            groups.setdefault(sampling.decay, []).append((name, bitwidth))
    for name, clip in _clips(model):
        if clip.requires_grad:
            groups.setdefault(0.0, []).append((name, clip))
    return [{"params": members, "weight_decay": rate} for rate, members in groups.items()]


# What was learned ------------------------------------------------------------------------------------------------------


BIN = 0.25
"""Width of the bins of a distribution of b_t, in bits."""


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

    def __str__(self) -> str:
        formats, steps = list(self.total.formats), list(self.total.histogram)
        rows = [("layer", "weights", "mean", "min", "max", *(f"<= {b}" for b in steps), *formats)]
        for row in (*self.layers, self.total):
            numbers = (f"{number:.2f}" for number in (row.mean, row.min, row.max))
            shares = [*(row.histogram.get(b, 0.0) for b in steps), *(row.formats.get(name, 0.0) for name in formats)]
            rows.append((row.name, f"{row.weights:,}", *numbers, *(f"{share:.0%}" if share else "" for share in shares)))
        return "\n".join(aligned(rows))


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
    layer  weights  mean  min   max   <= 3  <= 5  e2m1  e4m3
    0      2,048    4.00  3.00  5.00  50%   50%   50%   50%
    2      2,048    5.00  5.00  5.00        100%        100%
    total  4,096    4.50  3.00  5.00  25%   75%   25%   75%
    """
    learned = [(name, *learned_blocks(name, layer)) for name, layer in sampled_layers(model).items()]
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
    for layer in sampled_layers(model).values():
        assert layer.precision.sampling is not None
        b_t = layer.bitwidths().double()
        rows, columns = (block_lengths(size, layer.precision.sampling.block, b_t.device) for size in layer.weight.shape)
        found.append(torch.stack((rows @ b_t @ columns, *b_t.aminmax())))
        weights += layer.weight.numel()
    sums, low, high = torch.stack([numbers.to(found[0].device) for numbers in found]).unbind(1)
    total, least, most = torch.stack((sums.sum(), low.min(), high.max())).tolist()
    return total / weights, least, most


def sampled_layers(model: nn.Module) -> dict[str, Linear]:
    """Return the layers whose weights are sampled, by name."""
    modules = model.named_modules()
    layers = {name: module for name, module in modules if isinstance(module, Linear) and module.precision.sampling}
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layer with learned bitwidths: "
            "convert it with dither.convert(model, plan.with_sampling(Sampling()))."
        )
    return layers


def learned_blocks(name: str, layer: Linear) -> tuple[Tensor, Tensor]:
    """Return b_t and the number of weights of each block: two flat float64 tensors on the CPU."""
    sampling = layer.precision.sampling
    assert sampling is not None
    b_t = layer.bitwidths().double().cpu()
    if not bool(((b_t >= 0) & b_t.isfinite()).all()):
        raise UserError(f"The layer {name!r} has learned a bitwidth that is negative or not finite: {b_t.min().item():g}.")
    rows, columns = (block_lengths(size, sampling.block) for size in layer.weight.shape)
    return b_t.flatten(), torch.outer(rows, columns).flatten()


def block_lengths(size: int, block: int, device: torch.device | None = None) -> Tensor:
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
    chosen, candidates = narrowest_formats(b_t, formats, slack)
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
    for name, layer in sampled_layers(model).items():
        b_t = layer.bitwidths().detach().double().cpu()
        rows, columns = b_t.shape
        small = torch.nn.functional.adaptive_avg_pool2d(b_t[None], (min(rows, most), min(columns, most)))[0]
        values = [[round(value, 3) for value in row] for row in small.tolist()]
        found[name] = {"blocks": [rows, columns], "values": values}
    return found


def narrowest_formats(b_t: Tensor, formats: Sequence[str], slack: float) -> tuple[Tensor, list[str]]:
    """Return the index of the narrowest format that carries each b_t less `slack`, and the formats."""
    b_t = less_slack(b_t, slack)
    deployable(b_t.max().item(), formats)  # raises if none carries it
    candidates: list[str] = []
    for element in sorted(map(Format.parse, formats), key=lambda element: element.bits):
        if not candidates or capacity(element) > capacity(candidates[-1]):
            candidates.append(element.name)
    return torch.bucketize(b_t, torch.tensor([capacity(name) for name in candidates], dtype=b_t.dtype)), candidates


def less_slack(b_t: Tensor, slack: float) -> Tensor:
    if not isinstance(slack, int | float) or not 0 <= slack < math.inf:
        raise UserError(f"slack= is a non-negative number of bits, such as 0.05, not {slack!r}.")
    return (b_t - slack).clamp(min=0)
