"""Initial weights from a checkpoint of another run."""

import os
from pathlib import Path

import torch
from torch import nn

from dither.errors import UserError
from dither.models.saved_runs import saved_weights
from dither.storage.reading import SavedTensors
from dither.train import checkpoint
from dither.train.files import CHECKPOINTS, CONFIG
from dither.train.stored import Stored


def checkpoint_of(path: str | Path) -> tuple[Path, list[str]]:
    """Return the checkpoint at a path, and why others were passed over: the path itself, or the newest whole one of a run."""
    path = Path(path)
    if os.path.isfile(path / CONFIG):
        newest, skipped = checkpoint.newest(path / CHECKPOINTS)
        if newest is None:
            raise UserError(f"The run {str(path)!r} has no whole checkpoint yet.")
        return newest, [why for _, why in skipped]
    if not os.path.isfile(path / checkpoint.MANIFEST):
        raise UserError(
            f"{str(path)!r} is neither a run (config.toml), nor a checkpoint (manifest.json), nor a model (config.json)."
        )
    return path, []


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the weights of a checkpoint into a model that has not been converted yet.

    Float32 master weights are used where the checkpoint has them. Optimizer states and learned bitwidths are not read.

    Args:
        model: The model, whose tensors must have the names and shapes of those in the checkpoint.
        path: A run, whose newest whole checkpoint is read, or a checkpoint.
    """
    found, _ = checkpoint_of(path)
    with SavedTensors(found) as saved:
        names = saved_weights(saved)
        for name, value in model.state_dict(keep_vars=True).items():
            if name not in names:
                raise UserError(
                    f"The checkpoint {str(found)!r} has no tensor {name!r}: set [model] as in the run that made it."
                )
            shape = saved.tensors[names[name]].shape
            if shape != tuple(value.shape):
                raise UserError(
                    f"The tensor {name!r} has the shape {list(shape)} in {str(found)!r} and {list(value.shape)} in "
                    "this model: set [model] and data.tokenizer as in the run that made it."
                )
            value.copy_(Stored(saved).read(names[name], value))
