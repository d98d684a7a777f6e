"""Recommend a precision for a model on a GPU, with reasons: pure functions of sizes and compute capabilities.

Recommendations are based on measurements on an H200 (docs/benchmarks.md), and say so where there are none. `recommend` is for
one GPU; the parts of an estimate of `dither.tools.memory` help to divide a model over several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from dither.errors import UserError
from dither.spec import did_you_mean
from dither.spec.recipes import recipe
from dither.tools.memory import GIB, Estimate, Setting, Shape, estimate, largest_batch

Risk = Literal["none", "low", "high"]

FP8_FROM = 9e8
"""Parameters from which FP8 pays. With stochastic rounding it ran at 1.10 times o1's speed at 134M, and at 1.38 times at 1B."""

MARGIN, CONTEXT = 0.04, GIB
"""Fraction of a GPU's memory left to fragmentation, and bytes left to CUDA itself."""

PASS, MOST = 8192, 64
"""Desired tokens per forward pass, and maximum number of sequences that is recommended."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a CPU with `capability=None`."""

    name: str
    capability: tuple[int, int] | None
    memory: int
    """Memory in bytes."""

    @property
    def usable(self) -> int:
        """Return the bytes available to tensors."""
        return max(0, round(self.memory * (1 - MARGIN) - CONTEXT))


def _gpus(*rows: tuple[str, tuple[int, int], float]) -> Mapping[str, Gpu]:
    return MappingProxyType({name.lower(): Gpu(name, capability, round(gib * GIB)) for name, capability, gib in rows})


GPUS = _gpus(
    ("V100-32GB", (7, 0), 32),
    ("T4", (7, 5), 15),
    ("A100-40GB", (8, 0), 40),
    ("A100-80GB", (8, 0), 80),
    ("A40", (8, 6), 45),
    ("RTX-3090", (8, 6), 24),
    ("L4", (8, 9), 22.5),
    ("L40S", (8, 9), 45),
    ("RTX-4090", (8, 9), 24),
    ("H100-80GB", (9, 0), 80),
    ("H200", (9, 0), 140),
    ("B200", (10, 0), 180),
    ("RTX-5090", (12, 0), 32),
)
"""GPUs by name, with compute capability and approximately the memory that CUDA reports."""


@dataclass(frozen=True)
class Recommendation:
    """A recommended precision for training a model on a GPU."""

    mode: str
    """Value of `precision.mode`."""
    recipe: str | None
    """Value of `precision.recipe`."""
    states: str | None
    """Value of `precision.states`."""
    checkpointing: bool
    """True if blocks should be recomputed in backward."""
    batch: int
    """The largest power of two of sequences that fits into a forward pass; 0 if nothing fits."""
    estimate: Estimate
    """Memory with that batch, or with one sequence if nothing fits."""
    reasons: tuple[str, ...]
    """Sentences, the most important first."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings for `dither train --set`."""
        given = {"precision.mode": self.mode, "precision.recipe": self.recipe, "precision.states": self.states}
        return tuple(f"{key}={value}" for key, value in given.items() if value is not None)

    @property
    def summary(self) -> str:
        """Return the choice in a few words."""
        parts = [self.mode, self.recipe, self.states and f"{self.states} states", self.checkpointing and "checkpointing"]
        return " + ".join(str(part) for part in parts if part)


def gpu_named(name: str) -> Gpu:
    """Return the GPU of that name, ignoring case.

    >>> gpu_named("a100-80gb").capability
    (8, 0)
    """
    if name.lower() not in GPUS:
        known = [gpu.name for gpu in GPUS.values()]
        raise UserError(f"There is no GPU {name!r}{did_you_mean(name, known)} in the list: {', '.join(known)}.")
    return GPUS[name.lower()]


