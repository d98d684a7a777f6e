"""Open a model from any path: a run, a checkpoint, a Hugging Face folder, or a checkpoint of DCP."""

import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither import files
from dither.checkpoint import SavedTensors, newest, step_of
from dither.checkpoint.foreign import is_dcp, open_dcp
from dither.checkpoint.format import MANIFEST, PLAIN
from dither.checkpoint.read import LoadedTensors, TensorSource
from dither.checkpoint.state import plan_of, restore_model
from dither.errors import UserError
from dither.models.causal import CausalLM
from dither.models.folder_files import CONFIG, read_json
from dither.models.hub import load_pretrained
from dither.models.lora import adapt, merged_model, narrow_base
from dither.models.presets import empty
from dither.models.sizes import Lora, Model
from dither.models.transformers_models import hf
from dither.nn.clipping import clipped
from dither.nn.convert import convert
from dither.nn.sharded.gather import CodedWeight
from dither.nn.sites import clip_name, is_transposed
from dither.nn.stored import store_weights
from dither.ops.ranks import local, sharded_like
from dither.ops.reference.adamw import LOW, wide_weight
from dither.optim import training
from dither.optim.states import EXTRA
from dither.settings import from_table
from dither.spec import LayerPrecision, Plan

RUN, CHECKPOINTS = "config.toml", "checkpoints"
"""The config and the checkpoints in the folder of a run."""


