"""Fine-tune a Hugging Face model in FP8 with your own loop.

    python examples/huggingface.py                                      # about 30 seconds on a CPU
    python examples/huggingface.py --recipe fp4-block --steps 200
    python examples/huggingface.py --model path/to/model --save tuned   # a model of yours, such as a Llama or a GPT-2

Without --model it makes a tiny Llama with random weights, so nothing is downloaded. `dither.convert` replaces the linear layers
in place and keeps every parameter under its name. So the optimizer, `save_pretrained` and `from_pretrained` work as before.

Needs the extra `hf`: pip install 'dither[hf]'. The page docs/huggingface.md explains each line.
"""

import argparse
import tempfile

import torch
from text import VOCABULARY, batch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dither


def tiny_llama() -> LlamaForCausalLM:
    """Return a Llama with 0.4 M random parameters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="a folder or a name that from_pretrained takes; its vocabulary needs 256 entries or more"
    )
    parser.add_argument("--recipe", default="fp8-block", help="any name that `dither.spec.recipes.RECIPES` has")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", help="a folder for the trained model; default: a temporary one")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny_llama()).to(device)
    print(dither.convert(model, options.recipe))  # converted layers, their casts, and the reason for each layer left alone

    optimizer = dither.optim.AdamW(dither.nn.param_groups(model), lr=options.lr, max_norm=1.0)
    for step in range(options.steps):
        tokens = batch(step).to(device)
        with dither.step_context(model, step=step):  # weights are cast once per optimizer step
            for micro_batch in tokens.chunk(2):
                loss = model(input_ids=micro_batch, labels=micro_batch).loss
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f} nats per token")

    folder = options.save or tempfile.mkdtemp()
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)  # plain nn.Linear layers: the weights are ordinary weights
    same = all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    print(f"saved to {folder}; loaded back without dither: weights {'equal' if same else 'differ'}")


if __name__ == "__main__":
    main()
