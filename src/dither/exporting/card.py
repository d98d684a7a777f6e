"""The model card of an exported model: what it is, what the cast costs, and how it was made."""

import json
from collections.abc import Mapping
from typing import Any

from dither.exporting.record import Export
from dither.precision import Plan

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