def recommend(shape: Shape, gpu: Gpu, *, sequence: int = 2048, tokens: int = PASS, risk: Risk = "low") -> Recommendation:
    """Recommend a precision to train a model in on one GPU, with reasons.

    Settings are tried in order of decreasing memory. The first one that fits with `tokens` tokens per forward pass is taken. If
    none fits, it is the leanest one with fewer tokens, and if that does not fit either, one with checkpointing.

    Args:
        shape: Sizes of the model.
        gpu: The GPU.
        sequence: Tokens per sequence.
        tokens: Desired tokens per forward pass.
        risk: "none" keeps the numerics of mixed precision in BF16 (FP16 if the GPU has no BF16). "low" adds FP8, stochastic
            rounding and 8-bit states; "high" adds FP4 if the GPU has units for it.

    >>> from dither.tools.memory import llama_of
    >>> found = recommend(llama_of(3e9), GPUS["h100-80gb"])
    >>> found.summary, found.settings
    ('o1 + fp8-current', ('precision.mode=o1', 'precision.recipe=fp8-current'))
    """
    if risk not in ("none", "low", "high"):
        raise UserError(f"The risk is none, low or high, not {risk!r}.")
    ladder, reasons = _ladder(shape, gpu, risk)
    wanted = max(1, -(-tokens // sequence))
    plain, again = ([rung for rung in ladder if rung.checkpointing is kind] for kind in (False, True))
    for least, rungs in ((wanted, plain), (1, plain[::-1]), (wanted, again), (1, again)):
        for rung in rungs:
            setting = replace(rung.setting, accumulate=least < wanted)  # gradients accumulate over several passes
            batch = largest_batch(shape, setting, sequence=sequence, memory=gpu.usable, most=MOST)
            if batch >= least:
                why = [before.given_up(shape, gpu, sequence, least) for before in ladder[: ladder.index(rung)]]
                fits = estimate(shape, setting, batch=batch, sequence=sequence)
                small = [f"Only {batch * sequence} tokens fit into a pass: accumulate gradients."] if batch < wanted else []
                return rung.chosen(batch, fits, (*reasons, *why, *rung.reasons, *small))
    leanest = ladder[-1]
    needs = estimate(shape, leanest.setting, batch=1, sequence=sequence)
    no = (
        f"It does not fit: one sequence of {sequence} tokens needs {needs.peak / GIB:.0f} GiB in the leanest setting here, and "
        f"{gpu.name} has {gpu.usable / GIB:.0f} GiB to use. Shard the model over several GPUs."
    )
    return leanest.chosen(0, needs, (no, *reasons))


@dataclass(frozen=True)
class _Rung:
    """One setting to try."""

    mode: str
    recipe: str | None = None
    states: str | None = None
    checkpointing: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def setting(self) -> Setting:
        precision = None if self.recipe is None else recipe(self.recipe).default
        return Setting(mode=self.mode, precision=precision, states=self.states, checkpointing=self.checkpointing)

    def chosen(self, batch: int, fits: Estimate, reasons: Sequence[str]) -> Recommendation:
        return Recommendation(self.mode, self.recipe, self.states, self.checkpointing, batch, fits, tuple(reasons))

    def given_up(self, shape: Shape, gpu: Gpu, sequence: int, batch: int) -> str:
        """Return the reason why this setting was not taken."""
        setting = replace(self.setting, accumulate=batch * sequence < PASS)
        needs = estimate(shape, setting, batch=batch, sequence=sequence).peak / GIB
        name = Recommendation(self.mode, self.recipe, self.states, self.checkpointing, 0, Estimate({}), ()).summary
        return f"{name} needs {needs:.0f} GiB for {batch} x {sequence} tokens, and {gpu.usable / GIB:.0f} GiB can be used."


STOCHASTIC = (
    "bf16-sr keeps weights, gradients and states in BF16: 0.578 of the memory of o1 and 1.11 times its speed at 3B. Try the "
    "usual learning rate and twice as much: its paper finds 2 to 4 times the usual rate best, a sweep of ours the usual one."
)
EIGHT_BITS = "States of 8 bits (companded8) take 2 bytes per parameter less than BF16's."
AGAIN = (
    "Checkpointing computes each block twice, about a third more work, and changes no number: set "
    "parallel.checkpointing='full', or use torch.utils.checkpoint in a loop of your own."
)
SMALL = "FP8 gains little far below 1B parameters: with bf16-sr it ran at 1.10 times o1's speed at 134M, and 1.38 at 1B (H200)."
EIGHT = "fp8-current ran at 1.290 (1B), 1.318 (3B) and 1.341 times (8B with 4 layers) the speed of BF16 on an H200."
UNTRIED = "FP8 was not measured on this kind of GPU: compare it with `--set precision.mode=o1` first."
FOUR = "FP4 has no units on this kind of GPU: it runs on FP8 units, at 0.96 to 0.99 of the speed of FP8."
EXPERIMENT = (
    "NVFP4 is an experiment: this project has not run FP4 products on this kind of GPU. Choose layers by `dither plan`, and "
    "compare with fp8-current."
)
GENERAL = (STOCHASTIC, EIGHT_BITS, AGAIN, SMALL, EIGHT, UNTRIED, FOUR, EXPERIMENT)
"""Reasons that hold for any model."""


def _ladder(shape: Shape, gpu: Gpu, risk: Risk) -> tuple[list[_Rung], list[str]]:
    """Return the settings to try, in order of decreasing memory, and reasons that apply to all of them."""
    if gpu.capability is None:
        said = "A CPU has no matrix units for few bits: train in float32; recipes are emulated exactly, for experiments."
        return [_Rung("fp32")], [said]
    if gpu.capability < (7, 0):
        said = f"{gpu.name} has no matrix units for 16 bits: train in float32."
        return [_Rung("fp32"), _Rung("fp32", checkpointing=True, reasons=(AGAIN,))], [said]
    if gpu.capability < (8, 0):
        said = f"{gpu.name} has matrix units for FP16 and not for BF16: train in FP16, whose loss is scaled."
        lean = [] if risk == "none" else [_Rung("fp16", states="companded8", reasons=(EIGHT_BITS,))]
        last = replace((lean or [_Rung("fp16")])[-1], checkpointing=True)
        return [_Rung("fp16"), *lean, replace(last, reasons=(*last.reasons, AGAIN))], [said]
    if risk == "none":
        said = "Mixed precision in BF16 (o1) has the numerics that most models were trained with."
        return [_Rung("o1"), _Rung("o1", checkpointing=True, reasons=(AGAIN,))], [said]
    name, reasons = _casts(shape, gpu, risk)
    narrow = _Rung("bf16-sr", name, reasons=(STOCHASTIC,))
    eight = replace(narrow, states="companded8", reasons=(STOCHASTIC, EIGHT_BITS))
    # Without casts there are no codes of weights in memory.
    plain = replace(eight, recipe=None)
    again = replace(plain, checkpointing=True, reasons=(STOCHASTIC, EIGHT_BITS, AGAIN))
    return list(dict.fromkeys([_Rung("o1", name), narrow, eight, plain, again])), reasons


def _casts(shape: Shape, gpu: Gpu, risk: Risk) -> tuple[str | None, list[str]]:
    """Return the recipe for linear layers, or None if none is faster, and the reasons."""
    assert gpu.capability is not None
    if gpu.capability < (8, 9):
        return None, [f"{gpu.name} has no FP8 units: products run in BF16."]
    if shape.parameters < FP8_FROM:
        return None, [SMALL]
    if gpu.capability[0] == 9:
        return "fp8-current", [EIGHT, FOUR] if risk == "high" else [EIGHT]
    if gpu.capability >= (10, 0) and risk == "high":
        return "nvfp4", [EXPERIMENT]
    return "fp8-current", [EIGHT, UNTRIED]


def selection(gpus: Sequence[Gpu], sizes: Mapping[str, Shape], *, risk: Risk = "low") -> list[tuple[str, ...]]:
    """Return a table of recommendations: one row per GPU, one column per size of model.

    >>> from dither.tools.memory import llama_of
    >>> selection([GPUS["t4"], GPUS["h200"]], {"134M": llama_of(134e6), "7B": llama_of(7e9)})
    [('T4', 'fp16', 'does not fit'), ('H200', 'o1', 'o1 + fp8-current')]
    """

    def cell(gpu: Gpu, shape: Shape) -> str:
        found = recommend(shape, gpu, risk=risk)
        return found.summary if found.batch else "does not fit"

    return [(gpu.name, *(cell(gpu, shape) for shape in sizes.values())) for gpu in gpus]


@dataclass(frozen=True)
class Advice:
    """Recommendations for a machine: one row per device and size of model, and the reasons as sentences."""

    rows: tuple[tuple[str, ...], ...]
    """(device, model, recommendation, tokens per pass, estimated GiB)."""
    notes: tuple[str, ...]


def advise(gpus: Sequence[Gpu], sizes: Mapping[str, Shape], *, bf16_slowdown: float | None = None) -> Advice:
    """Return recommendations for a machine and models of these sizes; identical GPUs count once.

    `bf16_slowdown` is the time of a BF16 product over that of a float32 one on the CPU, if it was measured.

    >>> from dither.tools.memory import llama_of
    >>> found = advise([Gpu("cpu", None, 8 * GIB)], {"134M": llama_of(134e6)}, bf16_slowdown=300.0)
    >>> found.rows
    (('cpu', '134M', 'fp32', '4096', '4.8'),)
    >>> print(found.notes[1])
    BF16 products take 300 times as long as float32 ones here: `dither train` computes them in float32 and rounds.
    """
    rows, notes = [], list[str]()
    for gpu in dict.fromkeys(gpus):
        for size, shape in sizes.items():
            best = recommend(shape, gpu)
            fits = (f"{best.batch * 2048}", f"{best.estimate.peak / GIB:.1f}") if best.batch else ("-", "-")
            rows.append((gpu.name, size, best.summary if best.batch else "does not fit on one", *fits))
            # Reasons about a single size are in the table already.
            notes += [reason for reason in best.reasons if reason in GENERAL or reason.startswith(gpu.name)]
        notes += _ladder(next(iter(sizes.values())), gpu, "low")[1] if gpu.capability is None else []
    if bf16_slowdown is not None and bf16_slowdown > 2:
        notes.append(
            f"BF16 products take {bf16_slowdown:.0f} times as long as float32 ones here: `dither train` computes them in "
            "float32 and rounds."
        )
    return Advice(tuple(rows), tuple(dict.fromkeys(notes)))