@dataclass(frozen=True)
class Found:
    """What there is at a path. No weights are read."""

    kind: Literal["checkpoint", "dcp", "folder"]
    path: Path
    """The checkpoint, also if the path is that of a run, or the folder."""
    run: Path | None = None
    """The folder of the run that a checkpoint belongs to, if it is still there."""
    skipped: tuple[str, ...] = ()
    """Why newer checkpoints of the run were passed over."""

    def tell(self) -> None:
        """Print to stderr why newer checkpoints of the run were passed over."""
        for why in self.skipped:
            print(why, file=sys.stderr)

    @property
    def step(self) -> int | None:
        """The number of training steps in the name of a checkpoint, or None."""
        return step_of(self.path) if self.kind == "checkpoint" and re.search(r"-[0-9]+$", self.path.name) else None

    @property
    def plain(self) -> Mapping[str, Any]:
        """The plain values of a run's checkpoint. Their hash is checked when the checkpoint is opened."""
        try:
            plain, _ = files.read_json(self.path / PLAIN)
        except files.Refused as error:
            raise UserError(f"The checkpoint {str(self.path)!r} is refused: {error}.") from None
        others = plain.get("others") if isinstance(plain, dict) else None
        if not isinstance(others, dict) or not isinstance(others.get("config"), str):
            raise UserError(f"The checkpoint {str(self.path)!r} was not made by `dither train`: it has no config.")
        return plain  # type: ignore[no-any-return]

    @property
    def others(self) -> Mapping[str, Any]:
        """The values in a checkpoint that are the run's own."""
        others: Mapping[str, Any] = self.plain["others"]
        return others

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of the run in a checkpoint, as a TOML table."""
        try:
            return tomllib.loads(self.others["config"])
        except tomllib.TOMLDecodeError:
            raise UserError(f"The checkpoint {str(self.path)!r} was not made by `dither train`: it has no config.") from None

    def sha256(self) -> str:
        """Return the SHA-256 in the manifest of a checkpoint, or that of all files of a folder: a second per gigabyte."""
        if self.kind == "checkpoint":
            try:
                manifest, _ = files.read_json(self.path / MANIFEST)
            except files.Refused as error:
                raise UserError(f"The checkpoint {str(self.path)!r} is refused: {error}.") from None
            return str(manifest.get("sha256", "")) if isinstance(manifest, dict) else ""
        patterns = (CONFIG, "*.safetensors") if self.kind == "folder" else (".metadata", "*.distcp", "*.safetensors")
        return _digest(path for pattern in patterns for path in self.path.glob(pattern))


def _digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and digests of files."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            whole.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def find_model(path: str | Path) -> Found:
    """Return what there is at a path: a run, whose newest whole checkpoint is found, a checkpoint, or a folder.

    >>> find_model("nowhere")
    Traceback (most recent call last):
    dither.errors.UserError: 'nowhere' is neither a run (config.toml), nor a checkpoint (manifest.json), nor a model (config.json): name a folder that `dither train` or `dither export` wrote, or one of Hugging Face.
    """  # noqa: E501
    path = Path(path)
    if os.path.isfile(path / CONFIG):
        return Found("folder", path)
    if os.path.isfile(path / RUN):
        found, skipped = newest(path / CHECKPOINTS)
        if found is None:
            damage = f": {' '.join(why for _, why in skipped)[:300]}" if skipped else " yet."
            raise UserError(f"The run {str(path)!r} has no whole checkpoint{damage}")
        return Found("checkpoint", found, path, tuple(why for _, why in skipped))
    if os.path.isfile(path / MANIFEST):
        run = path.parent.parent
        return Found("checkpoint", path, run if os.path.isfile(run / RUN) else None)
    if is_dcp(path):
        return Found("dcp", path)
    raise UserError(
        f"{str(path)!r} is neither a run (config.toml), nor a checkpoint (manifest.json), nor a model (config.json): name "
        "a folder that `dither train` or `dither export` wrote, or one of Hugging Face."
    )


def origin_of(weights: str | None, hugging_face: str | None) -> dict[str, Any] | None:
    """Return the origin of a model's initial weights as plain values, or None if they are random.

    Args:
        weights: A run, a checkpoint, or one of DCP.
        hugging_face: A folder, the name of a model on the hub, or the file of a config.

    >>> origin_of(None, None) is None
    True
    """
    if weights is None and (hugging_face is None or hugging_face.endswith(".json")):
        return None
    if weights is None and not os.path.isfile(Path(str(hugging_face)) / CONFIG):
        return {"kind": "hub", "path": hugging_face, "sha256": None}
    found = find_model(str(weights or hugging_face))
    step = {} if found.step is None else {"step": found.step}
    return {"kind": found.kind, "path": str(found.path.absolute()), **step, "sha256": found.sha256()}


def check_same_base(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, path: Path) -> None:
    """Raise a UserError unless the base of adapters, as `origin_of` describes it, is the one that they were trained on."""
    then, here = (None if origin is None else origin.get("sha256") for origin in (saved, now))
    if then != here:
        where = "" if now is None else f" in {now['path']!r}"
        raise UserError(
            f"The adapters in {str(path)!r} were trained on another base than the one{where}: its SHA-256 has changed. Put the "
            "original weights back."
        )


@dataclass(frozen=True)
class Opened:
    """A model, and what is known about it."""

    found: Found
    model: CausalLM
    step: int | None = None
    """The number of training steps of a checkpoint, or None."""
    plan: Plan | None = None
    """The plan of a checkpoint, or None."""
    adapted: bool = False
    """True if weights exist as codes only, of a folder in few bits or of the base of adapters."""
    forward: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, repr=False)
    """The context of a forward pass: autocast, if the model was trained with it."""


def open_model(
    path: str | Path | Found,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    as_trained: bool = False,
    few_bits: bool = False,
    adapters: Literal["merge", "apart", "refuse"] = "merge",
) -> Opened:
    """Open a model from any path.

    The weights of a checkpoint are its masters or Kahan sums in float32 where there are any, not converted, without noise. A
    folder of Hugging Face is one of our models if it fits exactly, or else one of transformers.

        model = open_model("runs/a").model

    Args:
        path: A run, whose newest whole checkpoint is opened, a checkpoint, or a Hugging Face folder.
        device: Device of the model.
        dtype: Dtype of the parameters; None keeps that of the weights. Not with `as_trained`.
        as_trained: Convert the model of a checkpoint to its plan, and restore bitwidths and histories as well as weights.
        few_bits: Open a folder whose weights are in few bits, with the codes of its files; else it is refused.
        adapters: Merge adapters with their base into float32 weights, keep them apart, or refuse a checkpoint of adapters.
    """
    found = path if isinstance(path, Found) else find_model(path)
    if found.kind == "checkpoint":
        return _of_checkpoint(found, device, dtype, as_trained, adapters)
    if found.kind == "dcp":
        raise UserError(
            f"{str(found.path)!r} is a checkpoint of torch.distributed.checkpoint, which does not describe its model: start a "
            "run from it with `dither train --from`."
        )
    if read_json(found.path / CONFIG).get("quantization_config") is not None:
        if not few_bits:
            raise UserError(
                f"The weights in {str(found.path)!r} are in few bits already: name the run or the model they were made from."
            )
        return Opened(found, hf(str(found.path), device=device, dtype=dtype, codes=True), adapted=True)
    try:
        return Opened(found, load_pretrained(found.path, device=device, dtype=dtype))
    except UserError:
        return Opened(found, hf(str(found.path), device=device, dtype=dtype))  # transformers has more architectures


# Checkpoints ----------------------------------------------------------------------------------------------------------


def _of_checkpoint(
    found: Found, device: torch.device | str, dtype: torch.dtype | None, as_trained: bool, adapters: str
) -> Opened:
    config = found.config
    try:
        section, rank = config["model"], config.get("lora", {}).get("rank")
    except (KeyError, AttributeError):
        raise UserError(f"The checkpoint {str(found.path)!r} was not made by `dither train`: it has no config.") from None
    if rank is not None and adapters == "refuse":
        raise UserError(
            f"The checkpoint {str(found.path)!r} holds adapters alone: write the whole model with `dither export RUN --merge "
            "-o FOLDER`, and load that folder."
        )
    with SavedTensors(found.path) as saved:
        plan = plan_of(saved.plain)
        if as_trained or rank is not None:
            opened = _as_trained(found, saved, config, plan, device)
            merges = rank is not None and adapters == "merge" and not as_trained
            return replace(opened, model=merged_model(opened.model), adapted=False, forward=nullcontext) if merges else opened
        # What training for a deployment format multiplied are the codes of the weights themselves, not of their masters.
        names, masters = weight_names(saved), plan is None or "qat" not in plan.provenance
        dtypes = [
            torch.float32 if masters and _beside(saved, name) else saved.tensors[name].dtype
            for name in names.values()
            if saved.tensors[name].dtype.is_floating_point
        ]
        widest = dtype or max(dtypes, key=lambda each: each.itemsize, default=torch.float32)
        model = _unfilled(found, saved, section, device, widest)
        with torch.no_grad():
            for name, value in model.named_parameters():
                shape = saved.tensors[names[name]].shape if name in names else None
                if shape != tuple(value.shape):
                    raise UserError(
                        f"The checkpoint {str(found.path)!r} does not fit its config: the tensor {name!r} has the shape "
                        f"{list(value.shape)} in the model, and there it is {'none' if shape is None else list(shape)}."
                    )
                value.copy_(_weight(model, saved, names, name, masters=masters))
    return Opened(found, model.train(), saved.plain["step"], plan)


def _unfilled(
    found: Found, saved: SavedTensors, section: Mapping[str, Any], device: torch.device | str, dtype: torch.dtype | None
) -> CausalLM:
    """Return the model of a section [model], whose weights are not yet those of the checkpoint."""
    model = from_table(Model, dict(section), "model")
    if model.hf is not None:
        return hf(model.hf, device=device, dtype=dtype)
    embeddings = [name for name in saved.tensors if re.search(r"^model:.*(embed_tokens|wte)\.weight$", name)]
    if not embeddings:
        raise UserError(f"The checkpoint {str(found.path)!r} has no token embedding: it is not that of a language model.")
    vocab_size = int(saved.tensors[embeddings[0]].shape[0])
    if not model.ours:
        return hf(model.mixtral(vocab_size), device=device, dtype=dtype)
    return empty(model.sizes(vocab_size), device, dtype or torch.float32)


def _as_trained(
    found: Found, saved: SavedTensors, config: Mapping[str, Any], plan: Plan | None, device: torch.device | str
) -> Opened:
    """Build the model of a run as its trainer does, and restore its weights, bitwidths and histories."""
    section, precision, seed = config["model"], config["precision"], config["run"]["seed"]
    lora = config.get("lora", {})
    adapted = lora.get("rank") is not None
    # The base of adapters is never needed in float32: its codes are made from the weights as they are in the files.
    model = _base(section, device) if adapted else _unfilled(found, saved, section, device, torch.float32)
    if adapted:
        check_same_base(saved.plain["others"].get("base"), origin_of(section.get("weights"), section.get("hf")), found.path)
    if plan is not None:
        options = {key: precision[key] for key in ("fallback", "emulate", "engines") if key in precision}
        convert(model, plan, seed=seed, **options)
    if precision.get("weights") == "fp8":
        store_weights(model)
    if adapted:
        adapt(model, Lora(**lora | {"targets": tuple(lora["targets"])}), seed)
    run = training(model, precision["mode"], lr=0.0)
    if adapted:
        narrow_base(model, precision["mode"])
    restore_model(model, saved, saved.plain)
    return Opened(found, model, saved.plain["step"], plan, adapted, run.forward)


def _base(section: Mapping[str, Any], device: torch.device | str) -> CausalLM:
    """Return the base of adapters."""
    if section.get("hf") is not None:
        return hf(str(section["hf"]), device=device, codes=True)
    return open_model(str(section["weights"]), device=device).model


def weight_names(saved: SavedTensors) -> dict[str, str]:
    """Return the stored name of each weight: of FP8 codes where there are any, and of tied weights under both."""
    weights = {name.removeprefix("model:"): name for name in saved.tensors if name.startswith("model:")}
    weights = {
        name.removesuffix(CODES) + "weight" if name.endswith(CODES) else name: stored for name, stored in weights.items()
    }
    return weights | {name: weights[first] for name, first in saved.plain["same"].items() if first in weights}


CODES = "weight_codes"
"""The name of the codes in a layer whose weight is stored in FP8: see `dither.nn.stored`."""


def _weight(
    model: nn.Module,
    saved: SavedTensors,
    names: Mapping[str, str],
    name: str,
    like: Tensor | None = None,
    *,
    masters: bool = True,
) -> Tensor:
    """Return a weight as its layer cast it: clipped, if the run learned where (`dither.nn.clipping`).

    `masters` reads masters where there are any. Codes are returned as numbers, and of weights `like` a DTensor, a part.
    """
    home = model.get_submodule(name.rpartition(".")[0])
    # Adam-mini's state has the outputs of a matrix in rows.
    transposed = is_transposed(home) and not isinstance(home, nn.Embedding)
    numbers = _numbers(saved, names[name], like, _beside(saved, names[name]) if masters else {}, transposed)
    if (clip := clip_name(name)) not in names:
        return numbers
    if isinstance(numbers, DTensor):
        raise UserError(f"The checkpoint {str(saved.path)!r} has learned clips: load its weights before the model is sharded.")
    return clipped(numbers, saved.read(names[clip]), -2 if is_transposed(home) else -1)


def _beside(saved: SavedTensors, stored: str) -> dict[str, str]:
    """Return the stored names of the optimizer's entries that widen a weight to float32: see `wide_weight`."""
    state = {key: f"optimizer:{stored.removeprefix('model:')}:{key}" for key in (*EXTRA, "exp_avg_sq")}
    found = {key: name for key, name in state.items() if name in saved.tensors}
    split = "master_low" in found and saved.tensors[found["master_low"]].dtype == LOW["split"]  # the moments' signs are bits
    return {key: name for key, name in found.items() if key in EXTRA or split}


