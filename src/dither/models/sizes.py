"""Models as frozen data: configs with Hugging Face's names, presets by name, and the sections [model] and [lora] of a run.

Nothing here imports torch.
"""

import dataclasses
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from dither.errors import UserError
from dither.settings import AtLeast, Count, OneOf, Positive, Within, check
from dither.spec import did_you_mean

Size = Annotated[int, AtLeast(1, bits=28)]
"""A size in a config: three times its square, in bytes of float32, still fits into 64 bits."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a Llama; the fields have the names and meanings of Hugging Face's `LlamaConfig`.

    >>> from dither.models import LlamaConfig
    >>> LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4).head_dim
    64
    """

    model_type: ClassVar[str] = "llama"
    """Name of the architecture at Hugging Face."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Width of the feed-forward layers."""
    num_hidden_layers: Size
    """Number of blocks."""
    num_attention_heads: Size
    """Number of query heads, which split the hidden size evenly; the size of a head must be even."""
    num_key_value_heads: Size | None = None
    """Number of key/value heads, each shared by equally many query heads; None gives every query head its own."""
    vocab_size: Size = 32000
    """Size of the vocabulary."""
    max_position_embeddings: Size = 2048
    """Maximum sequence length; the model stores nothing per position."""
    rope_theta: Positive = 10000.0
    """Base of the rotary embeddings' wavelengths."""
    rms_norm_eps: Positive = 1e-5
    """Added to the mean square in each norm."""
    tie_word_embeddings: bool = False
    """True if the output layer shares the embedding's weight."""
    initializer_range: Positive = 0.02
    """Initial standard deviation of every matrix; norms start at one."""

    def __post_init__(self) -> None:
        check(type(self).__name__, self)
        if self.hidden_size % (2 * self.num_attention_heads):
            raise UserError(
                f"A hidden size of {self.hidden_size} does not split into {self.num_attention_heads} heads of an even size; "
                f"{2 * self.num_attention_heads * -(-self.hidden_size // (2 * self.num_attention_heads))} would."
            )
        if self.num_attention_heads % self.key_value_heads:
            raise UserError(
                f"{self.num_attention_heads} query heads cannot share {self.key_value_heads} key/value heads evenly; "
                "num_key_value_heads must divide num_attention_heads."
            )

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Return the number of key/value heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """The sizes of a Llama whose feed-forward layers are experts: transformers' Mixtral, which transformers builds.

    >>> from dither.models import PRESETS
    >>> PRESETS["moe-1b-a400m"].num_local_experts
    24
    """

    model_type: ClassVar[str] = "mixtral"
    """Name of the architecture at Hugging Face."""
    num_local_experts: Size
    """Number of experts per block, each with feed-forward layers of `intermediate_size`."""
    num_experts_per_tok: Size = 2
    """Number of experts that see a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise UserError(
                f"A token cannot see {self.num_experts_per_tok} of {self.num_local_experts} experts: num_experts_per_tok is at "
                "most num_local_experts."
            )


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The sizes of a GPT-2; the fields have the names and meanings of Hugging Face's `GPT2Config`. There is no dropout.

    >>> from dither.models import GPT2Config
    >>> GPT2Config(n_embd=256, n_layer=2, n_head=4).intermediate_size
    1024
    """

    model_type: ClassVar[str] = "gpt2"
    """Name of the architecture at Hugging Face."""
    n_embd: Size
    """Width of the residual stream."""
    n_layer: Size
    """Number of blocks."""
    n_head: Size
    """Number of attention heads, which split the width evenly."""
    n_inner: Size | None = None
    """Width of the feed-forward layers; None makes it four times `n_embd`."""
    vocab_size: Size = 50257
    """Size of the vocabulary."""
    n_positions: Size = 1024
    """Maximum sequence length: each position has a learned vector."""
    layer_norm_epsilon: Positive = 1e-5
    """Added to the variance in each norm."""
    tie_word_embeddings: bool = True
    """True if the output layer shares the embedding's weight."""
    initializer_range: Positive = 0.02
    """Initial standard deviation of matrices; those that add to the residual stream have 1 / sqrt(2 n_layer) of it."""

    def __post_init__(self) -> None:
        check(type(self).__name__, self)
        if self.n_embd % self.n_head:
            raise UserError(
                f"A width of {self.n_embd} (n_embd) does not split into {self.n_head} heads (n_head); "
                f"{self.n_head * -(-self.n_embd // self.n_head)} would."
            )

    hidden_size: ClassVar = property(lambda self: self.n_embd)
    """The same sizes under the names of other models, as transformers has them too."""
    num_hidden_layers: ClassVar = property(lambda self: self.n_layer)
    num_attention_heads: ClassVar = property(lambda self: self.n_head)
    max_position_embeddings: ClassVar = property(lambda self: self.n_positions)

    @property
    def intermediate_size(self) -> int:
        """Return the width of the feed-forward layers."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.n_embd // self.n_head


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig:
    """The sizes of a GPT-Neo; the fields have the names and meanings of Hugging Face's `GPTNeoConfig`. There is no dropout.

    >>> from dither.models import GPTNeoConfig
    >>> GPTNeoConfig(hidden_size=64, num_layers=3, num_heads=4).attention_layers
    ('global', 'local', 'global')
    """

    model_type: ClassVar[str] = "gpt_neo"
    """Name of the architecture at Hugging Face."""
    hidden_size: Size
    """Width of the residual stream."""
    num_layers: Size
    """Number of blocks: the first, third and so on attend globally, the others locally."""
    num_heads: Size
    """Number of attention heads, which split the hidden size evenly."""
    intermediate_size: Size | None = None
    """Width of the feed-forward layers; None makes it four times `hidden_size`."""
    window_size: Size = 256
    """Number of tokens that local attention sees, including the token itself."""
    vocab_size: Size = 50257
    """Size of the vocabulary."""
    max_position_embeddings: Size = 2048
    """Maximum sequence length: each position has a learned vector."""
    layer_norm_epsilon: Positive = 1e-5
    """Added to the variance in each norm."""
    tie_word_embeddings: bool = True
    """True if the output layer shares the embedding's weight."""
    initializer_range: Positive = 0.02
    """Initial standard deviation of every matrix; norms start at one, biases at zero."""

    def __post_init__(self) -> None:
        check(type(self).__name__, self)
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"A hidden size of {self.hidden_size} does not split into {self.num_heads} heads; "
                f"{self.num_heads * -(-self.hidden_size // self.num_heads)} would."
            )

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """Return the kind of attention of each block: "global" or "local"."""
        return tuple(("global", "local")[layer % 2] for layer in range(self.num_layers))

    num_hidden_layers: ClassVar = property(lambda self: self.num_layers)
    """The same sizes under the names of other models, as transformers has them too."""
    num_attention_heads: ClassVar = property(lambda self: self.num_heads)

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_heads


