"""What models have learned, the formats that carry it, what casting to them does, and targets from measured sensitivity."""

import math

import pytest
import torch
from torch import nn

import dither
from dither import Cast, LayerPrecision, Plan, UserError
from dither.evaluate.deployment import deploy, plan_from_bitwidths, weight_cast
from dither.nn.bitwidths import bitwidth_range, effective_precision
from dither.spec import Sampling
from dither.spec.bitwidths import deployable

B_T = torch.tensor([[3.0, 4.0, 5.0], [2.5, 3.5, 6.5]])
"""Of a 40 x 70 weight: blocks of 32 x 32, 32 x 6, 8 x 32 and 8 x 6."""
COUNTS = torch.tensor([[32 * 32, 32 * 32, 32 * 6], [8 * 32, 8 * 32, 8 * 6]])


def learned(b_t: torch.Tensor = B_T, **options) -> nn.Sequential:
    """Two layers, the first of which is sampled and has learned `b_t`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 10))
    sampling = Sampling(b_init=7, b_target=2, **options)
    dither.convert(model, Plan(layers=(("0", LayerPrecision(sampling=sampling)),)))
    with torch.no_grad():
        model[0].bitwidth.copy_((b_t - 2) / 5)
    return model


def stored() -> nn.Sequential:
    """A model whose weights are stored in FP8."""
    model = nn.Sequential(nn.Linear(64, 64))
    dither.convert(model, "fp8-current")
    dither.nn.store_weights(model)
    return model


# What was learned


def test_effective_precision_counts_weights_not_blocks():
    found = effective_precision(learned())
    (layer,) = found.layers
    share = COUNTS / COUNTS.sum()
    assert (layer.name, layer.weights) == ("0", 2800)
    assert layer.mean == pytest.approx((share * B_T).sum().item(), rel=1e-6)
    assert (layer.min, layer.max) == (2.5, 6.5)
    assert layer.histogram == pytest.approx(
        {b: share[B_T.ceil() == b].sum().item() for b in (3, 4, 5, 7)}, rel=1e-6
    )  # nothing at 6
    chosen = [deployable(b).name for b in B_T.flatten().tolist()]
    by_hand = dict.fromkeys(chosen, 0.0)
    for name, part in zip(chosen, share.flatten().tolist(), strict=True):
        by_hand[name] += part
    assert dict(layer.formats) == pytest.approx(by_hand, rel=1e-6)
    assert found.total.mean == layer.mean


def test_all_layers_together_and_printed():
    model = learned()
    model.append(nn.Linear(10, 10))
    bits = torch.nn.Sequential(nn.Linear(64, 64))
    dither.convert(bits, Plan().with_sampling(Sampling(b_init=4, b_target=4)))
    both = nn.ModuleDict({"a": model, "b": bits})
    found = effective_precision(both)
    total = found.total
    assert bitwidth_range(both) == pytest.approx((total.mean, total.min, total.max), rel=1e-12)
    assert [layer.name for layer in found.layers] == ["a.0", "b.0"]
    first, second = found.layers
    total = (first.mean * 2800 + second.mean * 4096) / 6896
    assert found.total.mean == pytest.approx(total)
    assert sum(found.total.histogram.values()) == pytest.approx(1)
    assert sum(found.total.formats.values()) == pytest.approx(1)
    header, *rows = str(found).splitlines()
    assert " ".join(header.split()) == "layer weights mean min max <= 3 <= 4 <= 5 <= 7 e2m1 e3m2 e4m3 bf16"
    assert [row.split()[0] for row in rows] == ["a.0", "b.0", "total"]
    assert found.to_dict()["total"]["weights"] == 6896


def test_formats_to_choose_from():
    found = effective_precision(learned(), formats=("e4m3", "e3m4", "fp32"))
    assert set(found.total.formats) == {"e4m3", "fp32"}  # e3m4 has as many bits as e4m3, which comes first; 6.5 needs fp32
    found = effective_precision(learned(), formats=("e3m4", "e4m3", "fp32"))
    assert set(found.total.formats) == {"e3m4", "fp32"}
    with pytest.raises(UserError, match=r"No format among e2m1, e4m3 carries a bitwidth of 6\.5"):
        effective_precision(learned(), formats=("e2m1", "e4m3"))


def test_bitwidths_that_have_almost_arrived():
    model = learned(torch.full((2, 3), 4.01))
    assert set(effective_precision(model).total.formats) == {"e4m3"}
    assert set(effective_precision(model, slack=0.05).total.formats) == {"e3m2"}
    assert plan_from_bitwidths(model).for_layer("0").weight.format == "e4m3"
    assert plan_from_bitwidths(model, slack=0.05).for_layer("0").weight.format == "e3m2"
    with pytest.raises(UserError, match=r"slack= is a non-negative number of bits.*not -1"):
        effective_precision(model, slack=-1)


# Plans


@pytest.mark.parametrize(("quantile", "format"), [(1.0, "bf16"), (0.95, "e4m3"), (0.9, "e3m2"), (0.4, "e2m1")])
def test_a_plan_carries_the_quantile(quantile, format):
    # Weights in order of their b_t: 256 at 2.5, 1024 at 3, 256 at 3.5, 1024 at 4, 192 at 5, 48 at 6.5.
    plan = plan_from_bitwidths(learned(), quantile=quantile)
    assert plan.for_layer("0") == LayerPrecision(weight=weight_cast(format))
    assert plan.for_layer("2") is None
    assert Plan.from_json(plan.to_json()) == plan


def test_a_quantile_that_a_block_meets_exactly():
    plan = plan_from_bitwidths(learned(), quantile=(256 + 1024) / 2800)
    assert plan.for_layer("0").weight.format == "e2m1"
    plan = plan_from_bitwidths(learned(), quantile=(256 + 1024 + 1) / 2800)
    assert plan.for_layer("0").weight.format == "e3m2"


@pytest.mark.parametrize("granularity", ["block(128)", "row"])
def test_granularities(granularity):
    cast = plan_from_bitwidths(learned(), granularity=granularity, quantile=0.95).for_layer("0").weight
    assert cast == Cast("e4m3", granularity, "fp32")
    assert plan_from_bitwidths(learned(), granularity=granularity).for_layer("0").weight == Cast("bf16")


# Deployment


def evaluation(model):
    x = torch.linspace(-1, 1, 700).view(10, 70)
    assert not model.training
    return model(x).square().mean().item()


def test_loss_before_and_after_in_one_call():
    model = learned()
    model[2].eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    result = deploy(model, plan_from_bitwidths(model, quantile=0.4), evaluate=evaluation)
    cast = dither.fake_quantize(before["0.weight"], "e2m1 block(32)")
    assert torch.equal(result.weights["0.weight"], cast)
    # The model is as it was: numbers, memory, modes.
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert (model.training, model[0].training, model[2].training) == (True, True, False)
    model.eval()
    assert result.loss_before == evaluation(model)
    result.write(model)
    assert result.loss_after == evaluation(model) != result.loss_before
    (layer,) = result.layers
    assert layer.error == pytest.approx(((cast - before["0.weight"]).norm() / before["0.weight"].norm()).item())
    # 40 rows of 70 codes, half a byte each, and 2 x 3 scales of four bytes.
    assert layer.bits == result.bits == 8 * (40 * 35 + 6 * 4) / 2800
    assert "4.07 bits per weight, loss" in str(result)


def test_the_model_comes_back_when_evaluation_fails():
    model = learned()
    calls = []

    def fails(model):
        calls.append(model[0].weight.detach().clone())
        if len(calls) == 2:
            raise RuntimeError("out of data")
        return 1.0

    with pytest.raises(RuntimeError, match="out of data"):
        deploy(model, Plan(default=LayerPrecision.of(weight="e2m1 block(32)")), evaluate=fails)
    assert not torch.equal(*calls)
    assert torch.equal(model[0].weight, calls[0])
    assert model.training


def test_layers_that_were_never_converted_are_cast_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 32), nn.Linear(32, 64), nn.Linear(64, 12))
    result = deploy(model, Plan(default=LayerPrecision.of(weight="e2m3 tensor")))
    assert [layer.name for layer in result.layers] == ["1"]  # 2 is the output layer
    assert (result.loss_before, result.loss_after) == (None, None)
    assert result.bits == 6 + 32 / (64 * 32)
    both = deploy(model, Plan(layers=(("2", LayerPrecision.of(weight="e4m3 row")),), default=LayerPrecision.of(weight="mxfp4")))
    assert {layer.name: layer.bits for layer in both.layers} == {"1": 4 + 8 / 32, "2": 8 + 32 / 64}


def test_transposed_weights_are_scaled_along_the_products_axis():
    class Conv1D(nn.Module):  # what transformers calls a linear layer with the weight [in, out]
        def __init__(self):
            super().__init__()
            self.nf, self.nx = 8, 64
            self.weight, self.bias = nn.Parameter(torch.randn(64, 8)), None

    model = nn.Sequential(nn.Linear(64, 64))
    model[0] = dither.Linear.adopt(Conv1D(), LayerPrecision())
    weight = model[0].weight.detach()
    result = deploy(model, Plan(default=LayerPrecision.of(weight="e2m1 tile(32)")))
    assert torch.equal(result.weights["0.weight"], dither.fake_quantize(weight, "e2m1 tile(32)", axis=0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_precision(nn.Sequential(nn.Linear(4, 4))), "Sequential has no layer with learned bitwidths"),
        (
            lambda: plan_from_bitwidths(learned(), quantile=0),
            "quantile= is a fraction of a layer's weights, above 0 and up to 1, not 0",
        ),
        (lambda: plan_from_bitwidths(learned(), granularity="blocks"), "There is no granularity 'blocks'"),
        (
            lambda: effective_precision(learned(torch.full((2, 3), math.nan))),
            "layer '0' has learned a bitwidth that is neg.*nan",
        ),
        (
            lambda: effective_precision(learned(torch.full((2, 3), -1.0))),
            "layer '0' has learned a bitwidth that is negative.*-1",
        ),
        (lambda: deploy(learned(), "fp8"), "deploy takes a Plan that casts weights, not 'fp8'"),
        (
            lambda: deploy(learned(), Plan(default=LayerPrecision())),
            "The plan casts no weight of Sequential: give its",
        ),
        (
            lambda: deploy(stored(), Plan(default=LayerPrecision.of(weight="mxfp4"))),
            r"of Sequential: 0: its weight exists only as codes, and restore_weights\(model\) gives it an ordinary one\.",
        ),
        (lambda: deploy(learned(), Plan(layers=(("9", LayerPrecision.of(weight="mxfp4")),))), "matches no linear layer"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(UserError, match=message):
        call()