def _numbers(saved: SavedTensors, stored: str, like: Tensor | None, beside: Mapping[str, str], transposed: bool) -> Tensor:
    """Return a weight of a checkpoint: the numbers of its codes, or float32 with what the optimizer keeps `beside` it."""
    if stored.endswith(CODES):
        return _coded(stored, saved.read(stored), saved.read(stored.replace(CODES, "weight_scale")), saved.plain).numbers()
    weight = saved.read(stored, like)
    if not beside:
        return weight
    squares = saved.tensors.get(f"optimizer:{stored.removeprefix('model:')}:exp_avg_sq")
    if transposed and weight.dim() == 2 and squares is not None and len(squares.shape) == 1:  # Adam-mini
        turned = LoadedTensors({key: saved.read(name).t().contiguous() for key, name in beside.items()})
        parts = {key: turned.read(key, like) for key in beside}
    else:
        parts = {key: saved.read(name, like) for key, name in beside.items()}
    return sharded_like(weight, wide_weight(local(weight), {key: local(part) for key, part in parts.items()}))


def _coded(stored: str, codes: Tensor, scale: Tensor, plain: Mapping[str, Any]) -> CodedWeight:
    layer = stored.removeprefix("model:").removesuffix(f".{CODES}")
    cast = LayerPrecision.from_dict(plain["layers"][layer]["precision"]).cast("forward", "weight")
    assert cast is not None
    return CodedWeight({"along": codes, "along_scale": scale}, False, codes.shape, torch.bfloat16, cast.group.size)


