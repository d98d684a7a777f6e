"""Converted models in the loops of other libraries: steps that begin and end in callbacks, metrics, and saved states.

Weights are saved by the library that owns the loop. Its readers know nothing of bitwidths and histories of delayed scaling,
so those are saved beside, with the plan and the seeds of the layers.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.checkpoint.read import LoadedTensors
from dither.checkpoint.state import check_same_layers, converted_linears, resting_bitwidths
from dither.errors import UserError
from dither.nn.bitwidths import bitwidth_range
from dither.nn.convert import Conversion
from dither.nn.linear import Linear
from dither.nn.sampling import BITWIDTHS
from dither.nn.sites import converted_layers, linear_of
from dither.nn.step import StepContext, step_context
from dither.spec import OPERANDS, Plan

FILE = "dither_state.safetensors"
"""Name of the file within a checkpoint folder."""
VERSION = 1
"""Version of the file's description."""
RESTING = "resting:"
"""Prefix of bitwidths whose sampling is switched off; they are not in the model's state_dict."""
STATES = frozenset((*BITWIDTHS, *(f"{operand}_history" for operand in OPERANDS), "outlier_channels", "outlier_norms"))
"""Last parts of the names that conversion adds to a model's state_dict."""


class _InterruptedStepError(Exception):
    """Ends a step_context whose optimizer step never came."""


class OpenStep:
    """A `dither.step_context` that callbacks and plugins begin and end.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    >>> _ = dither.convert(model, "fp8-block")
    >>> step = OpenStep()
    >>> step.begin(model, 0)
    >>> step.is_open
    True
    >>> step.end()
    """

    def __init__(self) -> None:
        self._context: AbstractContextManager[StepContext] | None = None

    @property
    def is_open(self) -> bool:
        """Return True between `begin` and `end`."""
        return self._context is not None

    def begin(self, model: nn.Module, step: int) -> None:
        """Begin a step. Histories of delayed scaling are reduced over all ranks."""
        self.interrupt()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        several = distributed and torch.distributed.get_world_size() > 1
        delayed = any(isinstance(module, Linear) and module.delayed.operands for module in model.modules())
        context = step_context(model, step=step, group=torch.distributed.group.WORLD if several and delayed else None)
        context.__enter__()
        self._context = context

    def end(self) -> None:
        """End the step, if one has begun."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def interrupt(self) -> None:
        """Leave a step that was not finished: histories do not advance."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(_InterruptedStepError, _InterruptedStepError(), None)


def layer_metrics(model: nn.Module) -> dict[str, float]:
    """Return learned bitwidths in bits, and the share of converted weights in each format of the forward product.

    Sharded bitwidths are gathered, so all ranks call this.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 384))
    >>> _ = dither.convert(model, dither.Plan(layers=(("0", None),), default=dither.recipe("fp8-block").default))
    >>> layer_metrics(model)
    {'dither/weights_e4m3': 1.0}
    """
    layers = _layers(model).values()
    sizes: Counter[str] = Counter()
    for layer in layers:
        cast = layer.precision.cast("forward", "weight")
        sizes["uncast" if cast is None else str(cast.format)] += layer.weight.numel()
    total = sum(sizes.values())
    numbers = {f"dither/weights_{format}": size / total for format, size in sorted(sizes.items())}
    if any(layer.precision.sampling is not None for layer in layers):
        numbers |= dict(zip((f"dither/bitwidth_{name}" for name in ("mean", "min", "max")), bitwidth_range(model), strict=True))
    return numbers


def state_names(model: nn.Module) -> list[str]:
    """Return the names in `model.state_dict()` that conversion has added: bitwidths and histories of delayed scaling.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    >>> _ = dither.convert(model, "fp8-delayed", only="2")
    >>> state_names(model)
    ['2.input_history', '2.weight_history', '2.grad_history']
    """
    return [
        f"{name}.{key}" if name else key
        for name, layer in converted_linears(model)
        for key in layer.state_dict()
        if key not in ("weight", "bias")
    ]


