"""Where the GPU waits in a training step: the gaps between kernels by phase, and the host's time beside the device's.

    PYTHONPATH=src python3 benchmarks/gaps.py --sizes 134m,1b --modes o1,recipe:fp8-current+sr

Sizes and modes are those of `dither bench train`. A step has four phases: entering `step_context` (casts of weights), forward,
backward, and optimizer. A kernel belongs to the phase in which the host launched it; a gap belongs to the kernel after it. It
is "host" if that kernel was launched after the kernel before it had ended, so that the GPU had nothing to do, and "device" if
it had been launched in time.
"""

import argparse
import itertools
import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from dither.tools.bench_train import StepSettings, build, check_size, parse_mode

PHASES = ("enter", "forward", "backward", "optimizer")

KERNELS = {
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"adam|multi_tensor|FusedOptimizer",
    "products": r"gemm|nvjet|cutlass|cublas|xmma|matmul|splitK|aten::(add|b|_scaled_)?mm",
    "sampling": r"_sample_|_noise_kernel|sample_backward|dither::(re)?sample",
    # Inductor's: norms, activations and rotations that also find the largest magnitude, or cast as torchao's recipes do.
    "joined with casts": r"triton_.*(amax|clamp)",
    # Dither's own kernels; copies that change the dtype.
    "casts": r"quantize|_cast|_(transpose|amax|factors|round|values|transform|decode|as_fp8|replace)_kernel|"
    r"copy_?kernel|Memcpy",
    "rest": "",
}
"""What a kernel does, by its name: the first pattern that is found. Norms, activations and the loss are the rest."""


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


def stepper(size: str, mode: str, sequence: int):
    """Return a training step whose phases are marked for the profiler."""
    settings = StepSettings("cuda", sequence=sequence)
    config, batch, _ = settings.shape(size)
    built = build(size, mode, settings)
    model, optimizer, context = built.model, built.optimizer, built.context
    random, steps = torch.Generator("cuda").manual_seed(1), itertools.count()

    def step() -> None:
        text = torch.randint(config.vocab_size, (batch, sequence + 1), device="cuda", generator=random)
        mark = record_function("phase:enter")
        mark.__enter__()
        with built.step_context(next(steps)):
            mark.__exit__(None, None, None)
            with record_function("phase:forward"), context:
                loss = model(text[:, :-1], text[:, 1:])
            with record_function("phase:backward"):
                loss.backward()
        with record_function("phase:optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def trace(step, steps: int = 2) -> list[dict]:
    """Return the events of some steps as the profiler writes them."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def analyse(events: list[dict]) -> None:
    """Print time on the device, gaps and the host's time by phase, of the last step in the trace."""
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("phase:")]
    last = sorted((event for event in marks if event["name"] == "phase:enter"), key=lambda event: event["ts"])[-1]
    phases = {
        event["name"].removeprefix("phase:"): (event["ts"], event["ts"] + event["dur"])
        for event in marks
        if event["ts"] >= last["ts"]
    }
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    kernels = sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda event: event["ts"]
    )
    busy, waits, late, counts, groups = defaultdict(float), defaultdict(float), defaultdict(float), defaultdict(int), {}
    end = None
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        at = None if launch is None else launch["ts"]
        phase = next((name for name in PHASES if at is not None and phases[name][0] <= at <= phases[name][1]), None)
        before, end = end, max(end or 0.0, kernel["ts"] + kernel["dur"])
        if phase is None or launch is None or before is None:
            continue
        counts[phase] += 1
        busy[phase] += kernel["dur"]
        gap = max(0.0, kernel["ts"] - before)
        (late if launch["ts"] + launch["dur"] > before else waits)[phase] += gap
        group = next(name for name, pattern in KERNELS.items() if re.search(pattern, kernel["name"], re.IGNORECASE))
        groups.setdefault(phase, defaultdict(float))[group] += kernel["dur"]
    print(f"{'phase':<11}{'host ms':>9}{'launches':>10}{'kernels ms':>12}{'gaps, host':>12}{'gaps, device':>14}")
    for name in PHASES:
        host = (phases[name][1] - phases[name][0]) / 1e3
        print(
            f"{name:<11}{host:>9.2f}{counts[name]:>10}{busy[name] / 1e3:>12.2f}{late[name] / 1e3:>12.2f}"
            f"{waits[name] / 1e3:>14.2f}  " + ", ".join(f"{g} {ms / 1e3:.2f}" for g, ms in groups.get(name, {}).items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="134m,1b")
    parser.add_argument("--modes", default="o1,recipe:fp8-current+sr")
    parser.add_argument("--sequence", type=int, default=2048)
    arguments = parser.parse_args()
    for size in arguments.sizes.split(","):
        check_size(size)
        for mode in arguments.modes.split(","):
            if parse_mode(mode).graphs:
                parser.error(f"{mode}: a graph has no phases; measure the mode without +graphs.")
            step = stepper(size, mode, arguments.sequence)
            for _ in range(6):
                step()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                step()
            end.record()
            end.synchronize()
            print(f"\n{size} {mode}: {begin.elapsed_time(end) / 10:.2f} ms per step", flush=True)
            analyse(trace(step))
            del step
            torch._dynamo.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
