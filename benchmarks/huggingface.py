"""A Hugging Face Llama of 1.2B parameters: tokens per second, time to the first step and peak memory, beside torchao's FP8.

    PYTHONPATH=src python3 benchmarks/huggingface.py --peer FOLDER                    # an unpacked wheel of torchao
    PYTHONPATH=src python3 benchmarks/huggingface.py --compile whole --modes o1,fp8-current --profile
    PYTHONPATH=src python3 benchmarks/huggingface.py --device cpu --layers 2 --width 64 --batch 1 --sequence 16 --modes o1

The model has 22 blocks of width 2048 with 32 heads and 8 key heads, and trains on 8 x 2048 random tokens in BF16 autocast with
torch's fused AdamW. `--compile blocks` compiles each block by itself, `whole` the model by torch.compile(model). Modes: o1;
torchao, which is tensorwise FP8 from --peer; and recipes of Dither, inside step_context. Each runs in a process of its own with
empty caches of compiled code, because the time to the first step is measured. With `--together`, all take their first step at
the same time and are timed one after another: quicker, if all fit in the GPU's memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch

import dither


def build(arguments: argparse.Namespace) -> torch.nn.Module:
    """Return the model of a mode, compiled as asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, heads = arguments.width, arguments.width // 64
    shape = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": arguments.layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "vocab_size": 32000}
    with torch.device(arguments.device):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=arguments.sequence, use_cache=False))
    if arguments.mode == "torchao":
        sys.path.insert(0, arguments.peer)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=chosen, module_filter_fn=lambda _, name: name != "lm_head")
    elif arguments.mode != "o1":
        dither.convert(model, arguments.mode)
    if arguments.compile == "whole":
        return torch.compile(model)
    if arguments.compile == "blocks":
        dither.compile(model)
    return model


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one mode."""
    cuda = arguments.device.startswith("cuda")
    wait = torch.cuda.synchronize if cuda else lambda: None
    torch.set_float32_matmul_precision("high")
    model = build(arguments)
    ours = arguments.mode not in ("o1", "torchao")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    draw = torch.Generator(arguments.device).manual_seed(1)
    entering: list[float] = []

    def step(number: int) -> None:
        tokens = torch.randint(32000, (arguments.batch, arguments.sequence), device=arguments.device, generator=draw)
        began = time.perf_counter()
        with dither.step_context(model, step=number) if ours else nullcontext():
            entering.append(time.perf_counter() - began)
            with torch.autocast(torch.device(arguments.device).type, dtype=torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    wait()
    began = time.perf_counter()
    step(0)
    wait()
    first, times = time.perf_counter() - began, []
    if arguments.together:
        print("ready", flush=True)
        input()
    for number in range(1, arguments.steps + 4):
        began = time.perf_counter()
        step(number)
        wait()
        times.append(time.perf_counter() - began)
    typical = statistics.median(times[3:])
    if arguments.profile:
        _profile(step, arguments.steps + 4)
    return {
        "mode": arguments.mode,
        "compile": arguments.compile,
        "tokens/s": arguments.batch * arguments.sequence / typical,
        "first step": first,
        "step": typical,
        "entering": statistics.median(entering[3:]),
        "peak": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        "where": _compile_times(),
    }


def _compile_times() -> dict[str, float]:
    """Return the seconds of the longest parts of compiling, by torch's own counters. Parts lie within one another."""
    sums = {name: sum(times) for name, times in torch._dynamo.utils.compilation_time_metrics.items()}
    return dict(sorted(sums.items(), key=lambda each: -each[1])[:14])


def _profile(step: Any, number: int) -> None:
    """Print the kernels of a step, slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        step(number)
        torch.cuda.synchronize()
    table = record.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=90)
    print(table, file=sys.stderr)


def main() -> None:
    """Measure each mode in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="o1,torchao,fp8-current")
    parser.add_argument("--mode", help="measure this mode here, and print JSON: used by the command itself")
    parser.add_argument("--compile", default="blocks", choices=["blocks", "whole", "none"])
    parser.add_argument("--peer", default="", help="the folder of an unpacked wheel of torchao")
    parser.add_argument("--device", default="cuda")
    for name, default in {"layers": 22, "width": 2048, "batch": 8, "sequence": 2048, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--together", action="store_true", help="compile all modes at the same time")
    arguments = parser.parse_args()
    if arguments.mode:
        print(json.dumps(measure(arguments)))
        return
    columns = {"tokens/s": 10, "first step": 11, "step": 9, "entering": 9, "peak GiB": 9}
    print(f"{'compile':8} {'mode':14} " + " ".join(f"{name:>{width}}" for name, width in columns.items()), flush=True)
    modes = arguments.modes.split(",")
    with tempfile.TemporaryDirectory() as caches:
        if not arguments.together:
            for mode in modes:
                show(arguments.compile, mode, start(mode, caches))
            return
        started = {mode: start(mode, caches) for mode in modes}
        for each in started.values():
            each.stdout.readline()  # "ready", or nothing if it failed
        for mode, each in started.items():
            show(arguments.compile, mode, each)


def start(mode: str, caches: str) -> "subprocess.Popen[str]":
    """Start the process that measures a mode."""
    empty = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{mode}-inductor", "TRITON_CACHE_DIR": f"{caches}/{mode}-triton"}
    command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
    return subprocess.Popen(command, env={**os.environ, **empty}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def show(compiled: str, mode: str, process: "subprocess.Popen[str]") -> None:
    """Let a process take its timed steps, and print its row."""
    printed = process.communicate("\n")[0]
    if process.returncode:
        print(f"{compiled:8} {mode:14} failed", flush=True)
        return
    found = json.loads(printed.splitlines()[-1])
    print(
        f"{compiled:8} {mode:14} {found['tokens/s']:10,.0f} {found['first step']:9.1f} s "
        f"{found['step'] * 1e3:6.1f} ms {found['entering'] * 1e3:6.2f} ms {found['peak']:9.1f}",
        flush=True,
    )
    print("         " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["where"].items()), flush=True)


if __name__ == "__main__":
    main()
