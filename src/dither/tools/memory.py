"""Layouts of a model over many GPUs, and the memory of the fullest GPU, part by part."""

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from dither.errors import UserError
from dither.files import Refused, from_json, read
from dither.models import PRESETS, parameter_count
from dither.models.sizes import Model, ModelConfig
from dither.parallel.layout import Layout
from dither.settings import OneOf, check
from dither.spec import SWIGLU_CAST, Cast, LayerPrecision, MemoryOptions, did_you_mean
from dither.spec.engines import container
from dither.spec.formats import TABLE, Format
from dither.spec.gpus import GIB as GIB
from dither.spec.layer import chunk_rows
from dither.spec.modes import MODES
from dither.spec.optimizer import BLOCKS, SLOTS, STREAMED, WHOLE, state_bytes
from dither.spec.recipes import recipe

ALIGNED = 64
"""Alignment of the rows of logits, in numbers, if the vocabulary has an odd size: see `dither.nn.functional`."""

WORKSPACE = 64 * 2**20
"""Bytes of workspaces of matrix products. Peaks on an H200 are 70 to 110 MiB above the sum of all other parts."""


def check_positive(what: str, given: object) -> None:
    """Raise a UserError unless a value is a positive integer."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise UserError(f"{what} is a positive integer, not {given!r}.")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder-only transformer that its memory depends on.

    >>> Shape(width=2048, layers=22, heads=32, feed_forward=5632, vocab=32000).parameters
    1261529088
    """

    width: int
    """d, the width of the residual stream."""
    layers: int
    """L, number of blocks."""
    heads: int
    """Number of query heads."""
    feed_forward: int
    """f, the width of the feed-forward layers."""
    vocab: int
    """V, size of the vocabulary."""
    head_size: int | None = None
    """Width of one head; None means width / heads."""
    key_value_heads: int | None = None
    """Number of key heads and of value heads; None means as many as query heads."""
    gated: bool = True
    """True if the feed-forward layer has a gate besides its two matrices (SwiGLU, as in Llama), and norms are RMSNorm."""
    biases: bool = False
    """True if linear layers and norms have biases, as in GPT-2."""
    positions: int = 0
    """Number of learned position vectors."""
    tied: bool = False
    """True if the output layer shares the embedding's weight."""
    experts: int = 1
    """Number of feed-forward layers per block; above 1 a router chooses among them."""
    experts_per_token: int = 1
    """Number of them that see a token."""
    counted: int | None = None
    """Number of parameters if it is known; None computes it from the sizes above."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "feed_forward", "vocab"):
            check_positive(f"The {name} of a model", getattr(self, name))

    @property
    def query_width(self) -> int:
        """Return q, the width of all query heads together."""
        return self.heads * (self.head_size or self.width // self.heads)

    @property
    def key_width(self) -> int:
        """Return k, the width of all key heads together, and of all value heads."""
        return (self.key_value_heads or self.heads) * (self.head_size or self.width // self.heads)

    @functools.cached_property
    def block_weights(self) -> int:
        """Return the number of weights of the linear layers of all blocks, which recipes cast."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        return self.layers * (attention + self.experts * (3 if self.gated else 2) * self.width * self.feed_forward)

    @property
    def output_weights(self) -> int:
        """Return the number of weights of the output layer, tied or not."""
        return self.vocab * self.width

    @functools.cached_property
    def parameters(self) -> int:
        """Return P, the number of all weights; a tied output layer counts once."""
        if self.counted is not None:
            return self.counted
        norms = (2 * self.layers + 1) * self.width * (2 if self.biases else 1)
        ups = 2 if self.gated else 1
        biases = self.query_width + 2 * self.key_width + 2 * self.width + ups * self.feed_forward if self.biases else 0
        embeddings = self.output_weights * (1 if self.tied else 2) + self.positions * self.width
        routers = self.layers * self.experts * self.width if self.experts > 1 else 0
        return self.block_weights + self.layers * biases + norms + embeddings + routers


