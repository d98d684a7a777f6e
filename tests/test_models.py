"""The model: beside Hugging Face's, beside torch's own cross entropy, and its gradients beside differences."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from dither import UserError
from dither.models import PRESETS, Llama, LlamaConfig, compile_blocks
from dither.models.causal import IGNORE, cross_entropy

TINY = PRESETS["tiny"]
VARIANTS = {
    "shared keys": TINY,
    "own keys": dataclasses.replace(TINY, num_key_value_heads=None),
    "one key": dataclasses.replace(TINY, num_key_value_heads=1),
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "other constants": dataclasses.replace(TINY, rope_theta=500.0, rms_norm_eps=1e-2, vocab_size=77),
}
"""Constants far from their defaults: one that was ignored would show."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(config: LlamaConfig, seed: int = 0) -> Llama:
    """A model whose norms are not all ones, nor all alike, or their weights would not be tested."""
    model, generator = Llama(config, generator=seeded(seed)), seeded(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.mul_(5)  # attention that is nearly uniform would hide mistakes in positions
    return model


def tokens_of(config: LlamaConfig, shape: tuple[int, int] = (2, 19), seed: int = 2) -> torch.Tensor:
    return torch.randint(config.vocab_size, shape, generator=seeded(seed))


def hugging_face(config: LlamaConfig):
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    fields = dataclasses.asdict(config) | {"num_key_value_heads": config.key_value_heads}
    theta = fields.pop("rope_theta")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**fields, rope_parameters={"rope_type": "default", "rope_theta": theta})
    ).eval()


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
        # float32 sums of up to 384 products in another order, two blocks deep.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        torch.testing.assert_close(model(tokens, targets), functional.cross_entropy(expected.flatten(0, 1), targets.flatten()))
    other = make(config, seed=9)
    assert not torch.allclose(other(tokens), logits)
    other.load_state_dict(peer.state_dict())
    assert torch.equal(other(tokens), logits)


def test_gradients_are_those_of_hugging_face():
    peer, model = hugging_face(TINY), make(TINY)
    peer.load_state_dict(model.state_dict())
    tokens, targets = tokens_of(TINY), tokens_of(TINY, seed=3)
    model(tokens, targets).backward()
    functional.cross_entropy(peer(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    for (name, mine), (_, its) in zip(model.named_parameters(), peer.named_parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-4 * its.grad.abs().max().item())


def test_names():
    """The same check of names, for where transformers is missing."""
    block = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    names = ["model.embed_tokens", *(f"model.layers.{i}.{name}" for i in (0, 1) for name in block), "model.norm", "lm_head"]
    assert [f"{name}.weight" for name in names] == [name for name, _ in Llama(TINY).named_parameters()]


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-134m", 134), ("llama-360m", 364), ("llama-1b", 1262), ("llama-3b", 3368), ("llama-8b", 7242)]
)
def test_presets_have_the_sizes_they_are_named_for(name, millions):
    config = PRESETS[name]
    with torch.device("meta"):
        model = Llama(config)
    d, f = config.hidden_size, config.intermediate_size
    block = 2 * d * d + 2 * d * config.key_value_heads * config.head_dim + 3 * d * f + 2 * d
    total = 2 * config.vocab_size * d + config.num_hidden_layers * block + d
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert round(total / 1e6) == millions


def test_tied_weights_are_one_parameter_with_both_gradients():
    tied, untied = make(VARIANTS["tied"]), make(TINY)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    untied.load_state_dict(tied.state_dict())
    tokens, targets = tokens_of(TINY), tokens_of(TINY, seed=3)
    for model in (tied, untied):
        model(tokens, targets).backward()
    both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    torch.testing.assert_close(tied.model.embed_tokens.weight.grad, both)


def test_a_shared_key_head_is_that_head_repeated():
    shared, own = make(TINY), make(VARIANTS["own keys"])
    weights = shared.state_dict()
    for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
        heads = weights[name].unflatten(0, (TINY.key_value_heads, -1))
        weights[name] = heads.repeat_interleave(TINY.num_attention_heads // TINY.key_value_heads, dim=0).flatten(0, 1)
    own.load_state_dict(weights)
    tokens = tokens_of(TINY)
    torch.testing.assert_close(own(tokens), shared(tokens))


def test_no_token_sees_a_later_one():
    model, tokens = make(TINY), tokens_of(TINY)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


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


@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_that_of_torch(chunk, dtype):
    logits = (torch.randn(20, 50, generator=seeded()) * 4).to(dtype).requires_grad_()
    targets = torch.randint(50, (20,), generator=seeded(1))
    targets[[0, 8, 19]] = IGNORE
    expected = functional.cross_entropy(logits.float(), targets)
    (slope,) = torch.autograd.grad(3 * expected, logits)
    loss = cross_entropy(logits, targets, chunk)
    (mine,) = torch.autograd.grad(3 * loss, logits)
    assert loss.dtype == torch.float32
    assert mine.dtype == dtype
    torch.testing.assert_close(loss, expected)
    # One rounding to the dtype of the logits is all that may differ.
    torch.testing.assert_close(mine, slope, rtol=torch.finfo(dtype).eps * 2, atol=1e-7)
    assert bool((mine[[0, 8, 19]] == 0).all())


def test_cross_entropy_by_differences():
    logits = torch.randn(6, 5, generator=seeded(), dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, IGNORE, 2, 2, 1])
    # The loss is float32, so differences over 2e-2 carry 1e-7 / 2e-2 of its rounding and a third derivative of 1e-4 / 6.
    torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, 4), logits, eps=1e-2, atol=1e-4, rtol=0)


