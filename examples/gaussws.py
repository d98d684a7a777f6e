"""Train with Gaussian weight sampling (GaussWS), then cast the weights to few bits and measure what that costs.

    python examples/gaussws.py                # about 20 seconds on a CPU
    python examples/gaussws.py --steps 400    # bitwidths have more time to fall

While the model trains, noise is added to each 32 x 32 block of a weight. The size of the noise follows a bitwidth b_t that is
learned per block: one bit less means twice the noise. Guidance pulls bitwidths from 6 toward 3, and the loss pushes them up
where a block does not tolerate noise. Afterwards the bitwidths say which format each layer needs. The pages docs/sampling.md
and docs/export.md have the theory; reproduce/gaussws says when the method pays.
"""

import argparse

import torch
from text import VOCABULARY, batch
from torch import nn

import dither
from dither import LayerPrecision, Plan, Sampling, WeightDecay
from dither.models import build


def held_out_loss(model: nn.Module) -> float:
    """Return the mean loss on text that was not trained on, in nats per token."""
    with torch.no_grad():
        tokens = [batch(step, held_out=True) for step in range(4)]
        return sum(model(part[:, :-1], part[:, 1:]).item() for part in tokens) / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()

    model = build("tiny", vocab_size=VOCABULARY, seed=0)
    # A short run needs a strong pull: the decay per step is lr * rate.
    sampling = Sampling(b_init=6, b_target=3, guidance=WeightDecay(2.0))
    dither.convert(model, Plan(default=LayerPrecision(sampling=sampling)))
    groups = dither.nn.param_groups(model, bitwidth_lr=1e-2)  # bitwidths get a group of their own
    optimizer = dither.optim.AdamW(groups, lr=2e-3, max_norm=1.0)

    for step in range(options.steps):
        tokens = batch(step)
        with dither.step_context(model, step=step):  # one sample of the noise per optimizer step
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            bitwidth = torch.cat([layer.bitwidths().flatten() for layer in model.modules() if isinstance(layer, dither.Linear)])
            print(f"step {step:4}  loss {loss.item():.3f} nats per token, mean bitwidth {bitwidth.mean().item():.2f}")

    model.eval()  # no noise in evaluation
    print(dither.effective_precision(model, slack=0.05))
    by_bitwidth = dither.plan_from_bitwidths(model, granularity="block(32)", slack=0.05)
    casts = {
        "the format that each layer's bitwidths ask for": by_bitwidth,
        "FP4 everywhere": Plan(default=LayerPrecision.of(weight="e2m1 block(32)")),
    }
    for name, plan in casts.items():
        result = dither.deploy(model, plan, evaluate=held_out_loss)
        print(f"{name}: {result.bits:.1f} bits per weight, held-out loss {result.loss_before:.3f} -> {result.loss_after:.3f}")


if __name__ == "__main__":
    main()
