"""The deployment format of each layer of a model: the one decision that quantization-aware training and export share.

Three rules keep a file from being read wrongly. A layer whose size does not fit a format stays in 16 bits. Layers that vLLM
fuses into one product (queries, keys and values; gate and up) have the same format, and share the tensor scale of NVFP4. The
experts of all mixtures in a model have one format.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.models.causal import CausalLM
from dither.models.hub import huggingface_config
from dither.models.transformers_models import HuggingFace, stored_tensors
from dither.nn.convert import alike
from dither.nn.sites import Site, clip_of, experts_beside, find_sites, output_layers, tuner_of, weight_of
from dither.nn.stored import StoredLinear
from dither.spec import Cast, Plan, Scale, did_you_mean
from dither.spec.deployment import DEPLOYMENTS, EXPERT_FP8, Deployment
from dither.spec.patterns import escape


class StoredModel:
    """A model to export, with its config and the names that its tensors have in files.

    Args:
        model: A model of `dither.models`, or a causal language model of transformers, converted or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.prefix = "hf." if isinstance(model, HuggingFace) else ""
        """The prefix of names of layers in plans of this model."""
        self.model: Any = model.hf if isinstance(model, HuggingFace) else model
        self.is_transformers = not isinstance(self.model, CausalLM)
        if type(self.model).__name__.startswith("Peft"):
            raise UserError("The model has adapters: merge them first, with model.merge_and_unload(), and export the result.")
        if self.is_transformers and not _is_pretrained(self.model):
            raise UserError(
                f"export takes a causal language model of dither.models or of transformers, not {type(model).__name__}."
            )

    @property
    def config(self) -> dict[str, Any]:
        """Return config.json without dtype and quantization."""
        if not self.is_transformers:
            return huggingface_config(self.model.config)
        config: dict[str, Any] = self.model.config.to_dict()
        config["architectures"] = [type(self.model).__name__]
        for key in ("quantization_config", "_name_or_path", "_attn_implementation_autoset"):
            config.pop(key, None)
        return config

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding."""
        embedding = self.model.get_input_embeddings() if self.is_transformers else self.model.embedding
        return int(embedding.weight.shape[0])

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by the names of modules, each shared one once, without those that training added.

        A weight is clipped where that is learned, as its cast reads it. Codes are returned as their numbers.
        """
        clipped = (weight_of(site) for site in find_sites(self.model) if clip_of(site) is not None)
        return stored_tensors(self.model) | {name: weight for name, weight, _ in clipped}

    def in_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the names, and in the pieces, that files have."""
        if not self.is_transformers or not tensors:
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(self.model, dict(tensors))
        return found

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]] | None:
        """Return (name, shape) of the matrices that a parameter is stored as; None if it is not stored by itself."""
        weight = torch.empty(shape, device="meta")
        try:
            found = self.in_files({name: weight})
        except Exception:  # transformers merges it with other tensors, which are missing here
            return None
        whole = sum(each.numel() for each in found.values()) == weight.numel()
        if not whole or any(each.dim() != 2 or not key.endswith(".weight") for key, each in found.items()):
            return None
        return [(key, tuple(each.shape)) for key, each in found.items()]


def _is_pretrained(model: nn.Module) -> bool:
    """Return True for models of transformers, by their interface: transformers may not be installed."""
    return hasattr(model, "config") and hasattr(model.config, "to_dict") and hasattr(model, "get_input_embeddings")


Engine = Literal["any", "vllm"]

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of layers beside each other that vLLM fuses into one."""