def test_the_loss_falls_along_its_gradient():
    """The directional derivative of the whole model by central differences, in float64 but for norms, angles and loss."""
    model = make(TINY).double()
    tokens, targets = tokens_of(TINY), tokens_of(TINY, seed=3)
    model(tokens, targets).backward()
    parameters = list(model.parameters())
    norm = torch.stack([p.grad.norm() for p in parameters]).norm().item()
    step = 1e-3 / norm

    @torch.no_grad()
    def loss_at(t: float) -> float:
        for p in parameters:
            p.add_(p.grad, alpha=t)
        loss = model(tokens, targets).item()
        for p in parameters:
            p.add_(p.grad, alpha=-t)
        return loss

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert slope == pytest.approx(norm**2, rel=2e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_stays_close_to_float32(autocast):
    model, tokens, targets = make(TINY), tokens_of(TINY, (1, 8)), tokens_of(TINY, (1, 8), seed=3)
    exact = model(tokens, targets)
    if not autocast:
        model = model.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert 0 < abs(loss.item() / exact.item() - 1) < 2**-5
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


# Two warnings of torch's own while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("blocks", [False, True])
def test_one_graph(blocks):
    """Both the whole model and each block trace without a break, and compute the same."""
    model, tokens, targets = make(TINY), tokens_of(TINY), tokens_of(TINY, seed=3)
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
    assert len(graphs) == 1  # for the two blocks together, too
    torch.testing.assert_close(loss, expected)
    for parameter, slope in zip(model.parameters(), slopes, strict=True):
        torch.testing.assert_close(parameter.grad, slope, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Llama(TINY).named_parameters()]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 12}, "hidden size of 100 .* 120 would"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is a positive integer, not 0"),
        ({"num_key_value_heads": True}, "LlamaConfig.num_key_value_heads is a positive integer, not True"),
        ({"vocab_size": 2.5}, "vocab_size is a positive integer, not 2.5"),
    ],
)
def test_impossible_sizes(wrong, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **wrong)


def test_impossible_tokens():
    model = Llama(dataclasses.replace(TINY, max_position_embeddings=8))
    with pytest.raises(UserError, match=r"length of up to 8 .* not \[2, 9\]"):
        model(torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(UserError, match=r"not \[9\]"):
        model(torch.zeros(9, dtype=torch.int64))
    with pytest.raises(UserError, match=r"shape of the tokens, \[2, 8\], not \[2, 7\]"):
        model(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64))
