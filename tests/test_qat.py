"""Training for a deployment format: products, gradients, and codes that the export writes byte for byte."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import SHORT, config_of, lines, write_words
from safetensors.torch import load_file

import dither
from dither import cli
from dither.commands.train import resolve
from dither.errors import UserError
from dither.exporting import FORMATS
from dither.models import build
from dither.models.open import open_model
from dither.nn import Linear, clipping
from dither.nn.frozen import FrozenLinear, freeze_base
from dither.nn.sites import clip_name, converted_layers
from dither.optim.oscillation import check_precision
from dither.settings import override
from dither.spec.deployment import DEPLOYMENTS
from dither.tools.inspect import inspect
from dither.train import Config
from dither.train import teacher as teaching
from dither.train.config import Qat
from dither.train.loop import train

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


@pytest.mark.sampled(only=["auto-nvfp4", "its own-nvfp4", "auto-fp8-block", "auto-int4-g32"])
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
            offset = 0x88 if format.startswith("int4") else 0  # compressed-tensors adds 8 to codes of int4
            assert torch.equal(codes.values.view(torch.uint8) ^ offset, values.view(torch.uint8)), name
            if scale.dtype == torch.bfloat16:
                assert torch.equal(codes.scale, scale.float()), name
            else:
                assert torch.equal(codes.scale.contiguous().view(torch.uint8).flatten(), scale.view(torch.uint8).flatten())
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


@pytest.mark.exhaustive
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


@pytest.mark.parametrize("format", [name for name, each in DEPLOYMENTS.items() if each.gguf])
def test_gguf_files_have_the_codes_of_training(format, tmp_path):
    model = build("tiny")
    dither.convert(model, dither.qat(model, format))
    record = dither.export(model, tmp_path / "model.gguf", format=format)
    layers = {name: layer for name, layer in converted_layers(model).items() if not layer.precision.plain}
    assert {layer.name for layer in record.layers if layer.format == format and layer.name != "lm_head"} == layers.keys()
    assert all(layer.precision.weight == DEPLOYMENTS[format].cast for layer in layers.values())
    config = SimpleNamespace(to_dict=lambda: {"model_type": "mamba"})
    other = SimpleNamespace(config=config, get_input_embeddings=None)
    with pytest.raises(UserError, match=r"GGUF is written for llama, .* models, not for 'mamba'"):
        dither.qat(other, format)


def test_wrong_formats_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="There is no deployment format 'nvfp5' \\(did you mean 'nvfp4'"):
        dither.qat(build("tiny"), "nvfp5")
    with pytest.raises(UserError, match=r"dither\.models or of transformers, not Sequential"):
        dither.qat(torch.nn.Sequential(torch.nn.Linear(32, 32)), "nvfp4")
    model = build("tiny")
    with pytest.raises(UserError, match="is one for all"):
        dither.export(model, tmp_path / "out", format="mxfp4", plan=dither.qat(model, "nvfp4"))
    assert json.dumps(dither.qat(model, "nvfp4").to_dict())


# Runs -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A trained model of bytes, and its text beside it."""
    folder = tmp_path_factory.mktemp("qat")
    write_words(folder / "text", 60)
    train(config_of(folder / "text", folder / "base", "run.steps=2"))
    return folder


def start(base: Path, out: str, *settings: str) -> Path:
    words = ["run.steps=4", "run.save_every=2", "optim.lr=1e-2", *settings]
    config = resolve(None, settings=[*SHORT, *words], start_from=str(base / "base"), out=str(base / out))
    train(config)
    return base / out


def saved(run: Path) -> dict[str, torch.Tensor]:
    return dither.checkpoint.load(run / "checkpoints" / "step-00000004")[0]


