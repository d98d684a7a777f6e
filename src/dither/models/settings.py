"""The sections [model] and [lora] of a config. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Annotated

from dither.errors import UserError
from dither.models.sizes import PRESETS
from dither.settings import AtLeast, Count, OneOf, Within, check


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: a preset, or any causal language model from Hugging Face."""

    preset: Annotated[str, OneOf(PRESETS)] | None = None
    """Name of a preset, such as tiny or llama-134m; tiny if neither this nor hf is set."""
    hf: str | None = None
    """Or a Hugging Face model: a folder with weights, or a config.json for random ones."""
    vocab: Annotated[int, AtLeast(2)] | None = None
    """Size of the vocabulary; by default that of the tokenizer."""
    weights: str | None = None
    """Initial weights: a run, whose newest checkpoint is read, or a checkpoint (or DCP's, torchtitan's); by default random."""

    def __post_init__(self) -> None:
        check("model", self)
        if self.preset is not None and self.hf is not None:
            raise UserError(f"model.preset={self.preset!r} and model.hf={self.hf!r} are two models: set only one of them.")
        if "" in (self.hf, self.weights):
            raise UserError("model.hf and model.weights are paths, and one of them is empty.")

    @property
    def size(self) -> str | None:
        """The name of the preset; None for a Hugging Face model."""
        return self.preset if self.preset is not None or self.hf is not None else "tiny"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of low rank (LoRA) on a frozen base, whose weights are held as the codes of the plan. Off without a rank."""

    rank: Count | None = None
    """Rank of the adapters; by default all weights are trained and there are none."""
    alpha: Annotated[float, Within(0, open_below=True)] = 16.0
    """Adapters are multiplied by alpha / rank."""
    dropout: Annotated[float, Within(0, 1, open_above=True)] = 0.0
    """Probability with which inputs of adapters are dropped in training."""
    targets: tuple[str, ...] = ()
    """Last names of the layers that get an adapter, such as q_proj; none means every linear layer of the blocks."""

    def __post_init__(self) -> None:
        check("lora", self)
        if "" in self.targets:
            raise UserError("lora.targets are names of layers, such as q_proj, and one of them is empty.")
        if self.rank is None and (self.targets or self.dropout):
            raise UserError("lora.targets and lora.dropout need adapters: set lora.rank, such as lora.rank=16.")
