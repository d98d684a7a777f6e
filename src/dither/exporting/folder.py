"""Export a model as a Hugging Face folder: weights in any format, config, tokenizer, record and model card."""

import copy
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dither.console import Stage, silent
from dither.errors import UserError
from dither.evaluate.deployment import SLACK, Evaluate, plan_from_bitwidths
from dither.evaluate.held_out import evaluating
from dither.exporting.formats import AUTO, DENSE, FORMATS, check_format, format_of
from dither.exporting.gguf import GGUF, read_gguf, write_new_file
from dither.exporting.layers import Choice, EncodedLayer, Engine, Layout, choose, encode
from dither.exporting.record import Export, ExportedLayer, model_card
from dither.exporting.record import check as compare
from dither.exporting.tokenizer_files import AnyTokenizer, check_fit, write_tokenizer
from dither.files import sync
from dither.models.folder_files import CONFIG, INDEX, WEIGHTS, appearing, check_new, write_json
from dither.models.presets import empty
from dither.models.transformers_models import HuggingFace
from dither.nn.convert import convert
from dither.nn.linear import Linear
from dither.nn.sites import converted_layers, linear_of
from dither.spec import LayerPrecision, Plan
from dither.versions import versions


def plain_copy(layout: Layout) -> nn.Module:
    """Return an unconverted float32 copy of a model, on the device of its weights."""
    device = next(layout.model.parameters()).device
    if not layout.is_transformers:
        fresh: Any = empty(layout.model.config, device, torch.float32)
    else:
        with torch.random.fork_rng(devices=[]):
            fresh = type(layout.model)(copy.deepcopy(layout.model.config)).to(device, torch.float32)
    state = fresh.state_dict()
    with torch.no_grad():
        for name, tensor in layout.model.state_dict().items():
            if name in state:
                state[name].copy_(tensor)
    return fresh.eval()  # type: ignore[no-any-return]


def plain_model(layout: Layout) -> nn.Module:
    """Return the same with the interface of our models: `model(tokens, targets)` returns the loss."""
    model = plain_copy(layout)
    return HuggingFace(model) if layout.is_transformers else model


@torch.no_grad()
def dequantized(layout: Layout, choices: Sequence[Choice], numbers: Mapping[str, Tensor], dense: torch.dtype) -> nn.Module:
    """Return a plain float32 model with the weights of an exported folder, which casts inputs as engines do.

    Args:
        layout: The model that was exported.
        choices: The formats of its layers; an empty list leaves inputs uncast.
        numbers: The numbers of layers in few bits, by the names of parameters.
        dense: The dtype of all other weights in the folder.
    """
    model = plain_copy(layout)
    for name, tensor in model.state_dict().items():
        if name in numbers:
            tensor.copy_(numbers[name])
        elif tensor.is_floating_point():
            tensor.copy_(tensor.to(dense))
    rules = tuple(
        (choice.site.name, LayerPrecision(input=cast))
        for choice in choices
        if choice.format and (cast := FORMATS[choice.format].input_cast)
    )
    if rules:
        convert(model, Plan(layers=rules), emulate=True)
    return HuggingFace(model) if layout.is_transformers else model


NO_EXPERTS = "re:^no experts in few bits$"
"""A target of compressed-tensors that matches no layer."""

CHECKING = "Loading the result with transformers and comparing logits"
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
    check: bool = False,
    max_shard_size: int | str = "5GB",
    provenance: Mapping[str, Any] | None = None,
) -> Export:
    """Write a model as a Hugging Face folder that transformers and vLLM load, and return a record of it.

    Layers whose sizes do not fit the format stay in BF16, and so does the output layer; the record says why. The folder holds
    the weights, config.json, generation_config.json, the tokenizer, a model card (README.md) and the record as JSON. It appears
    complete or not at all.

    Args:
        model: A causal language model of `dither.models` or of transformers, converted or not.
        folder: A new or empty folder.
        format: bf16, fp16, fp8-block, fp8-dynamic, mxfp8, mxfp4, nvfp4, int8, or auto, which chooses per layer: by `plan`, by
            learned bitwidths, or by the casts of a converted model. With gguf-f16, gguf-q8_0 or gguf-mxfp4, `folder` is a new
            GGUF file for llama.cpp.
        plan: For "auto", a plan whose casts of weights choose the formats.
        tokenizer: A tokenizer of `dither.data` or of transformers, a tokenizer.json, or a folder that has one.
        engine: "any", or "vllm" to also write experts in formats that vLLM reads and transformers does not.
        evaluate: A function (model) -> loss, called before and after the cast.
        check: Load the folder with transformers and compare logits before it appears.
        max_shard_size: Most bytes per file of weights, such as "5GB".
        provenance: Plain values for the model card, such as {"recipe": "fp8-block", "step": 1000}.

    >>> import dither, tempfile
    >>> from dither.models import build
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     record = dither.export(build("tiny"), f"{parent}/model", format="mxfp4")
    >>> record.sizes()
    [('mxfp4', 14, 393216, 4.25), ('bf16', 1, 32768, 16.0)]
    """
    chosen = ExportOptions(format, plan, tokenizer, engine, evaluate, check, max_shard_size, provenance or {})
    return export_in_stages(model, folder, chosen)


