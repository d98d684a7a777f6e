"""FP8 with delayed and with current scaling: what a scale from earlier steps costs when magnitudes change.

    python examples/fp8_scaling.py                              # tables, in seconds
    python examples/fp8_scaling.py --plot docs/fp8-scaling.svg  # and the figure of docs/scaling-recipes.md

Current scaling measures the largest magnitude of a tensor before it casts it. Delayed scaling takes the largest of earlier
steps, so that one pass over the tensor measures and casts: a tensor that is larger than before clips, and one that is smaller
leaves a part of the range empty.
"""

import argparse
from pathlib import Path

import torch
import toy
from torch import Tensor

import dither
from dither import AmaxHistory, Cast

CASTS = {
    "current": "e4m3 tensor",
    "delayed(16)": "e4m3 tensor delayed(16)",
    "delayed(16), margin 2": "e4m3 tensor delayed(16,2)",
    "delayed(16), most recent": "e4m3 tensor delayed(16,0,most_recent)",
}

JUMP, SPIKE, RETURN = 40, 80, 120
"""Steps at which magnitudes grow by 8 for good, by 64 for a single step, and fall by 2^14."""


def tensors(steps: int) -> list[Tensor]:
    """Return a tensor for each step: normal numbers whose size jumps, spikes and collapses."""
    generator = torch.Generator().manual_seed(0)
    size = [
        (8.0 if step >= JUMP else 1.0) * (64.0 if step == SPIKE else 1.0) / (2**14 if step >= RETURN else 1.0)
        for step in range(steps)
    ]
    return [scale * torch.randn(64, 64, generator=generator) for scale in size]


def errors(text: str, series: list[Tensor]) -> tuple[list[float], list[float]]:
    """Return the relative error of each cast, |cast(x) - x| / |x|, and the share of elements that clip."""
    cast = Cast.parse(text)
    history = AmaxHistory.empty(cast).push(dither.amax(series[0])) if cast.scaling.kind == "delayed" else None
    relative, clipped = [], []
    for x in series:
        used = dither.amax(x) if history is None else history.amax(cast)
        y = dither.fake_quantize(x, cast, amax=used)
        relative.append(((y - x).norm() / x.norm()).item())
        # The largest value stands for `used` times 2^margin; half a step beyond it still rounds to it.
        clipped.append((x.abs() > used * 2.0**cast.scaling.margin * (1 + 1 / 28)).float().mean().item())
        history = history and history.push(dither.amax(x))
    return relative, clipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--steps", type=int, default=160)
    arguments = parser.parse_args()

    series = tensors(arguments.steps)
    found = {name: errors(text, series) for name, text in CASTS.items()}
    shown = {"calm": JUMP - 1, "jump": JUMP, "after it": JUMP + 1, "spike": SPIKE, "after it ": SPIKE + 1}
    shown |= {"collapse": RETURN, "16 later": RETURN + 16}
    shown = {when: step for when, step in shown.items() if step < arguments.steps}
    for title, part in (("Relative error of the cast", 0), ("Share of elements that clip", 1)):
        print(title)
        print(f"{'':<28}" + "".join(f"{when:>10}" for when in shown))
        for name, both in found.items():
            print(f"{name:<28}" + "".join(f"{both[part][step]:>10.4f}" for step in shown.values()))
    if arguments.plot is None:
        return

    def draw(left, right) -> None:
        largest = torch.stack([dither.amax(x) for x in series])
        left.semilogy(largest, color="black", label="largest magnitude")
        cast = Cast.parse(CASTS["delayed(16)"])
        history, used = AmaxHistory.empty(cast).push(largest[0]), []
        for value in largest:
            used.append(history.amax(cast).item())
            history = history.push(value)
        left.semilogy(used, color="C1", linestyle="--", label="the one that delayed(16) scales by")
        left.set(xlabel="step", ylabel="magnitude")
        left.legend(frameon=False)
        for number, (name, (relative, _)) in enumerate(found.items()):
            right.semilogy(relative, color=f"C{number}", label=name)
        right.set(xlabel="step", ylabel="relative error of the cast")
        right.legend(frameon=False)

    toy.save(arguments.plot, draw)


if __name__ == "__main__":
    main()