def llama_of(parameters: float) -> Shape:
    """Return the shape of a Llama of about that many parameters: width / 128 blocks, a feed-forward width of 8/3 of the width.

    >>> llama_of(7e9).width, llama_of(7e9).layers, round(llama_of(7e9).parameters / 1e9, 1)
    (4160, 32, 6.9)
    """
    if not 1e6 <= parameters <= 1e13:
        raise UserError(f"A number of parameters is from 1e6 to 1e13, such as 7e9, not {parameters:g}.")

    def of(step: int) -> Shape:
        width = 64 * step
        feed_forward = 128 * math.ceil(8 * width / 3 / 128)
        return Shape(
            width=width, layers=max(2, width // 128), heads=max(1, width // 128), feed_forward=feed_forward, vocab=32000
        )

    return min((of(step) for step in range(1, 2048)), key=lambda shape: abs(shape.parameters - parameters))


class Storage(NamedTuple):
    """Formats in which a training stores its numbers, and the bytes that its optimizer keeps beside each weight."""

    parameters: str
    """Format of the weights that products read."""
    compute: str
    """Format of products; autocast if it is narrower than the parameters."""
    gradients: str
    """Format of gradients."""
    states: str
    """Format of the optimizer's moments."""
    masters: int
    """Bytes per parameter of master weights, of the bits beside weights if they are split, or of Kahan's compensation."""

    @property
    def autocast(self) -> bool:
        """Return True if products read narrower copies of the parameters."""
        return format_bytes(self.compute) < format_bytes(self.parameters)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a training that its memory depends on."""

    mode: Annotated[str, OneOf(MODES)] = "o1"
    """A precision mode: fp32, o1, o2, o2-split, bf16-rn, bf16-sr, bf16-kahan, bf16-24, fp16 or fp16-o2."""
    precision: LayerPrecision | None = None
    """Casts of linear layers in blocks, such as `recipe("fp8-current").default`; None means no casts."""
    states: Annotated[str, OneOf((*WHOLE, *BLOCKS))] | None = None
    """Format of the optimizer's moments, such as dynamic8; None takes the mode's."""
    weights: Literal["fp8"] | None = None
    """Storage of the weights that blocks cast: their codes alone, or (None) that of the mode."""
    state_block: int = 128
    """Number of elements that share the scale of an 8-bit state."""
    gradients: Literal["fp32", "bf16"] | None = None
    """Format of gradients, fp32 or bf16; None takes the mode's."""
    optimizer: Literal["adamw", "adam-mini", "muon"] = "adamw"
    """adamw has two moments per parameter; adam-mini has one, and almost nothing for the second; muon has one per weight of the
    blocks, and copies their gradients in a step."""
    sampling: Literal["none", "kept", "recomputed"] = "none"
    """Sampled weights (GaussWS, DiffQ): none, kept from forward to backward, or recomputed in backward."""
    compiled: bool = True
    """True if each block is compiled separately, as `dither train` does on a GPU."""
    released: bool = False
    """True if backward updates each block and frees its gradients (`dither.optim.release_gradients`)."""
    states_on: Literal["device", "host"] = "device"
    """Memory of the optimizer's states and masters: the GPU's, or the host's, from which a step copies some at a time."""
    watched: bool = False
    """True if an `OscillationReset` watches the weights that blocks cast."""
    residual: Annotated[str, OneOf(WHOLE)] | None = None
    """Format of the residual stream, as FSDP2's mixed precision sets it; None means that of the parameters."""
    memory: MemoryOptions = MemoryOptions()  # noqa: RUF009 (frozen)
    """Choice of the tensors that cast layers keep between forward and backward."""
    chunked_logits: bool = False
    """True if logits and their gradients are computed for some rows at a time (`precision.logits`)."""
    float_logits: bool = False
    """True if the loss keeps float32 logits and their gradients too; dither's own cross entropy does not."""

    def __post_init__(self) -> None:
        check("memory", self)

    @functools.cached_property
    def casts_weight(self) -> bool:
        """Return True if products read codes of weights."""
        return self.precision is not None and self.precision.casts_of("weight") != (None, None)

    @functools.cached_property
    def residual_bytes(self) -> int:
        """Return the bytes per number of the residual stream."""
        return format_bytes(self.residual or self.storage.parameters)

    @functools.cached_property
    def logit_bytes(self) -> int:
        """Return the bytes per logit of logits and their gradients."""
        return 2 * format_bytes(self.storage.compute) + (8 if self.float_logits else 0)

    @functools.cached_property
    def storage(self) -> Storage:
        """Return the formats in which everything is stored."""
        mode, plan = MODES[self.mode], MODES[self.mode].plan
        assert plan.parameters is not None
        assert plan.compute is not None
        masters = {None: 0, "fp32": 4, "split": 2, "split24": 1}[mode.master]
        if mode.weights == "kahan":
            masters = format_bytes(plan.parameters)
        return Storage(plan.parameters, plan.compute, self.gradients or mode.gradients, self.states or mode.states, masters)


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, by the names that the config's section [precision] has for it.

    >>> print(PrecisionChoice("o1", "fp8-current", "companded8"))
    o1 + fp8-current + companded8 states
    """

    mode: str
    recipe: str | None = None
    states: str | None = None

    @functools.cached_property
    def setting(self) -> Setting:
        """Return the setting of the memory and time estimates."""
        precision = None if self.recipe is None else recipe(self.recipe).default
        return Setting(mode=self.mode, precision=precision, states=self.states)

    def __str__(self) -> str:
        parts = (self.mode, self.recipe, self.states and f"{self.states} states")
        return " + ".join(part for part in parts if part)


PARTS = MappingProxyType(
    {
        "weights": "parameters",
        "masters": "float32 copies that the optimizer keeps, the low bits of split ones, or Kahan's compensation",
        "gradients": "gradients of all parameters",
        "states": "the optimizer's moments, and movements of watched weights",
        "weight_codes": "codes of weights, or their 16-bit copies for autocast or sampling",
        "activations": "tensors that blocks keep for backward, besides codes",
        "input_codes": "codes of the inputs of linear layers",
        "logits": "logits and their gradients",
        "temporaries": "the last norm, the current block, workspaces of products",
    }
)
"""The parts of an estimate and their descriptions."""

MOMENTS = ("loss", "recompute", "update")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part at each moment of a step that may be its peak."""

    moments: Mapping[str, Mapping[str, int]]
    """{moment: {part: bytes}}."""
    host: int = 0
    """Bytes of pinned host memory for states and masters, if they are kept there."""
    streamed: int = 0
    """Bytes that a step copies from there to the GPU, and as many back."""

    @functools.cached_property
    def moment(self) -> str:
        """Return the moment of the peak."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> Mapping[str, int]:
        """Return the bytes of each part at the peak."""
        return self.moments[self.moment]

    @functools.cached_property
    def peak(self) -> int:
        """Return the bytes of all parts at the peak."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the peak as plain values for JSON."""
        found = {"memory_bytes": dict(self.parts), "peak_bytes": self.peak, "peak_moment": self.moment}
        return found | ({"host_bytes": self.host, "streamed_bytes": self.streamed} if self.host else {})


def code_bytes(cast: Cast, rows: int, columns: int) -> float:
    """Return the bytes of one code of a [rows, columns] matrix on a GPU, with its share of the scales.

    FP6, and FP4 that FP8 units multiply, are stored in E4M3 codes; others are packed. A scale takes 4 bytes, E8M0 and E4M3 one.

    >>> [code_bytes(Cast.parse(text), 4096, 4096) for text in ("e4m3 tile(128)", "e2m1 tile(128)", "mxfp4")]
    [1.03125, 1.03125, 0.53125]
    """
    kept: Format = TABLE.get(container(cast)) or Format.parse(container(cast))
    scale = 4 if cast.scaling.storage == "fp32" else 1
    size = cast.group.size
    share = {"tensor": rows * columns, "row": columns, "block": size * size, "tile": size}.get(cast.group.kind)
    return kept.bits / 8 + (scale / share if share else 0.0)


# The parts -------------------------------------------------------------------------------------------------------------


@functools.cache
def resident(shape: Shape, setting: Setting) -> dict[str, int]:
    """Return the bytes of weights, masters and states, which persist between steps."""
    storage, count = setting.storage, shape.parameters
    moments = {"adamw": 2 * count, "adam-mini": count, "muon": 2 * count - shape.block_weights}[setting.optimizer]
    coded = shape.block_weights if setting.weights == "fp8" else 0
    return {
        "weights": round((count - coded) * format_bytes(storage.parameters) + coded),
        "masters": round(count * storage.masters),
        "states": round(moments * state_bytes(storage.states, setting.state_block)),
    }


def slot_bytes(shape: Shape, setting: Setting) -> int:
    """Return the bytes on the GPU through which states in host memory are streamed: `SLOTS` groups of parameters, or two.

    Matrices whose update needs all of them, because they are stored as codes, orthogonalized, or share second moments, are not
    divided.
    """
    whole = shape.width * shape.feed_forward
    largest = {"adamw": whole if setting.weights == "fp8" else 0, "adam-mini": shape.output_weights, "muon": whole}
    undivided = largest[setting.optimizer]
    weights = min(SLOTS * STREAMED if undivided <= STREAMED else 2 * undivided, shape.parameters)
    moments = 1 if setting.optimizer == "adam-mini" else 2
    per_weight = moments * state_bytes(setting.storage.states, setting.state_block) + setting.storage.masters
    return round(weights * per_weight)


def pinned_bytes(shape: Shape, setting: Setting) -> int:
    """Return the bytes of pinned host memory for states and masters: torch rounds each tensor up to a power of two.

    >>> from dither.spec.gpus import GIB
    >>> eight = Setting(mode="bf16-sr", states="companded8", states_on="host")
    >>> round(pinned_bytes(llama3_of(8e9), eight) / GIB, 1), round(resident(llama3_of(8e9), eight)["states"] / GIB, 1)
    (17.0, 15.4)
    """
    d, q, k, f = shape.width, shape.query_width, shape.key_width, shape.feed_forward
    layers, output = shape.layers, shape.output_weights
    experts = shape.experts * layers
    matrices = [(d * q, 2 * layers, True), (d * k, 2 * layers, True), (d * f, (3 if shape.gated else 2) * experts, True)]
    matrices += [(output, 1 if shape.tied else 2, False), (shape.positions * d, 1, False)]
    storage, total = setting.storage, 0
    for weights, number, in_block in matrices:
        one = setting.optimizer == "adam-mini" or (setting.optimizer == "muon" and in_block)
        codes = state_bytes(storage.states, setting.state_block)
        scales = 0.0 if storage.states in WHOLE else 4 / setting.state_block
        sizes = [codes - scales, scales] * (1 if one else 2) + [float(storage.masters)]
        total += number * sum(1 << math.ceil(math.log2(weights * size)) for size in sizes if weights * size)
    return total


@functools.cache
def block_activations(shape: Shape, setting: Setting, *, tp: int = 1) -> tuple[float, float]:
    """Return (activations, codes of inputs) that one block keeps, in bytes per token.

    With tensor parallelism of `tp` ranks and sequence parallelism, a compiled block shards everything but the inputs of q, k, v
    and of gate and up, which are gathered.
    """
    storage, precision = setting.storage, setting.precision
    p, c = setting.residual_bytes, format_bytes(storage.compute)
    d, q, k, f = shape.width, shape.query_width, shape.key_width, shape.feed_forward * shape.experts_per_token
    cast = precision.cast("weight_grad", "input") if precision is not None else None  # in the layout that backward needs
    attention = c * (q + 2 * k) + c * q + 4 * shape.heads  # queries, keys and values, the output, log-sum-exp
    if shape.experts > 1:
        attention += 2 * c * d * shape.experts_per_token  # a token's copies for its experts, and their outputs
    ups = 2 if shape.gated else 1
    coded = shape.gated and setting.memory.swiglu == "fp8"  # gate and up are codes, from which the input of down is made again
    down = 0 if coded else f
    if setting.compiled:
        # The block's input, and the residual stream after attention; norms are recomputed.
        residual = p * d + c * d
        up = 2 * f * code_bytes(SWIGLU_CAST, d, f) if coded else ups * c * f
        inputs = 0 if cast is not None else 2 * c * d + c * down / tp  # of q, k, v; of gate and up; of down
        codes = 0.0
        if cast is not None and setting.memory.save == "codes":  # else norms and products of activations are recomputed
            codes = (2 * d + q / tp) * code_bytes(cast, d, d) + down / tp * code_bytes(cast, d, f)
        return (residual + attention + up) / tp + inputs, codes
    # Two norms. RMSNorm, uncompiled, keeps x in float32 and the quotient in the dtype of x; LayerNorm keeps x.
    residual = 2 * (max(4, p) + p) * d + 8 if shape.gated else 2 * p * d + 4 * p
    # Gate, silu(gate), up and their product, or before and after GELU; or the codes of gate and up.
    up = 2 * f * code_bytes(SWIGLU_CAST, d, f) if coded else 2 * ups * c * f
    readers = (3, 2) if shape.gated else (1, 1)  # layers that read the first and the second norm
    if cast is not None and setting.memory.save == "codes":
        # Each layer casts its own input; the output of attention is kept for attention itself.
        codes = (sum(readers) * d + q) * code_bytes(cast, d, d) + down * code_bytes(cast, d, f)
        return residual + attention + up - c * down, codes
    # The inputs themselves: under autocast each layer converts its own, else layers share the output of a norm.
    return residual + attention + up + c * d * (sum(readers) if storage.autocast else 2), 0.0


@functools.cache
def weight_code_bytes(shape: Shape, setting: Setting) -> float:
    """Return the bytes of codes of weights in the layouts that are held, or of their narrower copies."""
    storage, weights = setting.storage, shape.block_weights
    copies = format_bytes(storage.compute) if storage.autocast else 0
    output = shape.output_weights * copies
    if setting.weights == "fp8":
        return output
    if setting.casts_weight:
        assert setting.precision is not None
        held = {"both": (1, 1), "one": (1, 0), "none": (0, 0)}[setting.memory.hold]  # forward product, input gradient
        layouts = (
            copies if cast is None else number * code_bytes(cast, shape.width, shape.width)
            for cast, number in zip(setting.precision.casts_of("weight"), held, strict=True)
        )
        return weights * sum(layouts) + output
    if setting.sampling != "none":
        return output + (weights * format_bytes(storage.compute) if setting.sampling == "kept" else 0)
    return output + weights * copies


def last_norm(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token of the last norm, which is not compiled, and of the output layer's input."""
    p, c = setting.residual_bytes, format_bytes(setting.storage.compute)
    norm = max(4, p) + p if shape.gated else p
    return shape.width * (norm + c)


def format_bytes(name: str) -> int:
    """Return the bytes per number of a format of 8 bits or more."""
    return TABLE[name].bits // 8


CONFIG = "config.json"

UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "starcoder2", "falcon")
"""Architectures of Hugging Face whose feed-forward layers have no gate; their linear layers have biases."""

NAMES = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "key_value_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "experts": ("num_local_experts",),
    "experts_per_token": ("num_experts_per_tok",),
}
"""Names of each size in Hugging Face configs."""