@dataclass(frozen=True)
class ExportOptions:
    """The options of `export`, which explains them."""

    format: str = "bf16"
    plan: Plan | None = None
    tokenizer: AnyTokenizer | None = None
    engine: Engine = "any"
    evaluate: Evaluate | None = None
    check: bool = False
    max_shard_size: int | str = "5GB"
    provenance: Mapping[str, Any] = field(default_factory=dict)


def export_in_stages(model: nn.Module, folder: str | os.PathLike[str], options: ExportOptions, stage: Stage = silent) -> Export:
    """Write a model as `export` does, and show the stages of that."""
    format, plan, tokenizer, engine = options.format, options.plan, options.tokenizer, options.engine
    check_format(format)
    if engine not in ("any", "vllm"):
        raise UserError(f"engine is 'any' or 'vllm', not {engine!r:.80}.")
    most = shard_bytes(options.max_shard_size)
    check_target(Path(folder), format)
    layout = Layout(model)
    if tokenizer is not None:
        check_fit(tokenizer, layout.vocab_size)
    given = {**dict(options.provenance), "versions": dict(versions())}
    if format in GGUF:
        return _export_gguf(layout, Path(folder), replace(options, provenance=given), stage)
    dense = "fp16" if format == "fp16" else "bf16"
    choices = choose(layout, _wanted(model, format, plan), engine)
    if format not in DENSE and not any(choice.format for choice in choices):
        raise UserError(_nothing(layout, format, choices))
    job = _Job(layout, choices, dense, format)
    with appearing(Path(folder)) as place:
        with stage("Writing weights") as tick:
            writer, layers = _Writer(place, most), list[ExportedLayer]()
            for layer in job.write(writer):
                layers.append(layer)
                tick(len(layers), len(choices))
            files = writer.finish()
        notes = () if tokenizer is not None else ("No tokenizer was given, so the folder has none.",)
        described = _settings(layout, DENSE[dense], job.quantization())
        if tokenizer is not None:
            described |= _ends(write_tokenizer(tokenizer, place, described.get("max_position_embeddings")))
        write_json(place / CONFIG, described)
        write_json(place / "generation_config.json", _generation(layout, described))
        record = Export(
            Path(folder), format, tuple(layers), sum(tensor.numel() for tensor in layout.tensors().values()), files, notes=notes
        )
        record = replace(record, provenance=given)
        record = job.measured(record, options.evaluate, place if options.check else None, stage)
        write_json(place / RECORD, record.to_dict())
        (place / CARD).write_text(model_card(record, described, plan), encoding="utf-8")
    return record


def check_target(path: Path, format: str) -> None:
    """Raise if the result would replace something."""
    if format not in GGUF:
        check_new(path)
    elif os.path.lexists(path):
        raise UserError(f"A GGUF file is written to a new path, and {str(path)!r} exists: name another with -o.")


# Choices --------------------------------------------------------------------------------------------------------------


def _wanted(model: nn.Module, format: str, plan: Plan | None) -> Callable[[str], str]:
    """Return a function from the name of a layer to its format, "" for 16 bits."""
    if plan is not None and format != AUTO:
        raise UserError(f"A plan chooses the formats of layers, and format={format!r} is one for all: use format='auto'.")
    if format in DENSE:
        return lambda name: ""
    if format != AUTO:
        return lambda name: format
    chosen = plan or _own_plan(model)

    def wanted(name: str) -> str:
        precision = chosen.for_layer(name)
        found = format_of(None if precision is None else precision.weight)
        return "" if found in DENSE else found

    return wanted


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


