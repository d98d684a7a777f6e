"""Export a model as a Hugging Face folder: weights in any format, config, tokenizer, record and model card."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dither.console import Stage, silent
from dither.errors import UserError
from dither.evaluate.deployment import SLACK, Evaluate, plan_from_bitwidths
from dither.evaluate.held_out import evaluating
from dither.exporting.formats import AUTO, DENSE, FORMATS, EncodedLayer, check_format, encode, format_of
from dither.exporting.gguf import GGUF, GgufModel
from dither.exporting.record import Export, ExportedLayer, check_logits, model_card, relative_error
from dither.exporting.tokenizer_files import AnyTokenizer, TokenizerFiles
from dither.files import new_folder, sync
from dither.models.deployment import GGUF_ARCHITECTURES, Engine, LayerFormat, StoredModel, Wanted, choose
from dither.models.folder_files import CONFIG, WeightsWriter, check_new, write_json
from dither.models.transformers_models import HuggingFace, unconverted
from dither.nn.convert import convert
from dither.nn.linear import Linear
from dither.nn.sites import converted_layers, linear_of
from dither.spec import Cast, LayerPrecision, Plan
from dither.spec.deployment import DEPLOYMENTS
from dither.spec.patterns import escape
from dither.versions import versions

LEARNED = 0.9
"""The share of what merged adapters learned, in held-out loss, that a cast must keep."""

CHECKING = "Loading the result with transformers and comparing weights and logits"
"""The title of the stage of `check`."""

RECORD, CARD = "dither_export.json", "README.md"

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    format: str = "bf16",
    plan: Plan | None = None,
    tokenizer: AnyTokenizer | None = None,
    engine: Engine = "any",
    evaluate: Evaluate | None = None,
    loss_base: float | None = None,
    check: bool = False,
    max_shard_size: int | str = "5GB",
    provenance: Mapping[str, Any] | None = None,
    stage: Stage = silent,
) -> Export:
    """Write a model as a Hugging Face folder that transformers and vLLM load, and return a record of it.

    Layers whose sizes do not fit the format stay in BF16, and so does the output layer; the record says why. The folder holds
    the weights, config.json, generation_config.json, the tokenizer, a model card (README.md) and the record as JSON. It appears
    complete or not at all.

    Args:
        model: A causal language model of `dither.models` or of transformers, converted or not.
        folder: A new or empty folder.
        format: bf16, fp16, fp8-block, fp8-dynamic, mxfp8, mxfp4, mxfp4-w4a4, nvfp4, int8, int4-g32, int4-g128, or auto, which
            chooses per layer: by `plan`, by learned bitwidths, or by the casts of a converted model. With gguf-f16, gguf-q8_0,
            gguf-q4_0 or gguf-mxfp4, `folder` is a new GGUF file for llama.cpp.
        plan: For "auto", a plan whose casts of weights choose the formats; or the plan of `dither.qat` for `format`.
        tokenizer: A tokenizer of `dither.data` or of transformers, a tokenizer.json, or a folder that has one.
        engine: "any", or "vllm" to also write experts in formats that vLLM reads and transformers does not.
        evaluate: A function (model) -> loss, called before and after the cast.
        loss_base: The loss of the base of adapters that `model` has merged. A cast that gives up more than a tenth of what they
            learned, by `evaluate`, is refused.
        check: Load the folder with transformers and compare weights and logits before it appears.
        max_shard_size: Most bytes per file of weights, such as "5GB".
        provenance: Plain values for the model card, such as {"recipe": "fp8-block", "step": 1000}.
        stage: Shows the stages of the export.

    >>> import dither, tempfile
    >>> from dither.models import build
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     record = dither.export(build("tiny"), f"{parent}/model", format="mxfp4")
    >>> record.sizes()
    [('mxfp4', 14, 393216, 4.25), ('bf16', 1, 32768, 16.0)]
    """
    check_format(format)
    if engine not in ("any", "vllm"):
        raise UserError(f"engine is 'any' or 'vllm', not {engine!r:.80}.")
    most, path = shard_bytes(max_shard_size), Path(folder)
    check_target(path, format)
    stored = StoredModel(model)
    tokens = None if tokenizer is None else TokenizerFiles.of(tokenizer)
    if tokens is not None:
        tokens.check_fit(stored.vocab_size)
    notes = (
        () if tokenizer is not None else (f"No tokenizer was given, so the {'file' if format in GGUF else 'folder'} has none.",)
    )
    for name, tensor in (tensors := stored.tensors()).items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(f"The tensor {name!r} has NaN or Inf: export an earlier checkpoint.")
    facts = {**(provenance or {}), "versions": dict(versions())}
    parameters = sum(map(Tensor.numel, tensors.values()))
    record = Export(path, format, parameters=parameters, loss_base=loss_base, notes=notes, provenance=facts)
    if format in GGUF:
        return _export_gguf(stored, record, tokens, evaluate, check, stage)
    choices = choose(stored, _wanted(model, format, plan), engine)
    if format not in DENSE and not any(choice.format for choice in choices):
        raise UserError(_nothing(stored, format, choices))
    job = _Folder(stored, choices, format)
    if check and (unread := job.unread_experts()):
        raise UserError(f"--check loads the folder with transformers, which does not read experts in {unread}: leave it out.")
    with new_folder(path, "The model") as place:
        with stage("Writing weights") as tick:
            writer, layers = WeightsWriter(place, most), list[ExportedLayer]()
            for layer in job.write(writer):
                layers.append(layer)
                tick(len(layers), len(choices))
            record = replace(record, layers=tuple(layers), bytes=writer.finish())
        described = _settings(stored, job.dtype, job.quantization())
        if tokens is not None:
            tokens.write(place, described.get("max_position_embeddings"))
            described |= {} if tokens.end is None else {"eos_token_id": tokens.end}
        write_json(place / CONFIG, described)
        write_json(place / "generation_config.json", _generation(stored, described))
        if evaluate is not None or check:
            numbers = {layer.choice.parameter: layer.numbers for layer in job.encoded()}
            if evaluate is not None:
                record = _with_losses(record, stored, dequantized(stored, numbers, job.dtype, choices), evaluate)
            if check:
                loaded = {
                    choice.parameter: FORMATS[choice.format].loaded_experts
                    if choice.is_expert
                    else FORMATS[choice.format].loaded
                    for choice in choices
                    if choice.format
                }
                numbers = {name: number.to(loaded[name]).float() for name, number in numbers.items()}
                with stage(CHECKING):
                    record = replace(
                        record, check=check_logits(place, dequantized(stored, numbers, job.dtype), stored.vocab_size)
                    )
        write_json(place / RECORD, record.to_dict())
        (place / CARD).write_text(model_card(record, described, plan), encoding="utf-8")
    return record


def _export_gguf(
    stored: StoredModel, record: Export, tokens: TokenizerFiles | None, evaluate: Evaluate | None, check: bool, stage: Stage
) -> Export:
    """Write a GGUF file; measure its loss, and compare it with transformers' own reader of GGUF."""
    path, model = record.path, GgufModel(stored)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with stage("Writing weights"):
            path.parent.mkdir(parents=True, exist_ok=True)
            layers, numbers = model.write(partial, record.format, tokens, path.stem)
        record = replace(record, layers=tuple(layers), bytes=partial.stat().st_size)
        after = dequantized(stored, numbers)
        if evaluate is not None:
            record = _with_losses(record, stored, after, evaluate)
        if check:
            with stage(CHECKING):
                record = replace(record, check=check_logits(partial, after, stored.vocab_size, model.described))
        sync(partial)
        os.rename(partial, path)
        sync(path.absolute().parent)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error}.") from None
    finally:
        partial.unlink(missing_ok=True)
    return record


