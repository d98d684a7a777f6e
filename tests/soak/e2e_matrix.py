"""The matrix of methods that must work together: axes, combinations that cover all pairs, and refused combinations."""

import itertools
import random
from collections.abc import Collection
from dataclasses import dataclass, fields
from types import MappingProxyType

from dither.train.config import Precision

AXES = MappingProxyType(
    {
        "mode": ("fp32", "o1", "bf16-sr", "fp16"),
        "recipe": ("none", "fp8-current", "fp8-delayed", "fp8-block", "fp8-block-2d", "fp4-block", "mxfp8", "nvfp4"),
        "states": ("fp32", "bf16", "dynamic8", "adam-mini"),
        "sampling": ("none", "gaussws-od", "gaussws-all-recompute", "inputs"),
        "plans": ("off", "snip", "schedule"),
        "blocks": ("compiled", "eager"),
        "accumulation": ("1", "3"),
        "model": ("llama", "gpt2", "huggingface"),
    }
)
"""Values of each axis. SNIP changes the plan at least twice; a schedule changes it in the middle of the run."""

PLACES = MappingProxyType({axis: place for place, axis in enumerate(AXES)})
"""Place of each axis in a pair."""

SEED = 1
"""Seed of the choice between equally good combinations."""

SCHEDULES = "schedule" in {field.name for field in fields(Precision)}
"""True if this version has `precision.schedule`; without it, no combination has the value "schedule"."""


@dataclass(frozen=True)
class Combination:
    """One value of each axis."""

    mode: str
    recipe: str
    states: str
    sampling: str
    plans: str
    blocks: str
    accumulation: str
    model: str

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values in the order of the axes."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def name(self) -> str:
        """Return the values in one line, without those of a plain run."""
        states = "Adam-mini" if self.states == "adam-mini" else f"{self.states} states"
        words = [self.mode, self.recipe, states, self.sampling, self.plans, self.blocks, f"x{self.accumulation}", self.model]
        return ", ".join(word for word in words if word not in ("none", "off"))

    @property
    def pairs(self) -> frozenset["Pair"]:
        """Return all pairs of values."""
        return frozenset(itertools.combinations(zip(AXES, self.values, strict=True), 2))


Value = tuple[str, str]
"""An axis and one of its values."""

Pair = tuple[Value, Value]


def axes() -> dict[str, tuple[str, ...]]:
    """Return the axes with the values that this version has."""
    return {axis: tuple(value for value in values if SCHEDULES or value != "schedule") for axis, values in AXES.items()}


def all_pairs(given: dict[str, tuple[str, ...]]) -> set[Pair]:
    """Return all pairs of values of two axes."""
    values = [[(axis, value) for value in of] for axis, of in given.items()]
    return {pair for one, other in itertools.combinations(values, 2) for pair in itertools.product(one, other)}


def cover(given: dict[str, tuple[str, ...]], forbidden: Collection[Pair] = (), *, tries: int = 100) -> list[Combination]:
    """Return few combinations without a forbidden pair that together have every other pair of values.

    Greedy: each combination begins with a pair that is still missing, gets the values that add most missing pairs, and is the
    best of several in random orders of the axes. The seed is fixed, so the result is always the same.
    """
    rng, refused, found = random.Random(SEED), set(forbidden), []
    missing = all_pairs(given) - refused
    while missing:
        first = sorted(missing)
        grown = (_grown(given, rng.choice(first), missing, refused, rng) for _ in range(tries))
        best = max(grown, key=lambda combination: len(combination.pairs & missing))
        found.append(best)
        missing -= best.pairs
    return found


def _grown(
    given: dict[str, tuple[str, ...]], first: Pair, missing: set[Pair], refused: set[Pair], rng: random.Random
) -> Combination:
    """Return a combination with the pair `first`. Every axis must have a value that is never forbidden."""
    chosen = dict(first)
    order = [axis for axis in given if axis not in chosen]
    rng.shuffle(order)
    for axis in order:
        pairs = {value: _pairs_with(chosen, axis, value) for value in given[axis]}
        values = [value for value in given[axis] if refused.isdisjoint(pairs[value])]
        rng.shuffle(values)
        chosen[axis] = max(values, key=lambda value: len(pairs[value] & missing))
    return Combination(**chosen)


