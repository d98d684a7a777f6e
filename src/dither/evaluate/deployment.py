"""Casts of trained weights, and plans from learned bitwidths.

`plan_from_bitwidths` turns the bitwidths of a model's sampled layers into a Plan with one weight format per layer. `deploy`
casts trained weights by a plan, and measures the loss before and after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dither.console import aligned
from dither.errors import UserError
from dither.evaluate.held_out import evaluating, replaced
from dither.nn.bitwidths import learned_blocks, less_slack, sampled_layers
from dither.nn.convert import reasons_left_alone
from dither.nn.sites import find_sites, weight_of
from dither.ops import quantize
from dither.spec import NAMED_CASTS, Cast, Granularity, LayerPrecision, Plan
from dither.spec.bitwidths import DEPLOYABLE, deployable
from dither.spec.formats import Format

Evaluate = Callable[[nn.Module], float]
"""A function (model) -> loss, which is called with the model in eval mode."""

SLACK = 0.05
"""Bits by which learned bitwidths may exceed the capacity of a format: guidance does not quite reach its target."""


# Plans ----------------------------------------------------------------------------------------------------------------


def plan_from_bitwidths(
    model: nn.Module,
    *,
    granularity: str = "block(32)",
    quantile: float = 1.0,
    slack: float = 0.0,
    formats: Sequence[str] = DEPLOYABLE,
) -> Plan:
    """Return a plan that casts the weight of each sampled layer to the narrowest of `formats` that its bitwidths allow.

    Layers without bitwidths are left alone. Formats carry bitwidths by the paper's Table 2.

    Args:
        model: A model with sampled layers.
        granularity: Granularity of the casts.
        quantile: The fraction of a layer's weights whose b_t the format must carry.
        slack: Bits by which b_t may exceed the capacity of a format.
        formats: The formats to choose from.

    >>> import dither, torch
    >>> from dither.spec import Sampling
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 64))
    >>> _ = dither.convert(model, dither.Plan().with_sampling(Sampling(b_init=4, b_target=3)))
    >>> print(plan_from_bitwidths(model).for_layer("0"))
    weight e3m2 block(32) fp32 nearest
    """
    if not isinstance(quantile, int | float) or not 0 < quantile <= 1:
        raise UserError(f"quantile= is a fraction of a layer's weights, above 0 and up to 1, not {quantile!r}.")
    Granularity.parse(granularity)
    rules = []
    for name, layer in sampled_layers(model).items():
        b_t, counts = learned_blocks(name, layer)
        format = deployable(_quantile(less_slack(b_t, slack), counts, quantile), formats)
        rules.append((name, LayerPrecision(weight=weight_cast(format.name, granularity))))
    return Plan(layers=tuple(rules), provenance={"origin": "bitwidths", "quantile": quantile, "slack": slack})


def weight_cast(format: str, granularity: str = "block(32)") -> Cast:
    """Return a cast of weights to `format`, without a scale if the format has float32's range.

    >>> str(weight_cast("e2m1")), str(weight_cast("bf16"))
    ('e2m1 block(32) fp32 nearest', 'bf16 nearest')
    """
    return Cast(format) if Format.parse(format).exponent_bits == 8 else Cast(format, granularity, "fp32")


def parse_cast(text: str) -> Cast:
    """Parse a cast of weights from the command line: colons replace spaces, and a format alone means blocks of 32 x 32.

    >>> str(parse_cast("e2m1")), str(parse_cast("e4m3:row"))
    ('e2m1 block(32) fp32 nearest', 'e4m3 row fp32 nearest')
    """
    words = text.replace(":", " ").split()
    alone = len(words) == 1 and words[0] not in NAMED_CASTS
    return weight_cast(words[0]) if alone else Cast.parse(" ".join(words))


def stored_bits(cast: str) -> float:
    """Return the bits per weight, scales included, of a matrix of 1024 x 1024 after a cast of the command line.

    >>> stored_bits("mxfp4"), stored_bits("int8:row")
    (4.25, 8.03125)
    """
    return quantize(torch.zeros(1024, 1024), parse_cast(cast)).bits


def _quantile(b_t: Tensor, counts: Tensor, quantile: float) -> float:
    """Return the smallest b_t that a fraction `quantile` of the weights do not exceed."""
    order = b_t.argsort()
    reached = counts[order].cumsum(0) >= quantile * counts.sum() * (1 - 1e-12)  # sums of shares are not exact
    return b_t[order][reached][0].item()


# Deployment -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeployedLayer:
    """A layer whose weight was cast."""

    name: str
    weights: int
    formats: Mapping[str, float]
    """Fraction of weights in each format."""
    bits: float
    """Bits per weight as stored, scales included."""
    error: float
    """Norm of the change divided by the norm of the weight."""


@dataclass(frozen=True)
class Deployment:
    """Trained weights cast to few bits, with their errors and the loss. Prints as a table."""

    layers: tuple[DeployedLayer, ...]
    weights: Mapping[str, Tensor]
    """The cast weights by the names of their parameters, dequantized to the parameters' dtype."""
    loss_before: float | None
    loss_after: float | None

    @property
    def bits(self) -> float:
        """Return the mean bits per weight of the cast layers."""
        return sum(layer.bits * layer.weights for layer in self.layers) / sum(layer.weights for layer in self.layers)

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype for a file of the deployed model: the narrower of BF16 and FP16 that its formats need, or None.

        Formats of few bits and BF16 are stored in BF16, FP16 in FP16. None, which keeps the dtype of the parameters, stands for
        wider formats, or BF16 and FP16 mixed.
        """
        formats = {name for layer in self.layers for name in layer.formats}
        if any(Format.parse(name).bits > 16 for name in formats) or {"bf16", "fp16"} <= formats:
            return None
        return torch.float16 if "fp16" in formats else torch.bfloat16

    def write(self, model: nn.Module) -> None:
        """Copy the cast weights into a model's parameters, whose dtype does not change.

        `dither.models.save_pretrained` then writes the model in the dtype of the deployment, BF16 for formats of few bits,
        unless its `dtype=` says otherwise. `dither.export` writes the few bits themselves.
        """
        with torch.no_grad():
            for name, weight in self.weights.items():
                model.get_parameter(name).copy_(weight)
        model.deployed_dtype = self.dtype  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the weights as plain values, ready for JSON."""
        losses = {"loss_before": self.loss_before, "loss_after": self.loss_after}
        return {"layers": [dict(vars(layer)) for layer in self.layers], "bits": self.bits, **losses}

    def __str__(self) -> str:
        losses = () if self.loss_before is None else (f"loss {self.loss_before:.5f} -> {self.loss_after:.5f}",)
        rows = [("layer", "weights", "formats", "bits", "error")]
        for layer in self.layers:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in layer.formats.items())
            rows.append((layer.name, f"{layer.weights:,}", shares, f"{layer.bits:.2f}", f"{layer.error:.4f}"))
        return "\n".join([*aligned(rows), ", ".join([f"{self.bits:.2f} bits per weight", *losses])])