@torch.no_grad()
def dequantized(
    stored: StoredModel,
    numbers: Mapping[str, Tensor],
    dense: torch.dtype = torch.float32,
    choices: Sequence[LayerFormat] = (),
) -> nn.Module:
    """Return a plain float32 model with the weights of an exported folder: `model(tokens, targets)` returns the loss.

    Args:
        stored: The model that was exported.
        numbers: The numbers of layers in few bits, by the names of parameters.
        dense: The dtype of all other weights in the folder.
        choices: The formats of layers whose inputs are cast, as engines do.
    """
    model, own = unconverted(stored.model), stored.model.state_dict()
    tensors = model.state_dict()
    for name in tensors.keys() & own.keys():
        tensors[name].copy_(own[name])
    for name, tensor in tensors.items():  # a tied one is there twice, and has its numbers under the first name
        if name in numbers:
            tensor.copy_(numbers[name])
        elif tensor.is_floating_point():
            tensor.copy_(tensor.to(dense))
    rules = tuple(
        (choice.site.name, LayerPrecision(input=cast))
        for choice in choices
        if choice.format and (cast := DEPLOYMENTS[choice.format].input_cast)
    )
    if rules:
        convert(model, Plan(layers=rules), emulate=True)
    found: nn.Module = HuggingFace(model) if stored.is_transformers else model
    return found


