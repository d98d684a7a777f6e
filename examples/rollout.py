"""Reinforcement learning in few bits: the generator multiplies the codes that the trainer multiplies.

    python examples/rollout.py    # a table, in half a minute

A tiny Llama trains with weights in MXFP4. In every step a model of transformers loads the codes that the step holds
(`dither.rollout_weights`), decodes them by itself, and samples answers. Their log-probabilities are the same on both sides, so
that the gradient of REINFORCE is that of the policy which sampled. The reward is the share of tokens below 16.
"""

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import dither

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The values of 4-bit codes."""


def decoded(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return the numbers of a weight in MXFP4: two codes per byte, the even column in the low half, 32 columns per scale."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
    return E2M1[codes] * scales


@torch.no_grad()
def load(generator: LlamaForCausalLM, weights: list) -> None:
    """Load a rollout's weights, as an engine would."""
    own = generator.state_dict()
    for name, codes, scales in weights:
        if scales:
            name, codes = name.replace("weight_packed", "weight"), decoded(codes, *scales.values())
        own[name].copy_(codes)


def log_probabilities(model: LlamaForCausalLM, tokens: Tensor, prompt: int) -> Tensor:
    """Return the log-probability of each token after the prompt."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, **sizes, bos_token_id=0, eos_token_id=None, pad_token_id=None)
    policy, generator = LlamaForCausalLM(config), LlamaForCausalLM(config).eval()
    precision = dither.LayerPrecision.of(weight="mxfp4", overrides={"input_grad.weight": None})
    dither.convert(policy, dither.Plan(default=precision))
    optimizer = dither.optim.AdamW(policy.named_parameters(), lr=3e-3)
    prompt = torch.zeros(32, 1, dtype=torch.long)
    print("step  reward  largest difference of log-probabilities")
    for step in range(steps):
        with dither.step_context(policy, step=step):
            # Weights that are not cast stay in float32 here, as the policy reads them.
            load(generator, list(dither.rollout_weights(policy, dtype=torch.float32)))
            tokens = generator.generate(prompt, do_sample=True, min_new_tokens=16, max_new_tokens=16, top_k=0)
            with torch.no_grad():
                sampled = log_probabilities(generator, tokens, prompt=1)
            learned = log_probabilities(policy, tokens, prompt=1)
            apart = (learned.detach() - sampled).abs().max().item()
            reward = (tokens[:, 1:] < 16).float().mean(1)
            loss = -((reward - reward.mean())[:, None] * learned).sum(1).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0 or step == steps - 1:
            print(f"{step:>4}  {reward.mean():>6.3f}  {apart:.1e}")


if __name__ == "__main__":
    main()
