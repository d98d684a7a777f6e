"""Llama training: tokens per second and peak memory of a whole step, by size and by mode, compared with BF16 autocast (`o1`).

    PYTHONPATH=src python3 benchmarks/train.py --sizes 1b,3b,8b4 --modes o1,bf16-nearest,bf16-sr,recipe:fp8-block
    PYTHONPATH=src python3 benchmarks/train.py --modes o1,torchao-tensorwise,torchao-rowwise --peer FOLDER  # an unpacked wheel
    PYTHONPATH=src python3 benchmarks/train.py --sizes 1b --modes recipe:fp8-block --profile  # where a step's time goes
    PYTHONPATH=src python3 benchmarks/train.py --table-1 --prepare  # GaussWS and DiffQ with AdamW and with Adam-mini
    PYTHONPATH=src python3 benchmarks/train.py --prepare          # compile everything first, in parallel, then time
    PYTHONPATH=src python3 benchmarks/train.py --device cpu --sizes tiny --modes o1 --steps 2 --sequence 64

A step is forward, backward and optimizer on random tokens made on the device; gradients are not clipped. Blocks are compiled,
each by itself and without graph breaks; embedding, output layer, loss and optimizer are not. Each size and mode runs in a
process of its own, so that neither memory nor a failure reaches the next one; differences of less than a percent need
--together, where the modes of a size take turns in one process, if all of them fit into memory. Modes:

    o1                   float32 parameters, bfloat16 autocast, torch's fused AdamW
    bf16-nearest         bfloat16 parameters, torch's fused AdamW, which rounds to nearest
    bf16-sr              bfloat16 parameters, dither.optim.AdamW: stochastic rounding, bfloat16 states
    torchao-tensorwise   o1 with torchao's FP8 linear layers (all but the output), from --peer
    torchao-rowwise      the same with one scale per row
    recipe:NAME          o1 with dither.convert(model, NAME): only the linear layers differ
    recipe:NAME+sr       bf16-sr with dither.convert(model, NAME)
    recipe:NAME+output   recipe:NAME with the output layer in the same precision; recipe:NAME+output+sr with bf16-sr
    SR+companded8        bf16-sr or a recipe with +sr, with 8-bit states; SR+dynamic8 likewise
    SR+release           the same, updated in the backward pass, which frees gradients; after the states
    RECIPE+input         any of the recipes so far with MemoryOptions(save="input"); +one or +none after it are its hold=
    RECIPE+swiglu        any of the recipes so far with MemoryOptions(swiglu="fp8")
    gaussws:PARTS        o1 with sampled weights, parts all, od, qkv, out, up or down; +recompute keeps no copy of them
    diffq:PARTS          the same with uniform noise
    MODE+adam-mini       o1, gaussws:PARTS or diffq:PARTS with dither.optim.AdamMini in place of torch's AdamW
    MODE+adamw           the same with dither.optim.AdamW, which differs from Adam-mini in its second moments only
    MODE+fsdp            any mode, sharded by FSDP2 over this one rank: its cost without communication
    MODE+fsdp-codes      the same; layers hold their codes for a step and FSDP2 gathers nothing of them

--table-1 measures the rows of Table 1 of the paper on GaussWS: autocast, GaussWS[od], GaussWS[all] and DiffQ[all], each with
AdamW and with Adam-mini, for Llamas of 134M, 360M, 1B and 3B. It prints the overhead of each row over autocast with the same
optimizer: how much more time per token, and how much more memory.
"""

import argparse
import concurrent.futures
import contextlib
import cProfile
import dataclasses
import io
import itertools
import json
import math
import multiprocessing
import pstats
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import goals
import torch
from train_modes import parse_mode

import dither
from dither import step_context
from dither.models import PRESETS, Llama, compile_blocks
from dither.nn import sampling_parameters
from dither.spec import Plan, Sampling

SIZES = {
    "tiny": (PRESETS["tiny"], 2),
    "134m": (PRESETS["llama-134m"], 24),
    "360m": (PRESETS["llama-360m"], 16),
    "1b": (PRESETS["llama-1b"], 8),
    "3b": (PRESETS["llama-3b"], 3),
    "8b4": (dataclasses.replace(PRESETS["llama-8b"], num_hidden_layers=4), 4),
}
"""Model and sequences a step."""

