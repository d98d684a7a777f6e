"""Train one combination of the matrix, in the trainer or in a loop of its own; resume it; perturb it; bound its losses."""

import itertools
import math
import shutil
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from e2e_matrix import Combination
from torch import Tensor, nn

import dither
from dither import checkpoint
from dither.checkpoint.state import pack, plan_of, unpack
from dither.data import Loader, is_prepared, load_tokenizer, open_tokens, prepare
from dither.data.text import STDLIB
from dither.models import build, preset
from dither.nn import param_groups
from dither.optim import MODES, roles, training
from dither.snip import Scores, Snip, SnipSettings, options
from dither.spec import LayerPrecision, Plan, Sampling
from dither.spec.recipes import recipe
from dither.train import config, loop
from dither.train.records import Progress

SAMPLINGS = {
    "gaussws-od": Sampling(parts="od", b_init=7, b_target=5),
    "gaussws-all-recompute": Sampling(b_init=6, b_target=4, recompute=True),
    "inputs": Sampling(b_init=7, b_target=5),
}
LATER = {"none": "fp8-block", "fp8-block": "fp4-block", "fp4-block": "fp8-block", "fp8-current": "fp8-row"}
LATER |= {"fp8-delayed": "fp8-current", "fp8-block-2d": "fp8-block", "mxfp8": "mxfp4", "nvfp4": "mxfp8"}
"""The recipe of the second half of a schedule, by that of the first."""

PRESETS = {"llama": "tiny", "gpt2": "gpt2-tiny"}
BLOCKS = 2
"""Blocks of each model."""