def _nothing(layout: Layout, format: str, choices: Sequence[Choice]) -> str:
    kept = [choice for choice in choices if choice.reason and choice.reason != "the output layer"]
    why = f": {kept[0].site.name}: {kept[0].reason}" if kept else ""
    if format == AUTO and not kept:
        why = ", since the plan or the learned bitwidths need 16 bits for all of them"
    gguf = ", or GGUF (--format gguf-q8_0)" if layout.config.get("model_type") in ("llama", "gpt2") else ""
    return f"No layer of {type(layout.model).__name__} can be written in {format}{why}; use --format bf16{gguf}."


@dataclass(frozen=True)
class _Job:
    """A model with the formats of its layers."""

    layout: Layout
    choices: Sequence[Choice]
    dense: str
    format: str

    @property
    def deepseek(self) -> bool:
        """Return whether the folder has the format of DeepSeek's checkpoints, and not that of compressed-tensors."""
        return self.format == "fp8-block"

    def encoded(self) -> Iterator[EncodedLayer]:
        """Yield the layers in few bits."""
        return encode(self.layout, self.choices, "weight_scale_inv" if self.deepseek else "weight_scale")

    def write(self, writer: "_Writer") -> Iterator[ExportedLayer]:
        """Write all tensors, and yield a record of each linear layer."""
        tensors = self.layout.tensors()
        kept = {choice.parameter: choice for choice in self.choices if not choice.format}
        cast = {choice.parameter for choice in self.choices if choice.format}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise UserError(f"The tensor {name!r} has NaN or Inf: export an earlier checkpoint.")
        for name, tensor in self.layout.stored({n: t for n, t in tensors.items() if n not in cast}).items():
            writer.add(name, self.rounded(name, tensor))
        for layer in self.encoded():
            for name, tensor in layer.tensors.items():
                writer.add(name, tensor)
            yield ExportedLayer(
                layer.choice.site.name, tuple(layer.numbers.shape), layer.choice.format, layer.bits, layer.error
            )
        for name, choice in kept.items():
            if name in tensors:
                weight = tensors[name].float()
                size = weight.norm().item()
                change = (weight.to(DENSE[self.dense]).float() - weight).norm().item()
                shape, error = tuple(weight.shape), change / size if size else 0.0
                reason = choice.reason if self.format not in DENSE else ""
                yield ExportedLayer(choice.site.name, shape, self.dense, 16.0, error, reason)

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in the 16-bit dtype; raise if it overflows."""
        if not tensor.is_floating_point():
            return tensor
        found = tensor.to(DENSE[self.dense])
        if not bool(found.isfinite().all()):
            raise UserError(f"The tensor {name!r} has numbers beyond the range of {self.dense}: use --format bf16.")
        return found

    def quantization(self) -> dict[str, Any] | None:
        """Return `quantization_config`, or None if nothing is in few bits."""
        if not any(choice.format for choice in self.choices):
            return None
        kept = _kept_modules(self.layout, self.choices)
        if self.deepseek:
            scheme: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
            return scheme | {"modules_to_not_convert": kept}
        groups: dict[str, list[Choice]] = {}
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
        if any(choice.is_expert and not choice.format for choice in self.choices):
            # transformers reads experts by the group whose targets mention them, and unscaled weights only by an FP8 group.
            fp8 = FORMATS["fp8-dynamic"]
            entries["no_experts"] = {
                "targets": [NO_EXPERTS],
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

    def measured(self, record: Export, evaluate: Evaluate | None, checked: Path | None, stage: Stage) -> Export:
        """Return the record with the losses before and after the cast, and with the result of the check."""
        if evaluate is None and checked is None:
            return record
        numbers = {layer.choice.parameter: layer.numbers for layer in self.encoded()}
        if evaluate is not None:
            after = dequantized(self.layout, self.choices, numbers, DENSE[self.dense])
            record = replace(record, loss_before=_loss(plain_model(self.layout), evaluate), loss_after=_loss(after, evaluate))
        if checked is not None:
            formats = {choice.parameter: FORMATS[choice.format] for choice in self.choices if choice.format}
            numbers = {name: number.to(formats[name].loaded).float() for name, number in numbers.items()}
            ours = dequantized(self.layout, (), numbers, DENSE[self.dense])
            longest = getattr(self.layout.model.config, "max_position_embeddings", None)
            quantized = bool(numbers) and not self.deepseek
            with stage(CHECKING):
                result = compare(checked, ours, quantized=quantized, vocab_size=self.layout.vocab_size, longest=longest)
            record = replace(record, check=result)
        return record


def _loss(model: nn.Module, evaluate: Evaluate) -> float:
    with evaluating(model):
        return float(evaluate(model))


def _export_gguf(layout: Layout, path: Path, options: ExportOptions, stage: Stage) -> Export:
    """Write a GGUF file; read it back to measure its loss, and to compare logits with transformers' own reader of GGUF."""
    evaluate = options.evaluate
    with stage("Writing weights"):
        partial, layers = write_new_file(layout, path, options.format, options.tokenizer)
    try:
        count = sum(tensor.numel() for tensor in layout.tensors().values())
        notes = () if options.tokenizer is not None else ("No tokenizer was given, so the file has no vocabulary.",)
        size = partial.stat().st_size
        record = Export(path, options.format, tuple(layers), count, size, notes=notes, provenance=options.provenance)
        after = dequantized(layout, (), read_gguf(layout, partial), torch.float32)
        if evaluate is not None:
            record = replace(record, loss_before=_loss(plain_model(layout), evaluate), loss_after=_loss(after, evaluate))
        if options.check:
            longest = getattr(layout.model.config, "max_position_embeddings", None)
            with stage(CHECKING):
                found = compare(partial, after, quantized=False, vocab_size=layout.vocab_size, longest=longest)
            record = replace(record, check=found)
        sync(partial)
        os.rename(partial, path)
        sync(path.absolute().parent)
    finally:
        partial.unlink(missing_ok=True)
    return record