def assert_resumes(run, tmp_path):
    """Resume a copy of a run before its last checkpoint, and compare all bits; return the tensors of the last checkpoint."""
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-00000004")
    train(resolve(None, resume=True, out=str(again)), resume=True)
    first, second = saved(run), saved(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


@pytest.mark.sampled(only=["o2"])
@pytest.mark.parametrize("mode", ["o2", "bf16-sr"])
def test_a_run_exports_the_codes_of_its_weights_also_where_masters_differ(base, mode, tmp_path):
    teach = (f"qat.teacher={base / 'base'}", "qat.top_k=8", f"qat.cache={tmp_path / 'cache'}")
    states = ("precision.states=dynamic8",) if mode == "bf16-sr" else ()
    run = start(base, f"run-{mode}", "qat.format=nvfp4", f"precision.mode={mode}", *states, *teach)
    first = assert_resumes(run, tmp_path)

    assert cli.main(["export", str(run), "-o", str(tmp_path / "out"), "--sequences", "1"]) == 0
    files = load_file(tmp_path / "out" / "model.safetensors")
    model = open_model(run, as_trained=True).model
    name, layer = next((name, layer) for name, layer in converted_layers(model).items() if not layer.precision.plain)
    with dither.step_context(model, step=0):
        assert torch.equal(layer.cache.codes.along.values, files[f"{name}.weight_packed"])
        assert torch.equal(layer.cache.codes.along.scale.view(torch.uint8), files[f"{name}.weight_scale"].view(torch.uint8))
    if mode == "o2":
        master = first[f"optimizer:{name}.weight:master"]
        cast = layer.precision.weight
        assert not torch.equal(dither.quantize(master, cast).values, files[f"{name}.weight_packed"])
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_other_codes_than_those_of_training_are_told(base, tmp_path, capsys):
    """A model that trained for one cast is worse in others than one that trained for none: reproduce/gaussws."""
    run = start(base, "told", "qat.format=mxfp4")
    for format in ("bf16", "nvfp4", "mxfp4", "mxfp4-w4a4"):
        assert cli.main(["export", str(run), "-o", str(tmp_path / format), "--format", format, "--sequences", "1"]) == 0
        assert ("The model trained for mxfp4." in capsys.readouterr().err) == (format in ("bf16", "nvfp4"))


def test_noise_comes_before_casts(base):
    run = start(base, "noise", "qat.format=mxfp4", "qat.noise_until=0.5", "optim.max_norm=0")
    plans = [line["plan"] for line in lines(run, "plan")]
    precisions = [next(rule[1] for rule in plan["layers"] if rule[1]) for plan in plans]
    assert [bool(each["sampling"]) for each in precisions] == [True, False]
    assert precisions[1]["weight"] == "e2m1 tile(32) pow2 nearest"
    assert precisions[0]["sampling"]["b_init"] == 4.0
    assert precisions[0]["weight"] is None


@pytest.mark.exhaustive
def test_adapters_train_on_the_codes_of_the_base(base, tmp_path):
    run = start(base, "lora", "qat.format=nvfp4", "lora.rank=2")
    layer = next(module for module in open_model(run, as_trained=True).model.modules() if isinstance(module, FrozenLinear))
    words = ["export", str(base / "base"), "-o", str(tmp_path / "out"), "--format", "auto", "--plan", str(run / "plan.json")]
    assert cli.main([*words, "--sequences", "1"]) == 0
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(layer.weight_codes, files[f"{layer.name}.weight_packed"])
    assert layer.weight_tensor_scale.reciprocal() == files[f"{layer.name}.weight_global_scale"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("precision.recipe=fp8-block",), r"precision.recipe and qat.format='nvfp4' both set the casts"),
        (("snip.target=0.5",), "both set the casts"),
        (("parallel.tp=2",), r"not parallel.tp=2 and parallel.pp=1"),
        (("parallel.dp_shard=2", "parallel.gather=codes"), "gathers weights"),
        (("qat.top_k=8",), r"qat.top_k=8 has no effect without qat.teacher"),
        (("qat.teacher=a", "qat.cache=b"), r"set qat.top_k"),
    ],
)
def test_settings_that_exclude_each_other(settings, said):
    with pytest.raises(UserError, match=said):
        override(Config(), ["model.weights=runs/a", "qat.format=nvfp4", *settings])


def test_settings_without_effect():
    with pytest.raises(UserError, match=r"qat\.noise_until=0.5 has no effect without qat\.format"):
        override(Config(), ["qat.noise_until=0.5"])
    with pytest.raises(UserError, match="name the model with --from"):
        override(Config(), ["qat.format=nvfp4"])


