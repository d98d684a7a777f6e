"""Models from the runs and checkpoints of `dither train`: the weights alone, without the state of training."""

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dither.errors import UserError
from dither.models.causal import CausalLM
from dither.models.presets import empty, preset
from dither.models.transformers_models import hf
from dither.safe_files import Refused, digest, open_plainly, read_json, to_json

RUN, CHECKPOINTS, MANIFEST, PLAIN = "config.toml", "checkpoints", "manifest.json", "plain.json"


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
        files = _checked_files(path)
        plain, _ = read_json(path / PLAIN)
        text = plain["others"]["config"]
        section = tomllib.loads(text).get("model", {})
        groups, same = plain["optimizer"]["groups"], plain["same"]
        return SavedWeights(path, section, _weights(path, files, groups, same))
    except Refused as error:
        raise UserError(f"The checkpoint {str(path)!r} is refused: {error}.") from None
    except (KeyError, TypeError, tomllib.TOMLDecodeError):
        raise UserError(f"The checkpoint {str(path)!r} was not made by `dither train`: it has no config.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"The checkpoint {str(path)!r} cannot be read: {error}.") from None


def _checked_files(path: Path) -> list[str]:
    """Return the files of tensors of a checkpoint, after comparing all sizes and hashes with its manifest."""
    manifest, _ = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != "dither checkpoint" or manifest.get("version") != 1:
        raise Refused(f"{MANIFEST} is not that of a checkpoint of version 1")
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if hashlib.sha256(to_json(body, "manifest")).hexdigest() != manifest.get("sha256"):
        raise Refused(f"{MANIFEST} was changed: it is not what its own SHA-256 says")
    for name, entry in manifest["files"].items():
        if not re.fullmatch(r"tensors-[0-9]{5}\.safetensors|plain\.json", name):
            raise Refused(f"{MANIFEST} names the file {name!r:.80}")
        with open_plainly(path / name) as file:
            if os.fstat(file.fileno()).st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                raise Refused(f"{name} is not what the manifest says: it was changed or truncated")
    return [name for name in manifest["files"] if name != PLAIN]


def _weights(path: Path, files: list[str], groups: Any, same: Mapping[str, str]) -> dict[str, Tensor]:
    masters = {
        f"optimizer:{index}:master": name
        for group in groups
        for index, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    weights: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for file in files:
        with safe_open(path / file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                if key.startswith("model:"):
                    weights[key.removeprefix("model:")] = opened.get_tensor(key)
                elif key in masters:
                    wide[masters[key]] = opened.get_tensor(key)
    for name, master in wide.items():
        if name in weights and master.shape == weights[name].shape:
            weights[name] = master
    return weights | {name: weights[first] for name, first in same.items() if first in weights}
