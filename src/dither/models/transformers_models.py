"""Causal language models of transformers with the interface of ours."""

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.models.causal import CausalLM, PlainLM, output_loss
from dither.models.few_bits import Reader
from dither.models.folder_files import CONFIG, read_json, write_json
from dither.models.presets import check_place, check_seed, empty, skeleton
from dither.nn.frozen import frozen_weights
from dither.nn.norms import cast_parameters
from dither.ops.reference.loss import IGNORE
from dither.spec.layer import chunk_rows

MOST_LAYERS = 10_000
"""Maximum number of layers, far above that of any model."""


def stored_names(model: nn.Module) -> list[str]:
    """Return the names in a model's state_dict, without those of state that training added to it.

    >>> import dither
    >>> from dither.models import build
    >>> model = build("tiny")
    >>> _ = dither.convert(model, dither.Plan().with_sampling(dither.Sampling()))
    >>> len(model.state_dict()) - len(stored_names(model))  # a bitwidth for each of 14 layers
    14
    """
    if isinstance(model, PlainLM):
        return list(skeleton(model.config).state_dict())
    with torch.device("meta"):
        return list(type(model)(model.config).state_dict())


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `stored_names`, each shared one once, and codes of weights as their numbers."""
    state = model.state_dict() | {name: layer.dequantize() for name, layer in frozen_weights(model).items()}
    if any(".lora_" in name for name in state):
        raise UserError(
            "The model has adapters: merge them with their base first, by `dither export RUN --merge` or "
            "dither.models.lora.merged_model(model)."
        )
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name in stored_names(model):
        if name not in state:
            raise UserError(
                f"The model has no tensor {name!r}, which its config asks for: remove what replaced it, such as a "
                "parametrization, before the model is written."
            )
        if isinstance(tensor := state[name], DTensor):
            raise UserError(f"The parameter {name!r} is sharded over ranks: gather the model on one rank before it is written.")
        key = (tensor.data_ptr(), tensor.shape)
        if not tensor.numel() or key not in seen:
            tensors[name] = tensor
        seen.add(key)
    return tensors


class HuggingFace(CausalLM):
    """A causal language model of transformers (`self.hf`) with our interface: `model(tokens, targets)` returns our loss.

    Names of parameters begin with `hf.`; `model.config` is the config of transformers. Auxiliary losses of the model, such as
    those of routers, are not included.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model

    @property
    def config(self) -> Any:
        """Return the config of transformers."""
        return self.hf.config

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the blocks, first to last: the list with as many modules as the config has layers."""
        layers = getattr(self.config, "num_hidden_layers", None)
        for module in self.hf.modules():
            if isinstance(module, nn.ModuleList) and len(module) == layers:
                return module
        raise UserError(f"{type(self.hf).__name__} has no list of {layers} blocks, as many as its config has layers.")

    @property
    def embedding(self) -> nn.Embedding:
        """Return the token embedding."""
        embedding: nn.Embedding = self.hf.get_input_embeddings()  # type: ignore[operator]
        return embedding

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer, which `dither.convert` does not convert."""
        layer: nn.Module | None = self.hf.get_output_embeddings()  # type: ignore[operator]
        return layer

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S]."""
        logits_BSV: Tensor = self.hf(input_ids=tokens_BS, use_cache=False).logits
        return logits_BSV

    def _result(self, tokens_BS: Tensor, targets_BS: Tensor | None) -> Tensor:
        if targets_BS is None or not self.loss_rows:
            return super()._result(tokens_BS, targets_BS)
        hidden_BSD, layer = hidden_of(self.hf, input_ids=tokens_BS)
        return output_loss(layer, hidden_BSD, targets_BS, rows=self.loss_rows)

    def save(self, place: Path, extra: dict[str, Any], shard_bytes: int, dtype: torch.dtype | None = None) -> None:
        """Write the model as transformers does, without what training added."""
        state = stored_tensors(self.hf)
        if dtype is not None:
            state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
            extra = {"dtype": str(dtype).removeprefix("torch.")} | extra
        self.hf.save_pretrained(place, state_dict=state, max_shard_size=shard_bytes)  # type: ignore[operator]
        write_json(place / CONFIG, read_json(place / CONFIG) | extra)


def hidden_of(model: nn.Module, **inputs: Any) -> tuple[Tensor, nn.Module]:
    """Return (the input of a transformers model's output layer, [B, S, D], the output layer)."""
    layer, base = model.get_output_embeddings(), getattr(model, "base_model", model)  # type: ignore[operator]
    if layer is None or base is model:
        raise UserError(f"{type(model).__name__} has no output layer of its own: compute its loss by the model.")
    return base(**inputs, use_cache=False).last_hidden_state, layer


@torch.no_grad()
def check_output_layer(model: nn.Module) -> None:
    """Raise unless the logits of a transformers model are those of its output layer alone, on two tokens.

    Some architectures scale their logits or cap them; a loss that is computed part by part would not.
    """
    tokens = torch.tensor([[0, 1]], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        hidden, layer = hidden_of(model, input_ids=tokens)
        same = torch.equal(layer(hidden), model(input_ids=tokens, use_cache=False).logits)
    finally:
        model.train(was_training)
    if not same:
        raise UserError(
            f"{type(model).__name__} changes the logits of its output layer, by a scale or a cap for instance, so its loss "
            "cannot be computed in parts: compute it at once."
        )


def causal_loss(model: nn.Module, input_ids: Tensor, labels: Tensor, *, rows: int | None = None, **inputs: Any) -> Tensor:
    """Return the loss of a transformers model as `model(input_ids, labels=labels).loss`, without all logits in memory.

    Label i is compared with the logits of token i - 1, and -100 ignores a position, as transformers does.

    Args:
        model: A causal language model of transformers, converted or not, whose logits are those of its output layer.
        input_ids: int64 [B, S].
        labels: int64 [B, S], not shifted.
        rows: Number of rows whose logits exist at a time; by default those of 256 MiB in 16 bits. See `output_loss`.
        inputs: Further inputs of the model, such as attention_mask.
    """
    if model not in _CHECKED:
        check_output_layer(model)
        _CHECKED.add(model)
    hidden, layer = hidden_of(model, input_ids=input_ids, **inputs)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    words: int = layer.out_features  # type: ignore[assignment]
    return output_loss(layer, hidden, targets, rows=chunk_rows(words) if rows is None else rows)


_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose output layer `causal_loss` has checked."""


def hf(
    source: Any,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    codes: bool = False,
) -> HuggingFace:
    """Return any causal language model of transformers with our interface. Code that comes with a model is not run.

        model = hf("Qwen/Qwen2.5-0.5B", device="cuda", dtype=torch.bfloat16)

    Args:
        source: A model or a config. A model is a folder, or a name as transformers takes it; its weights must be safetensors.
            A config is a file that ends in `.json`, a mapping with "model_type", or a config of transformers.
        seed: Seed of the initial weights, if `source` is a config.
        device: Device of the model.
        dtype: Dtype of the parameters; None keeps that of the weights, or float32 for a config. Buffers keep theirs.
        codes: Hold weights of a folder that are in few bits as the codes of the files, frozen; else they are dequantized.
    """
    check_seed(seed)
    check_place(device, dtype or torch.float32)
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"The model {_named(source)} needs transformers, which is not installed: pip install transformers."
        ) from None
    if isinstance(source, str | os.PathLike) and Path(source).suffix != ".json":
        return _pretrained(transformers, str(source), device, dtype, codes)
    config = read_json(Path(source)) if isinstance(source, str | os.PathLike) else source
    if isinstance(config, Mapping):
        fields = dict(config)
        kind = fields.pop("model_type", None)
        config = from_transformers(source, lambda: transformers.AutoConfig.for_model(kind, **fields))
    if not isinstance(config, transformers.PretrainedConfig):
        raise UserError(f"hf takes a folder, the name of a model, or a config of transformers, not {_named(source)}.")
    _check_sizes(source, config)
    config = copy.deepcopy(config)  # transformers writes the dtype into it
    options = {"trust_remote_code": False, "dtype": torch.float32}  # initial weights are drawn in float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = from_transformers(source, lambda: transformers.AutoModelForCausalLM.from_config(config, **options))
    return HuggingFace(_in_dtype(made, dtype or torch.float32).to(device)).train()


def _in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Convert the parameters, and not the buffers: rotary embeddings need their frequencies in float32."""
    cast_parameters(model, dtype, all_norms=False)
    model.config.dtype = dtype
    return model


def _pretrained(
    transformers: Any, source: str, device: torch.device | str, dtype: torch.dtype | None, codes: bool
) -> HuggingFace:
    config = from_transformers(source, lambda: transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))
    _check_sizes(source, config)
    if getattr(config, "quantization_config", None) is not None:
        model = _in_few_bits(transformers, source, config, device, dtype)
        if not codes:
            model = plain_copy(model, dtype or model.dtype)
        return HuggingFace(model).train()
    model = loaded(source, config=config, dtype=dtype or "auto")
    return HuggingFace(model.to(device)).train()


def loaded(source: str, **options: Any) -> Any:
    """Return a model of transformers with the weights that it reads itself; raise unless they fit its config exactly."""
    import transformers

    model, said = from_transformers(
        source,
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        ),
    )
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, said.get(what) or ())):
            raise UserError(
                f"The weights of {source!r} do not fit its config: {what.replace('_', ' ')} {', '.join(names[:3])}."
            )
    return model


