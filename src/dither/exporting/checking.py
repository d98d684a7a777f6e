"""Load an exported folder with transformers, and compare its logits with those of our own dequantized model."""

import importlib.metadata
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.exporting.record import Check
from dither.models.few_bits import load_dequantized
from dither.nn.deployment import evaluating

TOLERANCE = 1e-5
"""The largest difference of logits that passes, relative to the largest logit or 1."""

TOKENS = 32


def require(package: str, why: str, extra: str = "export") -> None:
    """Raise unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{why} needs {package.replace('_', '-')}, which is not installed: pip install 'dither[{extra}]'.")


def load(place: Path, *, quantized: bool) -> Any:
    """Load a folder or a GGUF file with transformers: weights are dequantized, and products are those of float32 inputs."""
    require("transformers", "--check")
    require("accelerate", "--check")
    if quantized:
        require("compressed_tensors", "--check of this format")
    if place.is_file():
        import transformers

        read = transformers.AutoModelForCausalLM.from_pretrained
        return read(place.parent, gguf_file=place.name, dtype=torch.float32, trust_remote_code=False).eval()
    return load_dequantized(place)


def sample_tokens(vocab_size: int, longest: int | None) -> Tensor:
    """Return two sequences of tokens spread over the vocabulary."""
    count = min(TOKENS, longest or TOKENS)
    return torch.randint(vocab_size, (2, count), generator=torch.Generator().manual_seed(0))


def check(place: Path, ours: nn.Module, *, quantized: bool, vocab_size: int, longest: int | None) -> Check:
    """Compare the logits of a folder with those of our model; raise if they differ by more than `TOLERANCE`."""
    tokens = sample_tokens(vocab_size, longest)
    with torch.no_grad():
        theirs: Tensor = load(place, quantized=quantized)(input_ids=tokens, use_cache=False).logits.float()
    with evaluating(ours):
        expected = ours(tokens.to(next(ours.parameters()).device)).float().cpu()
    difference, largest = (theirs - expected).abs().max().item(), expected.abs().max().item()
    if not math.isfinite(difference) or difference > TOLERANCE * max(1.0, largest):
        raise UserError(
            f"The logits of the exported folder differ by {difference:.2g} from those of the dequantized model (largest "
            f"{largest:.3g}): nothing was written; this is a defect, please report it."
        )
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "compressed-tensors") if _installed(name)}
    return Check(difference, largest, tokens.numel(), versions)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