def _with_losses(record: Export, stored: StoredModel, after: nn.Module, evaluate: Evaluate) -> Export:
    losses = []
    for model in (dequantized(stored, {}), after):
        with evaluating(model):
            losses.append(float(evaluate(model)))
    before, after_cast = losses
    if record.loss_base is not None and after_cast - before > (1 - LEARNED) * abs(record.loss_base - before):
        raise UserError(
            f"The cast to {record.format} loses what the adapters learned: the held-out loss is {record.loss_base:.4f} of the "
            f"base, {before:.4f} with adapters, and {after_cast:.4f} merged and cast; use --format bf16, or the adapters."
        )
    return replace(record, loss_before=before, loss_after=after_cast)


def check_target(path: Path, format: str) -> None:
    """Raise if the result would replace something."""
    if format not in GGUF:
        check_new(path)
    elif os.path.lexists(path):
        raise UserError(f"A GGUF file is written to a new path, and {str(path)!r} exists: name another with -o.")


# Choices --------------------------------------------------------------------------------------------------------------


def _wanted(model: nn.Module, format: str, plan: Plan | None) -> Wanted:
    """Return a function from the name of a layer to its format, "" for 16 bits, and the cast of its weight in training."""
    if plan is not None and format != AUTO and plan.provenance.get("qat") != format:
        raise UserError(f"A plan chooses the formats of layers, and format={format!r} is one for all: use format='auto'.")
    if format in DENSE:
        return lambda name: ("", None)
    if format != AUTO:
        trained = plan or Plan(
            layers=tuple((escape(name), linear_of(layer).precision) for name, layer in converted_layers(model).items())
        )
        return lambda name: (format, _own_cast(format, trained.for_layer(name)))
    chosen = (plan or _own_plan(model)).spared([name for name, _ in model.named_modules()])

    def wanted(name: str) -> tuple[str, Cast | None]:
        found = chosen.for_layer(name) or LayerPrecision()
        format = format_of(found.weight, found.input)
        return ("", None) if format in DENSE else (format, _own_cast(format, found))

    return wanted


def _own_cast(format: str, precision: LayerPrecision | None) -> Cast | None:
    """Return the cast of a weight in training if the export can repeat it: its codes have the format, and nothing is drawn."""
    cast = None if precision is None else precision.cast("forward", "weight")
    if cast is None or not DEPLOYMENTS[format].stores(cast) or cast.round.kind != "nearest" or cast.transforming.size:
        return None
    return None if cast.scaling.kind == "delayed" or cast.scaling.measures_tensor else cast


def _own_plan(model: nn.Module) -> Plan:
    """Return the plan of a model's learned bitwidths, or of the casts that its converted layers have."""
    layers = {name: linear_of(layer) for name, layer in converted_layers(model).items()}
    if any(isinstance(layer, Linear) and layer.precision.sampling for layer in layers.values()):
        return plan_from_bitwidths(model, granularity="row", slack=SLACK, formats=("e2m1", "e4m3", "bf16"))
    if any(layer.precision.weight is not None for layer in layers.values()):
        return Plan(layers=tuple((name, layer.precision) for name, layer in layers.items()))
    raise UserError(
        "format='auto' chooses by learned bitwidths or by casts of weights, and the model has neither: give it a plan (--plan)."
    )


