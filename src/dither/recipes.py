"""Named plans that treat every layer alike. A recipe is a plain Plan: print it, save it, change it with `dataclasses.replace`.

>>> print(recipe("fp8-block"))
layers  input                        weight                        grad
all     e4m3 tile(128) fp32 nearest  e4m3 block(128) fp32 nearest  e4m3 tile(128) fp32 nearest
compute bf16; parameters as they are; recipe: fp8-block
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dither.errors import UserError
from dither.precision import LayerPrecision, Plan, did_you_mean


@dataclass(frozen=True)
class Recipe:
    """A plan and a sentence on what it is for."""

    plan: Plan
    about: str


def recipe(name: str) -> Plan:
    """The plan of that name; `RECIPES` has them all.

    >>> recipe("bf16-o2").master
    True
    """
    if not isinstance(name, str) or name not in RECIPES:
        hint = did_you_mean(name, RECIPES) if isinstance(name, str) else ""
        raise UserError(f"There is no recipe {name!r}{hint}: choose one of {', '.join(RECIPES)}.")
    return RECIPES[name].plan


def _uncast(about: str, **fields: object) -> Recipe:
    return Recipe(Plan(default=LayerPrecision(), **fields), about)  # type: ignore[arg-type]


def _cast(about: str, input: str, weight: str, grad: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    # What is not cast runs in bf16, which is what low-precision training is compared with.
    return Recipe(Plan(default=LayerPrecision.of(input, weight, grad, overrides), compute="bf16"), about)


_RECIPES = {
    "fp32": _uncast("Single precision throughout: the yardstick of every other recipe.", parameters="fp32"),
    "bf16": _uncast(
        "Mixed precision (O1): fp32 parameters, operations under autocast to bf16.", compute="bf16", parameters="fp32"
    ),
    "bf16-o2": _uncast(
        "Mixed precision (O2): bf16 parameters, of which the optimizer keeps fp32 masters; norms stay fp32.",
        compute="bf16",
        parameters="bf16",
        master=True,
    ),
    "bf16-pure": _uncast(
        "bf16 parameters without masters: small updates are lost unless the optimizer rounds stochastically.",
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
        "fp16 parameters, of which the optimizer keeps fp32 masters; norms stay fp32, the loss is scaled.",
        compute="fp16",
        parameters="fp16",
        master=True,
        loss_scaling=True,
    ),
    "fp8-delayed": _cast(
        "FP8, one scale a tensor from the largest magnitude of the last 1024 steps, gradients in e5m2.",
        "e4m3 tensor delayed(1024)",
        "e4m3 tensor delayed(1024)",
        "e5m2 tensor delayed(1024)",
    ),
    "fp8-current": _cast(
        "FP8, one scale a tensor from the tensor itself, gradients in e5m2.", "e4m3 tensor", "e4m3 tensor", "e5m2 tensor"
    ),
    "fp8-row": _cast("FP8, one scale a row of each operand.", "e4m3 row", "e4m3 row", "e4m3 row"),
    "fp8-block": _cast(
        "FP8, scales for 1 x 128 tiles of inputs and gradients and 128 x 128 blocks of weights, as DeepSeek-V3 trained.",
        "e4m3 tile(128)",
        "e4m3 block(128)",
        "e4m3 tile(128)",
    ),
    # OCP's rule for a block's scale lets e4m3 clip the block's largest value when that is above 1.75 times a power of two. That
    # costs the model in tests/test_recipes.py 0.8 to 1.2 % of its loss (three seeds), where pow2_ceil costs 0.1 to 0.7 %.
    "mxfp8": _cast(
        "MX: e4m3 with a power-of-two scale for each 32 values, one that never clips.",
        "e4m3 tile(32) pow2_ceil",
        "e4m3 tile(32) pow2_ceil",
        "e4m3 tile(32) pow2_ceil",
    ),
    "mxfp6": _cast(
        "OCP MX: e2m3 with a power-of-two scale for each 32 values, one that never clips for gradients.",
        "mxfp6",
        "mxfp6",
        "e2m3 tile(32) pow2_ceil",
    ),
    "mxfp4": _cast(
        "OCP MX: e2m1 with a power-of-two scale for each 32 values, gradients never clipped and rounded stochastically.",
        "mxfp4",
        "mxfp4",
        "mxfp4 stochastic(16)",
    ),
    "nvfp4": _cast(
        "e2m1 with an e4m3 scale for each 16 values, 16 x 16 for weights, gradients rounded stochastically.",
        "nvfp4",
        "e2m1 block(16) nvfp4",
        "nvfp4 stochastic(16)",
    ),
    "fp4-block": _cast(
        "The FP4 of SNIP: e2m1, scaled as fp8-block is, gradients rounded stochastically.",
        "e2m1 tile(128)",
        "e2m1 block(128)",
        "e2m1 tile(128) stochastic(16)",
    ),
    "fp4-forward": _cast(
        "FP4 forward, scaled as fp8-block is; FP8 backward: gradients in e5m2, inputs and weights in e4m3, a scale a tensor.",
        "e2m1 tile(128)",
        "e2m1 block(128)",
        "e5m2 tensor",
        {"input_grad.weight": "e4m3 tensor", "weight_grad.input": "e4m3 tensor"},
    ),
    "fp4-fp8grad": _cast(
        "Inputs and weights in FP4 in all products, gradients in FP8, scaled as fp8-block is.",
        "e2m1 tile(128)",
        "e2m1 block(128)",
        "e4m3 tile(128)",
    ),
    "int8": _cast(
        "INT8 with one scale a tensor, gradients included, whose small values it loses: here to show why it fails.",
        "int8 tensor",
        "int8 tensor",
        "int8 tensor",
    ),
    # Gradients are rounded to nearest, as torchao does: the model in tests/test_recipes.py ends 0.2 % below to 0.4 % above the
    # loss of bf16, with stochastic gradients 0.1 % below to 0.3 % above (four seeds): tied, and nearest needs no random bits.
    # One scale a tensor costs it 2.7 to 6.1 %.
    "int8-row": _cast(
        "INT8 with one scale a row of each operand, rounded to nearest: integer sums, the same bits on every device.",
        "int8 row",
        "int8 row",
        "int8 row",
    ),
}

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {name: replace(each, plan=replace(each.plan, provenance={"recipe": name})) for name, each in _RECIPES.items()}
)
"""Every recipe by its name, with a sentence each."""