# Teachers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("chunk", [1 << 24, 100])
def test_the_loss_of_a_teacher_is_the_sum_of_two_losses_of_torch(top_k, chunk, monkeypatch, base):
    monkeypatch.setattr(teaching, "CHUNK", chunk)
    model = open_model(base / "base").model
    settings = Qat(teacher=str(base / "base"), teacher_weight=0.25, temperature=2.0, top_k=top_k)
    teacher = teaching.Teacher(settings, model, torch.device("cpu"))
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:].clone()
    targets[0, 3] = -100
    logits = torch.randn(2, 16, model.embedding.num_embeddings, generator=torch.Generator().manual_seed(5)).requires_grad_()
    loss = teacher.loss(logits, inputs, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    p, q = (model(inputs).detach() / 2).softmax(-1), (logits / 2).softmax(-1)
    if top_k:  # the others are one
        chosen = p.topk(top_k).indices
        p, q = (torch.cat([each.gather(-1, chosen), 1 - each.gather(-1, chosen).sum(-1, keepdim=True)], -1) for each in (p, q))
    kl = torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)[targets != -100].mean()
    wanted = 0.75 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.25 * 4 * kl
    close = {"rtol": 2e-3, "atol": 2e-5} if top_k else {}  # the teacher's logarithms are float16
    torch.testing.assert_close(loss, wanted, **close)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logits)[0], **close)


def test_caches_and_vocabularies_of_other_teachers_are_refused(base, tmp_path):
    model, device = open_model(base / "base").model, torch.device("cpu")
    settings = Qat(teacher=str(base / "base"), top_k=4, cache=str(tmp_path / "cache"))
    teacher = teaching.Teacher(settings, model, device)
    first = teacher.predictions(TOKENS)(slice(None))
    monkey = teaching.Teacher(settings, model, device)
    monkey._largest = None  # nothing is computed again
    assert all(map(torch.equal, first, monkey.predictions(TOKENS)(slice(None))))
    with pytest.raises(UserError, match="predictions of another top_k"):
        teaching.Teacher(replace(settings, top_k=5), model, device)
    path = teacher.cache._path(TOKENS[0])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="are damaged: remove the file"):
        teacher.predictions(TOKENS)
    (tmp_path / "cache" / "teacher.json").write_text("[")
    with pytest.raises(UserError, match=r"cache of the teacher in .* cannot be used"):
        teaching.Teacher(settings, model, device)
    with pytest.raises(UserError, match=r"has a vocabulary of \d+ tokens, and the model has 300"):
        teaching.Teacher(replace(settings, cache=None), build("tiny", vocab_size=300), device)


