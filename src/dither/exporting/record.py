"""The record of an export, its check with transformers, and its model card."""

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dither.data.text import first_line
from dither.errors import UserError
from dither.evaluate.held_out import evaluating
from dither.models.transformers_models import from_transformers, loaded, plain_copy
from dither.spec import Plan


@dataclass(frozen=True)
class ExportedLayer:
    """A linear layer of an exported model."""

    name: str
    shape: tuple[int, ...]
    """Outputs and inputs; before them the number of experts, if there are any."""
    format: str
    bits: float
    """Bits per weight in the file, scales included."""
    error: float
    """Norm of the change divided by the norm of the weight."""
    reason: str = ""
    """Why it is not in the format that was asked for, or ""."""

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)


def relative_error(numbers: Tensor, weight: Tensor) -> float:
    """Return the norm of the change of a weight divided by its norm."""
    change, size = (torch.linalg.vector_norm(each, dtype=torch.float64).item() for each in (numbers - weight, weight))
    return change / size if size else 0.0


@dataclass(frozen=True)
class LogitCheck:
    """A comparison of the exported folder, as transformers loads it, with our dequantized model."""

    weights: int
    """The number of weights, all of which are equal."""

    difference: float
    """The largest difference of two logits."""
    largest: float
    """The largest magnitude of a logit."""
    tokens: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Export:
    """An exported model. Prints as a few lines."""

    path: Path
    format: str
    layers: tuple[ExportedLayer, ...] = ()
    parameters: int = 0
    bytes: int = 0
    """Bytes of all files of weights."""
    loss_before: float | None = None
    """Loss before the cast."""
    loss_after: float | None = None
    loss_base: float | None = None
    """Loss of the base alone, for merged adapters."""
    check: LogitCheck | None = None
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[ExportedLayer, ...]:
        """Return the layers that are not in the format that was asked for."""
        return tuple(layer for layer in self.layers if layer.reason)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = asdict(self)
        found["path"] = self.path.name
        found["layers"] = [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers]
        return found | {"notes": list(self.notes), "provenance": dict(self.provenance)}

    def sizes(self) -> list[tuple[str, int, int, float]]:
        """Return (format, layers, weights, bits per weight) of the linear layers, by format."""
        rows = []
        for format in dict.fromkeys(layer.format for layer in self.layers):
            here = [layer for layer in self.layers if layer.format == format]
            weights = sum(layer.weights for layer in here)
            rows.append((format, len(here), weights, sum(layer.bits * layer.weights for layer in here) / max(weights, 1)))
        return rows

    def __str__(self) -> str:
        size = f"{self.bytes / 1e9:.2f} GB" if self.bytes >= 10**9 else f"{self.bytes / 1e6:.2f} MB"
        lines = [f"{self.path}: {self.parameters:,} parameters in {size}"]
        lines += [
            f"  {format}: {count} {'layer' if count == 1 else 'layers'}, {weights:,} weights, {bits:.2f} bits each"
            for format, count, weights, bits in self.sizes()
        ]
        reasons: dict[tuple[float, str], list[str]] = {}
        for layer in self.kept:
            reasons.setdefault((layer.bits, layer.reason), []).append(layer.name)
        for (bits, reason), names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"  in {bits:.3g} bits: {', '.join(names[:2])}{more}: {reason}")
        if self.loss_before is not None and self.loss_after is not None:
            change = self.loss_after - self.loss_before
            lines.append(f"  held-out loss {self.loss_before:.4f} -> {self.loss_after:.4f} nats per token ({change:+.4f})")
        if self.loss_base is not None:
            lines.append(f"  of the base without its adapters {self.loss_base:.4f}")
        if self.check is not None:
            apart, largest = f"{self.check.difference:.2g}", f"{self.check.largest:.3g}"
            weights = f"{self.check.weights:,} weights are equal"
            lines.append(
                f"  checked with transformers: {weights}, logits differ by at most {apart}, and the largest is {largest}"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


TOLERANCE = 1e-5
"""The largest difference of logits that passes, relative to the largest logit or 1."""

TOKENS = 32


def require(package: str, why: str, extra: str = "export") -> None:
    """Raise unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{why} needs {package.replace('_', '-')}, which is not installed: pip install 'dither[{extra}]'.")


def load(place: Path, config: Mapping[str, Any] | None = None) -> Any:
    """Load a folder or a GGUF file with transformers: weights are dequantized, and products are those of float32 inputs.

    Casts of inputs amplify the last bits of sums, which differ between implementations of a model; without them, differences
    of logits are those of the weights.

    Args:
        place: A folder or a GGUF file.
        config: The config of the model in a GGUF file, of which transformers reads only some fields.
    """
    require("transformers", "--check")
    require("accelerate", "--check")
    if place.is_file():
        import transformers

        fields = dict(config or {})
        settings = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        options = {"config": settings, "gguf_file": place.name, "dtype": torch.float32, "trust_remote_code": False}
        read = transformers.AutoModelForCausalLM.from_pretrained
        return from_transformers(place, lambda: read(place.parent, **options)).eval()
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(place, trust_remote_code=False)
    quantization: Any = getattr(settings, "quantization_config", None) or {}
    method = quantization.get("quant_method")
    if method == "fp8":
        quantization["dequantize"] = True
    elif method == "compressed-tensors":
        require("compressed_tensors", "--check of this format")
        for group in quantization.get("config_groups", {}).values():
            group["input_activations"] = None
    model = loaded(str(place), config=settings, dtype=torch.float32)
    if method == "compressed-tensors":  # transformers 5.23 dequantizes all layers by the first of several formats
        from_transformers(place, lambda: model.hf_quantizer.compressor.decompress_model(model=model))
    return (plain_copy(model, torch.float32) if quantization else model).eval()


def sample_tokens(model: Any, vocab_size: int) -> Tensor:
    """Return two sequences of tokens spread over the vocabulary, no longer than a model takes."""
    count = min(TOKENS, getattr(model.config, "max_position_embeddings", None) or TOKENS)
    return torch.randint(vocab_size, (2, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logit_difference(theirs: Any, ours: Any, tokens: Tensor) -> tuple[float, float]:
    """Return the largest difference between the logits of a model of transformers and of ours, and the largest logit."""
    try:
        found: Tensor = theirs(input_ids=tokens, use_cache=False).logits.float()
    except Exception as error:  # a library of kernels or of formats may raise anything
        raise UserError(f"transformers cannot run the exported model: {first_line(error)}.") from None
    with evaluating(ours):
        expected = ours(tokens.to(next(ours.parameters()).device)).float().cpu()
    return (found - expected).abs().max().item(), expected.abs().max().item()


def check_difference(difference: float, largest: float, what: str, other: str) -> None:
    """Raise if logits differ by more than `TOLERANCE`."""
    if not math.isfinite(difference) or difference > TOLERANCE * max(1.0, largest):
        raise UserError(
            f"The logits of the {what} differ by {difference:.2g} from those of {other} (largest {largest:.3g}): nothing was "
            "written; this is a defect, please report it."
        )


def _equal_weights(theirs: Any, ours: Any) -> int:
    """Return the number of weights in two models; raise unless all numbers are equal (GGUF's MXFP4 drops the sign of zeros)."""
    found, weights = theirs.state_dict(), 0
    for name, tensor in getattr(ours, "hf", ours).named_parameters():
        if name not in found or not torch.equal(found[name].float().cpu(), tensor.detach().float().cpu()):
            raise UserError(
                f"transformers reads other numbers of {name!r} than those of our codes: nothing was written; this is a defect, "
                "please report it."
            )
        weights += tensor.numel()
    return weights


def check_logits(place: Path, ours: Any, vocab_size: int, config: Mapping[str, Any] | None = None) -> LogitCheck:
    """Compare a folder or a GGUF file with our model; raise unless weights are equal, and logits up to `TOLERANCE`."""
    tokens, theirs = sample_tokens(ours, vocab_size), load(place, config)
    weights = _equal_weights(theirs, ours)
    difference, largest = logit_difference(theirs, ours, tokens)
    check_difference(difference, largest, "exported folder", "the dequantized model")
    packages = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    versions: dict[str, str] = {name: packages[name] for name in ("transformers", "compressed-tensors") if name in packages}
    return LogitCheck(weights, difference, largest, tokens.numel(), versions)


ENGINES = {
    "bf16": "transformers, vLLM and everything else that reads Hugging Face folders",
    "fp16": "transformers, vLLM and everything else that reads Hugging Face folders",
    "fp8-block": "vLLM; transformers (with accelerate; without a GPU it dequantizes the weights)",
}

MOST_ROWS = 40


def model_card(record: Export, config: Mapping[str, Any], plan: Plan | None) -> str:
    """Return the text of README.md."""
    blocks = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    engines = ENGINES.get("fp8-block" if blocks else record.format, "vLLM; transformers with compressed-tensors")
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- dither", f"- {record.format}"]
    lines += ["---", "", f"# {_plain(record.path.name)}", ""]
    lines += [
        f"A {config['architectures'][0]} with {record.parameters:,} parameters, exported by Dither in the format "
        f"`{record.format}`. It loads in {engines}.",
        "",
        *_losses(record),
        *_sizes(record),
        *_kept(record),
        *_made(record, plan),
    ]
    return "\n".join(lines)


def _losses(record: Export) -> list[str]:
    lines = ["## Loss on held-out text", ""]
    if record.loss_before is None or record.loss_after is None:
        return [*lines, "Not measured.", ""]
    lines += ["| | loss, nats per token |", "|---|---|", f"| before the cast | {record.loss_before:.5f} |"]
    alone = [] if record.loss_base is None else [f"| the base without its adapters | {record.loss_base:.5f} |"]
    return [*lines, f"| after the cast | {record.loss_after:.5f} |", *alone, ""]


def _sizes(record: Export) -> list[str]:
    lines = ["## Sizes", "", "| format | linear layers | weights | bits per weight |", "|---|---|---|---|"]
    lines += [f"| {format} | {count} | {weights:,} | {bits:.2f} |" for format, count, weights, bits in record.sizes()]
    return [*lines, "", f"All files of weights have {record.bytes:,} bytes for {record.parameters:,} parameters.", ""]


def _kept(record: Export) -> list[str]:
    if not record.kept:
        return []
    lines = ["## Layers in 16 bits", "", "| layer | shape | reason |", "|---|---|---|"]
    for layer in record.kept[:MOST_ROWS]:
        lines.append(f"| `{layer.name}` | {' x '.join(map(str, layer.shape))} | {layer.reason} |")
    more = len(record.kept) - MOST_ROWS
    return [*lines, *([f"| and {more} more | | |"] if more > 0 else []), ""]


def _made(record: Export, plan: Plan | None) -> list[str]:
    given = dict(record.provenance)
    libraries = given.pop("versions", {})
    lines = ["## How it was made", ""]
    if command := given.pop("command", None):
        lines += ["```", str(command).replace("```", ""), "```", ""]
    own = given.pop("plan", None)
    if rows := [f"| {key} | {_plain(value)} |" for key, value in given.items() if value is not None]:
        lines += ["| | |", "|---|---|", *rows, ""]
    chosen = plan.to_dict() if plan is not None else own
    if chosen is not None:
        lines += ["The plan:", "", "```json", json.dumps(chosen, indent=1), "```", ""]
    if record.check is not None:
        by = ", ".join(f"{name} {version}" for name, version in record.check.versions.items())
        lines += [
            f"Checked with {by}: all {record.check.weights:,} weights are equal to those of the dequantized model, and over "
            f"{record.check.tokens} tokens the logits differ by at most {record.check.difference:.2g}; the largest is "
            f"{record.check.largest:.3g}.",
            "",
        ]
    lines += [f"{note}\n" for note in record.notes]
    return [*lines, "Versions: " + ", ".join(f"{name} {version}" for name, version in libraries.items()) + ".", ""]


def _plain(value: object) -> str:
    """Return a value as text for a cell of a table."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")
