"""The tensors of a model as Hugging Face's files name them.

transformers stores some models under other names than those of their modules, and the experts of a mixture one by one. It has
the reverse of what it does on loading; models of `dither.models` have the names of the files already.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.models import CausalLM
from dither.models.hub import huggingface_config
from dither.models.transformers_models import HuggingFace, stored_names


class Layout:
    """A model, its config, and the names of its tensors in files.

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
        """Return parameters and buffers by the names of modules, each shared one once, without those that training added."""
        names = stored_names(self.model)
        seen: set[tuple[int, torch.Size]] = set()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if name not in names:
                continue
            if isinstance(tensor, DTensor):
                raise UserError(f"The parameter {name!r} is sharded over ranks: gather the model on one rank before exporting.")
            key = (tensor.data_ptr(), tensor.shape)
            if tensor.numel() and key in seen:
                continue
            seen.add(key)
            tensors[name] = tensor.detach()
        return tensors

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
            found = self.stored({name: weight})
        except Exception:  # transformers merges it with other tensors, which are missing here
            return None
        whole = sum(each.numel() for each in found.values()) == weight.numel()
        if not whole or any(each.dim() != 2 or not key.endswith(".weight") for key, each in found.items()):
            return None
        return [(key, tuple(each.shape)) for key, each in found.items()]


def _is_pretrained(model: nn.Module) -> bool:
    """Return True for models of transformers, by their interface: transformers may not be installed."""
    return hasattr(model, "config") and hasattr(model.config, "to_dict") and hasattr(model, "get_input_embeddings")
