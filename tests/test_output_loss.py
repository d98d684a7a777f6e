"""The loss of an output layer in FP8: its codes bit for bit, its gradients beside those of layer and loss apart, in a run."""

import json
import shutil

import pairs
import pytest
import torch
from runs import config_of
from torch.nn import functional

import dither
from dither import Cast, LayerPrecision, Plan, UserError, checkpoint, convert
from dither.models import GPT2, GPT2Config, build, preset
from dither.models.causal import cross_entropy, output_loss
from dither.nn import Linear, step_context
from dither.nn import output_loss as fused
from dither.nn.functional import aligned_linear
from dither.ops.reference import loss, quantize
from dither.ops.reference import loss as loss_codes
from dither.ops.reference.loss import IGNORE, ROOM
from dither.train import config as configs
from dither.train import loop

pytestmark = pytest.mark.usefixtures("quiet_numpy")

CASTS = ["e5m2 tensor", "e4m3 tile(128)", "e4m3 tile(32) pow2_ceil"]


@pytest.mark.sampled(without=["e4m3 tile(32) pow2_ceil-144-136-dtype0", "e5m2 tensor-144-136-dtype0"])
@pytest.mark.parametrize(("N", "V", "dtype"), [(144, 136, torch.bfloat16), (20, 130, torch.float32), (16, 128, torch.float16)])
@pytest.mark.parametrize("text", CASTS)
def test_codes_of_the_kernel(text, N, V, dtype, device):
    """The codes of the kernel are the reference's cast of the kernel's gradients, bit for bit, in one part and in two."""
    from dither.ops.triton import loss as kernel_codes
    from dither.ops.triton import loss as kernel_loss

    cast = Cast.parse(text)
    logits, targets, weights = pairs.logits_of(N, V, dtype, device)
    logits[5], targets[5], weights[5] = torch.nan, IGNORE, 0.0  # not read
    logits[6, 1], targets[6], weights[6] = torch.nan, 0, 0.5  # NaN
    logits[7, 2], targets[7], weights[7] = 1.0, V, 0.25  # no word
    parts = loss.forward(logits, targets)[1]
    amax = loss_codes.largest_gradient(weights)
    given = amax if cast.group.kind == "tensor" else None
    grads = kernel_loss.backward(logits, targets, parts, weights)
    wanted = quantize.quantize_both(grads, cast, None, given, cast.element)
    for size in {N, 128}:
        out = torch.ops.dither.empty_gradient_codes(logits, str(cast))
        rows = [slice(first, min(first + size, N)) for first in range(0, N, size)]
        found = [
            kernel_codes.backward_codes(logits[row], targets[row], parts[:, row], weights[row], amax, cast, row.start, out)
            for row in rows
        ]
        scales = found[0][1] if given is not None else torch.cat([scale.float() for _, scale in found])
        turned = wanted[3].T if wanted[3].dim() == 2 else wanted[3]
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in found])
        assert pairs.differing(codes, wanted[0].view(torch.uint8)) == 0
        assert pairs.differing(scales.reshape(-1), wanted[1].float().reshape(-1)) == 0
        assert pairs.differing(out[0].reshape(-1), wanted[2].T.reshape(-1)) == 0
        assert pairs.differing(out[1].reshape(-1), turned.reshape(-1)) == 0


@pytest.mark.parametrize("text", CASTS)
def test_operator(text):
    logits, targets, weights = pairs.logits_of(48, 160, torch.bfloat16, "cpu")
    parts, cast = loss.forward(logits, targets)[1], Cast.parse(text)
    out = torch.ops.dither.empty_gradient_codes(logits, str(cast))
    given = (logits, targets, parts, weights, loss_codes.largest_gradient(weights), str(cast), 0, *out, "reference")
    torch.library.opcheck(torch.ops.dither.cross_entropy_codes, given, test_utils="test_faketensor")
    torch.library.opcheck(torch.ops.dither.empty_gradient_codes, (logits, str(cast)), test_utils="test_faketensor")


