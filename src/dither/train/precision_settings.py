"""The section [precision] of a config: modes, recipes, plans, and plans by step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from dither.errors import UserError
from dither.optim import GRADIENTS, MODES
from dither.spec import MemoryOptions, Plan, Sampling
from dither.spec.fields import check_choice, check_types
from dither.spec.optimizer import BLOCKS
from dither.spec.recipes import ALIASES, MEASURED, RECIPES, recipe, recipe_name
from dither.spec.schedule import beginnings, check_name, is_file, split_forward


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of parameters, layers, gradients and optimizer states."""

    mode: str = "fp32"
    """Dtypes of parameters and states: fp32, o1, o2, o2-split, bf16-rn, bf16-sr, bf16-kahan, bf16-24, fp16 or fp16-o2."""
    recipe: str | None = None
    """Recipe for the casts of linear layers, such as fp8-block, or its alias blockwise; by default no casts."""
    plan: str | None = None
    """Or the file of a plan."""
    schedule: tuple[tuple[int | float, str], ...] = ()
    """Or plans by step: pairs of a step or share of the run and a recipe, "RECIPE forward" or a file; see docs/precision.md."""
    output: str | None = None
    """Recipe for the casts of the output layer, such as fp8-current; by default it is not cast."""
    states: str | None = None
    """Format of the optimizer's moments, such as dynamic8; by default that of the mode."""
    gradients: str | None = None
    """Format in which gradients are accumulated and reduced: fp32, bf16, or bf16-sr (stochastic); by default the mode's."""
    sampling: Sampling | None = None
    """Sampled weights: noise in place of quantization, with learned bitwidths; by default none."""
    emulate: bool = False
    """Multiply dequantized numbers in float32 on a GPU too, as the CPU does: correct everywhere, and slow."""
    fallback: Literal["error", "bf16", "emulate"] = "error"
    """For a layer whose casts no matrix units of the GPU support: error, run it uncast (bf16), or emulate."""
    engines: str | None = None
    """File in which `dither doctor --engines FILE` recorded the native units that passed the self-test on this machine."""
    save: Literal["codes", "input"] = "codes"
    """Backward reads the codes of a cast layer's input, or the input, which it casts again; see docs/memory.md."""
    hold: Literal["both", "one", "none"] = "both"
    """Layouts of a weight's codes that are held for a step: both, the forward product's, or none; see docs/memory.md."""
    swiglu: Literal["exact", "fp8"] = "exact"
    """Backward reads the inputs of SwiGLU as they are, or as FP8 codes, in half of the memory or less; see docs/memory.md."""
    times: str | None = None
    """With fp8-auto: file of measured times; on a GPU, what is missing is measured and added."""

    def __post_init__(self) -> None:
        check_types("precision", self)
        check_choice("precision.mode", self.mode, MODES)
        check_choice("precision.recipe", self.recipe, (*RECIPES, *ALIASES, *MEASURED))
        if self.recipe is not None:
            object.__setattr__(self, "recipe", recipe_name(self.recipe))
        check_choice("precision.states", self.states, ("fp32", "bf16", *BLOCKS))
        check_choice("precision.gradients", self.gradients, GRADIENTS)
        self._check_output()
        if self.recipe is not None and self.plan is not None:
            raise UserError(
                f"precision.recipe={self.recipe!r} and precision.plan={self.plan!r} both set the casts: set only one."
            )
        if self.schedule:
            self._check_schedule()
        elif self.recipe is not None and self.recipe not in MEASURED:
            self._check_plan(f"precision.recipe={self.recipe!r}", recipe(self.recipe))
        if self.measured:
            if MODES[self.mode].plan.compute != "bf16":
                fits = [name for name, mode in MODES.items() if mode.plan.compute == "bf16"]
                raise UserError(
                    f"fp8-auto compares FP8 with BF16, and precision.mode={self.mode!r} computes in "
                    f"{MODES[self.mode].plan.compute}: use the mode {', '.join(fits)}."
                )
            self._sampled(recipe("fp8-block"))  # a sampling that does not go with casts
        elif self.times is not None:
            raise UserError(f"precision.times={self.times!r} has no effect without the recipe fp8-auto: remove it.")

    def _check_output(self) -> None:
        """Raise if the output layer's recipe casts nothing; replace an alias by its name."""
        if self.output is None:
            return
        check_choice("precision.output", self.output, (*RECIPES, *ALIASES))
        object.__setattr__(self, "output", recipe_name(self.output))
        default = recipe(self.output).default
        if default is None or default.uncast:
            casts = [name for name, each in RECIPES.items() if each.plan.default is not None and not each.plan.default.uncast]
            raise UserError(
                f"precision.output={self.output!r} casts nothing, as without the field: leave it out, or choose one of "
                f"{', '.join(casts)}."
            )

    def _check_schedule(self) -> None:
        """Raise if the schedule names neither a recipe nor a file, or if another field contradicts it."""
        for number, (_, text) in enumerate(self.schedule):
            name, forward = split_forward(text)
            try:
                check_name(name)
            except UserError as error:
                raise UserError(f"In precision.schedule: {error}") from None
            if forward and not number:
                raise UserError(f"The first entry of precision.schedule sets all products, not only those of {text!r}.")
            if name not in MEASURED and not is_file(name):
                self._uncast_or_recipe(name)
        first = recipe_name(self.schedule[0][1])
        for key, value in (("recipe", self.recipe), ("plan", self.plan)):
            if value not in (None, first):
                raise UserError(
                    f"precision.{key}={value!r} and precision.schedule, which begins with {first!r}, both set the casts: set "
                    "only one."
                )

    @property
    def entries(self) -> tuple[tuple[int | float, str], ...]:
        """The schedule, or one entry for the recipe or the plan; an empty text means the plan of the mode."""
        return self.schedule or ((0, self.plan or self.recipe or ""),)

    @property
    def memory(self) -> MemoryOptions:
        """The tensors that layers keep between forward and backward."""
        return MemoryOptions(self.save, self.hold, self.swiglu)

    @property
    def measured(self) -> bool:
        """True if an entry is fp8-auto, whose plan is measured."""
        return any(split_forward(text)[0] in MEASURED for _, text in self.entries)

    def beginnings(self, steps: int) -> list[int]:
        """Return the first step of each entry in a run of that many steps; raise if the schedule does not fit the run."""
        try:
            return beginnings([begins for begins, _ in self.entries], steps)
        except UserError as error:
            raise UserError(f"In precision.schedule: {error}") from None

    def load_plan(self) -> Plan:
        """Return the plan of the recipe, the file or the mode, with the sampling; with a schedule, the first plan."""
        return self.plan_of(self.entries[0][1])

    def plan_of(self, name: str, known: Mapping[str, Plan] = MappingProxyType({})) -> Plan:
        """Return the plan of a recipe or a file, or of the mode if the name is "", with the sampling.

        Args:
            name: The name in an entry, without "forward".
            known: Plans by name, of fp8-auto and of files that need not be read.
        """
        if name in known:
            return self._with_output(self._sampled(known[name]))
        if self.names_file(name):
            found = Plan.load(name)
            self._check_plan(f"{'precision.schedule: ' if self.schedule else 'precision.plan='}{name!r}", found)
        elif self.schedule:
            found = self._uncast_or_recipe(name)
        else:
            found = recipe(name or MODES[self.mode].recipe)
        return self._with_output(self._sampled(found))

    def names_file(self, name: str) -> bool:
        """Return True if the name in an entry is a file."""
        return is_file(name) if self.schedule else name == self.plan

    def _uncast_or_recipe(self, name: str) -> Plan:
        """Return the plan of a recipe in a schedule: of one that casts nothing, the plan of the mode."""
        found, mode = recipe(name), MODES[self.mode].plan
        if found.default is None or not found.default.uncast:
            return found
        if found.compute != mode.compute:
            raise UserError(
                f"precision.schedule has {name!r}, which computes in {found.compute}, and precision.mode={self.mode!r} "
                f"computes in {mode.compute}: the type of uncast operations does not change during a run."
            )
        return replace(mode, provenance={"recipe": name})

    def _sampled(self, plan: Plan) -> Plan:
        return plan if self.sampling is None else plan.with_sampling(self.sampling)

    def _with_output(self, plan: Plan) -> Plan:
        return plan if self.output is None else plan.with_output(recipe(self.output).default)

    def _check_plan(self, given: str, found: Plan) -> None:
        mode = MODES[self.mode].plan
        says = [(each.parameters, each.compute, each.master, each.loss_scaling) for each in (found, mode)]
        if (found.parameters is not None and says[0] != says[1]) or (found.loss_scaling and not mode.loss_scaling):
            fits = [name for name, each in MODES.items() if each.recipe == self.recipe]
            raise UserError(
                f"{given} does not fit precision.mode={self.mode!r}"
                + (f": use the mode {' or '.join(map(repr, fits))}." if fits else ": change one of them.")
            )


def check_snip(precision: Precision, begins: list[int], steps: int, start: int, delay: int) -> None:
    """Raise if SNIP never chooses a plan: it chooses while an entry of the schedule casts all products of a layer.

    Args:
        precision: The section with the schedule.
        begins: The first step of each entry.
        steps: The steps of the run.
        start: The step of SNIP's first statistics.
        delay: Steps from statistics to the plan.
    """
    if not precision.schedule:
        return
    for begin, end, (_, text) in zip(begins, [*begins[1:], steps], precision.schedule, strict=True):
        name, forward = split_forward(text)
        default = None if name in MEASURED or is_file(name) else recipe(name).default
        casts = not forward and (default is None or not default.uncast)  # a file is not read here
        if casts and max(begin, start) + delay < end:
            return
    raise UserError(
        f"SNIP chooses plans while an entry of precision.schedule casts all products, and none of them does so for long enough "
        f"with snip.start={start} and snip.delay={delay}: change the schedule, or remove snip.target."
    )
