"""Folders of models: their files, written whole or not at all, and JSON."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dither.errors import UserError
from dither.files import Refused, from_json, read, sync

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def write_json(path: Path, value: object) -> None:
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path.name} cannot be written as JSON: {error}.") from None
    path.write_text(text + "\n", encoding="utf-8")


def check_new(folder: Path) -> None:
    """Raise unless a folder is new or empty."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"A model is saved into a new or empty folder, and {str(folder)!r} is neither.")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into; rename it to `folder` after everything in it is on disk."""
    check_new(folder)
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in sorted(partial.iterdir()):
            sync(path)
        sync(partial)
        os.replace(partial, folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The model could not be saved into {str(folder)!r}: {error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Links are followed, since Hugging Face's cache consists of them."""
    if not path.is_file():
        raise UserError(f"{path} is not a file.")
    try:
        value = from_json(read(path, follow=True))
    except Refused as error:
        raise UserError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {short(value)}, and not a JSON object.")
    return value


def short(value: object) -> str:
    """Return a value from a file as JSON of at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def is_in_few_bits(folder: Path) -> bool:
    """Return True if the config of a folder has a `quantization_config`."""
    return read_json(folder / CONFIG).get("quantization_config") is not None


def dequantize_at_loading(config: Any) -> Callable[[Any], None]:
    """Let transformers dequantize the weights in few bits of a config without casts of inputs; return what is left to do.

    transformers 5.23 dequantizes all layers by the first of several formats; compressed-tensors knows that of each.
    """
    quantization = getattr(config, "quantization_config", None)
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in ("compressed-tensors", "fp8"):
        return lambda model: None
    groups = quantization.get("config_groups", {})
    for group in groups.values():
        group["input_activations"] = None
    quantization["dequantize"] = len(groups) <= 1
    return (lambda model: None) if len(groups) <= 1 else lambda model: model.hf_quantizer.compressor.decompress_model(model)


def load_dequantized(folder: Path) -> Any:
    """Load a folder with transformers: weights are dequantized, and products are those of float32 inputs.

    Casts of inputs amplify the last bits of sums, which differ between implementations of a model; without them, differences
    of logits are those of the weights.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"The model {str(folder)!r} needs transformers, which is not installed: pip install 'dither[export]'."
        ) from None
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    finish = dequantize_at_loading(config)
    try:
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except ImportError as error:  # such as compressed-tensors or accelerate
        words = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"The weights of {str(folder)!r} are in few bits ({words}): pip install 'dither[export]'.") from None
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, said.get(what) or ())):
            raise UserError(f"transformers does not load {str(folder)!r}: {what.replace('_', ' ')} {', '.join(names[:3])}.")
    finish(model)
    return torch.nn.Module.float(model).eval()  # which transformers refuses for a config with few bits