@pytest.mark.parametrize(("format", "plain"), [("mxfp4", "pow2"), ("nvfp4", "nvfp4_fixed(0.00048828125)")])
def test_searched_scales_have_no_larger_error_and_are_exported(format, plain, tmp_path):
    model = uneven(build("tiny"))
    dither.convert(model, dither.qat(model, format, scales="search"))
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    cast, weight = layer.precision.weight, layer.weight.detach()
    assert "mse" in cast.scale
    errors = [
        float((dither.fake_quantize(weight, each) - weight).square().sum()) for each in (cast, replace(cast, scale=plain))
    ]
    assert errors[0] < errors[1]
    dither.export(model, tmp_path / "out", format="auto")
    files = load_file(tmp_path / "out" / "model.safetensors")
    values = files.get("model.layers.0.mlp.up_proj.weight_packed", files.get("model.layers.0.mlp.up_proj.weight"))
    assert torch.equal(dither.quantize(weight, cast).values.view(torch.uint8), values.view(torch.uint8))
    scale = files["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale.dtype == (torch.uint8 if format == "mxfp4" else torch.float8_e4m3fn)  # as compressed-tensors reads them
    assert torch.equal(dither.quantize(weight, cast).scale.view(torch.uint8), scale.view(torch.uint8))
    with pytest.raises(UserError, match=r"scales='search' is for .*mxfp4.*, not for 'int4-g32'"):
        dither.qat(build("tiny"), "int4-g32", scales="search")


# Learned clipping -------------------------------------------------------------------------------------------------------


def lsq(weight: torch.Tensor, gamma: torch.Tensor, cast: dither.Cast, unit: torch.Tensor, w_hat: torch.Tensor) -> torch.Tensor:
    """Return the numbers `w_hat` of a cast in float64, with scales `unit` at `gamma`, straight through all roundings."""
    lowest = -8.0 if cast.scaling.kind in ("bf16", "q4_0") else -cast.element.max
    step = unit * (gamma / gamma.detach())  # in proportion to gamma
    level = (weight / step).clamp(lowest, cast.element.max)
    rounding = w_hat / unit - level.detach()
    assert rounding.abs().max() <= (1.0 if cast.format == "e2m1" else 0.57)  # Q8_0 has steps of a scale that it then rounds
    return step * (level + rounding)


@pytest.mark.parametrize("format", ["int4-g32", "int4-g128", "int8", "mxfp4", "nvfp4", "gguf-q4_0", "gguf-q8_0"])
def test_the_gradient_of_a_learned_clip_is_that_of_lsq(format):
    cast = DEPLOYMENTS[format].cast
    layer = Linear(128, 16, bias=False, precision=DEPLOYMENTS[format].precision(learned_clip=True), name="up")
    random = torch.Generator().manual_seed(3)
    x, dy = torch.randn(32, 128, generator=random), torch.randn(32, 16, generator=random)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 128, generator=random))
        layer.clip.copy_(torch.rand(layer.clip.shape, generator=random) * 0.5 + 0.4)
    with dither.step_context(layer, step=0):
        y = layer(x)
        y.backward(dy)
    weight, gamma = (each.detach().double() for each in (layer.weight, layer.clip))
    operand = layer.clipped_weight()
    codes = dither.quantize(operand, cast)
    unit = codes.scale.double() * (1 if codes.tensor_scale is None else codes.tensor_scale.double())
    groups = weight.view(*gamma.shape, -1).requires_grad_()
    gamma = gamma.requires_grad_()
    limit = gamma * groups.detach().abs().amax(-1)
    below = torch.minimum(torch.maximum(groups, -limit[..., None]), limit[..., None])
    w_hat = lsq(below, gamma[..., None], cast, unit[..., None], dither.fake_quantize(operand, cast).double().view_as(groups))
    x_hat = x if DEPLOYMENTS[format].input_cast is None else dither.fake_quantize(x, DEPLOYMENTS[format].input_cast)
    (dy.double().T @ x_hat.double()).view_as(groups).mul(w_hat).sum().backward()
    torch.testing.assert_close(layer.clip.grad.double(), gamma.grad, rtol=1e-4, atol=1e-4)
    inside = (groups.abs() <= limit[..., None]).view_as(operand)
    wanted = (dy.T @ x_hat) * inside
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-4, atol=1e-4)
    assert 0.5 < inside.double().mean() < 0.999