def is_state(name: str) -> bool:
    """Return whether a name in a state_dict is that of a bitwidth or a history, which conversion adds to a linear layer.

    >>> is_state("layers.0.feed_forward.w1.bitwidth"), is_state("layers.0.feed_forward.w1.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in STATES


def save_state(model: nn.Module, folder: str | Path, *, others: Mapping[str, Any] | None = None, writes: bool = True) -> None:
    """Write the training state of a model's converted layers to `dither_state.safetensors` in a folder.

    Sharded tensors are gathered, so all ranks call this.

    Args:
        model: A converted model, between steps.
        folder: An existing folder, usually that of a checkpoint.
        others: Plain values of the caller.
        writes: False on ranks that only take part in gathering.

    >>> import dither, tempfile
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    >>> _ = dither.convert(model, "fp8-delayed")
    >>> folder = tempfile.mkdtemp()
    >>> save_state(model, folder, others={"step": 7})
    >>> load_state(model, folder)
    {'step': 7}
    """
    layers = _layers(model)
    description = {
        "version": VERSION,
        "plan": Conversion.of(model).plan.to_dict() if layers else None,
        "seeds": {name: layer.seed for name, layer in layers.items()},
        "weights": _fingerprint(layers),
        "others": dict(others or {}),
    }
    gathered = ((name, value.full_tensor() if isinstance(value, DTensor) else value) for name, value in _states(model).items())
    tensors = {name: value.detach().cpu().contiguous() for name, value in gathered}
    if not writes:
        return
    path = Path(folder) / FILE
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, metadata={"dither": json.dumps(description)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The training state cannot be written to {str(path)!r}: {error}.") from None


def load_state(model: nn.Module, folder: str | Path) -> dict[str, Any]:
    """Restore the state that `save_state` wrote into a model that was converted like the saved one and has its weights.

    If the plan changed during training, the saved one is applied. Everything is checked first.

    Returns:
        The `others` that were saved.
    """
    path = Path(folder) / FILE
    tensors, description = _read(path)
    layers, seeds = _layers(model), description["seeds"]
    check_same_layers(layers, seeds, "saved state")
    for name, layer in layers.items():
        if seeds[name] != layer.seed:
            raise UserError(
                f"The layer {name!r} was saved with the seed {seeds[name]}, and has the seed {layer.seed} now: "
                f"use dither.convert(model, plan, seed={seeds[name]})."
            )
    if description["weights"] != _fingerprint(layers):
        raise UserError(
            f"The weights of the model are not those that {str(path)!r} was saved with: load the weights of that folder first."
        )
    if layers and not (conversion := Conversion.of(model)).has(plan := Plan.from_dict(description["plan"])):
        conversion.switch(plan)
    _restore(model, LoadedTensors(tensors), path)
    others: dict[str, Any] = description["others"]
    return others


def _restore(model: nn.Module, saved: LoadedTensors, path: Path) -> None:
    """Copy tensors into a model with the right plan; raise before the first copy if one does not fit."""
    ours, by_name = _states(model), dict(converted_linears(model))
    for name in sorted(set(ours) - set(saved.tensors)):
        if not name.startswith(RESTING):
            raise UserError(f"The file {str(path)!r} has no tensor {name!r}: convert the model as the saved one was.")
    for name, tensor in saved.tensors.items():
        if name not in ours and not (name.startswith(RESTING) and name.split(":")[1] in by_name):
            raise UserError(f"The file {str(path)!r} has a tensor {name!r} that the model lacks: convert as the saved one was.")
        if name in ours and tuple(ours[name].shape) != tensor.shape:
            raise UserError(
                f"The tensor {name!r} of {str(path)!r} has the shape {tensor.shape}, and the model's has "
                f"{tuple(ours[name].shape)}: convert the model as the saved one was."
            )
    active = {name: saved.read(name, ours[name]) for name in saved.tensors if not name.startswith(RESTING)}
    model.load_state_dict(active, strict=False)
    with torch.no_grad():
        for name in saved.tensors.keys() - active.keys():
            if name in ours:  # in place, since an optimizer has this parameter
                ours[name].copy_(saved.read(name, ours[name]))
            else:
                _, layer, key = name.split(":")
                by_name[layer].resting_bitwidths[key] = nn.Parameter(saved.read(name).to(by_name[layer].weight.device))


def _layers(model: nn.Module) -> dict[str, Linear]:
    return {name: linear_of(layer) for name, layer in converted_layers(model).items()}


def _states(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state, those of switched off samplings included."""
    state = model.state_dict()
    tensors = {name: state[name] for name in state_names(model)}
    for name, layer, key in resting_bitwidths(model):
        tensors[f"{RESTING}{name}:{key}"] = layer.resting_bitwidths[key].detach()
    return tensors


def _fingerprint(layers: Mapping[str, Linear]) -> str:
    """Return a hash of a few numbers of each unsharded weight, which tells one checkpoint of a run from another."""
    weights = [local for layer in layers.values() if not isinstance(local := layer.weight.detach(), DTensor)]
    if not weights:
        return ""
    few = torch.cat([weight.flatten()[:16].to(torch.bfloat16).cpu() for weight in weights])
    return hashlib.sha256(few.view(torch.int16).numpy().tobytes()).hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            description = json.loads((file.metadata() or {}).get("dither", "null"))
    except FileNotFoundError:
        raise UserError(f"There is no training state {str(path)!r}: give the folder of a checkpoint that has {FILE}.") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"The training state {str(path)!r} cannot be read: {error}.") from None
    keys = {"version", "plan", "seeds", "weights", "others"}
    if not isinstance(description, dict) or set(description) != keys or description["version"] != VERSION:
        raise UserError(f"The file {str(path)!r} is no training state of version {VERSION}.")
    return tensors, description