def coded_weights(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, CodedWeight]:
    """Return the weights that a checkpoint has as FP8 codes, by the names that others have as numbers."""
    return {
        name.removesuffix(CODES) + "weight": _coded(name, codes, tensors[name.replace(CODES, "weight_scale")], plain)
        for name, codes in tensors.items()
        if name.endswith(CODES)
    }


# Weights for a model that exists --------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the weights of a checkpoint into a model that has not been converted yet.

    Masters and Kahan sums are used where the checkpoint has them. Other optimizer states and learned bitwidths are not read.

    Args:
        model: The model, whose tensors must have the names and shapes of those in the checkpoint.
        path: A run, whose newest whole checkpoint is read, a checkpoint, or one of torch.distributed.checkpoint, such as
            torchtitan's of Llama 3.
    """
    found = find_model(path)
    if found.kind == "dcp":
        with open_dcp(path) as source:
            _load_dcp(model, source)
        return
    with SavedTensors(found.path) as saved:
        names = weight_names(saved)
        for name, value in model.state_dict(keep_vars=True).items():
            if name not in names:
                raise UserError(
                    f"The checkpoint {str(found.path)!r} has no tensor {name!r}: set [model] as in the run that made it."
                )
            _check_shape(name, saved.tensors[names[name]].shape, value, found.path)
            value.copy_(_weight(model, saved, names, name, value))


def _check_shape(name: str, shape: tuple[int, ...], value: Tensor, path: Path) -> None:
    if shape != tuple(value.shape):
        raise UserError(
            f"The tensor {name!r} has the shape {list(shape)} in {str(path)!r} and {list(value.shape)} in "
            "this model: set [model] and data.tokenizer as in the run that made it."
        )


def _load_dcp(model: nn.Module, source: TensorSource) -> None:
    """Copy weights of a DCP checkpoint that has the names of the model, or those of torchtitan's Llama 3."""
    wanted: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in first:
            tied[name] = first[id(value)]
        else:
            wanted[name] = value
            first[id(value)] = name
    places, lacking = _places(list(wanted), source)
    if lacking:
        some = ", ".join(sorted(source.tensors)[:3]) or "none"
        raise UserError(
            f"The checkpoint {str(source.path)!r} has no tensor {lacking!r}, and no other name for it; it has "
            f"{some}: set [model] as in the run that made it."
        )
    for name, other in tied.items():
        own, missing = _places([name, other], source)
        if not missing and not torch.equal(source.box(own[name]), source.box(own[other])):
            raise UserError(
                f"The checkpoint {str(source.path)!r} has a {name!r} of its own, which this model ties to {other!r}."
            )
    head_size = getattr(getattr(model, "config", None), "head_dim", None)
    for name, value in wanted.items():
        _check_shape(name, source.tensors[places[name]].shape, value, source.path)
        if rotates(name) and not places[name].endswith(name):
            if head_size is None:
                raise UserError(f"The model {type(model).__name__} has no head_dim, by which {places[name]!r} is reordered.")
            whole = {name: halves_from_pairs(source.box(places[name]), int(head_size))}
            value.copy_(LoadedTensors(whole).read(name, value))
        else:
            value.copy_(source.read(places[name], value))


