"""Sampling: noise in place of quantization, and the guidance of its bitwidths (GaussWS)."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from dither.errors import UserError, checked_keys
from dither.settings import Within, check
from dither.spec.patterns import check_pattern, matches

Noise = Literal["rounded_normal", "rounded_normal_exact", "uniform", "none"]
Beyond = Literal["clamp", "warn"]

NOISES: tuple[Noise, ...] = get_args(Noise)
"""Distributions of R."""

MOST_BITS = 32.0
"""The largest bitwidth. float32 has 24 significant bits, so noise at 32 vanishes."""
Bitwidth = Annotated[float, Within(0, MOST_BITS)]


@dataclass(frozen=True)
class WeightDecay:
    """Guidance by decay: the optimizer shrinks the bitwidths b_i toward 0, and so b_t toward `b_target`."""

    rate: Annotated[float, Within(0)] = 0.1
    """The weight decay of the bitwidths' parameter group."""

    def __post_init__(self) -> None:
        check("weight_decay", self)

    def __str__(self) -> str:
        return f"decay({self.rate:g})"


@dataclass(frozen=True)
class BitwidthLoss:
    """Guidance by loss: `weight / n * sum |b_t - b_target|` over the n blocks of a model, computed by `bitwidth_loss`."""

    weight: Annotated[float, Within(0)] = 1e-4
    """The paper's lambda."""

    def __post_init__(self) -> None:
        check("bitwidth_loss", self)

    def __str__(self) -> str:
        return f"loss({self.weight:g})"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Noise in place of quantization, with learned bitwidths: w_hat = w + R * max_block|w| * 2^(1 - b_t) (GaussWS).

    b_t = b_target + b_i * (b_init - b_target), where b_i is a parameter per block of a weight that starts at 1.

    >>> print(Sampling(parts="od", guidance=BitwidthLoss(1e-3)))
    rounded_normal(32) 6 to 4 loss(0.001) parts='od'
    """

    noise: Noise = "rounded_normal"
    """Distribution of R: rounded_normal (GaussWS), rounded_normal_exact (round(N(0, 1) / 2)), uniform (DiffQ), or none (0)."""
    block: int = 32
    """Width of blocks, a power of two from 8 to 128: weights have block x block, inputs 1 x block."""
    b_init: Bitwidth = 6.0
    """b_t at the beginning of training."""
    b_target: Bitwidth = 4.0
    """The value toward which guidance moves b_t; at most b_init."""
    parts: str = "all"
    """Sampled layers: all, qkv, out, up (with gates), down, od (out and down), or a pattern of names as in a plan's rules."""
    recompute: bool = False
    """Sample w_hat again in backward instead of keeping it."""
    guidance: "WeightDecay | BitwidthLoss | tuple[WeightDecay | BitwidthLoss, ...]" = WeightDecay()
    """The pull of b_t toward b_target: one kind, a tuple of both, or () for the loss alone."""
    beyond: Beyond = "warn"
    """Treatment of a b_t above `safe_bitwidth`, where noise can vanish in rounding: warn once, or also clamp it there."""

    def __post_init__(self) -> None:
        check("sampling", self)
        if self.block not in SAMPLING_BLOCKS or isinstance(self.block, bool):
            raise UserError(f"The blocks of a Sampling are {', '.join(map(str, SAMPLING_BLOCKS))} wide, not {self.block!r}.")
        if self.b_init < self.b_target:
            raise UserError(
                f"Bitwidths decrease from b_init to b_target, and b_init={self.b_init:g} is less than "
                f"b_target={self.b_target:g}: exchange them, or set both to the same number."
            )
        if not self.parts:
            raise UserError(
                f"The parts of a Sampling are one of {', '.join(PARTS)}, or a pattern of names, not {self.parts!r}."
            )
        check_pattern(self.parts)
        kinds = [type(guide) for guide in self.guides]
        if len(set(kinds)) < len(kinds):
            raise UserError(
                "The guidance of a Sampling is a WeightDecay, a BitwidthLoss, a tuple with one of each, or (), "
                f"not {self.guidance!r}."
            )

    @property
    def guides(self) -> "tuple[WeightDecay | BitwidthLoss, ...]":
        """Return the guidance as a tuple."""
        return self.guidance if isinstance(self.guidance, tuple) else (self.guidance,)

    @property
    def decay(self) -> float:
        """Return the weight decay of the bitwidths, or 0."""
        return next((guide.rate for guide in self.guides if isinstance(guide, WeightDecay)), 0.0)

    @property
    def loss(self) -> float:
        """Return the weight of the bitwidths' loss, or 0."""
        return next((guide.weight for guide in self.guides if isinstance(guide, BitwidthLoss)), 0.0)

    def takes(self, name: str) -> bool:
        """Return True if the layer called `name` is among the `parts`.

        >>> [Sampling(parts="od").takes(f"h.0.{name}") for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")]
        [False, True, True]
        """
        part = PARTS.get(self.parts)
        return matches(self.parts, name) if part is None else part.fullmatch(name) is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        guidance = [{"kind": GUIDES[type(guide)], **vars(guide)} for guide in self.guides]
        return {**vars(self), "guidance": guidance}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Sampling":
        """Return the sampling of a dictionary, the inverse of `to_dict`. Keys may be missing; unknown keys are errors."""
        data = dict(checked_keys("sampling", data, tuple(cls.__dataclass_fields__)))
        if "guidance" in data:
            if not isinstance(data["guidance"], list | tuple):
                raise UserError(f"A sampling's guidance in JSON is a list of objects, not {data['guidance']!r}.")
            guides = tuple(_guide(item) for item in data["guidance"])
            data["guidance"] = guides[0] if len(guides) == 1 else guides
        return cls(**data)

    def __str__(self) -> str:
        words = [f"{self.noise}({self.block}) {self.b_init:g} to {self.b_target:g}", *map(str, self.guides)]
        words += [f"parts={self.parts!r}"] * (self.parts != "all") + ["recompute"] * self.recompute
        return " ".join(words + [f"beyond={self.beyond!r}"] * (self.beyond != "warn"))