def model_of(recipe: str, vocabulary: int = 304, length: int = 65):
    model = build(preset("tiny", num_hidden_layers=1), vocab_size=vocabulary)
    dither.convert(model, dither.recipe(recipe).with_output())
    tokens = torch.randint(vocabulary, (2, length + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :7] = IGNORE
    return model, tokens[:, :-1], targets


def gradients(model, loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    with step_context(model, step=0):
        value = loss()
        (3 * value).backward()
    return value.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.sampled(only=["mxfp8"])
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8"])
def test_tiles_have_the_bits_of_layer_and_loss_apart(recipe, monkeypatch):
    model, tokens, targets = model_of(recipe, length=64)  # one part: products of other sizes add in another order
    calls = []
    whole = fused.output_loss
    monkeypatch.setattr(fused, "output_loss", lambda *given: calls.append(1) or whole(*given))
    found = gradients(model, lambda: model(tokens, targets))
    assert calls == [1]
    apart = gradients(model, lambda: cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
    assert calls == [1]
    assert found[0] == apart[0]
    assert [name for name in found[1] if not found[1][name].equal(apart[1][name])] == []


def test_a_scale_per_tensor_is_that_of_the_bound():
    """The gradients of weight and input are the products of the codes whose scale is 1 / (N 57344)."""
    N, D, V = 48, 32, 64
    layer = Linear(D, V, bias=False, precision=dither.recipe("fp8-current").default, name="head")
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(N) % V
    output_loss(layer, x, targets).backward()
    logits = layer(x).detach()
    weights = torch.full((N,), 1 / N)
    grads = loss.backward(logits, targets, loss.forward(logits, targets)[1], weights)
    codes = quantize.quantize_both(grads, Cast.parse("e5m2 tensor"), None, torch.tensor(1 / N), Cast.parse("e5m2").element)
    assert float(codes[1]) == pytest.approx(1 / (N * 57344))
    dlogits = codes[0].float() * codes[1]
    w, inputs = (dither.fake_quantize(each.detach(), "e4m3 tensor") for each in (layer.weight, x))
    torch.testing.assert_close(x.grad, dlogits @ w)
    torch.testing.assert_close(layer.weight.grad, dlogits.T @ inputs)
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy((x.double() @ layer.weight.double().T), targets), x)[0]
    assert (x.grad - exact).norm() < 0.1 * exact.norm()


def test_layers_that_run_apart(monkeypatch):
    """Hooks see logits and whole gradients; other casts, a bias and layers that are not converted have no codes here."""
    monkeypatch.setattr(fused, "output_loss", lambda *_: pytest.fail("the loss wrote the codes"))
    model, tokens, targets = model_of("fp8-block")
    seen = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.shape))
    model(tokens, targets)
    assert seen == [(2, 65, 304)]
    hook.remove()
    x, chosen = torch.randn(32, 16), torch.zeros(32, dtype=torch.int64)
    for cast in ("e4m3 row", "e5m2 tensor delayed(4)", "e4m3 tile(128) stochastic(8)", "e2m1 tile(128)"):
        precision = LayerPrecision.of("e4m3 tensor", "e4m3 tensor", cast)
        layer = Linear(16, 32, bias=False, precision=precision, name="head")
        assert not fused.writes_its_codes(layer, x)
        assert output_loss(layer, x, chosen).isfinite()
    assert output_loss(Linear(16, 32, precision=dither.recipe("fp8-block").default), x, chosen).isfinite()
    assert output_loss(torch.nn.Linear(16, 32), x, chosen).isfinite()


def test_targets_of_another_shape():
    model, tokens, targets = model_of("fp8-block")
    hidden = model.hidden(tokens)
    with pytest.raises(UserError, match=r"int64 targets of shape \[2, 65\], one per row of the input, not"):
        output_loss(model.lm_head, hidden, targets[:, 1:])


