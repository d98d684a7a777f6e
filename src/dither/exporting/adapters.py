"""Export the adapters of a run as a folder that PEFT loads."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dither.exporting.record import check_difference, logit_difference, require, sample_tokens
from dither.exporting.tokenizer_files import AnyTokenizer, TokenizerFiles
from dither.files import new_folder
from dither.models import CausalLM
from dither.models.deployment import StoredModel
from dither.models.folder_files import check_new, write_json
from dither.models.lora import adapter_tensors, merged_model, peft_config
from dither.models.sizes import Lora
from dither.models.transformers_models import hf

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "dither_export.json"


@dataclass(frozen=True)
class AdapterExport:
    """An exported folder of adapters. Prints as a few lines."""

    path: Path
    parameters: int
    bytes: int
    base: str
    difference: float | None = None
    """Largest difference of logits between PEFT's model, with the numbers of the codes as base, and the trained one."""
    own_base_difference: float | None = None
    """The same with the base's own weights: what the codes of the base change; None if the base is no Hugging Face folder."""
    largest: float | None = None
    """Largest magnitude of a logit."""

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.parameters:,} parameters of adapters in {self.bytes / 1e6:.2f} MB, for {self.base}"]
        if self.difference is not None and self.largest is not None:
            said = f"  checked with peft: logits differ by at most {self.difference:.2g}, and the largest is {self.largest:.3g}"
            lines.append(said)
        if self.own_base_difference is not None:
            lines.append(f"  on the base's own weights, which are not the codes, they differ by {self.own_base_difference:.2g}")
        return "\n".join(lines)


def export_adapters(
    model: CausalLM,
    settings: Lora,
    folder: Path,
    *,
    base: str,
    tokenizer: AnyTokenizer | None = None,
    check: bool = False,
    provenance: dict[str, Any] | None = None,
) -> AdapterExport:
    """Write the adapters of a model as a folder that `peft.PeftModel.from_pretrained(base, folder)` loads.

    Args:
        model: The adapted model.
        settings: The section [lora] of its run.
        folder: A new or empty folder. It appears complete or not at all.
        base: The Hugging Face folder or the checkpoint of the base, which the folder refers to.
        tokenizer: The tokenizer to write beside the adapters.
        check: Load the folder with PEFT and compare logits before it appears.
        provenance: Plain values for the record.
    """
    config = peft_config(settings, model, base)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in adapter_tensors(model).items()}
    check_new(folder)
    with new_folder(folder, "The adapters") as place:
        save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(place))
        if tokenizer is not None:
            TokenizerFiles.of(tokenizer).write(place, None)
        sizes = sum(tensor.nbytes for tensor in tensors.values())
        record = AdapterExport(folder, sum(tensor.numel() for tensor in tensors.values()), sizes, base)
        if check:
            record = _checked(record, model, place)
        plain = {**vars(record), "path": folder.name, "provenance": dict(provenance or {})}
        write_json(place / RECORD, plain)
    return record


@torch.no_grad()
def _checked(record: AdapterExport, model: CausalLM, place: Path) -> AdapterExport:
    """Compare PEFT's logits with those of the trained model, whose inputs are not cast here; raise if they differ."""
    for package, extra in (("transformers", "hf"), ("peft", "lora")):
        require(package, "--check", extra)
    import peft

    def on(base: Any) -> tuple[float, float]:
        return logit_difference(peft.PeftModel.from_pretrained(base, str(place)).eval(), merged, tokens)

    merged, stored = merged_model(model).cpu(), StoredModel(merged_model(model, adapters=False).cpu())
    tokens = sample_tokens(model, model.embedding.num_embeddings)
    base = stored.model
    if not stored.is_transformers:
        base = hf(stored.config).hf
        base.load_state_dict(stored.model.state_dict())
    difference, largest = on(base)
    check_difference(difference, largest, "exported adapters", "the trained model")
    is_folder = (Path(record.base) / "config.json").is_file()
    own = on(hf(record.base, dtype=torch.float32).hf)[0] if is_folder else None
    return replace(record, difference=difference, own_base_difference=own, largest=largest)