SAMPLING_BLOCKS = (8, 16, 32, 64, 128)

GUIDES: dict[type[WeightDecay] | type[BitwidthLoss], str] = {WeightDecay: "weight_decay", BitwidthLoss: "bitwidth_loss"}
"""Names of the kinds of guidance in JSON."""

_QKV = r"q|k|v|qkv|[qkv]_proj|qkv_proj|c_attn|q_attn|query_key_value|query|key|value|w[qkv]|Wqkv|in_proj"

_OUT = r"out|[oO]|o_proj|out_proj|wo|(\w*attn|\w*attention)\.(c_proj|dense|proj)|attention\.output\.dense"

_UP = r"up|gate|up_proj|gate_proj|gate_up_proj|c_fc|fc1|fc_in|dense_h_to_4h|w1|w3|intermediate\.dense"

_DOWN = r"down|down_proj|(mlp|ffn|feed_forward)\.(c_proj|proj)|fc2|fc_out|dense_4h_to_h|w2|\d+\.output\.dense"

PARTS = {
    "all": re.compile(".*", re.DOTALL),
    **{
        part: re.compile(rf"(.*\.)?({names})", re.DOTALL)
        for part, names in {"qkv": _QKV, "out": _OUT, "up": _UP, "down": _DOWN, "od": f"{_OUT}|{_DOWN}"}.items()
    },
}
"""The parts of a transformer block, by their names in Llama, Qwen, Mistral, GPT-2, GPT-NeoX, OPT and similar models."""


def _guide(data: Any) -> WeightDecay | BitwidthLoss:
    kind = data.get("kind") if isinstance(data, dict) else None
    guide = next((cls for cls, name in GUIDES.items() if name == kind), None)
    if guide is None:
        raise UserError(f"A guidance in JSON has the key 'kind', one of {', '.join(map(repr, GUIDES.values()))}, not {data!r}.")
    fields = checked_keys(f"guidance of kind {kind!r}", data, ("kind", *guide.__dataclass_fields__))
    return guide(**{key: value for key, value in fields.items() if key != "kind"})
