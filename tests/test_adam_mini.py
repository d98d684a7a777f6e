"""Adam-mini: its closed form written out in float64, the roles of known models, and what is wrong with roles."""

import pytest
import torch
from torch import Tensor, nn

from dither import UserError
from dither.optim import AdamMini, Role, roles

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1


def blocks(role: Role, rows: int) -> list[range]:
    """The rows that share a second moment, one range for each."""
    found, start = [], 0
    for length, run in role.sections:
        length = length or rows - start
        step = run or length
        found += [range(first, first + step) for first in range(start, start + length, step)]
        start += length
    return found


def closed_form(w: Tensor, gradients: list[Tensor], role: Role) -> tuple[Tensor, list[float]]:
    """Weights and second moments after all gradients: float64, from the sums and not from the recurrence."""
    w = (w.T if role.transposed else w).double().clone()
    t = len(gradients)
    found = []
    for rows in blocks(role, w.shape[0] if w.dim() > 1 else 1):
        at = list(rows) if w.dim() > 1 else slice(None)
        for now in range(1, t + 1):
            seen = [(g.T if role.transposed else g).double()[at] for g in gradients[:now]]
            m = sum((1 - BETA1) * BETA1 ** (now - 1 - i) * g for i, g in enumerate(seen))
            v = sum((1 - BETA2) * BETA2 ** (now - 1 - i) * g.square().mean() for i, g in enumerate(seen))
            step = (m / (1 - BETA1**now)) / ((v / (1 - BETA2**now)).sqrt() + EPS)
            w[at] = (1 - LR * DECAY) * w[at] - LR * step
        found.append(v.item())
    return (w.T if role.transposed else w), found


CASES = {
    "heads": ((12, 10), Role.rows_each(4)),
    "rows": ((6, 17), Role.rows_each(1)),
    "whole": ((5, 9), Role.whole()),
    "norm": ((11,), Role.whole()),
    "c_attn": ((10, 24), Role(((16, 4), (8, 1)), transposed=True)),
    "c_fc": ((10, 6), Role.rows_each(1, transposed=True)),
    "heads then rows": ((10, 8), Role(((6, 3), (0, 1)))),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_its_closed_form(case: str) -> None:
    shape, role = CASES[case]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) * 3.0**step for step in range(4)]
    w = start.clone().requires_grad_()
    optimizer = AdamMini([("w", w)], {"w": role}, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    for gradient in gradients:
        w.grad = gradient
        optimizer.step()
    expected, moments = closed_form(start, gradients, role)
    torch.testing.assert_close(w.detach().double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state[w]["exp_avg_sq"].double(), torch.tensor(moments).double(), rtol=1e-6, atol=0)


# Roles ----------------------------------------------------------------------------------------------------------------


def config(kind: str) -> object:
    import transformers

    common = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6}
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=32, n_embd=24, n_layer=2, n_head=6, n_positions=16)
    name = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[kind]
    more = {"head_dim": 8} if kind == "qwen3" else {}
    return getattr(transformers, name)(num_key_value_heads=2, tie_word_embeddings=kind == "qwen2", **common, **more)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_roles_of_hugging_face_models(kind: str) -> None:
    settings = config(kind)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(settings)
    found = roles(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    head = 8 if kind == "qwen3" else 4
    layer = "model.layers.1.self_attn."
    assert found[f"{layer}q_proj.weight"] == found[f"{layer}k_proj.weight"] == Role.rows_each(head)
    for name in (f"{layer}v_proj.weight", f"{layer}o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        assert found[name] == Role.rows_each(1)
    assert found["model.embed_tokens.weight"] == Role.rows_each(1)
    assert ("lm_head.weight" in found) == (kind != "qwen2")  # Qwen's is the embedding
    assert found["model.norm.weight"] == Role.whole()
    if kind == "qwen2":
        assert found[f"{layer}q_proj.bias"] == Role.whole()

    optimizer = AdamMini(model.named_parameters(), found, lr=1e-2, betas=(BETA1, BETA2))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    queries = model.model.layers[1].self_attn.q_proj.weight
    assert optimizer.state[queries]["exp_avg_sq"].shape == (6,)
    second = 0.05 * queries.grad.double().square().reshape(6, -1).mean(1)
    torch.testing.assert_close(optimizer.state[queries]["exp_avg_sq"].double(), second, rtol=1e-6, atol=0)


def test_roles_of_gpt2() -> None:
    settings = config("gpt2")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(settings)
    found = roles(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    block = "transformer.h.0."
    assert found[f"{block}attn.c_attn.weight"] == Role(((48, 4), (24, 1)), transposed=True)
    assert found[f"{block}attn.c_proj.weight"] == found[f"{block}mlp.c_fc.weight"] == Role.rows_each(1, transposed=True)
    assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == Role.rows_each(1)
    assert found[f"{block}ln_1.weight"] == found[f"{block}attn.c_attn.bias"] == Role.whole()
    optimizer = AdamMini(model.named_parameters(), found, lr=1e-2, betas=(BETA1, BETA2))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    weight = model.transformer.h[0].attn.c_attn.weight  # 24 inputs, then 6 + 6 heads of 4 outputs and 24 outputs
    outputs = weight.grad.double().T
    expected = torch.cat([outputs[:48].reshape(12, -1).square().mean(1), outputs[48:].square().mean(1)])
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"].double(), 0.05 * expected, rtol=1e-6, atol=0)


class Settings:
    model_type, num_attention_heads, num_key_value_heads = "llama", 4, 2


def test_a_model_that_is_not_known_or_has_more_than_it_should() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UserError, match=r"Sequential's parameters are not known \(model type None; known are llama"):
        roles(net)
    net.config = Settings()
    with pytest.raises(UserError, match=r"'0\.weight' has no known role in a llama model"):
        roles(net)


def test_roles_that_cannot_be() -> None:
    net = nn.Linear(6, 4)
    each = {"weight": Role.rows_each(1), "bias": Role.whole()}
    with pytest.raises(UserError, match=r"'bias' has no role: add it .* known are weight\."):
        AdamMini(net.named_parameters(), {"weight": Role.rows_each(1)}, lr=LR)
    with pytest.raises(UserError, match="does not fit the parameter 'weight', which has 4 rows"):
        AdamMini(net.named_parameters(), each | {"weight": Role.rows_each(3)}, lr=LR)
    with pytest.raises(UserError, match="covers 2 of the 4 rows of the parameter 'weight'"):
        AdamMini(net.named_parameters(), each | {"weight": Role(((2, 1),))}, lr=LR)
    with pytest.raises(UserError, match=r"named_parameters\(\) instead of"):
        AdamMini(net.parameters(), each, lr=LR)
    with pytest.raises(UserError, match="first moments in fp32 or bf16, not in states='dynamic8'"):
        AdamMini(net.named_parameters(), each, lr=LR, states="dynamic8")
    with pytest.raises(UserError, match="'bias' has a transposed role, which takes an unsharded matrix"):
        AdamMini(net.named_parameters(), each | {"bias": Role.rows_each(1, transposed=True)}, lr=LR)
