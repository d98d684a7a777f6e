"""Training modes by name: the formats of parameters, products and gradients, and the optimizer's rounding and states.

The paper on stochastic rounding compares four of them: o1 (float32 parameters, autocast), o2 (bfloat16 parameters with
float32 master weights, norms and gradients), bf16-rn (bfloat16, rounded to nearest) and bf16-sr (bfloat16, rounded
stochastically). A mode is not a recipe: the recipe `bf16` is the mode o1, the recipe `bf16-pure` the mode bf16-rn.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from dither.errors import UserError
from dither.settings import AtLeast, Positive, Within, check
from dither.spec.formats import TABLE
from dither.spec.plan import Plan
from dither.spec.recipes import AUTO as AUTO
from dither.spec.recipes import recipe

GRADIENTS = ("fp32", "bf16", "bf16-sr")
"""Kinds of gradients: float32, bfloat16 with sums rounded to nearest, or bfloat16 with sums rounded stochastically."""

MOST_NORM = TABLE["fp32"].max
"""The largest valid `max_norm`: norms are float32."""


@dataclass(frozen=True)
class Mode:
    """A recipe (dtypes of parameters and products) with the optimizer's rounding and the formats of states and gradients."""

    recipe: str
    weights: str = "nearest"
    """Rounding of 16-bit weights: nearest, stochastic or kahan."""
    states: str = "fp32"
    """The format of the optimizer's moments."""
    gradients: str = "fp32"
    """The format that gradients are accumulated and all-reduced in: fp32, bf16 or bf16-sr."""
    split: str = ""
    """The split of masters into bfloat16 weights and more bits: "split", "split24", or "" for masters that are not split."""

    @property
    def master(self) -> str | None:
        """Return the kind of master weights, None if there are none."""
        return self.split or ("fp32" if self.plan.master else None)

    @property
    def plan(self) -> Plan:
        """Return the recipe's plan."""
        return recipe(self.recipe)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "fp32": Mode("fp32"),
        "o1": Mode("bf16"),
        "o2": Mode("bf16-o2"),
        "o2-split": Mode("bf16-o2", split="split"),
        "bf16-rn": Mode("bf16-pure", states="bf16", gradients="bf16"),
        "bf16-sr": Mode("bf16-pure", weights="stochastic", states="bf16", gradients="bf16"),
        "bf16-kahan": Mode("bf16-pure", weights="kahan", states="bf16", gradients="bf16"),
        "bf16-24": Mode("bf16-pure", states="bf16", gradients="bf16", split="split24"),
        "fp16": Mode("fp16"),
        "fp16-o2": Mode("fp16-o2"),
    }
)
"""Modes by name."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Settings of loss scaling. Only the modes fp16 and fp16-o2 scale losses.

    >>> LossScaling(init_scale=1024).growth_interval
    2000
    """

    init_scale: Positive = 65536.0
    """The first scale."""
    growth_factor: Annotated[float, Within(1, open_below=True)] = 2.0
    """Factor applied to the scale after growth_interval consecutive steps without overflow."""
    backoff_factor: Annotated[float, Within(0, 1, open_below=True, open_above=True)] = 0.5
    """Factor applied to the scale after an overflow. The step that overflowed is skipped."""
    growth_interval: Annotated[int, AtLeast(1, bits=31)] = 2000
    """Number of consecutive steps without overflow before the scale grows."""
    max_scale: Annotated[float, Within(0, TABLE["fp32"].max, open_below=True)] = 2.0**24
    """Largest scale."""

    def __post_init__(self) -> None:
        check("loss_scaling", self)
        if self.init_scale > self.max_scale:
            raise UserError(
                f"loss_scaling.init_scale={self.init_scale:g} is above loss_scaling.max_scale={self.max_scale:g}: reduce it."
            )
