"""Initial weights from a checkpoint of another run."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from dither import checkpoint
from dither.checkpoint.foreign import is_dcp, open_dcp
from dither.checkpoint.format import MANIFEST
from dither.checkpoint.read import LoadedTensors, SavedTensors, TensorSource
from dither.errors import UserError
from dither.models.saved_runs import saved_weights
from dither.models.torchtitan_names import PREFIXES, halves_from_pairs, rotates, titan_names
from dither.train.files import CHECKPOINTS, CONFIG


def checkpoint_of(path: str | Path) -> tuple[Path, list[str]]:
    """Return the checkpoint at a path, and why others were passed over: the path itself, or the newest whole one of a run."""
    path = Path(path)
    if os.path.isfile(path / CONFIG):
        newest, skipped = checkpoint.newest(path / CHECKPOINTS)
        if newest is None:
            raise UserError(f"The run {str(path)!r} has no whole checkpoint yet.")
        return newest, [why for _, why in skipped]
    if not os.path.isfile(path / MANIFEST):
        raise UserError(
            f"{str(path)!r} is neither a run (config.toml), nor a checkpoint (manifest.json), nor a model (config.json): name "
            "a folder that `dither train` or `dither export` wrote, or one of Hugging Face."
        )
    return path, []


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the weights of a checkpoint into a model that has not been converted yet.

    Float32 master weights are used where the checkpoint has them. Optimizer states and learned bitwidths are not read.

    Args:
        model: The model, whose tensors must have the names and shapes of those in the checkpoint.
        path: A run, whose newest whole checkpoint is read, a checkpoint, or one of torch.distributed.checkpoint, such as
            torchtitan's of Llama 3.
    """
    if is_dcp(path):
        with open_dcp(path) as source:
            _load_dcp(model, source)
        return
    found, _ = checkpoint_of(path)
    with SavedTensors(found) as saved:
        names = saved_weights(saved)
        for name, value in model.state_dict(keep_vars=True).items():
            if name not in names:
                raise UserError(
                    f"The checkpoint {str(found)!r} has no tensor {name!r}: set [model] as in the run that made it."
                )
            _check_shape(name, saved.tensors[names[name]].shape, value, found)
            value.copy_(saved.read(names[name], value))


def _check_shape(name: str, shape: tuple[int, ...], value: Tensor, path: Path) -> None:
    if shape != tuple(value.shape):
        raise UserError(
            f"The tensor {name!r} has the shape {list(shape)} in {str(path)!r} and {list(value.shape)} in "
            "this model: set [model] and data.tokenizer as in the run that made it."
        )


def _load_dcp(model: nn.Module, source: TensorSource) -> None:
    """Copy weights of a DCP checkpoint that has the names of the model, or those of torchtitan's Llama 3."""
    wanted: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in first:
            tied[name] = first[id(value)]
        else:
            wanted[name] = value
            first[id(value)] = name
    places, lacking = _places(list(wanted), source)
    if lacking:
        some = ", ".join(sorted(source.tensors)[:3]) or "none"
        raise UserError(
            f"The checkpoint {str(source.path)!r} has no tensor {lacking!r}, and no other name for it; it has "
            f"{some}: set [model] as in the run that made it."
        )
    for name, other in tied.items():
        own, missing = _places([name, other], source)
        if not missing and not torch.equal(source.box(own[name]), source.box(own[other])):
            raise UserError(
                f"The checkpoint {str(source.path)!r} has a {name!r} of its own, which this model ties to {other!r}."
            )
    head_size = getattr(getattr(model, "config", None), "head_dim", None)
    for name, value in wanted.items():
        _check_shape(name, source.tensors[places[name]].shape, value, source.path)
        if rotates(name) and not places[name].endswith(name):
            if head_size is None:
                raise UserError(f"The model {type(model).__name__} has no head_dim, by which {places[name]!r} is reordered.")
            whole = {name: halves_from_pairs(source.box(places[name]), int(head_size))}
            value.copy_(LoadedTensors(whole).read(name, value))
        else:
            value.copy_(source.read(places[name], value))


def _places(wanted: list[str], source: TensorSource) -> tuple[dict[str, str], str]:
    """Return the stored name of each tensor of the model, and the first tensor that has none, or "".

    The names are those of the model or of torchtitan, with the prefix under which most of them are found.
    """
    best: dict[str, str] = {}
    for prefix in PREFIXES:
        for names_of in (lambda name: (name,), titan_names):
            found = {}
            for name in wanted:
                theirs = [prefix + each for each in names_of(name) if prefix + each in source.tensors]
                if theirs:
                    found[name] = theirs[0]
            best = found if len(found) > len(best) else best
    return best, next((name for name in wanted if name not in best), "")