def _in_few_bits(transformers: Any, source: str, config: Any, device: torch.device | str, dtype: torch.dtype | None) -> Any:
    """Return a model whose layers in few bits hold the codes of the files."""
    if not os.path.isdir(source):
        raise UserError(f"The weights of {source!r} are in few bits: download it, and name its folder.")
    plain = copy.deepcopy(config)
    del plain.quantization_config
    wide = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        make = transformers.AutoModelForCausalLM.from_config
        model = from_transformers(source, lambda: make(plain, dtype=wide, trust_remote_code=False))
    Reader(Path(source), model, device, dtype).fill()
    return model


@torch.no_grad()
def plain_copy(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a model without the layers of other libraries, with the numbers of codes as weights."""
    plain, numbers, frozen = unconverted(model, dtype), model.state_dict(), frozen_weights(model)
    for name, tensor in plain.state_dict().items():
        tensor.copy_(frozen[name].dequantize(torch.float32) if name in frozen else numbers[name])
    return plain


def unconverted(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of the same class, config and device that is not converted. Its weights are arbitrary.

    Args:
        model: A model of `dither.models`, or one of transformers.
        dtype: Dtype of the parameters.
    """
    if isinstance(model, HuggingFace):
        return HuggingFace(unconverted(model.hf, dtype))
    device = next(model.parameters()).device
    if isinstance(model, PlainLM):
        return empty(model.config, device, dtype)
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.random.fork_rng(devices=[]):
        return _in_dtype(type(model)(config), dtype).to(device)


def _check_sizes(source: object, config: Any) -> None:
    """Raise for a number of layers that would take very long to build, and for a hidden size below 1."""
    if isinstance(layers := getattr(config, "num_hidden_layers", None), int) and layers > MOST_LAYERS:
        raise UserError(f"The model {_named(source)} would have {layers!r:.40} layers, and the maximum is {MOST_LAYERS:,}.")
    if isinstance(width := getattr(config, "hidden_size", None), int) and width < 1:
        raise UserError(f"The model {_named(source)} would have a hidden size of {width}, and at least 1 is needed.")


def from_transformers(source: object, make: Callable[[], Any]) -> Any:
    """Return `make()`; if transformers raises, raise a UserError with the first line of its message."""
    try:
        with _without_report():
            return make()
    except Exception as error:  # transformers raises errors of many libraries for a bad file
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:!")
        if isinstance(error, ImportError):  # such as compressed-tensors, for weights in few bits
            raise UserError(
                f"The model {_named(source)} needs another package ({words}): pip install 'dither[export]'."
            ) from None
        if "ignore_mismatched_sizes" in words:
            words = "its weights have other shapes than its config says"
        raise UserError(f"transformers cannot create the model {_named(source)}: {words}.") from None


@contextmanager
def _without_report() -> Iterator[None]:
    """Leave out the table of missing and mismatched weights that transformers logs: the error that follows says it."""
    handlers = list(logging.getLogger("transformers").handlers)

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    for handler in handlers:
        handler.addFilter(is_other)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_other)


def _named(source: object) -> str:
    return (
        repr(source if isinstance(source, str) else str(source))[:200]
        if isinstance(source, str | os.PathLike)
        else (f"of a {type(source).__name__}")
    )