TABLE_1 = ["o1", "gaussws:od", "gaussws:all", "diffq:all"]
"""The methods of Table 1 of the paper on GaussWS, with AdamW; `+adam-mini` makes the other half."""
LEARNING_RATE = 1e-4

KERNELS = {
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"adam|multi_tensor|FusedOptimizer",
    "products": r"gemm|nvjet|cutlass|cublas|xmma|matmul|splitK|aten::(add|b|_scaled_)?mm",
    "sampling": r"_sample_|_noise_kernel|sample_backward|dither::(re)?sample",
    # Inductor's: norms, activations and rotations that also find the largest magnitude, or cast as torchao's recipes do.
    "joined with casts": r"triton_.*(amax|clamp)",
    # Dither's own kernels; copies that change the dtype.
    "casts": r"quantize|_cast|_transpose_kernel|_amax_kernel|_factors_kernel|_round_kernel|copy_kernel|CopyKernel|Memcpy",
    "rest": "",
}
"""What a kernel does, by its name: the first pattern that is found. Norms, activations and the loss are the rest."""


def build(size: str, mode: str, device: str, peer: str | None, compiled: bool, layers: int | None):
    """Return the model of a mode, its optimizer, and the context of its forward pass."""
    config, _ = SIZES[size]
    chosen = parse_mode(mode)
    config = dataclasses.replace(config, num_hidden_layers=layers or config.num_hidden_layers)
    with torch.device(device):
        model = Llama(config, generator=torch.Generator(device).manual_seed(0))
    if chosen.narrow:
        model = model.bfloat16()
    if chosen.method == "recipe":
        plan = dither.recipe(chosen.name)
        memory = dither.MemoryOptions(chosen.save, chosen.hold, chosen.swiglu)
        dither.convert(model, plan.with_output() if chosen.output else plan, memory=memory)
    if chosen.method in ("gaussws", "diffq"):
        noise = "rounded_normal" if chosen.method == "gaussws" else "uniform"
        # Uniform noise at 6 bits is beyond what BF16 is sure to show; it is measured as the paper runs it.
        how = Sampling(noise=noise, parts=chosen.name, recompute=chosen.recompute, beyond="warn")
        dither.convert(model, Plan(compute="bf16").with_sampling(how))
    if chosen.method.startswith("torchao-"):
        if peer is None:
            raise RuntimeError("torchao is read from the folder of an unpacked wheel: --peer FOLDER")
        sys.path.insert(0, peer)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        scales = Float8LinearConfig.from_recipe_name(chosen.method.removeprefix("torchao-"))
        convert_to_float8_training(model, config=scales, module_filter_fn=lambda _, name: name != "lm_head")
    if chosen.fsdp:
        shard(model, device, codes=chosen.fsdp == "fsdp-codes")
    if compiled:
        compile_blocks(model)
    if chosen.sr:
        from dither.optim import AdamW, release_gradients

        # Gradients are not checked here, as torch's optimizers do not check them.
        options = {"weight_decay": 0.1, "nonfinite": "unchecked", "states": chosen.states}
        optimizer = AdamW(model.named_parameters(), LEARNING_RATE, (0.9, 0.95), **options)
        if chosen.release:
            release_gradients(model, optimizer)
    elif chosen.optimizer:
        from dither.nn import param_groups
        from dither.optim import AdamMini, AdamW, roles

        groups = param_groups(model, weight_decay=0.1)
        options = {"betas": (0.9, 0.95), "nonfinite": "unchecked"}
        optimizer = (
            AdamMini(groups, roles(model), LEARNING_RATE, **options)
            if chosen.optimizer == "adam-mini"
            else AdamW(groups, LEARNING_RATE, **options)
        )
    else:
        bitwidths = sampling_parameters(model)
        known = {id(bitwidth) for bitwidth in bitwidths}
        groups = [{"params": [parameter for parameter in model.parameters() if id(parameter) not in known]}]
        groups += [{"params": bitwidths, "weight_decay": 0.1}] if bitwidths else []
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    context = contextlib.nullcontext() if chosen.narrow else torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
    return model, optimizer, context


def shard(model: torch.nn.Module, device: str, *, codes: bool) -> None:
    """Shard a model by FSDP2 over one rank, which gathers weights or codes."""
    import torch.distributed as dist

    from dither.parallel.apply import gather_codes, shard_weights

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(torch.device(device).type, (1,), mesh_dim_names=("dp_shard",))
    if codes:
        gather_codes(model, mesh, None)
    shard_weights(model, mesh, reshard_after_forward=True)