def _pairs_with(chosen: dict[str, str], axis: str, value: str) -> set[Pair]:
    place, mine = PLACES[axis], (axis, value)
    return {(mine, other) if place < PLACES[other[0]] else (other, mine) for other in chosen.items()}


# Refusals -------------------------------------------------------------------------------------------------------------

RECOMPUTES = ("sampling", "gaussws-all-recompute")
KEEPS_CODES = "recompute=True keeps no copy of the weight"
REFUSED_PAIRS: dict[Pair, str] = {(("recipe", name), RECOMPUTES): KEEPS_CODES for name in AXES["recipe"] if name != "none"} | {
    (RECOMPUTES, ("plans", kind)): KEEPS_CODES for kind in ("snip", "schedule") if SCHEDULES or kind != "schedule"
}
"""Pairs that make no sense, with a pattern of the sentence that refuses them: casts keep codes, and recomputation nothing."""


def refusal(combination: Combination) -> str:
    """Return a pattern of the sentence that refuses a combination, or "" if it trains."""
    return next((sentence for pair, sentence in REFUSED_PAIRS.items() if pair in combination.pairs), "")


def matrix() -> list[Combination]:
    """Return the combinations that train."""
    return cover(axes(), REFUSED_PAIRS)


def refused() -> list[Combination]:
    """Return combinations with every refused pair and every model: each has one of these pairs, the rest is plain."""
    plain = {"mode": "o1", "recipe": "none", "states": "fp32", "sampling": "none", "plans": "off"}
    plain |= {"blocks": "eager", "accumulation": "1"}
    return [Combination(**plain | dict(pair) | {"model": model}) for pair in REFUSED_PAIRS for model in AXES["model"]]


NONSENSE: dict[str, tuple[list[str], str]] = {
    "Adam-mini with 8-bit states": (
        ["optim.optimizer=adam-mini", "precision.states=dynamic8"],
        r"adam-mini' keeps its moments in fp32 or bf16",
    ),
    "the recipe of another mode": (
        ["precision.mode=fp32", "precision.recipe=bf16-pure"],
        r"does not fit precision.mode='fp32'",
    ),
    "loss scaling in a mode without it": (["precision.mode=o1", "precision.recipe=fp16"], r"does not fit precision.mode='o1'"),
    "a recipe and a plan": (["precision.recipe=fp8-block", "precision.plan=plan.json"], r"both set the casts"),
    "CUDA graphs of eager blocks": (["run.cuda_graphs=true", "run.compile=false"], r"run.cuda_graphs=true is impossible"),
    "CUDA graphs with loss scaling": (
        ["run.cuda_graphs=true", "run.compile=true", "precision.mode=fp16"],
        r"run.cuda_graphs=true is impossible",
    ),
    "a first plan after the last step": (["snip.target=0.5", "snip.start=30"], r"put the first plan after the last"),
    "plans that overlap": (["snip.target=0.5", "snip.every=2", "snip.delay=3"], r"plans would overlap"),
    "sampled layers that do not exist": (['precision.sampling={parts="encoder.*"}'], r"encoder"),
    "a third of a batch of four": (["data.batch=4", "data.micro_batch=3"], r"does not divide data.batch=4"),
}
"""Settings that make no sense together, and a pattern of the sentence that refuses each."""

if SCHEDULES:
    NONSENSE |= {
        "a schedule that begins late": (['precision.schedule=[[5, "fp8-block"]]'], r"begins at 0"),
        "a schedule that ends before it begins": (
            ['precision.schedule=[[0, "fp8-block"], [0.5, "fp4-block"], [2, "fp8-block"]]'],
            r"ascend",
        ),
        "a schedule beside a recipe": (
            ["precision.recipe=fp8-block", 'precision.schedule=[[0, "fp4-block"], [0.5, "fp8-block"]]'],
            r"precision.schedule",
        ),
    }
