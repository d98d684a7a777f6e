"""Export the adapters of a run as a folder that PEFT loads."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dither.errors import UserError
from dither.evaluate.held_out import evaluating
from dither.exporting.layers import Layout
from dither.exporting.record import TOLERANCE, require, sample_tokens
from dither.exporting.tokenizer_files import AnyTokenizer, write_tokenizer
from dither.models import CausalLM
from dither.models.folder_files import appearing, write_json
from dither.models.lora import adapter_tensors, merged_model, peft_config
from dither.models.settings import Lora

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
    with appearing(folder) as place:
        save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(place))
        if tokenizer is not None:
            write_tokenizer(tokenizer, place, None)
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
    merged = merged_model(model).cpu()
    tokens = sample_tokens(model.embedding.num_embeddings, getattr(model.config, "max_position_embeddings", None))
    with evaluating(merged):
        expected = merged(tokens).float()
    adapted = _peft_model(_plain_base(model), place)
    difference = (adapted(input_ids=tokens, use_cache=False).logits.float() - expected).abs().max().item()
    largest = expected.abs().max().item()
    if not math.isfinite(difference) or difference > TOLERANCE * max(1.0, largest):
        raise UserError(
            f"The logits of the exported adapters differ by {difference:.2g} from those of the trained model (largest "
            f"{largest:.3g}): nothing was written; this is a defect, please report it."
        )
    own = None
    if (Path(record.base) / "config.json").is_file():
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(record.base, dtype=torch.float32, trust_remote_code=False)
        theirs = _peft_model(base, place)(input_ids=tokens, use_cache=False).logits.float()
        own = (theirs - expected).abs().max().item()
    return AdapterExport(record.path, record.parameters, record.bytes, record.base, difference, own, largest)


def _peft_model(base: Any, place: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(base, str(place)).eval()


@torch.no_grad()
def _plain_base(model: CausalLM) -> Any:
    """Return the base as a model of transformers, with the numbers of its codes, without adapters."""
    import transformers

    base = merged_model(model, adapters=False)
    layout = Layout(base)
    if layout.is_transformers:
        return layout.model.cpu().eval()
    fields = dict(layout.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        made = transformers.AutoModelForCausalLM.from_config(config).float()
    missing, unexpected = made.load_state_dict(base.cpu().state_dict(), strict=False)
    tied = {name for name in missing if "lm_head" in name and getattr(config, "tie_word_embeddings", False)}
    if set(missing) - tied or unexpected:
        raise UserError(f"transformers does not take the base: {', '.join([*missing, *unexpected][:3])}.")
    made.tie_weights()
    return made.eval()
