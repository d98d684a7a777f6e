"""Recipes: named plans with the same precision for every layer. Print, save or change them with `dataclasses.replace`.

>>> print(recipe("fp8-block"))
layers  input                        weight                        grad
all     e4m3 tile(128) fp32 nearest  e4m3 block(128) fp32 nearest  e4m3 tile(128) fp32 nearest
compute bf16; parameters as they are; recipe: fp8-block
"""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from dither.errors import UserError
from dither.spec import LayerPrecision, Plan, did_you_mean, registry


@dataclass(frozen=True)
class Recipe:
    """A plan with a name, and a sentence that describes it."""

    kind: ClassVar[str] = "recipe"

    plan: Plan
    about: str
    name: str = ""
    paper: str = ""
    """The arXiv number of the paper that defines it; docs/fp4.md says where the recipe departs from the paper."""

    @classmethod
    def of(
        cls, name: str, input: str, weight: str, grad: str, overrides: Mapping[str, str] | None = None, *, about: str = ""
    ) -> "Recipe":
        """Return a recipe that casts all layers alike, as in `LayerPrecision.of`, and computes the rest in bf16."""
        plan = Plan(default=LayerPrecision.of(input, weight, grad, overrides), compute="bf16", provenance={"recipe": name})
        return cls(plan, about, name)

    def check(self) -> None:
        """Raise a UserError unless the recipe has a plan, and a name that means no other recipe."""
        if not isinstance(self.plan, Plan):
            raise UserError(f"The recipe {self.name!r} has a Plan, not {self.plan!r:.200}.")
        if self.name in ALIASES or self.name in MEASURED or self.name == AUTO:
            raise UserError(f"The name {self.name!r} already means a recipe: choose another name.")


def recipe(name: str) -> Plan:
    """Return the plan of a recipe.

    Args:
        name: A name in `RECIPES`, or in `ALIASES`: names of the same recipes in other libraries.

    >>> recipe("bf16-o2").master
    True
    >>> recipe("rowwise").provenance["recipe"]
    'fp8-row'
    """
    if isinstance(name, str) and name in MEASURED:
        raise UserError(
            f"The recipe {name!r} is made for a model by measuring its layers on a GPU: dither.auto_plan(model, tokens=...) "
            "returns the plan, and `dither train` takes the name."
        )
    if not isinstance(name, str) or (known := recipe_name(name)) not in RECIPES:
        hint = did_you_mean(name, (*RECIPES, *ALIASES)) if isinstance(name, str) else ""
        raise UserError(f"There is no recipe {name!r}{hint}: choose one of {', '.join(RECIPES)}.")
    return RECIPES[known].plan


def recipe_name(name: str) -> str:
    """Return the recipe that an alias stands for, and any other name unchanged.

    >>> recipe_name("blockwise"), recipe_name("fp8-block")
    ('fp8-block', 'fp8-block')
    """
    return ALIASES.get(name, name)


ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "fp8": "fp8-current",
        "tensorwise": "fp8-current",
        "rowwise": "fp8-row",
        "blockwise": "fp8-block",
        "delayed": "fp8-delayed",
    }
)
"""Names of recipes in torchao and Transformer Engine.

Some scales differ: torchao's `rowwise` and, by default, the block scales of Transformer Engine are powers of two. Those of
`fp8-row` and `fp8-block` are float32. docs/migration.md has the casts that reproduce the scales of these libraries.
"""


AUTO = "auto"
"""In place of the name of a recipe or a mode: the one that suits the model and the device."""

MEASURED: Mapping[str, str] = MappingProxyType(
    {"fp8-auto": "FP8 for the layers that it makes faster on this GPU, by measured time per shape, and BF16 for the others."}
)
"""Recipes whose plans depend on a model and a GPU, with a sentence that describes each: `dither.auto_plan` makes them."""


def _uncast(about: str, **fields: object) -> Recipe:
    return Recipe(Plan(default=LayerPrecision(), **fields), about)  # type: ignore[arg-type]


def _cast(
    about: str,
    input: str,
    weight: str,
    grad: str,
    overrides: Mapping[str, str] | None = None,
    *,
    requantize: bool = False,
    mask_clipped: bool = False,
    spare_last: float = 0.0,
    paper: str = "",
) -> Recipe:
    # Uncast operations run in bf16, the baseline of low-precision training.
    precision = LayerPrecision.of(input, weight, grad, overrides, requantize, mask_clipped)
    return Recipe(Plan(default=precision, compute="bf16", spare_last=spare_last), about, paper=paper)


_EDEN = "e2m1 tile(16) eden(128) stochastic(16) hadamard(128,redrawn)"
_QUEST = "e2m1 tile(32) quest nearest hadamard(32,plain)"
_QUARTET = "mxfp4 stochastic(16) hadamard(32,redrawn)"
_TETRAJET = "nvfp4 stochastic(16) hadamard(32,redrawn)"