@dataclass(frozen=True)
class LayerFormat:
    """The format of a layer."""

    site: Site
    parameter: str
    """The name of its weight in the model."""
    pieces: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, shape) of its matrices in the file."""
    format: str
    """A name of `DEPLOYMENTS`, or "" for the 16-bit dtype of the file."""
    reason: str = ""
    """Why it stays in 16 bits."""
    group: str = ""
    """Layers with the same group have the same format."""
    own: Cast | None = None
    """The cast of its weight in training, if its codes have the format; None for the cast of the format itself."""

    @property
    def cast(self) -> Cast:
        """Return the cast of its weight."""
        return self.own or DEPLOYMENTS[self.format].cast

    @property
    def modules(self) -> list[str]:
        """Return the names of its modules in the file."""
        return [name.removesuffix(".weight") for name, _ in self.pieces]

    @property
    def is_expert(self) -> bool:
        """Return whether it is a matrix of experts."""
        return bool(self.site.parameter) or ".experts." in self.site.name


Wanted = Callable[[str], tuple[str, Cast | None]]
"""A function from the name of a layer to the format that it should have, "" for 16 bits, and its cast in training if known."""


def choose(stored: StoredModel, wanted: Wanted, engine: Engine = "any") -> list[LayerFormat]:
    """Return the format of every linear layer.

    The engine is "any" for files that transformers reads, "vllm" for those that vLLM reads.
    """
    model = stored.model
    sites = find_sites(model)
    output = set(output_layers(model, sites))
    choices = []
    for site in sites:
        parameter, weight, axis = weight_of(site)
        pieces = tuple(stored.pieces(parameter, tuple(weight.shape)) or ())
        (format, own), reason = wanted(stored.prefix + site.name), ""
        gguf = bool(format) and DEPLOYMENTS[format].gguf
        if not site.parameter and (tuner := tuner_of(model, site.name)):
            raise UserError(f"The layer {site.name!r} is an adapter of {tuner}: merge adapters into the model first.")
        if site.name in output:
            reason = "the output layer"
        elif not site.parameter and experts_beside(model, site.name):
            reason = "a router or gate beside experts"
        elif site.obstacle and not isinstance(site.module, StoredLinear):
            reason = site.obstacle
        elif not gguf and axis % weight.dim() != weight.dim() - 1:
            reason = "its weight is [in, out], and engines read [out, in] in few bits"
        elif not gguf and not pieces:
            reason = "transformers stores it merged with other layers"
        elif format:
            reason = _obstacle(DEPLOYMENTS[format], site, pieces, engine)
        if reason:
            format = ""
        choices.append(LayerFormat(site, parameter, pieces, format, reason, _group(site), own if format else None))
    choices = _together(choices, engine)
    if engine == "any" and len({choice.format for choice in choices if choice.format}) > 1:
        # A folder in blocks of FP8 alone has DeepSeek's format, which transformers reads for experts too.
        reason = f"{EXPERT_FP8} beside other formats; engine='vllm' writes them"
        blocks = [choice.is_expert and choice.format == "fp8-block" for choice in choices]
        choices = [
            replace(each, format="", reason=reason) if kept else each for each, kept in zip(choices, blocks, strict=True)
        ]
    return choices


def _obstacle(format: Deployment, site: Site, pieces: Sequence[tuple[str, tuple[int, ...]]], engine: Engine) -> str:
    if format.gguf:
        return format.obstacle(site.out_features, site.in_features)
    if site.parameter and format.experts and engine == "any":
        return f"{format.experts}; engine='vllm' writes them"
    return next(filter(None, (format.obstacle(*shape) for _, shape in pieces)), "")


def _group(site: Site) -> str:
    if site.parameter or ".experts." in site.name:
        return "experts"
    parent, _, last = site.name.rpartition(".")
    fused = next((names for names in FUSED if last in names), None)
    return site.name if fused is None else f"{parent}.{'+'.join(fused)}"


def _together(choices: list[LayerFormat], engine: Engine) -> list[LayerFormat]:
    """Give the layers of each group one format: the widest of theirs, or 16 bits if one of them needs that."""
    groups: dict[str, list[LayerFormat]] = {}
    for choice in choices:
        groups.setdefault(choice.group, []).append(choice)
    order = list(DEPLOYMENTS)
    decided: dict[str, tuple[str, str]] = {}
    for name, members in groups.items():
        dense = next((choice for choice in members if not choice.format), None)
        if dense is not None:
            decided[name] = "", f"{dense.site.name} stays in 16 bits, and engines need one format for both"
            continue
        format = max((choice.format for choice in members), key=order.index)
        obstacles = [_obstacle(DEPLOYMENTS[format], choice.site, choice.pieces, engine) for choice in members]
        decided[name] = ("" if any(obstacles) else format), next(filter(None, obstacles), "")
    found = []
    for choice in choices:
        format, why = decided[choice.group]
        reason = "" if format else choice.reason or (why if choice.format else "")
        # Layers that share a tensor scale must have been trained with the same one.
        same = format == choice.format and len({_tensor_scale(each.own) for each in groups[choice.group]}) == 1
        found.append(replace(choice, format=format, reason=reason, own=choice.own if same else None))
    return found


def _tensor_scale(cast: Cast | None) -> str:
    return cast.scale if cast is not None and cast.scaling.two_level else ""


# GGUF -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufArchitecture:
    """The names and sizes by which llama.cpp reads a kind of model."""

    name: str
    """Its name in GGUF."""
    fixed: Mapping[str, Any]
    """Fields of the config that llama.cpp takes for granted."""
    pairs: bool = False
    """True if llama.cpp rotates neighbouring rows of queries and keys; ours are half a head apart."""


_SILU = {"hidden_act": "silu"}
GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", {"attention_bias": False, "mlp_bias": False, **_SILU}, pairs=True),
    "mistral": GgufArchitecture("llama", _SILU, pairs=True),
    "qwen2": GgufArchitecture("qwen2", {"use_sliding_window": False, **_SILU}),
    "qwen3": GgufArchitecture("qwen3", {"attention_bias": False, "use_sliding_window": False, **_SILU}),
    "gpt2": GgufArchitecture(
        "gpt2",
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
}
"""Models that are written, by their model_type."""


def gguf_architecture(config: Mapping[str, Any]) -> GgufArchitecture:
    """Return the architecture of a model; raise if its file would be read wrongly."""
    kind, advice = str(config.get("model_type")), "export it with --format bf16, and convert that folder with llama.cpp"
    if kind not in GGUF_ARCHITECTURES:
        raise UserError(f"GGUF is written for {', '.join(GGUF_ARCHITECTURES)} models, not for {kind!r}: {advice}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"GGUF is written without scaled rotary embeddings, and this model has {rope!r:.100}: {advice}.")
    for key, value in GGUF_ARCHITECTURES[kind].fixed.items():
        if config.get(key, value) != value:
            raise UserError(f"GGUF is written for {kind} models with {key}={value}, not {config[key]!r}: {advice}.")
    window = config.get("sliding_window")
    if kind == "mistral" and window is not None and window < config["max_position_embeddings"]:
        raise UserError(f"GGUF is written without sliding windows, and this model has one of {window} tokens: {advice}.")
    return GGUF_ARCHITECTURES[kind]


# Training for a format ------------------------------------------------------------------------------------------------

SEARCHES = {"pow2": "pow2_mse", "nvfp4_fixed": "nvfp4_mse"}
"""Scale rules of e2m1 that search for the smallest error, by those that take the largest magnitude."""

SCALES = ("largest", "search", "learned")
"""Choices of the scales of weights."""

LEARNED_FORMATS = ("int4", "int8", "e2m1")
"""Number formats whose scales may be learned: equal steps, or few of them."""

HEADROOM = 2.0
"""Factor by which weights may grow in training before the fixed tensor scale of NVFP4 clips them."""


def described(format: str, choices: Sequence[LayerFormat]) -> str:
    """Return which layers training for a format casts, and why others stay as they are."""
    kept = [choice for choice in choices if not choice.format]
    lines = [f"Training for {format} in {len(choices) - len(kept)} of {len(choices)} linear layers."]
    for pattern, group in alike(kept, lambda choice: choice.site.name, lambda choice: choice.reason):
        lines.append(f"Not cast: {pattern} ({len(group)}): {group[0].reason}.")
    return "\n".join(lines)


def _check_learned(format: str) -> None:
    """Raise if layers of a format cannot learn where to clip their weights."""
    known = [name for name, each in DEPLOYMENTS.items() if each.cast.format in LEARNED_FORMATS]
    if format not in known:
        raise UserError(
            f"scales='learned' is for {', '.join(known)}; {format!r} has steps relative to each number, and clipping gains "
            "little: use scales='largest'."
        )


def qat(
    model: nn.Module,
    format: str,
    *,
    scales: str = "largest",
    base: Plan | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Return a plan that trains a model for a deployment format: forward multiplies the numbers that an engine would.

    Gradients are straight-through. Layers that the export keeps in 16 bits are not cast. `dither.convert` applies the plan,
    and `dither.export(model, folder, format="auto")` writes the codes of the converted model.

    Args:
        model: A causal language model of `dither.models` or of transformers with its initial weights, not converted.
        format: A deployment format, such as "nvfp4" or "mxfp4": see docs/qat.md.
        scales: Scales of weights by the "largest" magnitude of each group, "search" for those with the smallest error, or
            "learned" to clip each group at a fraction of that magnitude, which is a parameter of the layer.
        base: A plan whose dtypes are kept; by default those of the model.
        say: Called with the layers that are cast, and the reasons why others are not.

    >>> from dither.models import build
    >>> plan = qat(build("tiny"), "mxfp4", say=print)
    Training for mxfp4 in 14 of 15 linear layers.
    Not cast: lm_head (1): the output layer.
    >>> print(plan.for_layer("model.layers.0.mlp.down_proj"))
    weight e2m1 tile(32) pow2 nearest, input_grad.weight uncast, backward from the codes of forward
    """
    if not isinstance(format, str) or format not in DEPLOYMENTS:
        hint = did_you_mean(format, DEPLOYMENTS) if isinstance(format, str) else ""
        raise UserError(f"There is no deployment format {format!r:.80}{hint}: use {', '.join(DEPLOYMENTS)}.")
    stored, chosen = StoredModel(model), DEPLOYMENTS[format]
    if chosen.gguf:
        gguf_architecture(stored.config)
    choices = choose(stored, lambda _: (format, None))
    weights = [weight_of(choice.site)[1] for choice in choices if choice.format]
    if not weights:
        reason = next((choice.reason for choice in choices if choice.reason != "the output layer"), "it has no linear layers")
        raise UserError(f"No layer of {type(stored.model).__name__} can be written in {format}: {reason}.")
    cast = chosen.cast
    if cast.scaling.kind == "nvfp4":
        # One power of two for all layers: engines that fuse layers need one scale, and shards and compiled blocks share it.
        largest = max(float(weight.abs().max()) for weight in weights)
        exponent = math.ceil(math.log2(max(HEADROOM * largest, 2.0**-100) / (cast.element.max * 448)))
        cast = replace(cast, scale=str(Scale("nvfp4_fixed", arguments=(2.0**exponent,))))
    if scales not in SCALES:
        raise UserError(f"scales is one of {', '.join(map(repr, SCALES))}, not {scales!r:.80}.")
    if scales == "search":
        if cast.format != "e2m1":
            known = [name for name, each in DEPLOYMENTS.items() if each.cast.format == "e2m1"]
            raise UserError(f"scales='search' is for {', '.join(known)}, not for {format!r}: use scales='largest'.")
        cast = replace(cast, scale=str(replace(cast.scaling, kind=SEARCHES[cast.scaling.kind])))
    if scales == "learned":
        _check_learned(format)
    precision = chosen.precision(cast, learned_clip=scales == "learned")
    rules = tuple((escape(stored.prefix + choice.site.name), precision if choice.format else None) for choice in choices)
    say(described(format, choices))
    return replace(base or Plan(), layers=rules, provenance={"qat": format})
