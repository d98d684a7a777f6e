"""Guidance of learned bitwidths toward their target: weight decay in a parameter group of its own, or a term of the loss."""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.sampling import BITWIDTHS
from dither.spec import Sampling


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
        for dimension, placement in enumerate(first.placements):
            if not placement.is_replicate():
                torch.distributed.all_reduce(total, group=first.device_mesh.get_group(dimension))
        return total + (part - part.detach())  # every rank has the whole sum, and the gradient of its own part
    return torch.cat([bitwidth.flatten() for bitwidth in bitwidths]).abs().sum()


def param_groups(model: nn.Module, *, weight_decay: float = 0.1, bitwidth_lr: float | None = None) -> list[dict[str, Any]]:
    """Return parameter groups for `dither.optim.AdamW` or torch's optimizers: matrices, the rest (no decay), and bitwidths.

    Bitwidths have the decay of their guidance, in one group per rate. Parameters are (name, parameter) pairs; those without
    requires_grad are left out.

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
    bitwidths = {id(bitwidth) for bitwidth in sampling_parameters(model)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in bitwidths]
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
    """Return the parameter groups of bitwidths, one per rate of decay; none if nothing is sampled."""
    groups: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for name, bitwidth, sampling in _bitwidths(model):
        if bitwidth.requires_grad:
            groups.setdefault(sampling.decay, []).append((name, bitwidth))
    return [{"params": members, "weight_decay": rate} for rate, members in groups.items()]