ModelConfig = LlamaConfig | GPT2Config | GPTNeoConfig


def _llama(hidden: int, layers: int, heads: int, intermediate: int, **fields: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=intermediate, **fields
    )


PRESETS: dict[str, ModelConfig] = {
    "tiny": _llama(128, 2, 4, 384, num_key_value_heads=2, vocab_size=256),
    "llama-3m": _llama(128, 4, 2, 384, vocab_size=8192),
    "llama-5m": _llama(192, 5, 3, 512, vocab_size=8192),
    "llama-10m": _llama(256, 8, 4, 704, vocab_size=8192),
    "llama-34m": _llama(512, 8, 8, 1408, vocab_size=8192),
    "llama-134m": _llama(768, 12, 12, 2048),
    "llama-360m": _llama(1024, 24, 16, 2688),
    "llama-1b": _llama(2048, 22, 32, 5632),
    "llama-3b": _llama(3072, 28, 24, 8192),
    "llama-8b": _llama(4096, 32, 32, 14336, num_key_value_heads=8, max_position_embeddings=8192),
    "moe-1b-a400m": MixtralConfig(
        hidden_size=1024,
        num_hidden_layers=22,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=512,
        num_local_experts=24,
        num_experts_per_tok=8,
    ),
    "gpt2-tiny": GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=256),
    "gpt2-124m": GPT2Config(n_embd=768, n_layer=12, n_head=12),
    "gpt2-350m": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-770m": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt-neo-125m": GPTNeoConfig(hidden_size=768, num_layers=12, num_heads=12),
    "gpt-neo-1.3b": GPTNeoConfig(hidden_size=2048, num_layers=24, num_heads=16),
    "gpt-neo-2.7b": GPTNeoConfig(hidden_size=2560, num_layers=32, num_heads=20),
}
"""Sizes by name.

Llamas: output layers are untied; the vocabulary is 32,000 except for `tiny` (256) and those of 3M to 34M (8192). The mixture
has 0.97B weights, of which a token meets 0.41B. GPT-2: a tiny
one for tests, GPT-2, medium and large, with 1024 positions. GPT-Neo: the published ones, with 2048 positions and windows of 256
tokens. Both have a vocabulary of 50,257 and tied output layers.
"""


