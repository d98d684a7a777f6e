"""Training state of converted layers in a file of its own: bitwidths, histories of delayed scaling, precisions and seeds.

Weights are saved by the library that owns the loop. Its readers know nothing of the other tensors, so those are saved beside.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dither.checkpoint.state import check_same_layers, converted_linears, resting_bitwidths
from dither.errors import UserError
from dither.nn.convert import Conversion
from dither.nn.linear import Linear
from dither.nn.sampling import BITWIDTHS
from dither.nn.sites import converted_layers, linear_of
from dither.spec import OPERANDS, LayerPrecision, Plan

FILE = "dither_state.safetensors"
"""Name of the file within a checkpoint folder."""
VERSION = 1
"""Version of the file's description."""
RESTING = "resting:"
"""Prefix of bitwidths whose sampling is switched off; they are not in the model's state_dict."""
STATES = frozenset((*BITWIDTHS, *(f"{operand}_history" for operand in OPERANDS)))
"""Last parts of the names that conversion adds to a model's state_dict."""


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
    tensors = {name: _whole(value) for name, value in _tensors(model).items()}
    layers = {name: linear_of(layer) for name, layer in converted_layers(model).items()}
    description = {
        "version": VERSION,
        "layers": {
            name: {"precision": layer.choice.planned.to_dict(), "compute": layer.choice.compute, "seed": layer.seed}
            for name, layer in layers.items()
        },
        "weights": _fingerprint(layers),
        "others": dict(others or {}),
    }
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
    layers = {name: linear_of(layer) for name, layer in converted_layers(model).items()}
    saved = description["layers"]
    check_same_layers(layers, saved, "saved state")
    for name, layer in layers.items():
        if saved[name]["seed"] != layer.seed:
            raise UserError(
                f"The layer {name!r} was saved with the seed {saved[name]['seed']}, and has the seed {layer.seed} now: "
                f"use dither.convert(model, plan, seed={saved[name]['seed']})."
            )
    if description["weights"] != _fingerprint(layers):
        raise UserError(
            f"The weights of the model are not those that {str(path)!r} was saved with: load the weights of that folder first."
        )
    precisions = {name: LayerPrecision.from_dict(layer["precision"]) for name, layer in saved.items()}
    compute: Any = next((layer["compute"] for layer in saved.values()), "bf16")
    plan = Plan(layers=tuple(precisions.items()), compute=compute)
    if layers and not (conversion := Conversion.of(model)).has(plan):
        conversion.switch(plan)
    _restore(model, tensors, path)
    others: dict[str, Any] = description["others"]
    return others


def _restore(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into a model with the right plan; raise before the first copy if one does not fit."""
    ours = _tensors(model)
    by_name = dict(converted_linears(model))
    for name in sorted(set(ours) - set(tensors)):
        if not name.startswith(RESTING):
            raise UserError(f"The file {str(path)!r} has no tensor {name!r}: convert the model as the saved one was.")
    for name, tensor in tensors.items():
        if name not in ours and not (name.startswith(RESTING) and name.split(":")[1] in by_name):
            raise UserError(f"The file {str(path)!r} has a tensor {name!r} that the model lacks: convert as the saved one was.")
        if name in ours and ours[name].shape != tensor.shape:
            raise UserError(
                f"The tensor {name!r} of {str(path)!r} has the shape {tuple(tensor.shape)}, and the model's has "
                f"{tuple(ours[name].shape)}: convert the model as the saved one was."
            )
    active = {name: _like(tensor, ours[name]) for name, tensor in tensors.items() if not name.startswith(RESTING)}
    model.load_state_dict(active, strict=False)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in active:
                continue
            if name in ours:  # in place, since an optimizer has this parameter
                ours[name].copy_(_like(tensor, ours[name]))
            else:
                _, layer, key = name.split(":")
                by_name[layer].resting_bitwidths[key] = nn.Parameter(tensor.to(by_name[layer].weight.device))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state, those of switched off samplings included."""
    state = model.state_dict()
    tensors = {name: state[name] for name in state_names(model)}
    for name, layer, key in resting_bitwidths(model):
        tensors[f"{RESTING}{name}:{key}"] = layer.resting_bitwidths[key].detach()
    return tensors


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().contiguous()


def _like(value: Tensor, ours: Tensor) -> Tensor:
    """Return a whole tensor as a shard if the model has shards."""
    if isinstance(ours, DTensor):
        return distribute_tensor(value.to(ours.device), ours.device_mesh, ours.placements, src_data_rank=None)
    return value


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
    keys = {"version", "layers", "weights", "others"}
    if not isinstance(description, dict) or set(description) != keys or description["version"] != VERSION:
        raise UserError(f"The file {str(path)!r} is no training state of version {VERSION}.")
    return tensors, description
