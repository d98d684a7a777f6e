"""The record of an export."""

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.evaluate.held_out import evaluating
from dither.models.folder_files import load_dequantized
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
    """Why it stays in 16 bits though another format was asked for, or ""."""

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Check:
    """A comparison of the logits of the exported folder, as transformers loads it, with those of our dequantized model."""

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
    layers: tuple[ExportedLayer, ...]
    parameters: int
    bytes: int
    """Bytes of all files of weights."""
    loss_before: float | None = None
    """Loss before the cast."""
    loss_after: float | None = None
    check: Check | None = None
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[ExportedLayer, ...]:
        """Return the layers that stay in 16 bits for a reason."""
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
        lines = [f"{self.path}: {self.parameters:,} parameters in {_megabytes(self.bytes)}"]
        lines += [
            f"  {format}: {count} {'layer' if count == 1 else 'layers'}, {weights:,} weights, {bits:.2f} bits each"
            for format, count, weights, bits in self.sizes()
        ]
        reasons: dict[str, list[str]] = {}
        for layer in self.kept:
            reasons.setdefault(layer.reason, []).append(layer.name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            lines.append(f"  in 16 bits: {', '.join(names[:2])}{more}: {reason}")
        if self.loss_before is not None and self.loss_after is not None:
            change = self.loss_after - self.loss_before
            lines.append(f"  held-out loss {self.loss_before:.4f} -> {self.loss_after:.4f} nats per token ({change:+.4f})")
        if self.check is not None:
            apart, largest = f"{self.check.difference:.2g}", f"{self.check.largest:.3g}"
            lines.append(f"  checked with transformers: logits differ by at most {apart}, and the largest is {largest}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.2f} MB"


TOLERANCE = 1e-5
"""The largest difference of logits that passes, relative to the largest logit or 1."""

TOKENS = 32


def require(package: str, why: str, extra: str = "export") -> None:
    """Raise unless a package is installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{why} needs {package.replace('_', '-')}, which is not installed: pip install 'dither[{extra}]'.")


def load(place: Path, *, quantized: bool, vocab_size: int | None = None) -> Any:
    """Load a folder or a GGUF file with transformers: weights are dequantized, and products are those of float32 inputs."""
    require("transformers", "--check")
    require("accelerate", "--check")
    if quantized:
        require("compressed_tensors", "--check of this format")
    if place.is_file():
        import transformers

        config = transformers.AutoConfig.from_pretrained(place.parent, gguf_file=place.name, trust_remote_code=False)
        if config.model_type == "gpt2":  # whose sizes transformers 5.23 does not take from the file
            config.vocab_size, config.n_positions = vocab_size or config.vocab_size, config.n_ctx
        read = transformers.AutoModelForCausalLM.from_pretrained
        return read(place.parent, gguf_file=place.name, config=config, dtype=torch.float32, trust_remote_code=False).eval()
    return load_dequantized(place)


def sample_tokens(vocab_size: int, longest: int | None) -> Tensor:
    """Return two sequences of tokens spread over the vocabulary."""
    count = min(TOKENS, longest or TOKENS)
    return torch.randint(vocab_size, (2, count), generator=torch.Generator().manual_seed(0))


def check(place: Path, ours: nn.Module, *, quantized: bool, vocab_size: int, longest: int | None) -> Check:
    """Compare the logits of a folder with those of our model; raise if they differ by more than `TOLERANCE`."""
    tokens = sample_tokens(vocab_size, longest)
    with torch.no_grad():
        model = load(place, quantized=quantized, vocab_size=vocab_size)
        theirs: Tensor = model(input_ids=tokens, use_cache=False).logits.float()
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


ENGINES = {
    "bf16": "transformers, vLLM and everything else that reads Hugging Face folders",
    "fp16": "transformers, vLLM and everything else that reads Hugging Face folders",
    "fp8-block": "vLLM; transformers (with accelerate; without a GPU it dequantizes the weights)",
}

MOST_ROWS = 40


def model_card(record: Export, config: Mapping[str, Any], plan: Plan | None) -> str:
    """Return the text of README.md."""
    engines = ENGINES.get(record.format, "vLLM; transformers with compressed-tensors")
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
    return [*lines, f"| after the cast | {record.loss_after:.5f} |", ""]


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
            f"Checked with {by}: over {record.check.tokens} tokens the logits differ by at most {record.check.difference:.2g} "
            f"from those of the dequantized model, whose largest logit is {record.check.largest:.3g}.",
            "",
        ]
    lines += [f"{note}\n" for note in record.notes]
    return [*lines, "Versions: " + ", ".join(f"{name} {version}" for name, version in libraries.items()) + ".", ""]


def _plain(value: object) -> str:
    """Return a value as text for a cell of a table."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")
