"""Hugging Face folders whose weights are in few bits, with the weights dequantized."""

from pathlib import Path
from typing import Any

import torch

from dither.errors import UserError
from dither.models.folder_files import CONFIG, read_json


def is_in_few_bits(folder: Path) -> bool:
    """Return True if the config of a folder has a `quantization_config`."""
    return read_json(folder / CONFIG).get("quantization_config") is not None


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
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") in ("compressed-tensors", "fp8"):
        for group in quantization.get("config_groups", {}).values():
            group["input_activations"] = None
        quantization["dequantize"] = True
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
    return model.float().eval()