def shape_of(config: ModelConfig | Mapping[str, Any]) -> Shape:
    """Return the sizes of one of dither's configs, or of a Hugging Face config as a dictionary.

    >>> from dither.models import PRESETS
    >>> shape_of(PRESETS["gpt2-124m"]).parameters
    124439808
    """
    if isinstance(config, Mapping):
        data: Mapping[str, Any] = config
    else:
        known = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads")
        more = ("vocab_size", "tie_word_embeddings", "max_position_embeddings", "num_local_experts", "num_experts_per_tok")
        data = {name: getattr(config, name) for name in (*known, *more) if hasattr(config, name)}
        data |= {"model_type": config.model_type}
    kind = str(data.get("model_type", ""))
    experts = data.get("num_local_experts") or data.get("num_experts") or data.get("n_routed_experts")
    if experts and kind != "mixtral":
        raise UserError(
            f"The model {kind!r} has experts, which are not supported here: give --params, the parameters without experts."
        )
    found: dict[str, Any] = {}
    for size, names in NAMES.items():
        value = next((data[name] for name in names if data.get(name) is not None), None)
        if value is not None:
            found[size] = value
    if "width" in found:
        found.setdefault("feed_forward", 4 * found["width"])
    if missing := [size for size in ("width", "layers", "heads", "vocab") if size not in found]:
        raise UserError(f"The model's config does not say its {missing[0]}: add {' or '.join(NAMES[missing[0]])}.")
    ungated = kind in UNGATED
    positions = int(data.get("n_positions") or data.get("max_position_embeddings") or 0) if kind in ("gpt2", "gpt_neo") else 0
    tied = bool(data.get("tie_word_embeddings", kind in ("gpt2", "gpt_neo")))
    shape = Shape(**found, gated=not ungated, biases=ungated, positions=positions, tied=tied)
    if isinstance(config, Mapping):
        return shape
    exact = parameter_count(config)  # architectures differ in a few biases
    return shape if exact == shape.parameters else replace(shape, counted=exact)


