"""The models: beside Hugging Face's, and their gradients beside differences."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn import functional

import dither
from dither import UserError
from dither.models import (
    GPT2,
    PRESETS,
    CausalLM,
    GPT2Config,
    GPTNeo,
    GPTNeoConfig,
    Llama,
    LlamaConfig,
    ModelConfig,
    build,
    compile_blocks,
    flops_per_token,
    generate,
    parameter_count,
    preset,
)
from dither.nn.compile import compiled_modules
from dither.parallel.apply import recompute_blocks
from dither.tools.memory import model_shape

TINY = PRESETS["tiny"]
SMALL = GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=256, n_positions=128)
NEO = GPTNeoConfig(hidden_size=128, num_layers=3, num_heads=4, window_size=5, vocab_size=256, max_position_embeddings=128)
BOTH = {"llama": TINY, "gpt2": SMALL, "gpt-neo": NEO}
VARIANTS = {
    "shared keys": TINY,
    "own keys": dataclasses.replace(TINY, num_key_value_heads=None),
    "one key": dataclasses.replace(TINY, num_key_value_heads=1),
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "other constants": dataclasses.replace(TINY, rope_theta=500.0, rms_norm_eps=1e-2, vocab_size=77),
    "gpt2": SMALL,
    "gpt2 untied": dataclasses.replace(SMALL, tie_word_embeddings=False),
    "gpt-neo": NEO,
    "gpt-neo untied": dataclasses.replace(NEO, tie_word_embeddings=False, window_size=64),
    "gpt-neo other constants": dataclasses.replace(NEO, intermediate_size=200, layer_norm_epsilon=1e-2, vocab_size=77),
    "gpt2 other constants": dataclasses.replace(SMALL, n_inner=200, layer_norm_epsilon=1e-2, n_positions=19, vocab_size=77),
}
"""Constants far from their defaults: one that was ignored would show."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(config: ModelConfig, seed: int = 0) -> CausalLM:
    """A model whose norms are not all ones, nor all alike, or their weights would not be tested."""
    family = {GPT2Config: GPT2, GPTNeoConfig: GPTNeo, LlamaConfig: Llama}[type(config)]
    model, generator = family(config, generator=seeded(seed)), seeded(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.mul_(5)  # attention that is nearly uniform would hide mistakes in positions
    return model


def tokens_of(config: ModelConfig, shape: tuple[int, int] = (2, 19), seed: int = 2) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=seeded(seed))


def hugging_face(config: ModelConfig):
    import transformers

    fields = dataclasses.asdict(config)
    if isinstance(config, GPT2Config):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields, bos_token_id=0, eos_token_id=0)).eval()
    if isinstance(config, GPTNeoConfig):
        kinds = [[[kind], 1] for kind in config.attention_layers]
        fields |= {"attention_types": kinds, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**fields)).eval()
    theta = fields.pop("rope_theta")
    fields["num_key_value_heads"] = config.key_value_heads
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**fields, rope_parameters={"rope_type": "default", "rope_theta": theta})
    ).eval()