_RECIPES = {
    "fp32": _uncast("Single precision throughout: the baseline of all other recipes.", parameters="fp32"),
    "bf16": _uncast(
        "Mixed precision (O1): fp32 parameters, operations under autocast to bf16.", compute="bf16", parameters="fp32"
    ),
    "bf16-o2": _uncast(
        "Mixed precision (O2): bf16 parameters with fp32 master weights in the optimizer; norms stay fp32.",
        compute="bf16",
        parameters="bf16",
        master=True,
    ),
    "bf16-pure": _uncast(
        "bf16 parameters without master weights: small updates are lost unless the optimizer rounds stochastically.",
        compute="bf16",
        parameters="bf16",
    ),
    "fp16": _uncast(
        "fp32 parameters, operations under autocast to fp16, the loss scaled.",
        compute="fp16",
        parameters="fp32",
        loss_scaling=True,
    ),
    "fp16-o2": _uncast(
        "fp16 parameters with fp32 master weights in the optimizer; norms stay fp32, the loss is scaled.",
        compute="fp16",
        parameters="fp16",
        master=True,
        loss_scaling=True,
    ),
    "fp8-delayed": _cast(
        "FP8, one scale per tensor from the largest magnitude of the last 1024 steps, gradients in e5m2.",
        "e4m3 tensor delayed(1024)",
        "e4m3 tensor delayed(1024)",
        "e5m2 tensor delayed(1024)",
    ),
    # Room for growth between measurements: twice the weights, 4 times the inputs, 16 times the gradients. It takes binades from
    # the lower end of the range, of which e5m2 has most.
    "fp8-static": _cast(
        "FP8, one scale per tensor, measured in one of 32 steps and with room for growth, gradients in e5m2.",
        "e4m3 tensor delayed(4,2,max,32)",
        "e4m3 tensor delayed(4,1,max,32)",
        "e5m2 tensor delayed(4,4,max,32)",
    ),
    "fp8-current": _cast(
        "FP8, one scale per tensor from the tensor itself, gradients in e5m2.", "e4m3 tensor", "e4m3 tensor", "e5m2 tensor"
    ),
    "fp8-row": _cast("FP8, one scale per row of each operand.", "e4m3 row", "e4m3 row", "e4m3 row"),
    "fp8-block": _cast(
        "FP8, one scale per 1 x 128 tile of inputs and gradients and per 128 x 128 block of weights, as in DeepSeek-V3.",
        "e4m3 tile(128)",
        "e4m3 block(128)",
        "e4m3 tile(128)",
    ),
    # Forward products keep the tiles of fp8-block, and so its bits: with blocks there too, a token's values would depend on the
    # 127 others of its block, and inference in the same format would need blocks of tokens as well.
    "fp8-block-2d": _cast(
        "fp8-block with inputs in 128 x 128 blocks in the weight gradient, whose product is then as fast as the other two.",
        "e4m3 tile(128)",
        "e4m3 block(128)",
        "e4m3 tile(128)",
        {"weight_grad.input": "e4m3 block(128)"},
    ),
    # With OCP's rule for scales, e4m3 clips the largest value of a block if it is above 1.75 times a power of two. That raises
    # the loss of the model in tests/test_recipes.py by 0.8 to 1.2 % (three seeds), pow2_ceil by 0.1 to 0.7 %.
    "mxfp8": _cast(
        "MX: e4m3 with a power-of-two scale per 32 values that never clips.",
        "e4m3 tile(32) pow2_ceil",
        "e4m3 tile(32) pow2_ceil",
        "e4m3 tile(32) pow2_ceil",
    ),
    "mxfp6": _cast(
        "OCP MX: e2m3 with a power-of-two scale per 32 values, which never clips gradients.",
        "mxfp6",
        "mxfp6",
        "e2m3 tile(32) pow2_ceil",
    ),
    "mxfp4": _cast(
        "OCP MX: e2m1 with a power-of-two scale per 32 values; gradients are never clipped and are rounded stochastically.",
        "mxfp4",
        "mxfp4",
        "mxfp4 stochastic(16)",
    ),
    "nvfp4": _cast(
        "NVIDIA's NVFP4: 16 x 16 weights, stochastic dY, Hadamard in the weight gradient, the last 15 % of the blocks in BF16.",
        "nvfp4",
        "e2m1 block(16) nvfp4",
        "nvfp4 stochastic(16)",
        {"weight_grad.input": "nvfp4 hadamard(16)", "weight_grad.grad": "nvfp4 stochastic(16) hadamard(16)"},
        spare_last=0.15,
        paper="2509.25149",
    ),
    "nvfp4-46": _cast(
        "nvfp4 with four over six for inputs and weights, and a sixth of the blocks in BF16.",
        "e2m1 tile(16) four_over_six",
        "e2m1 block(16) four_over_six",
        "nvfp4 stochastic(16)",
        {
            "weight_grad.input": "e2m1 tile(16) four_over_six nearest hadamard(16)",
            "weight_grad.grad": "nvfp4 stochastic(16) hadamard(16)",
        },
        spare_last=1 / 6,
        paper="2512.02010",
    ),
    "quartet": _cast(
        "Quartet: MXFP4 after a Hadamard transform; QuEST forward, both gradients stochastic from its codes.",
        _QUEST,
        _QUEST,
        _QUARTET,
        {"input_grad.weight": _QUARTET, "weight_grad.input": _QUARTET},
        requantize=True,
        mask_clipped=True,
        paper="2505.14669",
    ),
    "quartet2": _cast(
        "Quartet II: four over six forward; both gradients by MS-EDEN from the codes of forward, after a Hadamard transform.",
        "e2m1 tile(16) four_over_six",
        "e2m1 tile(16) four_over_six",
        _EDEN,
        {"input_grad.weight": _EDEN, "weight_grad.input": _EDEN},
        requantize=True,
        paper="2601.22813",
    ),
    "tetrajet2": _cast(
        "The layers of TetraJet-v2: NVFP4; both gradients stochastic from the codes of forward, after a Hadamard transform.",
        "nvfp4",
        "nvfp4",
        _TETRAJET,
        {"input_grad.weight": _TETRAJET, "weight_grad.input": _TETRAJET},
        requantize=True,
        paper="2510.27527",
    ),
    "fp4-all-the-way": _cast(
        "NVFP4 in all products: nearest in forward, stochastic in both gradients.",
        "nvfp4",
        "nvfp4",
        "nvfp4 stochastic(16)",
        {"input_grad.weight": "nvfp4 stochastic(16)", "weight_grad.input": "nvfp4 stochastic(16)"},
        paper="2505.19115",
    ),
    "mxfp4-rht": _cast(
        "MXFP4 in both gradients, stochastic after a Hadamard transform with new signs in each step; forward in BF16.",
        "mxfp4 stochastic(16) hadamard(64,redrawn)",
        "mxfp4 stochastic(16) hadamard(64,redrawn)",
        "mxfp4 stochastic(16) hadamard(64,redrawn)",
        {"forward": "bf16"},
        paper="2502.20586",
    ),
    "fp4-block": _cast(
        "The FP4 of SNIP: e2m1, scaled like fp8-block; gradients are rounded stochastically.",
        "e2m1 tile(128)",
        "e2m1 block(128)",
        "e2m1 tile(128) stochastic(16)",
    ),
    "fp6-block": _cast("FP6: e2m3, scaled like fp8-block.", "e2m3 tile(128)", "e2m3 block(128)", "e2m3 tile(128)"),
    "fp4-forward": _cast(
        "NVFP4 forward, a scale per 16 values; FP8 backward, one scale per tensor: gradients in e5m2, the rest in e4m3.",
        "e2m1 tile(16) nvfp4",
        "e2m1 tile(16) nvfp4",
        "e5m2 tensor",
        {"input_grad.weight": "e4m3 tensor", "weight_grad.input": "e4m3 tensor"},
    ),
    "fp4-fp8grad": _cast(
        "Inputs and weights in FP4 in all products, gradients in FP8, scaled like fp8-block.",
        "e2m1 tile(128)",
        "e2m1 block(128)",
        "e4m3 tile(128)",
    ),
    "int8": _cast(
        "INT8 with one scale per tensor. It loses small gradients: here to show why it fails.",
        "int8 tensor",
        "int8 tensor",
        "int8 tensor",
    ),
    # Gradients are rounded to nearest, as in torchao. Over four seeds the loss of the model in tests/test_recipes.py is from
    # 0.2 % below to 0.4 % above that of bf16, and with stochastic gradients from 0.1 % below to 0.3 % above: statistically
    # tied, and rounding to nearest needs no random bits. One scale per tensor raises the loss by 2.7 to 6.1 %.
    "int8-row": _cast(
        "INT8 with one scale per row of each operand, rounded to nearest: integer sums, the same bits on every device.",
        "int8 row",
        "int8 row",
        "int8 row",
    ),
}

for _name, _recipe in _RECIPES.items():
    registry.RECIPES.add(
        replace(_recipe, name=_name, plan=replace(_recipe.plan, provenance={"recipe": _name})), registry.BUILT_IN
    )

RECIPES: registry.Table[Recipe] = registry.RECIPES
"""All recipes by name."""

NAMES: Mapping[str, object] = ChainMap(MEASURED, ALIASES, RECIPES)  # type: ignore[arg-type]
"""Every name of a recipe, also of those that are registered later."""
