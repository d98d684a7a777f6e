"""Estimated memory compared with measured peaks: whole training steps, by size and by setting, each in a process of its own.

    PYTHONPATH=src python3 benchmarks/memory.py                                  # all cases of CASES, about five minutes
    PYTHONPATH=src python3 benchmarks/memory.py --cases 1b:o1,1b:bf16-sr+nvfp4 --json memory.json
    PYTHONPATH=src python3 benchmarks/memory.py --list                           # the cases and their estimates; needs no GPU

A case is SIZE:MODE with parts added by +: a recipe (fp8-block), states (dynamic8), again (checkpointing), eager (blocks not
compiled), accumulate (two backward passes), small (128 tokens, so that gradients are the peak), input (MemoryOptions(save=
"input")), one or none (its hold=), swiglu (its swiglu="fp8"). The measured peak is that of
allocated memory over three steps after a warm-up, by `torch.cuda.max_memory_allocated`. The last column but one is the
estimate's error; more than 10 % fails (exit code 1).
"""

import argparse
import dataclasses
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dither
from dither.models import PRESETS, build, compile_blocks
from dither.optim import training
from dither.spec.modes import MODES
from dither.spec.optimizer import BLOCKS
from dither.spec.recipes import RECIPES, recipe
from dither.tools.memory import GIB, PARTS, Setting, Shape, StepPasses, estimate, shape_of

SIZES = {
    "tiny": (PRESETS["tiny"], 4, 128),
    "134m": (PRESETS["llama-134m"], 24, 2048),
    "gpt2": (PRESETS["gpt2-124m"], 32, 1024),
    "1b": (PRESETS["llama-1b"], 8, 2048),
    "3b": (PRESETS["llama-3b"], 3, 2048),
    "8b4": (dataclasses.replace(PRESETS["llama-8b"], num_hidden_layers=4), 4, 2048),
}
"""Model, sequences in a pass, tokens in a sequence."""

CASES = (
    "134m:o1,134m:bf16-sr,134m:bf16-sr+eager,134m:o1+eager,134m:fp32,gpt2:o1,gpt2:bf16-sr,gpt2:o1+fp8-block,"
    "1b:o1,1b:o2,1b:bf16-sr,1b:fp16,1b:o1+fp8-current,1b:o1+mxfp4,1b:bf16-sr+nvfp4,1b:bf16-sr+fp8-block+dynamic8,"
    "1b:o1+again,1b:bf16-sr+again,1b:bf16-sr+fp8-current+again,1b:o1+accumulate,1b:o1+small,1b:bf16-sr+small,"
    "3b:o1,3b:bf16-sr+dynamic8,8b4:bf16-sr+fp8-current,"
    "134m:o1+fp8-current+input+one,1b:o1+fp8-current+input+one,1b:o1+fp8-current+input+none,1b:bf16-sr+fp8-current+input+one,"
    "1b:o1+fp8-block+input+one,3b:o1+fp8-current+input+none,8b4:o1+fp8-current+input+none,1b:o1+fp8-current+input+eager"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A size and the settings of its training."""

    text: str
    shape: Shape
    setting: Setting
    recipe: str | None
    passes: StepPasses


def parse(text: str) -> Case:
    """Parse the text of a case; a mistake ends the script with a message."""
    size, _, rest = text.partition(":")
    mode, *parts = rest.split("+")
    known = {*RECIPES, *BLOCKS, "again", "eager", "accumulate", "small", "input", "one", "none", "swiglu"}
    if size not in SIZES or mode not in MODES or not set(parts) <= known:
        sys.exit(
            f"{text!r} is no case: sizes are {', '.join(SIZES)}, modes {', '.join(MODES)}; add {', '.join(sorted(known))}."
        )
    config, batch, sequence = SIZES[size]
    # `int8` is a recipe and a format of states: here it is the format.
    name = next((part for part in parts if part in RECIPES and part not in BLOCKS), None)
    setting = Setting(
        mode=mode,
        precision=None if name is None else recipe(name).default,
        states=next((part for part in parts if part in BLOCKS), None),
        compiled="eager" not in parts,
        memory=dither.MemoryOptions(
            "input" if "input" in parts else "codes",
            next((part for part in parts if part in ("one", "none")), "both"),
            "fp8" if "swiglu" in parts else "exact",
        ),
    )
    batch, sequence = (1, 128) if "small" in parts else (batch, sequence)
    again, number = "full" if "again" in parts else "none", 2 if "accumulate" in parts else 1
    passes = StepPasses(batch=batch, sequence=sequence, number=number, checkpointing=again)
    return Case(text, shape_of(config), setting, name, passes)


class Again(nn.Module):
    """A block that keeps only its input and is recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return checkpoint(self.block, *inputs, use_reentrant=False)


def measure(text: str, device: str) -> int:
    """Return the peak of allocated bytes over three steps; 0 on a CPU, where torch does not count."""
    case, how = parse(text), parse(text).setting
    config = SIZES[text.partition(":")[0]][0]
    model = build(config, device=device)
    if case.recipe is not None:
        dither.convert(model, case.recipe, memory=how.memory)
    given = {} if how.states is None else {"states": how.states}
    run = training(model, how.mode, 1e-4, **given)
    if how.compiled and device != "cpu":
        torch._dynamo.config.recompile_limit = 4 * config.num_hidden_layers + 8
        compile_blocks(model)
    if case.passes.checkpointing == "full":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = Again(block)
    for step in range(5):
        if step == 2 and device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with dither.step_context(model, step=step):
            for _ in range(case.passes.number):
                words = torch.randint(config.vocab_size, (case.passes.batch, case.passes.sequence + 1), device=device)
                with run.forward():
                    loss = model(words[:, :-1], words[:, 1:])
                run.backward(loss)
                del loss
        run.step()
    return torch.cuda.max_memory_allocated() if device != "cpu" else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    cases = [parse(text) for text in given.cases.split(",")]
    if not given.list and given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no GPU here: --list shows the estimates, --device cpu --cases tiny:o1 that the script runs.")
    print(f"{'case':<36}{'tokens':>8}{'measured':>10}{'estimated':>11}{'error':>8}  at")
    results, wrong = [], 0
    for case in cases:
        found = estimate(case.shape, case.setting, case.passes)
        peak, failure = 0, ""
        if not given.list:
            births = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=births) as pool:
                task = pool.submit(measure, case.text, given.device)
                if (error := task.exception()) is None:
                    peak = task.result()
                else:
                    failure = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        error = found.peak / peak - 1 if peak else None
        wrong += bool(failure) or (error is not None and abs(error) > 0.1)
        cells = ("-" if not peak else f"{peak / GIB:.2f}", f"{found.peak / GIB:.2f}", "-" if error is None else f"{error:+.1%}")
        tokens = case.passes.tokens
        print(f"{case.text:<36}{tokens:>8}{cells[0]:>10}{cells[1]:>11}{cells[2]:>8}  {failure or found.moment}", flush=True)
        parts = {part: found.parts[part] for part in PARTS}
        results.append({"case": case.text, "measured": peak, "estimated": found.peak, "parts": parts, "failure": failure})
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