@torch.no_grad()
def rounding_error(peer, tokens: torch.Tensor) -> float:
    """How far the peer's float32 logits are from its float64 ones: what rounding does to this function of these weights."""
    return (peer(tokens).logits - copy.deepcopy(peer).double()(tokens).logits).abs().max().item()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_names_weights_logits_and_loss_are_those_of_hugging_face(config):
    peer, model = hugging_face(config), make(config)
    assert [name for name, _ in peer.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert {name: w.shape for name, w in peer.state_dict().items()} == {name: w.shape for name, w in model.state_dict().items()}
    tokens, targets = tokens_of(config), tokens_of(config, seed=3)
    peer.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = peer(tokens).logits
        logits = model(tokens)
        # Both round the same numbers in different orders: twice the error of one, and twice that since it varies.
        torch.testing.assert_close(logits, expected, rtol=0, atol=4 * rounding_error(peer, tokens))
        torch.testing.assert_close(model(tokens, targets), functional.cross_entropy(expected.flatten(0, 1), targets.flatten()))
    other = make(config, seed=9)
    assert not torch.allclose(other(tokens), logits)
    other.load_state_dict(peer.state_dict())
    assert torch.equal(other(tokens), logits)


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_gradients_are_those_of_hugging_face(config):
    peer, model = hugging_face(config), make(config)
    peer.load_state_dict(model.state_dict())
    tokens, targets = tokens_of(config), tokens_of(config, seed=3)
    model(tokens, targets).backward()
    functional.cross_entropy(peer(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    for (name, mine), (_, its) in zip(model.named_parameters(), peer.named_parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-4 * its.grad.abs().max().item())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama-3m", 3),
        ("llama-5m", 5),
        ("llama-10m", 11),
        ("llama-34m", 34),
        ("llama-134m", 134),
        ("llama-360m", 364),
        ("llama-1b", 1262),
        ("llama-3b", 3368),
        ("llama-8b", 7242),
    ],
)
def test_presets_have_the_sizes_they_are_named_for(name, millions):
    config = PRESETS[name]
    with torch.device("meta"):
        model = Llama(config)
    d, f = config.hidden_size, config.intermediate_size
    block = 2 * d * d + 2 * d * config.key_value_heads * config.head_dim + 3 * d * f + 2 * d
    total = 2 * config.vocab_size * d + config.num_hidden_layers * block + d
    assert sum(parameter.numel() for parameter in model.parameters()) == total == parameter_count(config)
    assert round(total / 1e6) == millions


def test_the_mixture_has_the_size_it_is_named_for():
    transformers = pytest.importorskip("transformers")
    config = PRESETS["moe-1b-a400m"]
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**dataclasses.asdict(config)))
    shape = model_shape("moe-1b-a400m")
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    active = shape.parameters - shape.layers * 3 * config.hidden_size * config.intermediate_size * (24 - 8)
    assert (round(shape.parameters / 1e6), round(active / 1e6)) == (966, 412)
    with pytest.raises(UserError, match="is a model of transformers"):
        build("moe-1b-a400m")


@pytest.mark.parametrize(
    ("name", "count"), [("gpt2-124m", 124_439_808), ("gpt2-350m", 354_823_168), ("gpt2-770m", 774_030_080)]
)
def test_gpt2_presets_have_the_sizes_of_the_published_models(name, count):
    assert parameter_count(PRESETS[name]) == count


@pytest.mark.parametrize(
    ("name", "count"), [("gpt-neo-125m", 125_198_592), ("gpt-neo-1.3b", 1_315_575_808), ("gpt-neo-2.7b", 2_651_307_520)]
)
def test_gpt_neo_presets_have_the_sizes_of_the_published_models(name, count):
    """And are what transformers makes of the same sizes, whose defaults are those of the model of 1.3 billion."""
    import transformers

    c = PRESETS[name]
    sizes = {"hidden_size": c.hidden_size, "num_layers": c.num_layers, "num_heads": c.num_heads}
    theirs = transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], c.num_layers // 2]])
    with torch.device("meta"):
        peer = transformers.GPTNeoForCausalLM(theirs)
    assert sum(parameter.numel() for parameter in peer.parameters()) == parameter_count(c) == count
    assert tuple(theirs.attention_layers) == c.attention_layers
    for field in ("window_size", "vocab_size", "max_position_embeddings", "layer_norm_epsilon", "initializer_range"):
        assert getattr(theirs, field) == getattr(c, field)


