"""A task that trains in a second, and figures as small SVG files: shared by the examples about number formats.

Three linear layers predict the next token from the two before it, with a vocabulary of 32. One token in sixteen is a separator.
Its inputs are 100 times as large as the others, as in language models at the first token and at delimiters. Any token may
follow it, so its loss never falls and its gradients stay large. Everywhere else a rule holds, and gradients shrink as the model
learns it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import dither
from dither import LayerPrecision, Plan, step_context

WORDS, WIDTH, BATCH, STEPS = 32, 32, 64, 140

LARGE = 100.0
"""The size of the inputs at separators; those of other words are 1."""


@functools.cache
def batch(step: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of words [BATCH, 2], the next words, and which of those follow the rule: none after a separator."""
    generator = torch.Generator().manual_seed(1_000_000 * seed + step)
    pairs = torch.randint(WORDS, (BATCH, 2), generator=generator)
    ruled = pairs[:, 1] >= WORDS // 16
    any_word = torch.randint(WORDS, (BATCH,), generator=generator)
    return pairs, torch.where(ruled, (5 * pairs[:, 0] + 7) % WORDS, any_word), ruled


@functools.cache
def embedding() -> Tensor:
    """Return a fixed vector for each word, [WORDS, WIDTH / 2], normally distributed."""
    return torch.randn(WORDS, WIDTH // 2, generator=torch.Generator().manual_seed(0))


def model(casts: Sequence[str | None] | None = None, seed: int = 0) -> nn.Sequential:
    """Return the model in float32, its layers' input, weight and gradient cast as three strings say, or uncast."""
    torch.manual_seed(seed)
    layers = (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WORDS))
    made = nn.Sequential(*layers)
    if casts is not None:
        dither.convert(made, Plan(default=LayerPrecision.of(*casts)))
    return made


def losses(made: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each word of a step's batch, and which words follow the rule."""
    pairs, targets, ruled = batch(step)
    inputs = embedding()[pairs].flatten(1) * torch.where(ruled, 1.0, LARGE)[:, None]
    return nn.functional.cross_entropy(made(inputs), targets, reduction="none"), ruled


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained model and how it learned."""

    model: nn.Module
    loss: list[float]
    """Mean loss of the words that follow the rule, per step."""


def train(
    casts: Sequence[str | None] | None = None,
    *,
    divisor: float = 1.0,
    loss_scale: float = 1.0,
    steps: int = STEPS,
) -> Result:
    """Train by Adam; the loss is divided by `divisor`, as by more micro-batches of a step, and multiplied by `loss_scale`."""
    made, found = model(casts), list[float]()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-16)
    for step in range(steps):
        with contextlib.nullcontext() if casts is None else step_context(made, step=step):
            each, ruled = losses(made, step)
            (each.mean() / divisor * loss_scale).backward()
        for parameter in made.parameters():
            assert parameter.grad is not None
            parameter.grad /= loss_scale
        optimizer.step()
        optimizer.zero_grad()
        found.append(each[ruled].mean().item())
    return Result(made, found)


def operands(made: nn.Module, step: int, layer: str = "0", divisor: float = 1.0) -> dict[str, Tensor]:
    """Return a layer's input, weight and output gradient at a step, for the loss that `train` would have, in float32."""
    found: dict[str, Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        found.update(input=inputs[0].detach(), weight=module.weight.detach(), output=output)

    handle = made.get_submodule(layer).register_forward_hook(keep)
    (losses(made, step)[0].mean() / divisor).backward()
    handle.remove()
    made.zero_grad()
    gradient = found.pop("output").grad
    assert gradient is not None
    return {**found, "gradient": gradient}


def smooth(values: Sequence[float], window: int = 15) -> list[float]:
    """Return running means over so many steps."""
    sums = torch.tensor([0.0, *values]).double().cumsum(0)
    return ((sums[window:] - sums[:-window]) / window).tolist()


def save(path: Path, draw: "Callable[..., None]") -> None:
    """Write a figure of two panels as SVG; the same numbers give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        draw(*figure.subplots(1, 2))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(f"figure: {path}")