@pytest.mark.sampled(only=["nvfp4", "gguf-q4_0"])
@pytest.mark.parametrize("format", ["int4-g32", "int8", "mxfp4", "nvfp4", "gguf-q4_0"])
def test_the_export_has_the_codes_of_learned_clips(format, base, tmp_path):
    """Also after a resumed run, in BF16 weights rounded stochastically, and of the model itself."""
    settings = (f"qat.format={format}", "qat.scales=learned", "precision.mode=bf16-sr", "precision.states=companded8")
    run = start(base, f"learned-{format}", *settings, "optim.lr=0.05")
    assert_resumes(run, tmp_path)

    trained, plain = open_model(run, as_trained=True).model, open_model(run).model
    name, layer = next((name, layer) for name, layer in converted_layers(trained).items() if not layer.precision.plain)
    assert layer.clip.dtype == torch.float32
    assert layer.clip.min() < 0.97
    with dither.step_context(trained, step=0):
        codes = layer.cache.codes.along
        held = layer.clipped_weight()
    weight = plain.get_submodule(name).weight
    assert torch.equal(weight, held)  # what other commands open is what the layer casts
    assert not torch.equal(weight, layer.weight)
    seen = next(each for each in inspect(run, [layer.precision.weight]).layers if each.name == name)
    noise = dither.fake_quantize(held.float(), layer.precision.weight) - held.float()
    assert seen.casts[str(layer.precision.weight)].sqnr == pytest.approx(20 * torch.log10(held.float().norm() / noise.norm()))
    files = []
    if DEPLOYMENTS[format].gguf:
        for index, model in enumerate((trained, plain)):
            dither.export(model, tmp_path / f"{index}.gguf", format=format)
            files.append((tmp_path / f"{index}.gguf").read_bytes().replace(f"{index}.gguf".encode(), b""))
        wanted = dither.quantize(held.float(), layer.precision.weight)
        assert torch.equal(wanted.values, codes.values)
        assert torch.equal(wanted.scale, codes.scale)
        # A block of Q4_0 is a float16 scale and 16 bytes: the low nibbles are elements 0 to 15, the high ones 16 to 31.
        single = torch.stack((codes.values & 0xF, codes.values >> 4), -1).flatten(-2).view(-1, 32) ^ 8
        packed = single[:, :16] | single[:, 16:] << 4
        block = torch.cat((codes.scale.half().view(-1, 1).view(torch.uint8), packed), -1).flatten()
        if not name.endswith(("q_proj", "k_proj")):
            assert block.numpy().tobytes() in files[0]
        return
    dither.export(trained, tmp_path / "own", format="auto")
    assert cli.main(["export", str(run), "-o", str(tmp_path / "out"), "--sequences", "1"]) == 0
    files = [load_file(tmp_path / each / "model.safetensors") for each in ("own", "out")]
    offset = 0x88 if format.startswith("int4") else 0
    for file in files:
        values = file.get(f"{name}.weight_packed", file.get(f"{name}.weight"))
        assert torch.equal(codes.values.view(torch.uint8) ^ offset, values.view(torch.uint8))
    assert all(torch.equal(files[0][key].view(torch.uint8), files[1][key].view(torch.uint8)) for key in files[0])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """A trained mixture of two experts, and its text beside it."""
    folder = tmp_path_factory.mktemp("mixture")
    write_words(folder / "text", 60)
    sizes = (
        "model.layers=1",
        "model.width=32",
        "model.heads=2",
        "model.kv_heads=2",
        "model.feed_forward=64",
        "model.experts=2",
    )
    train(config_of(folder / "text", folder / "base", "run.steps=1", sizes))
    return folder


@pytest.mark.sampled(without=["mxfp4-learned-bf16-sr"])
@pytest.mark.parametrize(
    ("format", "scales", "mode"),
    [("mxfp4", "learned", "bf16-sr"), ("int4-g32", "learned", "o2"), ("mxfp4", "search", "bf16-sr")],
)
def test_the_export_has_the_codes_of_experts(format, scales, mode, mixture, tmp_path):
    """Also after a resumed run; `--check` compares what transformers loads with them."""
    run = start(
        mixture, f"{format}-{scales}", f"qat.format={format}", f"qat.scales={scales}", f"precision.mode={mode}", "optim.lr=0.05"
    )
    saved = assert_resumes(run, tmp_path)
    trained, plain = open_model(run, as_trained=True).model, open_model(run).model
    assert cli.main(["export", str(run), "-o", str(tmp_path / "out"), "--sequences", "1", "--check"]) == 0
    dither.export(trained, tmp_path / "own", format="auto")
    files, own = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "own"))
    with dither.step_context(trained, step=0):
        rollout = {name: {name: values, **scale} for name, values, scale in dither.rollout_weights(trained)}
    assert "4 matrices of experts are not inspected" in inspect(run, [dither.Cast.parse("mxfp4")]).note
    held = {key: tensor for parts in rollout.values() for key, tensor in parts.items() if "experts" in key}
    assert len(held) == 2 * 3 * (3 if format == "int4-g32" else 2)
    for written in (files, own):
        assert all(torch.equal(written[key].view(torch.uint8), tensor.view(torch.uint8)) for key, tensor in held.items())
    for name, layer in converted_layers(trained).items():
        if ".experts." in name:
            weight, opened = trained.get_parameter(name), plain.get_parameter(name)
            assert torch.equal(weight, opened) == (scales == "search")
            if scales == "learned":
                clip = layer.first.clip
                assert torch.equal(clip, saved[f"model:{clip_name(name)}"])
                assert clip.min() < 0.97
                assert torch.equal(clipping.clipped(weight, clip, -1), opened)  # what other commands open


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("lora.rank=4",), "does not go with lora.rank"),
        (("qat.noise_until=0.5",), "remove noise_until"),
    ],
)
def test_settings_that_learned_clips_exclude(settings, said):
    with pytest.raises(UserError, match=said):
        override(Config(), ["model.weights=runs/a", "qat.format=nvfp4", "qat.scales=learned", *settings])


