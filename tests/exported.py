"""Tiny models for the tests of exports: trained for two steps in few bits, with weights that differ everywhere."""

import functools

import torch
from lazily import Lazy

import dither
from dither.models import GPT2Config, LlamaConfig, build

transformers = Lazy("transformers")

VOCAB = 64
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))


def _transformers(kind, **sizes):
    config = transformers.AutoConfig.for_model(kind, **SIZES, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


MAKERS = {
    "llama": lambda: build(LlamaConfig(hidden_size=128, intermediate_size=256, **SIZES)),
    "gpt2": lambda: build(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=VOCAB, n_positions=64)),
    "qwen3": lambda: _transformers("qwen3", hidden_size=128, intermediate_size=256, num_key_value_heads=2, head_dim=64),
    "qwen2": lambda: _transformers(
        "qwen2", hidden_size=128, intermediate_size=256, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "mistral": lambda: _transformers("mistral", hidden_size=128, intermediate_size=256, num_key_value_heads=1, head_dim=32),
    "qwen3_moe": lambda: _transformers(
        "qwen3_moe",
        hidden_size=128,
        moe_intermediate_size=128,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    "mixtral": lambda: _transformers(
        "mixtral", hidden_size=128, intermediate_size=256, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    ),
}


@functools.cache
def trained(kind):
    """Return a model after two steps of an own loop in FP8; tests do not change it."""
    model = MAKERS[kind]()
    dither.convert(model, "fp8-block", emulate=True)
    optimizer = dither.optim.AdamW(model.parameters(), lr=3e-2)
    for step in range(2):
        with dither.step_context(model, step=step):
            if kind in ("llama", "gpt2"):
                loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
            else:
                loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
