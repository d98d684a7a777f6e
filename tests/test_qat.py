"""Training for a deployment format: products, gradients, and codes that the export writes byte for byte."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import dither
from dither.errors import UserError
from dither.exporting import FORMATS
from dither.models import build
from dither.nn import Linear
from dither.nn.sites import converted_layers
from dither.spec.deployment import DEPLOYMENTS

TOKENS = torch.arange(34).reshape(2, 17) % 31


def uneven(model: torch.nn.Module) -> torch.nn.Module:
    """Give layers that engines fuse different magnitudes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("k_proj.weight", "up_proj.weight")):
                parameter.mul_(5.0)
    return model


def trained(format: str, steps: int = 1, **options) -> tuple[torch.nn.Module, dither.Conversion]:
    model = uneven(build("tiny", **options))
    conversion = dither.convert(model, dither.qat(model, format))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        with dither.step_context(model, step=step):
            model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
            optimizer.step()
        optimizer.zero_grad()
    return model, conversion


@pytest.mark.sampled(only=["auto-nvfp4", "its own-nvfp4", "auto-fp8-block", "auto-int8"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("asked", ["auto", "its own"])
def test_the_export_writes_the_codes_that_forward_multiplies(format, asked, tmp_path):
    model, _ = trained(format)
    record = dither.export(model, tmp_path / "out", format="auto" if asked == "auto" else format)
    files = load_file(tmp_path / "out" / "model.safetensors")
    layers = {name: layer for name, layer in converted_layers(model).items() if not layer.precision.plain}
    assert {layer.name for layer in record.layers if layer.format == format} == layers.keys()
    assert layers
    with dither.step_context(model, step=9):  # what the next forward pass multiplies
        model(TOKENS[:, :-1])
        for name, layer in layers.items():
            codes = layer.cache.codes.along
            values = files.get(f"{name}.weight_packed", files.get(f"{name}.weight"))
            scale = files.get(f"{name}.weight_scale", files.get(f"{name}.weight_scale_inv"))
            assert torch.equal(codes.values.view(torch.uint8), values.view(torch.uint8)), name
            assert torch.equal(codes.scale.contiguous().view(torch.uint8).flatten(), scale.view(torch.uint8).flatten()), name
            if codes.tensor_scale is not None and codes.tensor_scale.numel():
                assert codes.tensor_scale.reciprocal() == files[f"{name}.weight_global_scale"]
    scales = {float(tensor) for name, tensor in files.items() if name.endswith("global_scale")}
    assert len(scales) == (format == "nvfp4")  # one for all layers that engines may fuse


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int8", "fp8-block"])
@pytest.mark.parametrize("cached", [True, False])
def test_gradients_are_straight_through(format, cached):
    found = DEPLOYMENTS[format]
    layer = Linear(128, 128, bias=False, precision=found.precision(), name="up")
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dy = torch.randn(32, 128, generator=torch.Generator().manual_seed(2))
    if cached:
        with dither.step_context(layer, step=0):
            y = layer(x)
            y.backward(dy)
    else:
        y = layer(x)
        y.backward(dy)
    w_hat = dither.fake_quantize(layer.weight.detach(), found.cast)
    x_hat = x.detach() if found.input_cast is None else dither.fake_quantize(x.detach(), found.input_cast)
    torch.testing.assert_close(y.detach(), x_hat @ w_hat.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, dy @ w_hat, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, dy.T @ x_hat, rtol=1e-5, atol=1e-5)
    assert (x.grad - dy @ layer.weight.detach()).abs().max() > 1e-3


@pytest.mark.sampled(only=["nvfp4"])
@pytest.mark.parametrize("format", ["nvfp4", "int8", "fp8-block"])
def test_compiled_training_is_eager_training(format):
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        precision = DEPLOYMENTS[format].precision()
        net = torch.nn.Sequential(*(Linear(32, 32, precision=precision, name=name) for name in ("up", "down")))
        call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with dither.step_context(net, step=0):
            y = call(x)
            y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())])
    assert all(map(torch.equal, *found))


def test_a_fixed_tensor_scale_is_that_of_a_tensor_with_its_magnitude():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    given = torch.tensor(6 * 448 * 2.0**-8)
    fixed, measured = (
        dither.quantize(x, "e2m1 tile(16) nvfp4_fixed(0.00390625)"),
        dither.quantize(x, "nvfp4", amax=given),
    )
    assert torch.equal(fixed.values, measured.values)
    assert torch.equal(fixed.scale.view(torch.uint8), measured.scale.view(torch.uint8))
    assert fixed.tensor_scale == measured.tensor_scale == 2.0**-8
    assert torch.equal(dither.fake_quantize(x, "e2m1 tile(16) nvfp4_fixed(0.00390625)"), fixed.dequantize(torch.float32))


def test_layers_that_the_export_keeps_in_16_bits_are_not_cast(tmp_path):
    said: list[str] = []
    model = build("tiny")
    plan = dither.qat(model, "fp8-block", say=said.append)
    dither.convert(model, plan)
    record = dither.export(model, tmp_path / "out", format="fp8-block")
    kept = {layer.name: layer.reason for layer in record.layers if layer.reason}
    assert "lm_head" in kept
    assert "model.layers.0.self_attn.k_proj" in kept
    assert {name for name, precision in plan.layers if precision is None} == kept.keys()
    assert all(re.search(re.escape(reason), said[0]) for reason in kept.values())


def test_wrong_formats_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="There is no deployment format 'nvfp5' \\(did you mean 'nvfp4'"):
        dither.qat(build("tiny"), "nvfp5")
    with pytest.raises(UserError, match=r"dither\.models or of transformers, not Sequential"):
        dither.qat(torch.nn.Sequential(torch.nn.Linear(32, 32)), "nvfp4")
    model = build("tiny")
    with pytest.raises(UserError, match="is one for all"):
        dither.export(model, tmp_path / "out", format="mxfp4", plan=dither.qat(model, "nvfp4"))
    assert json.dumps(dither.qat(model, "nvfp4").to_dict())