def warmed_step(size: str, mode: str, arguments: argparse.Namespace):
    """Return a training step of a mode, after --warmup runs."""
    config, batch = SIZES[size]
    model, optimizer, context = build(size, mode, arguments.device, arguments.peer, arguments.compile, arguments.layers)
    random = torch.Generator(arguments.device).manual_seed(1)
    steps = itertools.count()

    def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with context:
            loss = model(inputs, targets)
        loss.backward()
        return loss

    passes = dither.capture_passes(model, run) if arguments.graphs else run

    def step() -> torch.Tensor:
        shape = (arguments.batch or batch, arguments.sequence + 1)
        text = torch.randint(config.vocab_size, shape, device=arguments.device, generator=random)
        # Weights are cast once a step, and layers learn which step it is.
        with step_context(model, step=next(steps)):
            loss = passes(text[:, :-1], text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(arguments.warmup):
        step()
    if arguments.device.startswith("cuda"):
        torch.cuda.synchronize()
    return step


def timed(step, count: int, cuda: bool) -> tuple[list[float], torch.Tensor]:
    """Return the milliseconds of each step, and the last loss, which must be finite."""
    times = []
    if cuda:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            loss = step()
            mark.record()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
    else:
        for _ in range(count):
            start = time.perf_counter()
            loss = step()
            times.append((time.perf_counter() - start) * 1e3)
    if not loss.isfinite():
        raise RuntimeError(f"the loss became {loss.item()}")
    return times, loss


def measure(size: str, modes: Sequence[str], arguments: argparse.Namespace) -> list[dict]:
    """Return the median step of each mode, its tokens per second, and the peak of allocated memory over the timed steps.

    Several modes alternate, so that a slowdown of the GPU affects all of them; memory is counted separately.
    """
    config, batch = SIZES[size]
    cuda = arguments.device.startswith("cuda")
    # Layers that differ in constants are traced one by one; past the limit dynamo would run them uncompiled, in silence.
    torch._dynamo.config.recompile_limit = len(modes) * (4 * config.num_hidden_layers + 8)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    held = lambda: torch.cuda.memory_allocated() if cuda else 0  # noqa: E731
    steps, kept, times, peaks, losses = {}, {}, {mode: [] for mode in modes}, dict.fromkeys(modes, 0), {}
    for mode in modes:
        before, began = held(), time.perf_counter()
        steps[mode] = warmed_step(size, mode, arguments)
        kept[mode] = (held() - before, time.perf_counter() - began)
    rounds = 1 if len(modes) == 1 else 4
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else reversed(modes):
            if rounds > 1:
                steps[mode]()  # the first one after another mode's
            before = held()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            found, losses[mode] = timed(steps[mode], math.ceil(arguments.steps / rounds), cuda)
            times[mode] += found
            if cuda:
                peaks[mode] = max(peaks[mode], torch.cuda.max_memory_allocated() - before + kept[mode][0])
    return [
        {
            "size": size,
            "mode": mode,
            "batch": arguments.batch or batch,
            "sequence": arguments.sequence,
            "tokens_per_second": (arguments.batch or batch) * arguments.sequence / statistics.median(times[mode]) * 1e3,
            "step_ms": statistics.median(times[mode]),
            "slowest_ms": max(times[mode]),
            "peak_gib": peaks[mode] / 2**30 if cuda else None,
            "loss": losses[mode].item(),
            "warmup_s": kept[mode][1],
            "profile": profile(steps[mode], cuda) if arguments.profile else None,
            "host_profile": host_profile(steps[mode]) if arguments.profile else None,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "torch": torch.__version__,
        }
        for mode in modes
    ]


def profile(step, cuda: bool) -> list[dict]:
    """Return the kernels of one step (on a CPU: its operations), slowest first: name, group, milliseconds, calls."""
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as record:
        step()
        if cuda:
            torch.cuda.synchronize()
    kernels = []
    for event in record.key_averages():
        # Events of the host, and ranges that it marks, repeat the time of the kernels that they launch.
        if event.is_user_annotation or (cuda and event.device_type != torch.autograd.DeviceType.CUDA):
            continue
        ms = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
        group = next(name for name, pattern in KERNELS.items() if re.search(pattern, event.key, re.IGNORECASE))
        kernels.append({"name": event.key, "group": group, "ms": ms, "calls": event.count})
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def host_profile(step, shown: int = 25) -> str:
    """Return the host's functions in a step, slowest first by their own time. Profiling doubles the time."""
    record = cProfile.Profile()
    record.enable()
    step()
    record.disable()
    text = io.StringIO()
    pstats.Stats(record, stream=text).sort_stats("tottime").print_stats(shown)
    return re.sub(r"/\S*/(?=\S*/\S*\.py)", "", text.getvalue())


def print_profile(result: dict, shown: int = 15) -> None:
    """Print Markdown tables of a step's time by group of kernels and of its slowest kernels, then the host's functions."""
    kernels, step = result["profile"], result["step_ms"]
    total = sum(kernel["ms"] for kernel in kernels)
    print(f"\n{result['size']} `{result['mode']}`: a step of {step:.2f} ms\n\n| part | ms | share of the step |\n|---|---|---|")
    spent = {group: sum(kernel["ms"] for kernel in kernels if kernel["group"] == group) for group in KERNELS}
    for group, ms in spent.items():
        print(f"| {group} | {ms:.2f} | {ms / step:.1%} |")
    # The goal counts joined kernels in full, although most of their time is that of the norm or the activation.
    ms = spent["casts"] + spent["joined with casts"]
    print(f"| casts and what is joined with them | {ms:.2f} | {ms / step:.1%} (goal: at most {goals.CASTS:.0%}) |")
    print(f"| gaps between kernels | {max(step - total, 0.0):.2f} | {max(1 - total / step, 0.0):.1%} |")
    print("\n| kernel | part | ms | calls |\n|---|---|---|---|")
    for kernel in kernels[:shown]:
        name = kernel["name"][:90].replace("|", "\\|")
        print(f"| `{name}` | {kernel['group']} | {kernel['ms']:.3f} | {kernel['calls']} |")
    print("\n" + result["host_profile"])


def processes(count: int) -> concurrent.futures.ProcessPoolExecutor:
    """Return a pool of processes for one task each, forked after importing torch; the parent must not use the GPU."""
    births = multiprocessing.get_context("forkserver")
    births.set_forkserver_preload(["torch", "sympy", "numpy"])
    return concurrent.futures.ProcessPoolExecutor(count, mp_context=births, max_tasks_per_child=1)


def compile_all(arguments: argparse.Namespace) -> None:
    """Run one step of two layers of each size and mode in parallel, so that timed runs find their blocks compiled."""
    shortened = argparse.Namespace(**{**vars(arguments), "layers": 2, "warmup": 0, "steps": 1, "profile": False})
    with processes(10) as pool:
        for size in arguments.sizes:
            for mode in arguments.modes:
                pool.submit(measure, size, [mode], shortened)  # a failure shows again when it is timed


def separately(size: str, modes: Sequence[str], arguments: argparse.Namespace) -> list[dict]:
    """Run `measure` in a process of its own; a failure becomes its first line."""
    began = time.perf_counter()
    with processes(1) as pool:
        error = (task := pool.submit(measure, size, modes, arguments)).exception()
    if error is None:
        return [{**result, "process_s": time.perf_counter() - began} for result in task.result()]
    if arguments.verbose:
        traceback.print_exception(error)
    failure = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return [{"size": size, "mode": mode, "failure": failure} for mode in modes]


def shown(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def print_table(results: list[dict]) -> None:
    """Print a Markdown table: one line per size and mode, with ratios to o1 of the same size if that ran, and goals."""
    columns = ("size", "mode", "thousand tokens/s", "relative to o1", "goal", "peak GiB", "relative to o1", "goal", "step ms")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for result in results:
        size, mode = result["size"], result["mode"]
        if "failure" in result:
            print(f"| {size} | `{mode}` | failed: {result['failure'][:160]} |")
            continue
        base = next((r for r in results if (r["size"], r["mode"]) == (size, "o1") and "failure" not in r), {})
        speed, peak = (
            result[key] / base[key] if result[key] and base.get(key) else None for key in ("tokens_per_second", "peak_gib")
        )
        cells = [f"{result['tokens_per_second'] / 1e3:.2f}", shown(speed), goals.speed(mode, size, speed)]
        cells += [shown(result["peak_gib"], 2), shown(peak), goals.memory(mode, size, peak), f"{result['step_ms']:.2f}"]
        print(f"| {size} | `{mode}` | {' | '.join(cells)} |")


def print_table_1(results: list[dict]) -> None:
    """Print the rows of Table 1: thousand tokens per second, peak memory, and the overhead over autocast."""
    found = {(result["size"], result["mode"]): result for result in results if "failure" not in result}
    sizes = list(dict.fromkeys(result["size"] for result in results))
    for title, key, unit in (("k tokens/s", "tokens_per_second", 1e-3), ("peak GiB", "peak_gib", 1.0)):
        print(f"\n{title:<12}{'method':<16}" + "".join(f"{size:>10}{'overhead':>10}" for size in sizes))
        for ending, name in (("", "AdamW"), ("+adam-mini", "Adam-mini")):
            for method in TABLE_1:
                cells = ""
                for size in sizes:
                    row, base = found.get((size, method + ending)), found.get((size, f"o1{ending}"))
                    value, of = (each and each[key] for each in (row, base))
                    over = (of / value if key == "tokens_per_second" else value / of) - 1 if value and of else None
                    cells += f"{value * unit:>10.2f}" if value else f"{'-':>10}"
                    cells += f"{over:>10.2%}" if over is not None and method != "o1" else f"{'':>10}"
                print(f"{name:<12}{method:<16}{cells}")


def listed(check: Callable[[str], object]):
    """Return a parser of comma-separated words; `check` raises a ValueError with a sentence about a wrong one."""

    def parse(text: str) -> list[str]:
        try:
            for word in (words := text.split(",")):
                check(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return words

    return parse


def check_size(name: str) -> None:
    """Raise a ValueError if there is no such size."""
    if name not in SIZES:
        raise ValueError(f"There is no size {name!r}: choose from {', '.join(SIZES)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=listed(check_size), help=f"of {', '.join(SIZES)} (default: 1b,3b,8b4)")
    parser.add_argument("--modes", type=listed(parse_mode), help="see above (default: o1,bf16-nearest,bf16-sr)")
    parser.add_argument("--table-1", action="store_true", help="sizes and modes of Table 1 of the paper on GaussWS")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones; the first compiles")
    parser.add_argument("--steps", type=int, default=20, help="timed steps, of which the median counts")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, help="sequences a step, instead of the size's own")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="per-block compilation (default: on a GPU)")
    parser.add_argument("--peer", help="folder of an unpacked torchao wheel")
    parser.add_argument("--layers", type=int, help="blocks of the model, instead of the size's own")
    parser.add_argument("--graphs", action="store_true", help="forward and backward as a CUDA graph: dither.capture_passes")
    parser.add_argument("--prepare", action="store_true", help="compile all sizes and modes first, side by side")
    parser.add_argument("--together", action="store_true", help="the modes of a size in one process, taking turns")
    parser.add_argument("--json", type=Path, help="write the results there, after each one")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step, and what the host does, by time")
    parser.add_argument("--verbose", action="store_true", help="print the whole trace of a failure")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --sizes tiny --sequence 64 shows that the script runs")
    if arguments.table_1 and arguments.modes:
        parser.error("--table-1 says which modes are measured: leave --modes out")
    arguments.modes = arguments.modes or ["o1", "bf16-nearest", "bf16-sr"]
    if arguments.table_1:
        arguments.modes = [method + ending for ending in ("", "+adam-mini") for method in TABLE_1]
        arguments.sizes = arguments.sizes or ["134m", "360m", "1b", "3b"]
    arguments.sizes = arguments.sizes or ["1b", "3b", "8b4"]
    if arguments.compile is None:
        arguments.compile = arguments.device != "cpu"  # there it takes longer than it saves
    if arguments.prepare:
        compile_all(arguments)
    results = []
    for size in arguments.sizes:
        for modes in [arguments.modes] if arguments.together else [[mode] for mode in arguments.modes]:
            for result in separately(size, modes, arguments):
                results.append(result)
                print(json.dumps({key: value for key, value in result.items() if not key.endswith("profile")}), flush=True)
                if result.get("profile"):
                    print_profile(result)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print_table(results)
    if arguments.table_1:
        print_table_1(results)


if __name__ == "__main__":
    main()