def _places(wanted: list[str], source: TensorSource) -> tuple[dict[str, str], str]:
    """Return the stored name of each tensor of the model, and the first tensor that has none, or "".

    The names are those of the model or of torchtitan, with the prefix under which most of them are found.
    """
    best: dict[str, str] = {}
    for prefix in PREFIXES:
        for names_of in (lambda name: (name,), titan_names):
            found = {}
            for name in wanted:
                theirs = [prefix + each for each in names_of(name) if prefix + each in source.tensors]
                if theirs:
                    found[name] = theirs[0]
            best = found if len(found) > len(best) else best
    return best, next((name for name in wanted if name not in best), "")


# torchtitan ------------------------------------------------------------------------------------------------------------

PREFIXES = ("", "model.", "module.", "model.module.", "state_dict.", "state_dict.model.")
"""Names under which a checkpoint may hold the state of the model."""

TITAN_LAYER = {
    "self_attn.q_proj": ("attention.wq", "attention.qkv_linear.wq"),
    "self_attn.k_proj": ("attention.wk", "attention.qkv_linear.wk"),
    "self_attn.v_proj": ("attention.wv", "attention.qkv_linear.wv"),
    "self_attn.o_proj": ("attention.wo",),
    "mlp.gate_proj": ("feed_forward.w1",),
    "mlp.up_proj": ("feed_forward.w3",),
    "mlp.down_proj": ("feed_forward.w2",),
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("ffn_norm",),
}
"""The names of a layer's modules here, and in versions of torchtitan's Llama 3."""

