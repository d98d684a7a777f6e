"""Let SNIP choose the precision of each layer while your own loop trains.

    python examples/own_loop_snip.py                  # about 30 seconds on a CPU
    python examples/own_loop_snip.py --target 0.5     # half of the FLOPs of linear layers in FP4 instead of three quarters

The model starts in FP8. After a third of the steps SNIP estimates, for every layer, how much FP4 would disturb the loss and the
weight updates. It then finds the options that disturb least and reach the target, and switches the layers between two steps.
Training continues with the same weights and the same optimizer. The page docs/snip.md has the details.
"""

import argparse

import torch
from text import VOCABULARY, batch
from torch import Tensor, nn

import dither
from dither.models import build
from dither.snip import Snip, SnipSettings
from dither.snip.planning import picture


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of a batch of tokens [sequences, length + 1]: SNIP calls this too."""
    return model(tokens[:, :-1], tokens[:, 1:])


def held_out_loss(model: nn.Module) -> float:
    """Return the mean loss on text that was not trained on, in nats per token."""
    with torch.no_grad():
        return sum(loss_of(model, batch(step, held_out=True)).item() for step in range(4)) / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=float, default=0.75, help="share of the FLOPs that should run in FP4")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    model = build("tiny", vocab_size=VOCABULARY, seed=0)
    conversion = dither.convert(model, "fp8-block")
    optimizer = dither.optim.AdamW(dither.nn.param_groups(model), lr=2e-3, max_norm=1.0)
    snip = Snip(
        conversion,
        optimizer,
        SnipSettings(target=options.target, start=options.steps // 3, delay=2, probe="direct"),
        forward=loss_of,
    )

    for step in range(options.steps):
        tokens = batch(step)
        if decision := snip.before_step(step, [tokens]):
            print(f"step {decision.step}: a plan from the statistics of step {decision.measured}, input/weight/gradient bits")
            print(picture(decision.plan))
        with dither.step_context(model, step=step):
            loss = loss_of(model, tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f} nats per token")
    print(f"held-out loss {held_out_loss(model):.3f} nats per token")


if __name__ == "__main__":
    main()