def test_compiled_as_a_whole():
    model, tokens, targets = model_of("fp8-block")
    found = gradients(model, lambda: model(tokens, targets))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    again = gradients(model, lambda: compiled(tokens, targets))
    assert found[0] == again[0]
    assert [name for name in found[1] if not found[1][name].equal(again[1][name])] == []


def test_no_gradient_of_the_input_and_none_of_the_weight():
    layer = Linear(128, 256, bias=False, precision=dither.recipe("fp8-block").default, name="head")
    targets = torch.arange(160) % 256
    x = torch.randn(160, 128, requires_grad=True)
    both = torch.autograd.grad(output_loss(layer, x, targets), [x, layer.weight])
    assert torch.autograd.grad(output_loss(layer, x.detach(), targets), layer.weight)[0].equal(both[1])
    layer.weight.requires_grad_(False)
    assert torch.autograd.grad(output_loss(layer, x, targets), x)[0].equal(both[0])


# In the trainer --------------------------------------------------------------------------------------------------------


def settings(text, out, *more: str) -> configs.Config:
    small = ["run.steps=4", "run.save_every=2", "data.batch=2", "precision.mode=o1", "precision.recipe=fp8-block"]
    return config_of(text, out, small, more)


def test_a_run_with_an_output_layer_in_fp8(text, tmp_path):
    """The option casts the output layer in every plan of a schedule, and a resumed run has the bits of a whole one."""
    more = ["precision.output=fp8-current", 'precision.schedule=[[0, "fp8-block"], [2, "mxfp8"]]']
    whole = settings(text, tmp_path / "whole", *more)
    assert configs.loads(configs.dumps(whole)) == whole
    assert loop.train(whole).code == 0
    layers = {layer["name"]: layer for layer in json.loads((tmp_path / "whole" / "conversion.json").read_text())["layers"]}
    assert "e5m2 tensor" in json.dumps(layers["lm_head"])
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    checkpoint.drop(tmp_path / "half" / "checkpoints", after=2)
    half = configs.override(whole, [f'run.out="{tmp_path}/half"'])
    assert loop.train(half, resume=True).code == 0
    tensors = [checkpoint.load(checkpoint.newest(tmp_path / name / "checkpoints")[0])[0] for name in ("whole", "half")]
    assert [name for name in tensors[0] if not torch.equal(tensors[0][name], tensors[1][name])] == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["precision.output=bf16"], "precision.output='bf16' casts nothing"),
        (["precision.output=fp9"], "no precision.output=.fp9."),
        (["precision.output=fp8-block", "snip.target=0.5", "snip.start=1", "snip.delay=1"], "does not go with snip.target"),
    ],
)
def test_outputs_that_are_refused(text, tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        settings(text, tmp_path / "run", *more)


def test_an_alias_and_a_plan_without_a_default():
    assert (
        configs.override(configs.Config(), ["precision.mode=o1", "precision.output=blockwise"]).precision.output == "fp8-block"
    )
    with pytest.raises(UserError, match="has no default precision"):
        dither.Plan().with_output()


# The output layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [5, 64, 257])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 1, 8)])
def test_numbers_and_gradients_are_those_of_a_linear_layer(words, shape):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator).requires_grad_() for size in (shape, (words, 8)))
    found, expected = aligned_linear(x, weight), functional.linear(x, weight)
    rows = found.flatten(0, -2)
    if len(rows) > 1:
        assert rows.stride() == (-(-words // ROOM) * ROOM, 1)
    assert torch.equal(found, expected)
    grad = torch.randn(found.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_it_converts_as_a_linear_layer_does():
    model = GPT2(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61, tie_word_embeddings=False))
    weight = model.lm_head.weight
    record = convert(model, Plan(layers=(("lm_head", LayerPrecision.of("e4m3 tile(128)", None, None)),)))
    assert "lm_head" in [layer.name for layer in record.layers]
    assert isinstance(model.lm_head, Linear)
    assert model.lm_head.weight is weight
