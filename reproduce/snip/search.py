"""Find the choice of layers that trains best, from plans that were drawn at random and trained.

    python reproduce/snip/search.py draw                 # 84 plans and a ladder into runs/snip-search; needs no GPU
    dither ladder runs/snip-search/ladder.toml --jobs 14 # trains them, from runs/snip-base
    python reproduce/snip/search.py fit                  # writes reproduce/snip/searched.json
    dither ladder reproduce/snip/searched.toml --jobs 15 # judges it, on orders of the text that no plan was fitted on

Each plan has layers with a quarter of the FLOPs in FP8 and the others in FP4. `fit` explains the losses by the harm of FP4 in
each layer, a ridge regression whose strength leaves the least error for plans left out one at a time, and lets the solver of
SNIP choose by these harms.
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dither.models import preset
from dither.models.presets import skeleton
from dither.report.ladder import read_result
from dither.snip.solver import solve
from dither.spec import LayerPrecision, Plan

HERE = Path(__file__).parent
DRAWN, RESULTS = Path("runs/snip-search"), Path("reproduce/snip/search-results")
ARMS = [f"o1@plan={DRAWN}/{seed}.json" for seed in range(84)]
TARGET = 0.75


def layers(model: str) -> dict[str, float]:
    """Return the share of FLOPs of each linear layer, by patterns that match its name."""
    sizes = {name: each.numel() for name, each in skeleton(preset(model, vocab_size=8192)).named_parameters() if "proj" in name}
    total = sum(sizes.values())
    return {f"*.{name.removeprefix('model.').removesuffix('.weight')}": size / total for name, size in sizes.items()}


def plan(wide: list[str], origin: str) -> Plan:
    """Return the plan with some layers in FP8 and all others in FP4."""
    ends = Plan.load(HERE / "spare-ends.json")
    fp8: LayerPrecision | None = ends.layers[0][1]
    return replace(ends, layers=tuple((name, fp8) for name in wide), provenance={"origin": origin})


def drawn(shares: dict[str, float], seed: int) -> list[str]:
    """Return layers in a random order, from the first until no further one fits into a quarter of the FLOPs."""
    wide, room = list[str](), 1 - TARGET + 1e-9
    for name in np.random.default_rng(seed).permutation(list(shares)):
        if shares[str(name)] <= room:
            wide.append(str(name))
            room -= shares[str(name)]
    return wide


def fitted(fp4: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the harm of FP4 in each layer, and the share of the variance of losses that it explains in plans left out."""
    x, y = fp4 - fp4.mean(0), losses - losses.mean()
    best = (np.inf, np.zeros(fp4.shape[1]))
    for strength in np.logspace(-3, 3, 61):
        inverse = np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T)
        hat = x @ inverse + 1 / len(y)  # the mean is fitted too
        left_out = (y - x @ inverse @ y) / (1 - np.diag(hat))
        best = min(best, (float(left_out @ left_out), inverse @ y), key=lambda each: each[0])
    return best[1], 1 - best[0] / float(y @ y)


def fit(model: str) -> None:
    """Fit the trained plans, and write the plan that follows."""
    shares = layers(model)
    found = [read_result(path) for path in sorted(RESULTS.glob("*.json"))]
    runs = {run.arm: run.loss for run in found if run.loss is not None}
    seeds = {arm: seed for seed, arm in enumerate(ARMS)}
    used = [(drawn(shares, seeds[arm]), loss) for arm, loss in runs.items() if arm in seeds]
    if len(used) < 2:
        sys.exit(f"{len(used)} plans are trained: run dither ladder {DRAWN}/ladder.toml first.")
    fp4 = np.array([[name not in wide for name in shares] for wide, _ in used], float)
    losses = np.array([loss for _, loss in used])
    harm, explained = fitted(fp4, losses)
    rows = [[0.0, float(each)] for each in harm]
    solution = solve(rows, [[0.0, share] for share in shares.values()], target=TARGET)
    wide = [name for name, option in zip(shares, solution.choice, strict=True) if option == 0]
    plan(wide, f"fitted to {len(used)} trained plans").save(HERE / "searched.json")
    expected = losses.mean() + solution.harm - float(fp4.mean(0) @ harm)
    print(f"{len(used)} plans, mean loss {losses.mean():.4f}; {explained:.0%} of the variance explained in plans left out")
    print(f"expected of searched.json: {expected:.4f}")
    print(json.dumps({name: round(float(each), 5) for name, each in zip(shares, harm, strict=True)}, indent=1))


def main() -> None:
    """Draw plans, or fit them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["draw", "fit"])
    parser.add_argument("--model", default="llama-10m")
    arguments = parser.parse_args()
    if arguments.step == "fit":
        return fit(arguments.model)
    DRAWN.mkdir(parents=True, exist_ok=True)
    shares = layers(arguments.model)
    for seed in range(len(ARMS)):
        plan(drawn(shares, seed), f"FP8 for layers drawn at random, seed {seed}").save(DRAWN / f"{seed}.json")
    text = (HERE / "ladder.toml").read_text()
    text = re.sub(r"arms = \[.*?\n\]", f"arms = {json.dumps(ARMS)}", text, flags=re.DOTALL)
    text = re.sub(r"baseline = .*\nseeds = .*", f'baseline = "{ARMS[0]}"\nseeds = 1\nout = "../../{RESULTS}"', text)
    (DRAWN / "ladder.toml").write_text(re.sub(r"tokens_per_parameter = .*", "tokens_per_parameter = [1]", text))
    print(f"{len(ARMS)} plans in {DRAWN}")
    return None


if __name__ == "__main__":
    main()
