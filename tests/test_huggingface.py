"""Models of Hugging Face, built from tiny configurations: convert, run, learn, save, load."""

import copy

import pytest
import torch
from lazily import Lazy

from dither import Cast, UserError, fake_quantize
from dither.evaluate.deployment import deploy
from dither.nn import Conversion, convert, step_context
from dither.spec import LayerPrecision, Plan

transformers = Lazy("transformers")

SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SHORT = {**SIZE, "max_position_embeddings": 32}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
MODELS = {
    "llama": {**SHORT, "num_key_value_heads": 1},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, **NO_DROPOUT},
    "gpt_neox": SHORT,
    "qwen2": {**SHORT, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {**SHORT, "num_key_value_heads": 1, "head_dim": 16},
    "mixtral": {**SHORT, **EXPERTS},
    "gpt_oss": {**SHORT, **EXPERTS, "head_dim": 16},  # experts with biases, their weights [in, out]
}
RECIPES = ("fp8-block", "mxfp8", "fp4-block")
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
UNCAST = Plan(default=LayerPrecision())


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind], **TOKENS)
    config.loss_type = "ForCausalLM"  # otherwise the library logs that it chose just this one
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()


def learn(model: torch.nn.Module) -> torch.Tensor:
    with step_context(model, step=0):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
    return loss.detach()


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_converted_model_learns(kind, recipe):
    model = build(kind)
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    plain = learn(copy.deepcopy(model))
    record = convert(model, recipe)
    assert all(layer.note == "" for layer in record.layers)
    assert sum(layer.share for layer in record.layers) > 0.85  # all but the output layer
    loss = learn(model)
    assert loss != plain
    assert abs(loss - plain) < 0.05  # of about log(64) = 4.16
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == keys
    for name, parameter in after.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.sampled(only=["llama", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_converted_model_goes_through_a_checkpoint(kind, tmp_path):
    model = build(kind)
    convert(model, "fp8-block")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())
    uncast = loaded.eval()(IDS).logits
    convert(loaded, "fp8-block")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
        assert not torch.equal(loaded(IDS).logits, uncast)


@pytest.mark.parametrize("kind", MODELS)
def test_without_casts_a_converted_model_is_the_model(kind):
    model, converted = build(kind), build(kind)
    convert(converted, UNCAST)
    assert torch.equal(learn(model), learn(converted))
    for (name, one), other in zip(model.named_parameters(), converted.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad) or (kind in ("mixtral", "gpt_oss") and nearly(one.grad, other.grad)), name


def nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether gradients differ by no more than what a sum over 32 tokens and 2 experts loses when its order changes."""
    return bool((one - other).abs().max() <= 64 * 2**-24 * one.abs().max())


def reasons(record) -> dict[str, str]:
    return {module.name: module.reason for module in record.left_alone}


def test_what_is_left_alone():
    record = convert(build("llama"), "mxfp8")
    assert len(record.layers) == 14
    assert reasons(record)["lm_head"] == "the output layer"
    assert reasons(record)["model.embed_tokens"] == "an embedding"
    assert reasons(record)["model.norm"] == "LlamaRMSNorm is not a linear layer"
    assert len(record.left_alone) == 7


def test_a_tied_output_layer_is_left_alone_and_stays_tied():
    model = build("qwen2")
    assert reasons(convert(model, "mxfp8"))["lm_head"] == "the output layer"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_layer_stored_the_other_way_round_keeps_its_weight():
    model = build("gpt2")
    record = convert(model, "mxfp8")
    layer = model.transformer.h[0].mlp.c_fc
    assert layer.weight.shape == (32, 128)
    assert next((a.out_features, a.in_features) for a in record.layers if a.name == "transformer.h.0.mlp.c_fc") == (128, 32)


# Experts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_cast_each_experts_matrix(kind):
    # One cast for W and W^T: the layer must equal one whose weights were rounded beforehand, gradients included.
    cast = Cast.parse("e4m3 block(32)")
    rounded, converted = build(kind), build(kind)
    for name, parameter in rounded.named_parameters():
        if parameter.dim() == 3:
            parameter.data = torch.stack([fake_quantize(matrix, cast) for matrix in parameter.data])
            assert "experts" in name
    record = convert(converted, Plan((("*.experts.*", LayerPrecision(weight=cast)),)))
    assert len(record.layers) == 4
    assert torch.equal(learn(converted), learn(rounded))
    for (name, one), other in zip(rounded.named_parameters(), converted.parameters(), strict=True):
        assert nearly(one.grad, other.grad), name


def test_the_share_of_experts_is_that_of_the_tokens_they_see():
    record = convert(build("mixtral"), "mxfp8")
    work = {"gate_up_proj": 2 * 128 * 32, "down_proj": 2 * 32 * 64}
    total = 2 * (sum(work.values()) + 4 * 32 * 32) + 64 * 32
    found = {layer.name.split(".")[-1]: layer.share for layer in record.layers if "experts" in layer.name}
    assert found == {name: pytest.approx(each / total) for name, each in work.items()}
    assert reasons(record)["model.layers.0.mlp.gate"] == "MixtralTopKRouter is not a linear layer"


def test_one_matrix_of_the_experts_alone():
    model, both = build("mixtral"), build("mixtral")
    record = convert(model, "fp8-block", only="*.down_proj")
    assert [layer.name for layer in record.layers] == [f"model.layers.{i}.mlp.experts.down_proj" for i in range(2)]
    assert reasons(record)["model.layers.0.mlp.experts.gate_up_proj"] == "only= names others"
    convert(both, "fp8-block", only="*.experts.*")
    uncast = build("mixtral")(IDS).logits
    assert not torch.equal(model(IDS).logits, uncast)
    assert not torch.equal(both(IDS).logits, model(IDS).logits)


def test_experts_switch_and_only_where_they_were_converted():
    model = build("mixtral")
    other = type(model)(model.config)  # two models with one configuration
    other.load_state_dict(model.state_dict())
    uncast = model(IDS).logits
    convert(model, "fp8-block")
    cast = model(IDS).logits
    assert not torch.equal(cast, uncast)
    assert torch.equal(other(IDS).logits, uncast)
    with pytest.raises(UserError, match="converted already"):
        convert(model, "fp8-block")
    Conversion.of(model).switch("bf16")
    assert torch.equal(model(IDS).logits, uncast)
    Conversion.of(model).switch("fp8-block")
    assert torch.equal(model(IDS).logits, cast)


def test_a_copy_of_converted_experts_has_its_own_weights():
    model = build("mixtral")
    convert(model, "fp8-block")
    twin = copy.deepcopy(model)
    logits = model(IDS).logits
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(IDS).logits, logits)
    experts = twin.model.layers[0].mlp.experts
    assert torch.equal(experts.dither["down_proj"].first.weight, experts.down_proj[0])


def test_delayed_scales_of_experts_are_part_of_the_state():
    model = build("mixtral")
    convert(model, "fp8-delayed")
    learn(model)
    state = model.state_dict()
    key = "model.layers.0.mlp.experts.dither.down_proj.experts.1.weight_history"
    assert state[key][0] == model.model.layers[0].mlp.experts.down_proj[1].abs().max()
    fresh = build("mixtral")
    convert(fresh, "fp8-delayed")
    fresh.load_state_dict(state)
    assert torch.equal(fresh.state_dict()[key], state[key])


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_any_model_are_deployed(kind, converted):
    """Casting weights is what converted layers do with theirs, along the axis that the forward product sums over."""
    plan = Plan(default=LayerPrecision.of(weight="e2m1 tile(32)"))
    model = build(kind).eval()
    cast = copy.deepcopy(model)
    convert(cast, plan)
    if converted:
        convert(model, UNCAST)
    with torch.no_grad():
        before, expected = (each(input_ids=IDS).logits for each in (model, cast))
        result = deploy(model, plan, evaluate=lambda model: model(input_ids=IDS).logits.square().sum().item())
        assert result.loss_before == before.square().sum().item()
        result.write(model)
        after = model(input_ids=IDS).logits
    assert result.loss_after == after.square().sum().item()
    assert (after - expected).norm() < 1e-5 * expected.norm() < 1e-3 * (before - expected).norm()