@dataclass(frozen=True)
class Setup:
    """The size of the runs, and their device."""

    tokens: str
    """Folder of prepared tokens."""
    device: str = "cpu"
    steps: int = 30
    batch: int = 6
    sequence: int = 32
    lr: float = 3e-3
    seed: int = 0

    @property
    def half(self) -> int:
        """Return the step of the checkpoint that runs resume from."""
        return self.steps // 2

    @property
    def snip(self) -> SnipSettings:
        """Return settings with at least two changes of plan, one of them after the checkpoint."""
        every = max(2, self.steps // 4)
        start = max(1, self.steps // 6)
        return SnipSettings(target=0.5, start=start, every=every, delay=min(2, every - 1), probe="last")


@dataclass
class Trace:
    """The numbers of a run by step, counted from 1."""

    losses: dict[int, float] = field(default_factory=dict)
    graphs: dict[int, int] = field(default_factory=dict)
    """Graphs that Dynamo has compiled, after each step."""
    plans: dict[int, dict[str, str]] = field(default_factory=dict)
    """Precision of each layer, by the number of steps done when it took effect; 0 is the beginning."""
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)
    """SNIP's estimates, likewise."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Trace":
        """Return the trace of a dictionary that went through JSON."""
        return cls(**{name: {int(step): value for step, value in values.items()} for name, values in data.items()})

    @property
    def changes(self) -> int:
        """Return the number of changes of plan."""
        return sum(one != other for one, other in itertools.pairwise(self.plans.values()))

    @property
    def recompilations(self) -> int:
        """Return the number of graphs that were compiled after the first step."""
        return self.graphs[max(self.graphs)] - self.graphs[min(self.graphs)]


def tokens(folder: Path) -> str:
    """Prepare the source code of Python's standard library as bytes, once. Return the folder."""
    if not is_prepared(folder):
        prepare((STDLIB,), folder, load_tokenizer("bytes"), held_out=0.05)
    return str(folder)


def graphs_compiled() -> int:
    """Return the number of graphs that Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# Plans ----------------------------------------------------------------------------------------------------------------


def sampled(plan: Plan, kind: str) -> Plan:
    """Return a plan with the sampling of a combination."""
    if kind == "none":
        return plan
    if kind != "inputs":
        return plan.with_sampling(SAMPLINGS[kind])
    return replace(plan, default=replace(plan.default or LayerPrecision(), input_sampling=SAMPLINGS[kind]))


def first_plan(combination: Combination) -> Plan:
    """Return the plan at the beginning of a run."""
    name = MODES[combination.mode].recipe if combination.recipe == "none" else combination.recipe
    return sampled(recipe(name), combination.sampling)


def later_plan(combination: Combination) -> Plan:
    """Return the plan of the second half of a schedule."""
    return sampled(recipe(LATER[combination.recipe]), combination.sampling)


# The trainer ----------------------------------------------------------------------------------------------------------


def settings(combination: Combination, setup: Setup, folder: Path, out: Path) -> list[str]:
    """Return the settings of a combination; files of plans are written into `folder`."""
    found = [
        f"model.preset={PRESETS[combination.model]}",
        f'data.sources=["{setup.tokens}"]',
        f"data.sequence={setup.sequence}",
        f"data.batch={setup.batch}",
        f"data.micro_batch={setup.batch // int(combination.accumulation)}",
        f"optim.lr={setup.lr}",
        f"run.steps={setup.steps}",
        f"run.save_every={setup.half}",
        "run.eval_every=0",
        "run.sample_every=0",
        "run.log_every=1",
        "run.eval_sequences=4",
        f"run.seed={setup.seed}",
        f"run.device={setup.device}",
        f"run.compile={'true' if combination.blocks == 'compiled' else 'false'}",
        f'run.out="{out}"',
        f"precision.mode={combination.mode}",
        *precisions(combination, folder),
    ]
    mini = combination.states == "adam-mini"
    found.append("optim.optimizer=adam-mini" if mini else f"precision.states={combination.states}")
    if combination.plans == "snip":
        when = setup.snip
        found += ["snip.target=0.5", f"snip.start={when.start}", f"snip.every={when.every}", f"snip.delay={when.delay}"]
        found.append('snip.probe="last"')
    return found


def precisions(combination: Combination, folder: Path) -> list[str]:
    """Return the settings of the plans and of the sampling."""
    found = []
    kind = combination.sampling
    if kind not in ("none", "inputs"):
        values = SAMPLINGS[kind]
        found.append(
            f'precision.sampling={{parts="{values.parts}", b_init={values.b_init}, b_target={values.b_target}, '
            f"recompute={'true' if values.recompute else 'false'}}}"
        )
    names = [MODES[combination.mode].recipe if combination.recipe == "none" else combination.recipe, LATER[combination.recipe]]
    if kind == "inputs":
        folder.mkdir(parents=True, exist_ok=True)
        for number, plan in enumerate((first_plan(combination), later_plan(combination))):
            names[number] = str(folder / f"plan-{number}.json")
            plan.save(names[number])
    if combination.plans == "schedule":
        found.append(f'precision.schedule=[[0, "{names[0]}"], [0.5, "{names[1]}"]]')
    elif kind == "inputs":
        found.append(f'precision.plan="{names[0]}"')
    elif combination.recipe != "none":
        found.append(f"precision.recipe={combination.recipe}")
    return found


class Watching(Progress):
    """Records Dynamo's graphs after each step in place of showing anything."""

    def __init__(self, trace: Trace, steps: int) -> None:
        super().__init__(steps=steps)
        self.trace = trace

    def say(self, text: str) -> None:
        """Show nothing."""

    def show(self, line: dict[str, Any]) -> None:
        """Record a line of metrics."""
        if line["kind"] == "train":
            self.trace.losses[line["step"]] = math.nan if line["loss"] is None else line["loss"]
            self.trace.graphs[line["step"]] = graphs_compiled()
        if line["kind"] == "plan":
            plan = Plan.from_dict(line["plan"])
            self.trace.plans[line["step"]] = {"*": str(plan.default), **{name: str(each) for name, each in plan.layers}}
            if line.get("scores") is not None:
                self.trace.scores[line["step"]] = line["scores"]


def in_trainer(
    combination: Combination, setup: Setup, folder: Path, *, resume: bool = False, weights: Path | None = None
) -> Trace:
    """Train a combination by `dither.train`."""
    trace, out = Trace(), folder / "run"
    given = settings(combination, setup, folder, out) + ([f'model.weights="{weights}"'] if weights else [])
    torch._dynamo.utils.counters.clear()
    outcome = loop.train(config.override(config.Config(), given), resume=resume, progress=Watching(trace, setup.steps))
    if outcome.code:
        raise RuntimeError(f"The run ended with {outcome.how}: {outcome.why}")
    return trace


# A loop of its own ----------------------------------------------------------------------------------------------------


def hugging_face(seed: int) -> nn.Module:
    """Return a small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": BLOCKS}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()


class OwnLoop:
    """The loop that docs/huggingface.md describes, with everything that a combination asks for."""

    def __init__(self, combination: Combination, setup: Setup, model: nn.Module) -> None:
        self.combination, self.setup = combination, setup
        self.loader = Loader(open_tokens(setup.tokens).train, setup.sequence, setup.batch, setup.seed)
        self.model = model.to(setup.device)
        self.plan = first_plan(combination)
        self.conversion = dither.convert(self.model, self.plan, seed=setup.seed)
        mini = combination.states == "adam-mini"
        self.run = training(
            self.model,
            combination.mode,
            setup.lr,
            groups=param_groups(self.model),
            roles=roles(self.model) if mini else None,
            max_norm=1.0,
            nonfinite="skip",
            seed=setup.seed,
            **({} if mini else {"states": combination.states}),
        )
        if combination.blocks == "compiled":
            torch._dynamo.reset()
            dither.compile(self.model)
        self.snip = self._snip() if combination.plans == "snip" else None
        self.schedule = self._schedule() if combination.plans == "schedule" else None

    def _snip(self) -> Snip:
        return Snip(
            self.conversion,
            self.run.optimizer,
            self.setup.snip,
            forward=lambda _, batch: self.loss(batch),
            seed=self.setup.seed,
        )

    def _schedule(self) -> Any:
        entries = [(0, self.plan), (0.5, later_plan(self.combination))]
        schedule = dither.PlanSchedule(entries, steps=self.setup.steps)
        self.conversion.prepare(schedule)
        return schedule

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        with self.run.forward():
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def precisions(self) -> dict[str, str]:
        """Return the precision of each layer."""
        return {layer.name: str(layer.precision) for layer in self.model.modules() if isinstance(layer, dither.Linear)}

    def step(self, step: int, trace: Trace) -> None:
        """Do one step."""
        batches = self.loader.batch(step).tokens.to(self.setup.device).chunk(int(self.combination.accumulation))
        if self.snip is not None and (decision := self.snip.before_step(step, batches)) is not None:
            trace.plans[step] = self.precisions()
            trace.scores[step] = decision.to_dict()["scores"]
        if self.schedule is not None and self.conversion.follow(self.schedule, step):
            trace.plans[step] = self.precisions()
        total = 0.0
        with dither.step_context(self.model, step=step):
            for batch in batches:
                loss = self.loss(batch) / len(batches)
                self.run.backward(loss)
                total += float(loss.detach())
        self.run.step()
        trace.losses[step + 1], trace.graphs[step + 1] = total, graphs_compiled()

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint after `step` steps."""
        others = {"snip": self.snip and self.snip.state_dict()}
        state = pack(
            self.model, self.run.optimizer, step=step, plan=self.conversion.plan, scaler=self.run.scaler, others=others
        )
        checkpoint.save(folder, step, tensors=state[0], plain=state[1])

    def restore(self, folder: Path) -> int:
        """Restore the newest checkpoint. Return its step."""
        path, _ = checkpoint.newest(folder)
        assert path is not None
        tensors, plain = checkpoint.load(path)
        if (plan := plan_of(plain)) is not None and plan != self.plan:
            self.conversion.switch(plan)
        resumed = unpack(self.model, self.run.optimizer, tensors, plain, scaler=self.run.scaler)
        if self.snip is not None:
            self.snip.load_state_dict(resumed.others["snip"])
        return resumed.step


def in_own_loop(
    combination: Combination, setup: Setup, folder: Path, *, resume: bool = False, seed: int | None = None
) -> Trace:
    """Train a combination in a loop of its own; with `seed`, from perturbed weights."""
    trace, saved = Trace(), folder / "run" / "checkpoints"
    model = hugging_face(setup.seed)
    if seed is not None:
        perturb(model, combination, seed)
    torch._dynamo.utils.counters.clear()
    here = OwnLoop(combination, setup, model)
    trace.plans[0] = here.precisions()
    for step in range(here.restore(saved) if resume else 0, setup.steps):
        here.step(step, trace)
        if step + 1 in (setup.half, setup.steps):
            here.save(saved, step + 1)
    return trace


# Runs -----------------------------------------------------------------------------------------------------------------


def train(combination: Combination, setup: Setup, folder: Path, *, resume: bool = False, seed: int | None = None) -> Trace:
    """Train a combination in `folder`, or resume it there; with `seed`, from perturbed weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Bitwidths of the layer .* noise can vanish", UserWarning)
        if combination.model == "huggingface":
            return in_own_loop(combination, setup, folder, resume=resume, seed=seed)
        weights = None if seed is None else perturbed_weights(combination, setup, folder / "weights", seed)
        return in_trainer(combination, setup, folder, resume=resume, weights=weights)


def train_and_resume(combination: Combination, setup: Setup, folder: Path) -> tuple[Trace, list[str]]:
    """Train a combination, then resume it from its middle. Return the first run, and the names of values that differ."""
    trace, saved = train(combination, setup, folder), folder / "run" / "checkpoints"
    last = saved / f"step-{setup.steps:08d}"
    before = checkpoint.load(last)
    shutil.rmtree(last)
    again = train(combination, setup, folder, resume=True)
    after = checkpoint.load(last)
    different = [name for name in before[0].keys() | after[0].keys() if not _same(before[0].get(name), after[0].get(name))]
    different += [f"loss of step {step}" for step, loss in again.losses.items() if loss != trace.losses[step]]
    for plain in (before[1], after[1]):
        plain["others"].pop("time", None)
        if pending := (plain["others"].get("snip") or {}).get("pending"):  # how far the solver was, and how long it took
            pending["answer"], pending["scores"]["seconds"], pending["scores"]["pause"] = None, 0.0, 0.0
    return trace, sorted(different) + [f"plain {key}" for key in before[1] if before[1][key] != after[1].get(key)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# Perturbations --------------------------------------------------------------------------------------------------------

UNITS = {"fp32": 2.0**-22, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative error of an operation, by the type of uncast operations.

For 16 bits it is the rounding of a result. In float32, exponentials and roots of two devices differ by up to four roundings.
"""

FP8_UNITS = 2.0**-13
"""Relative error of a sum on Hopper's FP8 units, which keep 13 bits below the largest of its products (docs/precision.md)."""


def unit(combination: Combination) -> float:
    """Return the relative error by which operations of two devices may differ."""
    on_fp8_units = combination.recipe.startswith("fp8") or combination.plans != "off"
    return max(UNITS[MODES[combination.mode].plan.compute], FP8_UNITS if on_fp8_units else 0.0)


@torch.no_grad()
def perturb(model: nn.Module, combination: Combination, seed: int) -> None:
    """Move every weight by a normal error of the relative size `unit`, rounded stochastically if weights have 16 bits.

    The perturbed weights change the result of every product in every step, as the arithmetic of another device does.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        moved = parameter * (1 + unit(combination) * noise)
        if MODES[combination.mode].plan.parameters == "bf16":
            bits = torch.randint(1 << 16, moved.shape, generator=generator, dtype=torch.int32)
            moved = ((moved.view(torch.int32) + bits) & ~0xFFFF).view(torch.float32)
        parameter.copy_(moved)


def perturbed_weights(combination: Combination, setup: Setup, folder: Path, seed: int) -> Path:
    """Write a checkpoint with perturbed initial weights of the trainer's model. Return its folder."""
    size = preset(PRESETS[combination.model], vocab_size=open_tokens(setup.tokens).tokenizer.vocab_size)
    model = build(size, seed=setup.seed)
    perturb(model, combination, seed)
    tensors, plain = pack(model, dither.optim.AdamW(model.named_parameters()), step=0)
    return checkpoint.save(folder, 0, tensors=tensors, plain=plain)


# Bounds ---------------------------------------------------------------------------------------------------------------

WINDOW = 5
"""Steps whose differences are pooled. Their batches are different, so their differences count as independent."""

FALSE_ALARMS = 1e-3
"""Probability that a matrix without an error exceeds a bound anywhere, if differences are normal."""


def student(probability: float, degrees: int) -> float:
    """Return x such that |T| > x has the given probability, T having Student's distribution.

    >>> round(student(0.05, 10), 3), round(student(1e-5, 15), 2)
    (2.228, 6.5)
    """
    peak = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    inside, x, width = 0.0, 0.0, 1e-3
    while 1 - 2 * inside > probability:  # the middle of each strip
        inside += width * peak * (1 + (x + width / 2) ** 2 / degrees) ** (-(degrees + 1) / 2)
        x += width
    return x


def bounds(reference: Sequence[float], perturbed: Sequence[Sequence[float]], comparisons: int) -> list[float]:
    """Return how far the loss of each step may be from the reference's on another device.

    Another device is one more perturbed run. The differences of the perturbed runs give a standard deviation for each step:
    the root mean square over the runs and the last steps, and never less than at an earlier step, since differences grow. The
    factor is the quantile of Student's distribution at which `comparisons` losses stay inside with high probability. Losses
    themselves have the rounding of float32.
    """
    squares = [statistics.fmean((run[t] - loss) ** 2 for run in perturbed) for t, loss in enumerate(reference)]
    factor = student(FALSE_ALARMS / comparisons, WINDOW * len(perturbed))
    found, largest = [], 0.0
    for t, loss in enumerate(reference):
        last = max(t + 1, min(WINDOW, len(squares)))
        largest = max(largest, statistics.fmean(squares[max(0, last - WINDOW) : last]))
        found.append(factor * math.sqrt(largest) + 2.0**-22 * abs(loss))
    return found


def parted(one: Trace, other: Trace) -> int | None:
    """Return the first step, counted from 1, before which the plans of two runs differ; None if there is none."""
    steps = sorted(one.plans.keys() | other.plans.keys())
    return next((step + 1 for step in steps if one.plans.get(step) != other.plans.get(step)), None)


def harms(scores: dict[str, Any], plans: Sequence[dict[str, str]]) -> list[float]:
    """Return the harm of plans by SNIP's estimates."""
    found, known = Scores.from_dict(scores), options("fp8-block,fp4-block")
    rows = found.harm()
    names = [str(option.precision) for option in known]
    return [sum(row[names.index(_casts(plan[layer]))] for layer, row in zip(found.layers, rows, strict=True)) for plan in plans]


def _casts(text: str) -> str:
    return text.split(", sampl")[0].split(", input_sampl")[0]