def preset(name: str, **changes: Any) -> ModelConfig:
    """Return the config of that name with some fields changed.

    >>> from dither.models import preset
    >>> preset("gpt2-124m", vocab_size=8192, n_positions=2048).vocab_size
    8192
    """
    if not isinstance(name, str) or name not in PRESETS:
        hint = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
        raise UserError(f"There is no model {name!r}{hint}: there are {', '.join(PRESETS)}.")
    known = [field.name for field in dataclasses.fields(PRESETS[name])]
    for change in changes:
        if change not in known:
            raise UserError(
                f"The config of {name!r} has no field {change!r}{did_you_mean(change, known)}: it has {', '.join(known)}."
            )
    return dataclasses.replace(PRESETS[name], **changes)


_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "feed_forward": "intermediate_size",
}
NAMES: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "mixtral": {**_LLAMA, "experts": "num_local_experts"},
    "gpt2": {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "feed_forward": "n_inner"},
    "gpt_neo": {
        "layers": "num_layers",
        "width": "hidden_size",
        "heads": "num_heads",
        "feed_forward": "intermediate_size",
    },
}
"""Names of the fields of [model] in the configs of each architecture."""

CHANGES = tuple(NAMES["mixtral"])
"""Fields of [model] that change a preset."""


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
    layers: Count | None = None
    """Number of blocks, in place of the preset's."""
    width: Count | None = None
    """Width of the residual stream, in place of the preset's; the feed-forward layers become wider or narrower with it."""
    heads: Count | None = None
    """Number of attention heads, in place of the preset's."""
    kv_heads: Count | None = None
    """Number of key/value heads of a Llama, in place of the preset's."""
    feed_forward: Count | None = None
    """Width of the feed-forward layers, in place of the preset's."""
    experts: Annotated[int, AtLeast(2)] | None = None
    """Number of experts per block: a Llama becomes the Mixtral of transformers, where two experts see a token."""

    def __post_init__(self) -> None:
        check("model", self)
        if self.hf is not None and (given := [key for key in CHANGES if getattr(self, key) is not None]):
            raise UserError(f"model.{given[0]} changes a preset, and model.hf={self.hf!r} is none: change its config.json.")
        if self.hf is None:
            self.sizes()
        if self.preset is not None and self.hf is not None:
            raise UserError(f"model.preset={self.preset!r} and model.hf={self.hf!r} are two models: set only one of them.")
        if "" in (self.hf, self.weights):
            raise UserError("model.hf and model.weights are paths, and one of them is empty.")

    @property
    def size(self) -> str | None:
        """The name of the preset; None for a Hugging Face model."""
        return self.preset if self.preset is not None or self.hf is not None else "tiny"

    @property
    def ours(self) -> bool:
        """True for a model of Dither, False for one of transformers."""
        return self.hf is None and not isinstance(self.sizes(), MixtralConfig)

    def sizes(self, vocab: int | None = None) -> ModelConfig:
        """Return the sizes of the preset with the changes of this section, and with a vocabulary of that size.

        >>> Model(preset="gpt2-tiny", layers=4).sizes(257).num_hidden_layers
        4
        >>> Model(width=256).sizes().intermediate_size
        768
        """
        assert self.size is not None
        base = PRESETS[self.size]
        if self.experts is not None and type(base) is LlamaConfig:
            base = MixtralConfig(**asdict(base), num_local_experts=self.experts)
        names = NAMES[base.model_type]
        changes = {key: value for key in CHANGES if (value := getattr(self, key)) is not None}
        if unknown := [key for key in changes if key not in names]:
            raise UserError(f"model.{unknown[0]} is for Llamas, and model.preset={self.size!r} is none: leave it out.")
        if "width" in changes and "feed_forward" not in changes:
            wide = base.intermediate_size or 4 * base.hidden_size
            changes["feed_forward"] = -(-wide * changes["width"] // base.hidden_size)
        try:
            sizes: dict[str, Any] = {names[key]: value for key, value in changes.items()}
            return dataclasses.replace(base, **sizes | ({} if vocab is None else {"vocab_size": vocab}))
        except UserError as error:
            raise UserError(f"In [model]: {error}") from None

    def mixtral(self, vocab: int | None) -> dict[str, Any]:
        """Return the config of transformers' Mixtral with these sizes and experts."""
        return {"model_type": "mixtral", **asdict(self.sizes(vocab))}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of low rank (LoRA) on a frozen base, whose weights are held as the codes of the plan. Off without a rank."""

    rank: Count | None = None
    """Rank of the adapters; by default all weights are trained and there are none."""
    alpha: Positive = 16.0
    """Adapters are multiplied by alpha / rank."""
    dropout: Annotated[float, Within(0, 1, open_above=True)] = 0.0
    """Probability with which inputs of adapters are dropped in training."""
    targets: tuple[str, ...] = ()
    """Last names of the layers that get an adapter, such as q_proj; none means every linear layer of the blocks."""

    def __post_init__(self) -> None:
        check("lora", self)
        if "" in self.targets:
            raise UserError("lora.targets are names of layers, such as q_proj, and one of them is empty.")