# Two warnings of torch's own while it traces.
def test_initialisation():
    config = dataclasses.replace(TINY, initializer_range=0.01)
    model = Llama(config, generator=seeded())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert bool((parameter == 1).all()), name
        else:  # mean and deviation of n numbers are off by sigma / sqrt(n) and sigma / sqrt(2 n); five of them
            n = parameter.numel()
            assert abs(parameter.mean().item()) < 5 * 0.01 / n**0.5, name
            assert abs(parameter.std().item() - 0.01) < 5 * 0.01 / (2 * n) ** 0.5, name
    again = Llama(config, generator=seeded())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.sampled(cover=1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
@pytest.mark.parametrize("blocks", [False, True])
def test_one_graph(blocks, config):
    """Both the whole model and each block trace without a break, and compute the same."""
    model, tokens, targets = make(config), tokens_of(config), tokens_of(config, seed=3)
    expected = model(tokens, targets)
    expected.backward()
    slopes = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    run = model
    if blocks:
        compile_blocks(model, backend=backend)
    else:
        run = torch.compile(model, backend=backend, fullgraph=True)
    loss = run(tokens, targets)
    loss.backward()
    # One for all blocks together, too; GPT-Neo's are of two kinds, of which the local has a mask.
    assert len(graphs) == (2 if blocks and isinstance(config, GPTNeoConfig) else 1)
    torch.testing.assert_close(loss, expected)
    for parameter, slope in zip(model.parameters(), slopes, strict=True):
        torch.testing.assert_close(parameter.grad, slope, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in make(config).named_parameters()]


@pytest.mark.parametrize(
    ("config", "wrong", "words"),
    [
        (TINY, {"hidden_size": 100, "num_attention_heads": 12}, "hidden size of 100 .* 120 would"),
        (TINY, {"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        (TINY, {"num_key_value_heads": True}, "LlamaConfig.num_key_value_heads is an integer, not True"),
        (TINY, {"vocab_size": 2.5}, "vocab_size is an integer, not 2.5"),
        (TINY, {"vocab_size": 1 << 40}, r"vocab_size is an integer of at least 1 and below 2\^28, not 1099511627776"),
        (TINY, {"rms_norm_eps": math.nan}, "rms_norm_eps is a finite number, not nan"),
        (TINY, {"tie_word_embeddings": 1}, "tie_word_embeddings is true or false, not 1"),
        (SMALL, {"n_head": 3}, r"width of 128 \(n_embd\) does not split into 3 heads \(n_head\); 129 would"),
        (SMALL, {"n_inner": -1}, "GPT2Config.n_inner is an integer of at least 1 .*, not -1"),
        (SMALL, {"layer_norm_epsilon": math.inf}, "layer_norm_epsilon is a finite number, not inf"),
    ],
)
def test_impossible_sizes(config, wrong, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(config, **wrong)


def test_impossible_tokens():
    model = Llama(dataclasses.replace(TINY, max_position_embeddings=8))
    with pytest.raises(UserError, match=r"length of up to 8 .* not \[2, 9\]"):
        model(torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(UserError, match=r"not \[9\]"):
        model(torch.zeros(9, dtype=torch.int64))
    with pytest.raises(UserError, match=r"shape of the tokens, \[2, 8\], not \[2, 7\]"):
        model(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(UserError, match=r"Tokens are an int64 tensor, not torch.uint8"):
        model(torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"Targets are an int64 tensor, not torch.int32"):
        model(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int32))
    with pytest.raises(UserError, match=r"GPT2 takes tokens .* length of up to 128 by its config, not \[1, 129\]"):
        GPT2(SMALL)(torch.zeros(1, 129, dtype=torch.int64))


# Models by name -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_first_weights_depend_on_seed_name_and_place_alone(config):
    model, again, other = build(config), build(config), build(config, seed=1)
    wider = build(dataclasses.replace(config, vocab_size=300))
    for (name, weight), same, unlike, more in zip(
        model.named_parameters(), again.parameters(), other.parameters(), wider.parameters(), strict=True
    ):
        assert torch.equal(weight, same), name
        assert torch.equal(weight, unlike) == (weight.dim() == 1), name
        assert torch.equal(weight, more[: len(weight)]), name  # further words change nothing
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    for one, two in itertools.pairwise(matrices):
        least = min(one.numel(), two.numel())
        assert not torch.equal(one.flatten()[:least], two.flatten()[:least])


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_first_weights_are_normal(config):
    for name, weight in build(dataclasses.replace(config, initializer_range=0.01)).named_parameters():
        if weight.dim() == 1:
            assert bool((weight == (0 if name.endswith("bias") else 1)).all()), name
            continue
        # GPT-2's four sublayers that add to the residual stream start at half the deviation.
        x = weight.double().flatten() / (0.005 if "c_proj" in name and isinstance(config, GPT2Config) else 0.01)
        n = x.numel()
        # Five standard errors of the mean, the deviation, and the share below -1 (which is 0.1587).
        assert abs(x.mean()) < 5 / n**0.5, name
        assert abs(x.std() - 1) < 5 / (2 * n) ** 0.5, name
        assert abs((x < -1).double().mean() - 0.15866) < 5 * (0.15866 * 0.84134 / n) ** 0.5, name
        assert x.abs().max() < 4.33


def test_first_weights_of_large_matrices_are_drawn_in_parts(monkeypatch):
    expected = build(SMALL).state_dict()
    monkeypatch.setattr("dither.models.presets.DRAWN_AT_ONCE", 1000)
    assert all(torch.equal(weight, expected[name]) for name, weight in build(SMALL).state_dict().items())


def test_models_are_built_in_other_dtypes_by_rounding():
    narrow, wide = build(SMALL, dtype=torch.bfloat16), build(SMALL)
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("config", [SMALL, VARIANTS["tied"]], ids=["gpt2", "llama"])
def test_a_tied_output_stays_tied(config):
    model, other = build(config), build(config, seed=1)
    assert model.lm_head.weight is model.embedding.weight
    other.load_state_dict(model.state_dict())
    assert other.lm_head.weight is other.embedding.weight
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert "lm_head.weight" not in dict(model.named_parameters())
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.embedding.weight is not model.embedding.weight


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build("lama-134m"), r"no model 'lama-134m' \(did you mean 'llama-134m'\?\): there are tiny, "),
        (lambda: build(None), "name of a preset, a LlamaConfig, a GPT2Config or a GPTNeoConfig, not None"),
        (lambda: build({"n_embd": 8}), "not {'n_embd': 8}"),
        (lambda: build("tiny", vocab_size=0), "vocab_size is an integer of at least 1 .*, not 0"),
        (lambda: build(None, vocab_size=5), "not None"),
        (lambda: build("tiny", seed=-1), "seed is an integer from 0 to"),
        (lambda: build("tiny", dtype=torch.int64), "not in torch.int64"),
        (lambda: build("tiny", dtype=torch.float8_e4m3fn), "not in torch.float8_e4m3fn"),
        (lambda: preset("tiny", hidden=3), r"'tiny' has no field 'hidden' .*: it has hidden_size, "),
        (lambda: preset(["tiny"]), r"no model \['tiny'\]"),
        (lambda: flops_per_token(TINY, 0), "positive number of tokens, not 0"),
        (lambda: flops_per_token(torch.nn.Linear(2, 2), 8), "Linear has no config"),
    ],
)
def test_models_that_there_are_not(call, words):
    with pytest.raises(UserError, match=words):
        call()


@pytest.mark.parametrize("config", [TINY, SMALL, VARIANTS["gpt2 untied"]], ids=["llama", "gpt2", "gpt2 untied"])
def test_flops_are_those_that_torch_counts(config):
    """Its counter adds up all products; attention written out as products is counted whole by it, too."""
    from torch.utils.flop_counter import FlopCounterMode

    model, tokens = make(config), tokens_of(config, (1, 64))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == 64 * flops_per_token(config, 64)
    assert flops_per_token(model, 64) == flops_per_token(config, 64)
    dither.convert(model, "fp8-block")
    assert flops_per_token(model, 64) == flops_per_token(config, 64)


# Few bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(only=["fp8-block"])
@pytest.mark.parametrize("recipe", ["fp8-block", "fp4-block", "mxfp8"])
def test_gpt2_converts_and_learns(recipe):
    config = dataclasses.replace(SMALL, n_embd=64, n_positions=16)
    model, tokens, targets = build(config), tokens_of(config, (2, 16)), tokens_of(config, (2, 16), seed=3)
    names = [name for name, _ in model.named_parameters()]
    plain = model(tokens, targets).item()
    record = dither.convert(model, recipe)
    assert [layer.name for layer in record.layers] == [
        f"transformer.h.{i}.{name}" for i in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert (record.layers[0].out_features, record.layers[0].in_features) == (192, 64)
    assert {module.name: module.reason for module in record.left_alone}["lm_head"] == "the output layer"
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        with dither.step_context(model, step=step):
            loss = model(tokens, targets)
            loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < abs(losses[0] - plain) < 0.05
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.5


def test_gpt_neo_converts_and_learns():
    """In O2 and FP8, with Adam-mini; attention is local in the second block, over 5 of 16 tokens."""
    config = dataclasses.replace(NEO, hidden_size=64, num_layers=2, max_position_embeddings=16)
    model, tokens, targets = build(config), tokens_of(config, (2, 16)), tokens_of(config, (2, 16), seed=3)
    record = dither.convert(model, "fp8-block")
    parts = [f"attn.attention.{name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj")] + ["mlp.c_fc", "mlp.c_proj"]
    assert [layer.name for layer in record.layers] == [f"transformer.h.{i}.{part}" for i in (0, 1) for part in parts]
    taken = [part for part in parts if dither.Sampling(parts="od").takes(f"transformer.h.0.{part}")]
    assert taken == ["attn.attention.out_proj", "mlp.c_proj"]
    run = dither.optim.training(model, "o2", lr=1e-2, roles=dither.optim.roles(model))
    losses = []
    for step in range(4):
        with dither.step_context(model, step=step):
            with run.forward():
                loss = model(tokens, targets)
            run.backward(loss)
        run.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_adam_mini_knows_every_parameter(config):
    model, tokens = build(config), tokens_of(config)
    roles = dither.optim.roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    optimizer = dither.optim.AdamMini(model.named_parameters(), roles, lr=1e-2)
    before = copy.deepcopy(model)
    model(tokens, tokens).backward()
    optimizer.step()
    for (name, new), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(new, old), name
    if config is SMALL:  # 4 heads of queries, 4 of keys, 128 outputs of values
        assert optimizer.state[model.transformer.h[0].attn.c_attn.weight]["exp_avg_sq"].shape == (136,)


# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_generation_is_that_of_its_seed(config):
    model, start = make(config), tokens_of(config, (3, 5))
    one, same, other = (generate(model, start, 12, temperature=0.7, top_k=40, generator=seeded(s)) for s in (0, 0, 1))
    assert one.shape == (3, 17)
    assert torch.equal(one[:, :5], start)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(generate(model, start, 0, temperature=0), start)


@pytest.mark.parametrize("config", BOTH.values(), ids=BOTH)
def test_greedy_generation_is_the_likeliest_token_each_time(config):
    model, tokens = make(config), tokens_of(config, (2, 5))
    found = generate(model, tokens, 6, temperature=0)
    for _ in range(6):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(found, tokens)
    assert torch.equal(generate(model, found[:, :5], 6, top_k=1, generator=seeded()), tokens)
    assert torch.equal(generate(model, found[:, :5], 6, temperature=1e-310, generator=seeded()), tokens)


def test_tokens_are_drawn_in_proportion():
    class Fixed(torch.nn.Module):
        def forward(self, tokens):
            return torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(*tokens.shape, 4)

    n = 20_000
    drawn = generate(Fixed(), torch.zeros(n, 1, dtype=torch.int64), 1, temperature=2.0, top_k=3, generator=seeded())[:, 1]
    weights = [0, math.exp(0.5), math.exp(1), math.exp(1.5)]
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs((drawn == token).double().mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / n)


def test_generation_leaves_the_model_as_it_was_and_goes_past_its_positions():
    model = make(dataclasses.replace(SMALL, n_positions=8))
    model.transformer.ln_f.eval()
    modes = [module.training for module in model.modules()]
    tokens = generate(model, tokens_of(SMALL, (1, 5)), 10, temperature=0)
    assert tokens.shape == (1, 15)
    assert torch.equal(tokens[:, -1:], model(tokens[:, -9:-1])[:, -1:].argmax(-1))
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated")
def test_generation_compiles_nothing():
    model, start = make(TINY), tokens_of(TINY, (1, 4))
    expected = generate(model, start, 5, temperature=0)
    graphs = []
    compile_blocks(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert torch.equal(generate(model, start, 5, temperature=0), expected)
    assert graphs == []
    model(start)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_compiled_blocks_are_recomputed(kind):
    """The graph of a block runs once in forward and again in backward, also in a copy; gradients are the same."""
    plain, model, tokens, runs = make(TINY), make(TINY), tokens_of(TINY, (2, 8)), []
    plain(tokens, tokens).backward()
    recompute_blocks(model, kind)
    compile_blocks(model, backend=lambda graph, _: lambda *inputs: runs.append(1) or graph(*inputs))
    blocks = len(model.model.layers)
    assert compiled_modules(model) == [f"model.layers.{block}" for block in range(blocks)]
    for each in (model, copy.deepcopy(model)):
        runs.clear()
        each(tokens, tokens).backward()
        assert len(runs) == 2 * blocks
        for expected, found in zip(plain.parameters(), each.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)
    compile_blocks(compiled := make(TINY))
    with pytest.raises(UserError, match=r"'model.layers.0' is compiled already.*first dither.parallelize"):
        recompute_blocks(compiled, kind)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"not torch.int64 tokens of shape \[4\]"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, r"at least one of them"),
        ({"tokens": torch.zeros(1, 4)}, r"not torch.float32 tokens"),
        ({"count": -1}, "number of tokens is an integer of at least 0, not -1"),
        ({"count": 1.5}, "not 1.5"),
        ({"temperature": -1.0}, "temperature is a number of at least 0, not -1.0"),
        ({"temperature": math.nan}, "not nan"),
        ({"top_k": 0}, "top_k is an integer of at least 1, not 0"),
        ({"generator": None}, "temperature of 1 needs a generator"),
    ],
)
def test_impossible_generation(changes, words):
    given = {"tokens": torch.zeros(1, 4, dtype=torch.int64), "count": 2, "temperature": 1.0, "generator": seeded()} | changes
    with pytest.raises(UserError, match=words):
        generate(build("tiny"), given.pop("tokens"), given.pop("count"), **given)


def test_no_token_is_drawn_from_nan():
    model = build("tiny")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, torch.zeros(1, 4, dtype=torch.int64), 2, temperature=0)