def _nothing(stored: StoredModel, format: str, choices: Sequence[LayerFormat]) -> str:
    kept = [choice for choice in choices if choice.reason and choice.reason != "the output layer"]
    why = f": {kept[0].site.name}: {kept[0].reason}" if kept else ""
    if format == AUTO and not kept:
        why = ", since the plan or the learned bitwidths need 16 bits for all of them"
    gguf = ", or GGUF (--format gguf-q8_0)" if stored.config.get("model_type") in GGUF_ARCHITECTURES else ""
    return f"No layer of {type(stored.model).__name__} can be written in {format}{why}; use --format bf16{gguf}."


@dataclass(frozen=True)
class _Folder:
    """The weights of a model in the formats of its layers, and their description in config.json."""

    stored: StoredModel
    choices: Sequence[LayerFormat]
    format: str

    @property
    def dense(self) -> str:
        """Return the name of the 16-bit format of all other tensors."""
        return "fp16" if self.format == "fp16" else "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Return the 16-bit dtype of all other tensors."""
        return DENSE[self.dense]

    @property
    def deepseek(self) -> bool:
        """Return whether the folder has the format of DeepSeek's checkpoints, and not that of compressed-tensors."""
        return {choice.format for choice in self.choices if choice.format} == {"fp8-block"}

    def unread_experts(self) -> str:
        """Return the format of the experts if transformers does not read it, or ""."""
        format = next((choice.format for choice in self.choices if choice.is_expert), "")
        unread = bool(format) and (bool(DEPLOYMENTS[format].experts) or (format == "fp8-block" and not self.deepseek))
        return format if unread else ""

    def encoded(self) -> Iterator[EncodedLayer]:
        """Yield the layers in few bits."""
        return encode(self.stored, self.choices, "weight_scale_inv" if self.deepseek else "weight_scale")

    def write(self, writer: WeightsWriter) -> Iterator[ExportedLayer]:
        """Write all tensors, and yield a record of each linear layer."""
        tensors = self.stored.tensors()
        kept = {choice.parameter: choice for choice in self.choices if not choice.format}
        cast = {choice.parameter for choice in self.choices if choice.format}
        for name, tensor in self.stored.in_files({n: t for n, t in tensors.items() if n not in cast}).items():
            writer.add(name, self.rounded(name, tensor))
        for layer in self.encoded():
            for name, tensor in layer.tensors.items():
                writer.add(name, tensor)
            name, shape = layer.choice.site.name, tuple(layer.numbers.shape)
            yield ExportedLayer(name, shape, layer.choice.format, layer.bits, layer.error)
        for name, choice in kept.items():
            if name in tensors:
                weight = tensors[name].float()
                error = relative_error(weight.to(self.dtype).float(), weight)
                reason = choice.reason if self.format not in DENSE else ""
                yield ExportedLayer(choice.site.name, tuple(weight.shape), self.dense, 16.0, error, reason)

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in the 16-bit dtype; raise if it overflows."""
        if not tensor.is_floating_point():
            return tensor
        found = tensor.to(self.dtype)
        if not bool(found.isfinite().all()):
            raise UserError(f"The tensor {name!r} has numbers beyond the range of {self.dense}: use --format bf16.")
        return found

    def quantization(self) -> dict[str, Any] | None:
        """Return `quantization_config`, or None if nothing is in few bits."""
        if not any(choice.format for choice in self.choices):
            return None
        kept = _kept_modules(self.stored, self.choices)
        if self.deepseek:
            scheme: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
            return scheme | {"modules_to_not_convert": kept}
        groups: dict[str, list[LayerFormat]] = {}
        for choice in self.choices:
            if choice.format:
                groups.setdefault(choice.format, []).append(choice)
        uniform = self.format != AUTO
        entries = {
            f"group_{number}": {
                "targets": ["Linear"] if uniform else _targets(members),
                "weights": dict(FORMATS[format].weights),
                "input_activations": None if FORMATS[format].inputs is None else dict(FORMATS[format].inputs or {}),
                "output_activations": None,
                "format": FORMATS[format].storage,
            }
            for number, (format, members) in enumerate(groups.items())
        }
        storage = {entry["format"] for entry in entries.values()}
        if kept_experts := [choice for choice in self.choices if choice.is_expert and not choice.format]:
            # transformers reads experts by the group whose targets mention them, and unscaled weights only by an FP8 group. The
            # targets of this one are modules that are ignored.
            homes = dict.fromkeys(choice.site.name.rpartition(".experts")[0] for choice in kept_experts)
            fp8 = FORMATS["fp8-dynamic"]
            entries["no_experts"] = {
                "targets": [f"re:{re.escape(home)}\\.experts$" for home in homes],
                "weights": dict(fp8.weights),
                "input_activations": dict(fp8.inputs or {}),
                "output_activations": None,
                "format": fp8.storage,
            }
        return {
            "quant_method": "compressed-tensors",
            "format": storage.pop() if len(storage) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": entries,
            "ignore": kept,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _kept_modules(stored: StoredModel, choices: Sequence[LayerFormat]) -> list[str]:
    """Return the names of modules in 16 bits: as files name them, and as transformers does."""
    names: dict[str, None] = {}
    for choice in choices:
        if choice.format:
            continue
        if choice.is_expert:  # vLLM names them gate_proj, up_proj and down_proj in every model
            for name in (
                *(module.rpartition(".experts.")[0] for module in choice.modules),
                choice.site.name.rpartition(".experts.")[0],
            ):
                names |= dict.fromkeys((f"{name}.experts", f"re:{re.escape(name)}\\.experts\\..*"))
        else:
            names |= dict.fromkeys((*choice.modules, choice.site.name))
    for name, module in stored.model.named_modules():  # routers are linear layers in vLLM but not in transformers
        if hasattr(module, "experts") and isinstance(module.experts, nn.Module):
            for child, router in module.named_children():
                weight = getattr(router, "weight", None)
                if child != "experts" and isinstance(weight, Tensor) and weight.dim() == 2:
                    files = stored.in_files({f"{name}.{child}.weight": torch.empty(weight.shape, device="meta")})
                    names |= dict.fromkeys((*(key.removesuffix(".weight") for key in files), f"{name}.{child}"))
    return list(names)


def _targets(members: Sequence[LayerFormat]) -> list[str]:
    names: dict[str, None] = {}
    for choice in members:
        if choice.is_expert:  # by the names that files and vLLM have for them, and by those of modules in transformers
            homes = dict.fromkeys(name.rpartition(".experts.")[0] for name in (*choice.modules, choice.site.name))
            either = "|".join(map(re.escape, homes))
            names[f"re:{either if len(homes) == 1 else f'(?:{either})'}\\.experts\\..*"] = None
        else:
            names |= dict.fromkeys(choice.modules)
    return list(names)


# Files ----------------------------------------------------------------------------------------------------------------


def shard_bytes(size: int | str) -> int:
    """Return a number of bytes, given as such or with a unit.

    >>> shard_bytes("5GB"), shard_bytes("1.5 GiB"), shard_bytes(1000)
    (5000000000, 1610612736, 1000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", str(size).upper())
    count = float(match[1]) * UNITS.get(match[2], math.nan) if match and not isinstance(size, bool) else math.nan
    if not count >= 1:
        raise UserError(f"The largest size of a file is a number of bytes, such as 5GB or 500MB, not {size!r:.80}.")
    return int(count)


def _settings(stored: StoredModel, dtype: torch.dtype, quantization: dict[str, Any] | None) -> dict[str, Any]:
    settings = stored.config
    if not stored.is_transformers:  # its defaults for a Llama are those of another vocabulary
        settings |= {"bos_token_id": None, "eos_token_id": None}
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    return settings | ({} if quantization is None else {"quantization_config": quantization})


def _generation(stored: StoredModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    own = getattr(stored.model, "generation_config", None) if stored.is_transformers else None
    found: dict[str, Any] = json.loads(own.to_json_string(use_diff=True)) if own is not None else {}
    ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if settings.get(key) is not None}
    return {"_from_model_config": True} | found | ends