def deploy(model: nn.Module, plan: Plan, *, evaluate: Evaluate | None = None) -> Deployment:
    """Cast the weights of a model's linear layers by a plan, and measure the loss before and after.

    The model is not changed: `Deployment.write` copies the cast weights into it. Casts of a converted model's products stay in
    use during the evaluation.

    Args:
        model: A trained model.
        plan: A plan, of which only the casts of weights are used. Layers without one are left alone, and so is the output
            layer unless a rule names it.
        evaluate: A function (model) -> loss. It is called twice in eval mode, in which sampled layers have no noise.

    >>> import dither, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    >>> plan = dither.Plan(default=dither.LayerPrecision.of(weight="e2m1 block(32)"))
    >>> x = torch.randn(100, 64)
    >>> deployment = deploy(model, plan, evaluate=lambda model: (model(x) - x).square().mean().item())
    >>> deployment.bits  # 4, and 32 for each 1024 weights
    4.03125
    """
    if not isinstance(plan, Plan):
        raise UserError(f"deploy takes a Plan that casts weights, not {plan!r}; plan_from_bitwidths(model) makes one.")
    layers, weights = list[DeployedLayer](), dict[str, Tensor]()
    sites = find_sites(model)
    plan = plan.spared([site.name for site in sites])
    left_alone = reasons_left_alone(model, plan, sites, (), ())
    for site in sites:
        precision = plan.for_layer(site.name)
        if site.name not in left_alone and precision is not None and precision.weight is not None:
            parameter, weight, axis = weight_of(site)
            codes = quantize(weight, precision.weight, axis=axis)
            weights[parameter] = new = codes.dequantize()
            size, formats = weight.float().norm().item(), {precision.weight.format: 1.0}
            error = (new.float() - weight.float()).norm().item() / size if size else 0.0
            layers.append(DeployedLayer(site.name, weight.numel(), formats, codes.bits, error))
    if not layers:
        obstacles = (f"{site.name}: {site.obstacle}" for site in sites if site.obstacle and plan.for_layer(site.name))
        why = next(obstacles, "give its layers a weight such as 'e2m1 block(32)'")
        raise UserError(f"The plan casts no weight of {type(model).__name__}: {why}.")
    before = after = None
    if evaluate is not None:
        with evaluating(model):
            before = float(evaluate(model))
            with replaced(model, weights):
                after = float(evaluate(model))
    return Deployment(tuple(layers), weights, before, after)