TITAN_OTHERS = {
    "model.embed_tokens.weight": ("tok_embeddings.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("output.weight", "lm_head.weight"),
}


def titan_names(name: str) -> tuple[str, ...]:
    """Return the names that torchtitan may have for a tensor of our Llama.

    >>> titan_names("model.layers.3.self_attn.q_proj.weight")
    ('layers.3.attention.wq.weight', 'layers.3.attention.qkv_linear.wq.weight')
    """
    match = re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return TITAN_OTHERS.get(name, ())
    number, module, kind = match.groups()
    return tuple(f"layers.{number}.{theirs}.{kind}" for theirs in TITAN_LAYER.get(module, ()))


def rotates(name: str) -> bool:
    """Return whether a tensor's rows are rotated by rotary embeddings: those of queries and keys.

    >>> rotates("model.layers.3.self_attn.q_proj.weight"), rotates("model.layers.3.self_attn.v_proj.weight")
    (True, False)
    """
    return re.search(r"\.self_attn\.[qk]_proj\.", name) is not None


def halves_from_pairs(weight: Tensor, head_size: int) -> Tensor:
    """Return the rows of queries or keys in our order.

    torchtitan rotates neighbouring rows of a head with each other; our models, like Hugging Face's, rotate a row of the first
    half with one of the second half.

    >>> import torch
    >>> halves_from_pairs(torch.arange(8.0)[:, None], head_size=4)[:, 0]
    tensor([0., 2., 1., 3., 4., 6., 5., 7.])
    """
    rows = weight.reshape(-1, head_size // 2, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)