LLAMAS = tuple(
    Shape(width=width, layers=layers, heads=width // 128, feed_forward=feed_forward, vocab=128_256, key_value_heads=8)
    for width, layers, feed_forward in (
        (2048, 16, 8192),
        (3072, 28, 8192),
        (4096, 32, 14336),
        (8192, 80, 28672),
        (16384, 126, 53248),
    )
)
"""The proportions of Llama 3 from 1.5B to 405B parameters, with heads of 128 and an output layer of its own."""


def llama3_of(parameters: float) -> Shape:
    """Return the shape of a Llama of about that many parameters, in the proportions of Llama 3.

    Within 5 % of one of `LLAMAS` it is that one. Between them the logarithm of the width is interpolated over that of the
    number of parameters, to a multiple of 1024. The feed-forward width is 3.5 times as large, and the number of blocks follows
    from the parameters. Below 1.5B it is the shape of `llama_of`.

    >>> [(shape.width, shape.layers) for shape in map(llama3_of, (8e9, 30e9, 70e9, 405e9))]
    [(4096, 32), (6144, 59), (8192, 80), (16384, 126)]
    """
    if not LLAMAS[0].parameters * 0.95 <= parameters <= 1e13:
        return llama_of(parameters)
    for shape in LLAMAS:
        if abs(shape.parameters / parameters - 1) < 0.05:
            return shape
    pairs = list(itertools.pairwise(LLAMAS))
    low, high = next((pair for pair in pairs if parameters < pair[1].parameters), pairs[-1])
    share = math.log(parameters / low.parameters) / math.log(high.parameters / low.parameters)
    width = max(1, round(low.width * (high.width / low.width) ** share / 1024)) * 1024
    one = replace(low, width=width, heads=width // 128, feed_forward=round(3.5 * width), layers=1)
    block = replace(one, layers=2).parameters - one.parameters
    return replace(one, layers=max(1, round((parameters - one.parameters) / block) + 1))


def dense(shape: Shape) -> Shape:
    """Return a shape without experts; raise for others, whose times are not known."""
    if shape.experts > 1:
        raise UserError(
            "The time of a step of a mixture of experts is not known here: choose its precision yourself, and see its memory "
            "with `dither memory`."
        )
    return shape


def shape_of_section(model: Model, vocab: int | None) -> Shape:
    """Return the sizes of a config's section [model], with a vocabulary of that size in place of the preset's."""
    if model.hf is not None:
        return model_shape(model.hf)
    return shape_of(model.sizes(vocab))


def model_shape(model: str | None, parameters: float | None = None) -> Shape:
    """Return the sizes of a preset or a folder with a config.json, or those of a Llama of that many parameters.

    >>> model_shape("llama-1b").layers
    22
    """
    if (model is None) == (parameters is None):
        raise UserError("Give a model (a preset, a Hugging Face folder or a run) or --params, and not both.")
    if parameters is not None:
        return llama_of(parameters)
    assert model is not None
    if model in PRESETS:
        return shape_of(PRESETS[model])
    path = Path(model)
    if path.is_dir() and not (path / CONFIG).is_file():
        raise UserError(f"The folder {model} has no {CONFIG}: give the folder of a Hugging Face model, or a preset.")
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"There is no model {model!r}{did_you_mean(model, PRESETS)}: give a preset ({', '.join(PRESETS)}), a Hugging Face "
            "folder, or a run."
        )
    return shape_of(_config(path))


def _config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        found = from_json(read(Path(path), follow=True))
    except Refused as error:
        raise UserError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold a model's config.")
    return found


Checkpointing = Literal["none", "selective", "half", "full"]
"""Recomputation in backward. none: nothing beyond what the compiler recomputes. selective: all but products and attention.
half: also every second product, as torchtitan's per-op option does. full: whole blocks."""

SCHEDULES = MappingProxyType({"1f1b": 1, "interleaved-1f1b": 2})
"""Pipeline schedules and their stages per GPU."""


@dataclass(frozen=True)
class ScheduledLayout(Layout):
    """A layout with the schedule of its pipeline.

    >>> layout = ScheduledLayout(dp_shard=8, tp=8)
    >>> layout.ranks, str(layout)
    (64, 'dp_shard 8, tp 8')
    """

    schedule: str = "1f1b"
    """Order of the passes in a pipeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise UserError(f"There is no schedule {self.schedule!r}: choose from {', '.join(SCHEDULES)}.")

    @property
    def virtual(self) -> int:
        """Return the number of stages per GPU."""
        return SCHEDULES[self.schedule]

    def __str__(self) -> str:
        names = ("dp_replicate", "dp_shard", "tp", "pp")
        text = ", ".join(f"{name} {self.sizes[name]}" for name in names if self.sizes[name] > 1) or "one GPU"
        return text if self.virtual == 1 else f"{text} interleaved"


def layouts(shape: Shape, gpus: int, *, node: int = 8) -> Iterator[ScheduledLayout]:
    """Yield the layouts worth trying: tp inside a node, and replicas only of whole nodes or of whole models.

    Sizes that heads, features, blocks of 128 or layers do not allow are left out.

    >>> len(list(layouts(Shape(width=4096, layers=32, heads=32, feed_forward=14336, vocab=128256), 8)))
    25
    """
    heads = math.gcd(shape.heads, shape.key_value_heads or shape.heads)
    for tp in (size for size in range(1, min(node, gpus) + 1) if gpus % size == 0 and node % size == 0):
        if heads % tp or shape.vocab % tp or (tp > 1 and not splits_evenly(shape, tp)):
            continue
        for pp in (size for size in range(1, min(shape.layers, gpus // tp) + 1) if gpus // tp % size == 0):
            data = gpus // tp // pp
            shards = sorted({1, data, min(data, node // tp)} if data % min(data, node // tp) == 0 else {1, data})
            for schedule, virtual in SCHEDULES.items():
                if virtual > 1 and (pp == 1 or virtual * pp > shape.layers):
                    continue
                for dp_shard in shards:
                    yield ScheduledLayout(dp_replicate=data // dp_shard, dp_shard=dp_shard, tp=tp, pp=pp, schedule=schedule)


def splits_evenly(shape: Shape, tp: int) -> bool:
    """Return True if tensor parallelism leaves whole blocks of scales to each GPU, or whole features if blocks never fit."""
    sizes = (shape.query_width, shape.key_width, shape.feed_forward)
    return all(size % (tp * (128 if size % 128 == 0 else 1)) == 0 for size in sizes)


def stage_layers(shape: Shape, layout: ScheduledLayout, *, last: bool) -> int:
    """Return the number of blocks of the first or the last stage; the first stages have one more if they do not divide."""
    return shape.layers // layout.pp if last and layout.pp > 1 else math.ceil(shape.layers / layout.pp)


def stage_parameters(shape: Shape, layout: ScheduledLayout, *, last: bool) -> float:
    """Return the parameters of a stage per rank of tensor parallelism, before they are sharded by FSDP2."""
    embedding = shape.output_weights + shape.positions * shape.width
    output = 0 if shape.tied else shape.output_weights
    blocks = (shape.parameters - embedding - output) * stage_layers(shape, layout, last=last) / shape.layers
    if layout.pp == 1:
        return shape.parameters / layout.tp
    return (blocks + (shape.output_weights if last else embedding)) / layout.tp


def in_flight(layout: ScheduledLayout, passes: int, *, last: bool) -> float:
    """Return the number of micro-batches whose activations a stage holds at once."""
    if layout.pp == 1:
        return 1.0
    if layout.virtual == 1:
        return 1.0 if last else float(min(passes, layout.pp))
    chunks = (layout.virtual - 1) * layout.pp + 1 + (0 if last else 2 * (layout.pp - 1))
    return min(chunks, passes * layout.virtual) / layout.virtual


def kept_per_token(shape: Shape, setting: Setting, checkpointing: Checkpointing, tp: int) -> tuple[float, float]:
    """Return (activations, codes of inputs) that one block keeps until backward, in bytes per token."""
    if checkpointing == "none":
        return block_activations(shape, setting, tp=tp)
    own = setting.residual_bytes * shape.width / tp
    if checkpointing == "full":
        return own, 0.0
    c, d, q, k, f = format_bytes(setting.storage.compute), shape.width, shape.query_width, shape.key_width, shape.feed_forward
    ups = 2 if shape.gated else 1
    # Results of q, k, v, out, gate and up, down, or every second of them; attention keeps its output and log-sum-exp.
    products = q + 2 * k + 2 * d + ups * f if checkpointing == "selective" else q + k + d + f
    return own + (c * (products + q) + 4 * shape.heads) / tp, 0.0


@dataclass(frozen=True, kw_only=True)
class StepPasses:
    """The forward passes of a step on one GPU: their number, size and recomputation."""

    batch: int = 1
    """Sequences per forward pass."""
    sequence: int = 8192
    """Tokens per sequence."""
    number: int = 1
    """Forward passes per step; gradients of several ones are accumulated, and coexist with activations."""
    checkpointing: Checkpointing = "none"
    """Recomputation in backward."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            check_positive(f"The {name}", getattr(self, name))

    @property
    def tokens(self) -> int:
        """Return the tokens per forward pass."""
        return self.batch * self.sequence


ONE_GPU = ScheduledLayout()


def estimate(shape: Shape, setting: Setting, passes: StepPasses, layout: ScheduledLayout = ONE_GPU) -> MemoryEstimate:
    """Estimate the memory of a training step: of the only GPU, or of the fullest one of a layout.

    >>> shape = Shape(width=2048, layers=22, heads=32, feed_forward=5632, vocab=32000)
    >>> passes = StepPasses(batch=8, sequence=2048)
    >>> round(estimate(shape, Setting(mode="o1"), passes).peak / GIB, 1)  # an H200 measures 42.42
    42.4
    >>> sharded = estimate(llama_of(8e9), Setting(), StepPasses(), ScheduledLayout(dp_shard=8))
    >>> round(estimate(llama_of(8e9), Setting(), StepPasses()).peak / GIB), round(sharded.peak / GIB)
    (144, 53)
    """
    if setting.released and passes.number > 1:
        raise UserError("released=True uses gradients in the backward pass, and several passes accumulate them: choose one.")
    stages = [_stage(shape, setting, passes, layout, last=last) for last in ((False, True) if layout.pp > 1 else (True,))]
    return max(stages, key=lambda found: found.peak)


def largest_batch(shape: Shape, setting: Setting, passes: StepPasses, *, memory: int, most: int = 1024) -> int:
    """Return the largest power of two of sequences per pass whose estimate is within `memory` bytes; 0 if none fits.

    >>> largest_batch(llama_of(1e9), Setting(mode="bf16-sr"), StepPasses(sequence=2048), memory=80 * GIB)
    16
    """
    batch = 0
    while 2 * batch <= most and estimate(shape, setting, replace(passes, batch=max(1, 2 * batch))).peak <= memory:
        batch = max(1, 2 * batch)
    return batch


def _stage(shape: Shape, setting: Setting, passes: StepPasses, layout: ScheduledLayout, *, last: bool) -> MemoryEstimate:
    """Estimate the memory of one GPU of the first or of the last stage of a pipeline."""
    storage, tokens, tp = setting.storage, passes.tokens, layout.tp
    layers = stage_layers(shape, layout, last=last)
    whole = stage_parameters(shape, layout, last=last)
    held = whole / layout.dp_shard
    sharded, pipeline = layout.dp_shard > 1, layout.pp > 1
    c, g = format_bytes(storage.compute), format_bytes(storage.gradients)
    weights = shape.block_weights * layers / shape.layers / tp
    output = shape.output_weights / tp if last else 0.0
    share = held / shape.parameters
    still = {part: size * share for part, size in resident(shape, setting).items()}
    host = streamed = 0.0
    if setting.states_on == "host":
        streamed, host = still["masters"] + still["states"], pinned_bytes(shape, setting) * share
        still |= {"masters": 0.0, "states": min(slot_bytes(shape, setting), streamed)}
    if setting.watched:  # a weight, what is read of it, and how far both moved, in float32
        still["states"] += 16 * weights

    narrow = c if storage.autocast else 0
    per_weight = (weight_code_bytes(shape, setting) - shape.output_weights * narrow) / shape.block_weights
    codes_held = setting.casts_weight  # codes stay in buffers; backward frees copies
    copies = per_weight * weights / layout.dp_shard if codes_held or not sharded else 0.0
    copies += 0.0 if sharded else narrow * output
    gathered = 0.0
    gradients, of_block = held * g, weights / layers / layout.dp_shard * g
    if setting.released:
        gradients = max(output, weights / layers) / layout.dp_shard * g
    if sharded:
        # Blocks are gathered one ahead and freed again; a pipeline keeps its stage gathered, and its gradients unsharded.
        block, one = weights / layers, per_weight / 2 if codes_held else c
        gathered = weights * 2 * one if pipeline and codes_held else weights * one if pipeline else 2 * block * one
        gathered += max(output, shape.output_weights / tp) * c + (0.0 if pipeline else block * (c + g))
        gradients, of_block = (whole * g, weights / layers * g) if pipeline else (gradients, of_block)

    kept, codes = (tokens * each for each in kept_per_token(shape, setting, passes.checkpointing, tp))
    block_kept, block_codes = (tokens * each for each in block_activations(shape, setting, tp=tp))
    flight = in_flight(layout, passes.number, last=last)
    columns = math.ceil(shape.vocab / ALIGNED) * ALIGNED / tp
    rows = min(tokens, chunk_rows(shape.vocab)) if setting.chunked_logits else tokens
    logits = rows * columns * setting.logit_bytes if last else 0.0
    ending = tokens * last_norm(shape, setting) / tp if last else 0.0
    accumulated = gradients if passes.number > 1 else 0.0
    forward = {**still, "gradients": accumulated, "weight_codes": copies}
    everything = {"activations": flight * layers * kept, "input_codes": flight * layers * codes}
    moments = {}
    if passes.checkpointing != "none":
        # A compiled block recreates its copies of weights; autocast without compilation keeps them all.
        forward["weight_codes"] = copies if codes_held or not setting.compiled else copies / layers
        again = {**forward, **everything, "logits": 0.0, "temporaries": block_kept + WORKSPACE + gathered}
        again["input_codes"] = block_codes
        again["gradients"] = max(accumulated, output / layout.dp_shard * g)
        moments["recompute"] = again
    moments["loss"] = {**forward, **everything, "logits": logits, "temporaries": ending + WORKSPACE + gathered}
    if setting.chunked_logits:  # gradients of the output layer exist before the backward pass
        moments["loss"]["gradients"] = max(accumulated, output / layout.dp_shard * g)
    # The last gradient is computed in the format of products before it is converted to its own; during the backward pass of
    # the first block, all gradients but its own exist.
    widest = (output or shape.output_weights / tp) * c
    largest = max(widest, block_kept + block_codes - of_block)
    if setting.optimizer == "muon":
        # Directions of all matrices, or of a block's; and of one, its gathered direction and the operands of its iteration.
        whole_matrix = shape.width * shape.feed_forward
        directions = weights / layout.dp_shard / (layers if setting.released else 1) * min(g, 4)
        largest = max(largest, directions + 12 * whole_matrix)
    nothing = {"activations": 0.0, "input_codes": 0.0, "logits": 0.0, "temporaries": largest + WORKSPACE + gathered}
    moments["update"] = {**still, "gradients": gradients, "weight_codes": copies if codes_held else 0.0, **nothing}
    return MemoryEstimate(
        MappingProxyType(
            {
                moment: MappingProxyType({part: round(moments[moment][part]) for part in PARTS})
                for moment in MOMENTS
                if moment in moments
            }
        ),
        host=round(host),
        streamed=round(streamed),
    )