def _kept_modules(layout: Layout, choices: Sequence[Choice]) -> list[str]:
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
    for name, module in layout.model.named_modules():  # routers are linear layers in vLLM but not in transformers
        if hasattr(module, "experts") and isinstance(module.experts, nn.Module):
            for child, router in module.named_children():
                weight = getattr(router, "weight", None)
                if child != "experts" and isinstance(weight, Tensor) and weight.dim() == 2:
                    stored = layout.stored({f"{name}.{child}.weight": torch.empty(weight.shape, device="meta")})
                    names |= dict.fromkeys((*(key.removesuffix(".weight") for key in stored), f"{name}.{child}"))
    return list(names)


def _targets(members: Sequence[Choice]) -> list[str]:
    names: dict[str, None] = {}
    for choice in members:
        if choice.is_expert:
            homes = {module.rpartition(".experts.")[0] for module in choice.modules}
            names |= dict.fromkeys(f"re:{re.escape(home)}\\.experts\\..*" for home in sorted(homes))
        else:
            names |= dict.fromkeys(choice.modules)
    return list(names)


# Files ----------------------------------------------------------------------------------------------------------------


class _Writer:
    """Write tensors into one file, or several with an index."""

    def __init__(self, place: Path, most: int) -> None:
        self.place, self.most = place, most
        self.shard: dict[str, Tensor] = {}
        self.names: list[list[str]] = []
        self.filled = self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current file, or to the next one if that is full."""
        if self.shard and self.filled + tensor.nbytes > self.most:
            self._flush()
        self.shard[name] = tensor.detach().cpu().contiguous()
        self.filled += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        self.names.append(list(self.shard))
        save_file(self.shard, self.place / f"part-{len(self.names)}", metadata={"format": "pt"})
        self.shard, self.filled = {}, 0

    def finish(self) -> int:
        """Write the last file and the index, and return the number of bytes of all files."""
        self._flush()
        count = len(self.names)
        files = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for number, file in enumerate(files, 1):
            os.rename(self.place / f"part-{number}", self.place / file)
        if count > 1:
            where = {name: file for file, names in zip(files, self.names, strict=True) for name in names}
            write_json(self.place / INDEX, {"metadata": {"total_size": self.total}, "weight_map": where})
        return sum((self.place / file).stat().st_size for file in files)


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


def _settings(layout: Layout, dtype: torch.dtype, quantization: dict[str, Any] | None) -> dict[str, Any]:
    settings = layout.config
    if not layout.is_transformers:  # its defaults for a Llama are those of another vocabulary
        settings |= {"bos_token_id": None, "eos_token_id": None}
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    return settings | ({} if quantization is None else {"quantization_config": quantization})


def _ends(end: int | None) -> dict[str, Any]:
    return {} if end is None else {"eos_token_id": end}


def _generation(layout: Layout, settings: Mapping[str, Any]) -> dict[str, Any]:
    own = getattr(layout.model, "generation_config", None) if layout.is_transformers else None
    found: dict[str, Any] = json.loads(own.to_json_string(use_diff=True)) if own is not None else {}
    ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if settings.get(key) is not None}
    return {"_from_model_config": True} | found | ends