def test_what_has_no_learned_clip_is_one_sentence():
    with pytest.raises(UserError, match=r"scales='learned' is for .*mxfp4.*'fp8-block'"):
        dither.qat(build("tiny"), "fp8-block", scales="learned")
    with pytest.raises(UserError, match="scales is one of 'largest', 'search', 'learned', not 'lsq'"):
        dither.qat(build("tiny"), "nvfp4", scales="lsq")
    learned = DEPLOYMENTS["int4-g32"].precision(learned_clip=True)
    with pytest.raises(UserError, match="groups of 128 inputs, and has 192 inputs, which is no multiple"):
        Linear(192, 16, precision=DEPLOYMENTS["int4-g128"].precision(learned_clip=True), name="up")
    with pytest.raises(UserError, match="in tiles or rows, without transform, not 'None'"):
        dither.LayerPrecision(learned_clip=True)
    with pytest.raises(UserError, match=r"in tiles or rows, without transform, not 'e4m3 block\(128\)"):
        DEPLOYMENTS["fp8-block"].precision(learned_clip=True)
    assert dither.LayerPrecision.from_dict(learned.to_dict()) == learned
    assert "clipped where learned" in str(learned)
    with pytest.raises(UserError, match="learns where to clip its weight, and oscillating weights are reset"):
        check_precision("The layer", learned)
    frozen = torch.nn.Sequential(torch.nn.Linear(32, 32)).requires_grad_(False)
    dither.convert(frozen, dither.Plan(default=learned))
    with pytest.raises(UserError, match="learns where to clip its weight, which is frozen"):
        freeze_base(frozen)


def test_a_learned_clip_begins_as_the_largest_magnitude_and_stays_within_its_limits():
    learned = DEPLOYMENTS["int4-g32"].precision(learned_clip=True)
    layer = Linear(64, 32, bias=False, precision=learned, name="up")
    assert torch.equal(layer.clipped_weight(), layer.weight)
    assert layer.to(torch.bfloat16).clip.dtype == torch.float32
    assert torch.equal(layer.clipped_weight(), layer.weight)  # also in bfloat16
    weight, row = torch.tensor([[3.0, 1.0, -0.5, 0.25]]), clipping.Clipping.of(dither.Cast.parse("int8 row"))
    for gamma, inward in ((1.5, 1.0), (0.05, -1.0)):
        fractions = torch.tensor([[gamma]])
        limit = clipping.LOWEST if gamma < 1 else 1.0
        assert torch.equal(clipping.clipped(weight, fractions, 1), weight.clamp(-3 * limit, 3 * limit))
        grads = [clipping.fraction_grad(sign * weight.sign(), weight, fractions, row, 1) for sign in (1.0, -1.0)]
        kept = [bool(grad.ne(0)) for grad in grads]
        assert kept == ([True, False] if inward > 0 else [False, True])


@pytest.mark.exhaustive
def test_compiled_layers_learn_the_same_clips():
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        learned = DEPLOYMENTS["int4-g32"].precision(learned_clip=True)
        net = torch.nn.Sequential(*(Linear(32, 32, precision=learned, name=name) for name in ("up", "down")))
        with torch.no_grad():
            net[0].clip.fill_(0.7)
        call = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with dither.step_context(net, step=0):
            y = call(x)
            y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())])
    assert len(found[0]) == 8
    assert all(map(torch.equal, *found))
