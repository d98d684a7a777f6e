"""Models from the runs and checkpoints of `dither train`: the weights alone, without the state of training."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dither.checkpoint import SavedTensors
from dither.checkpoint.format import MANIFEST
from dither.errors import UserError
from dither.models.causal import CausalLM
from dither.models.presets import empty
from dither.models.sizes import preset
from dither.models.transformers_models import hf

RUN, CHECKPOINTS = "config.toml", "checkpoints"


class SavedWeights(NamedTuple):
    """The weights of a checkpoint, and the model that they belong to."""

    path: Path
    model: Mapping[str, Any]
    """The section [model] of its config."""
    tensors: Mapping[str, Tensor]
    """Weights by the names of parameters: float32 masters where there are any."""


def is_saved_run(folder: str | Path) -> bool:
    """Return whether a folder is a run or a checkpoint, and not a model of Hugging Face."""
    folder = Path(folder)
    return any(os.path.isfile(folder / name) for name in (RUN, MANIFEST)) and not os.path.isfile(folder / "config.json")


def load_saved(folder: str | Path, device: torch.device | str, dtype: torch.dtype | None) -> CausalLM:
    """Load the model of a run, from its newest whole checkpoint, or that of a checkpoint."""
    saved = read_saved(folder)
    if saved.tensors and all(".lora_" in name for name in saved.tensors):
        raise UserError(
            f"The checkpoint {str(saved.path)!r} holds adapters alone: write the whole model with `dither export RUN --merge "
            "-o FOLDER`, and load that folder."
        )
    chosen = dtype or _widest(saved.tensors)
    if saved.model.get("hf") is not None:
        model: CausalLM = hf(str(saved.model["hf"]), device=device, dtype=chosen)
    else:
        found = [tensor for name, tensor in saved.tensors.items() if re.search(r"(embed_tokens|wte)\.weight$", name)]
        if not found:
            raise UserError(f"The checkpoint {str(saved.path)!r} has no token embedding: it is not that of a language model.")
        model = empty(preset(saved.model.get("preset", "tiny"), vocab_size=int(found[0].shape[0])), device, chosen)
    with torch.no_grad():
        for name, value in model.named_parameters():
            stored = saved.tensors.get(name)
            if stored is None or stored.shape != value.shape:
                shape = "none" if stored is None else list(stored.shape)
                raise UserError(
                    f"The checkpoint {str(saved.path)!r} does not fit its config: the tensor {name!r} has the shape "
                    f"{list(value.shape)} in the model, and there it is {shape}."
                )
            value.copy_(stored)
    return model.train()


def _widest(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return max((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), key=lambda dtype: dtype.itemsize)


def read_saved(folder: str | Path) -> SavedWeights:
    """Return the weights of a checkpoint, or of the newest whole one of a run."""
    folder = Path(folder)
    if not os.path.isfile(folder / RUN):
        return _read(folder)
    steps = sorted((folder / CHECKPOINTS).glob("step-*"), key=lambda path: path.name.rjust(30), reverse=True)
    problem = ""
    for path in steps:
        try:
            return _read(path)
        except UserError as error:
            problem = problem or f" ({error})"
    raise UserError(f"The run {str(folder)!r} has no whole checkpoint{problem}.")


def _read(path: Path) -> SavedWeights:
    try:
        with SavedTensors(path) as saved:
            section = tomllib.loads(saved.plain["others"]["config"]).get("model", {})
            return SavedWeights(path, section, {name: saved.box(key) for name, key in saved_weights(saved).items()})
    except (KeyError, TypeError, tomllib.TOMLDecodeError):
        raise UserError(f"The checkpoint {str(path)!r} was not made by `dither train`: it has no config.") from None


def saved_weights(saved: SavedTensors) -> dict[str, str]:
    """Return the stored name of each weight: of float32 masters where there are any, and of tied weights under both names."""
    weights = {name.removeprefix("model:"): name for name in saved.tensors if name.startswith("model:")}
    for group in saved.plain["optimizer"]["groups"]:
        for name in group["params"]:
            master = saved.tensors.get(f"optimizer:{name}:master")
            if master is not None and name in weights and master.shape == saved.tensors[weights[name]].shape:
                weights[name] = f"optimizer:{name}:master"
    return weights | {name: weights[first] for name, first in saved.plain["same"].items() if first in weights}
