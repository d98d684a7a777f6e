"""torchtitan's own trainer on one GPU: tokens per second, peak memory and losses of plain BF16, torchao's converter and Dither.

    PYTHONPATH=src:peers python3 benchmarks/torchtitan.py --sizes debug
    PYTHONPATH=src:peers python3 benchmarks/torchtitan.py --sizes 8b4 --modes bf16,fp8-block --steps 20 --limit 150

`peers` is a folder of unpacked wheels (torchtitan, spmd_types, torchdata, ...), if they are not installed. Sizes: debug
(torchtitan's debug model, 6 layers of width 256) and 8b4 (4 layers of the 8B model, 8192 tokens). Modes:

    bf16            torchtitan's trainer with torch's fused AdamW
    bf16+graphs     the same with CUDA graphs, torchtitan's default; other modes run without them
    torchao         torchtitan's Float8LinearConverter (rowwise), all layers but the output
    fp8-block, gaussws, bf16-sr   configurations of dither.integrations.torchtitan
    snip            the debug size only: FP8 or FP4 per layer, chosen after a few steps

Blocks and loss are compiled as torchtitan compiles them; the loss is not chunked. Data are bytes of torchtitan's source
code, the same for all modes.
Each size and mode runs in a process of its own under a time limit, and the table is printed at the end even if some of them
fail. Tokens per second are the median of torchtitan's own figures from step 10 on, each the mean of 5 steps.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("bf16", "torchao", "fp8-block", "gaussws", "bf16-sr")
EVERY = 5
"""Steps between logs, each of which waits for the GPU."""


def configuration(size: str, mode: str, steps: int, folder: str, compiled: bool) -> Any:
    """Return the configuration of a size and a mode."""
    import torch
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from dither.integrations.torchtitan import config_registry

    name = {"debug": "llama3_debug", "8b4": "llama3_8b_4layers"}[size]
    own = mode in ("bf16", "bf16+graphs", "torchao")
    config = getattr(config_registry, f"{name}_{'bf16' if own else mode.replace('-', '_')}")()
    if mode == "torchao":
        converter = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=compiled)
        config.model_spec.model = converter.build().convert(config.model_spec.model)
    config.training.steps, config.metrics.log_freq = steps, EVERY
    config.training.disable_cuda_graphs = mode != "bf16+graphs"
    config.compile.enable, config.dump_folder, config.debug.seed = compiled, folder, 1
    config.comm.trace_buf_size = 0
    if torch.__version__ < "2.12":  # it lacks FSDP2's mesh dimensions, and arguments of flex attention's masks
        config.parallelism.spmd_backend = "partial_dtensor"
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def train(trainer: Any, steps: int) -> None:
    """Run the trainer's steps, also if torch lacks `set_timeout`, which torchtitan's loop calls after the first one."""
    import torch

    from dither.integrations.torchtitan import DitherTrainer

    if isinstance(trainer, DitherTrainer) or hasattr(torch.distributed, "set_timeout"):
        trainer.train()
        return
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, steps + 1):
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)


def record_losses(trainer: Any) -> list[Any]:
    """Return a list that gets the loss of each later step, on its device, so that no step waits for the GPU."""
    losses: list[Any] = []
    body = trainer.fwd_bwd_fn

    def recording(*args: Any) -> Any:
        loss = body(*args)
        losses.append(loss.detach().clone())
        return loss

    trainer.fwd_bwd_fn = recording
    return losses


def run(size: str, mode: str, steps: int, compiled: bool) -> dict[str, Any]:
    """Train in this process, and return what torchtitan logged."""
    import torch
    from torchtitan.components.metrics import BaseLogger
    from torchtitan.tools.logging import init_logger

    class Recorder(BaseLogger):
        def log(self, numbers: dict[str, Any], step: int) -> None:
            logged[step] = numbers

    logged: dict[int, dict[str, Any]] = {}
    init_logger()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with tempfile.TemporaryDirectory() as folder:
        trainer = configuration(size, mode, steps, folder, compiled).build()
        trainer.metrics_processor.logger = Recorder()
        losses = record_losses(trainer)
        train(trainer, steps)
        trainer.close()
    loss = "loss_metrics/global_avg_loss"
    late = [numbers["throughput(tps)"] for step, numbers in logged.items() if step >= min(10, max(logged))]
    extra = {key: value for key, value in logged[max(logged)].items() if key.startswith("dither/")}
    return {
        "tokens/s": statistics.median(late),
        "memory": max(numbers["memory/max_reserved(GiB)"] for numbers in logged.values()),
        "first": logged[min(logged)][loss],
        "last": logged[max(logged)][loss],
        "losses": [round(value.item(), 4) for value in losses],
        "extra": extra,
        "torch": torch.__version__,
    }


def attempt(size: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a size and a mode in a process of its own; return its results, or {"error": ...}."""
    # -P: otherwise this file would be found as the package torchtitan
    command = [sys.executable, "-P", __file__, "--one", size, mode, "--steps", str(options.steps)]
    command += ["--eager"] * options.eager
    began = time.monotonic()
    log = options.logs / f"{size}-{mode}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile
            process.communicate()
            return {"error": f"more than {options.limit} s", "seconds": options.limit}
        file.write(output)
    seconds = time.monotonic() - began
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode == 0 and lines:
        return {**json.loads(lines[-1].removeprefix("RESULT ")), "seconds": seconds}
    said = re.findall(r"^(?:\[rank0\]: )?(\S*Error: .*)$", log.read_text(), re.MULTILINE)
    return {"error": (said or [f"exit status {process.returncode}"])[-1][:160], "seconds": seconds}


def table(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the results as Markdown, speeds also as ratios to bf16 of the same size."""
    rows = [
        "| size | mode | tokens/s | speed | reserved GiB | loss, first | loss, last | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (size, mode), found in results.items():
        if "error" in found:
            rows.append(f"| {size} | {mode} | {found['error'].replace('|', '/')} | | | | | {found['seconds']:.0f} |")
            continue
        plain = results.get((size, "bf16"), {}).get("tokens/s")
        speed = f"{found['tokens/s'] / plain:.3f}" if plain else ""
        rows.append(
            f"| {size} | {mode} | {found['tokens/s']:,.0f} | {speed} | {found['memory']:.1f} | {found['first']:.4f} | "
            f"{found['last']:.4f} | {found['seconds']:.0f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run all sizes and modes, or one of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="debug,8b4")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=int, default=150, help="seconds for each size and mode")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for the output of the runs")
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(run(*options.one, options.steps, not options.eager)), flush=True)
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for size in options.sizes.split(","):
        for mode in options.modes.split(","):
            results[size, mode] = attempt(size, mode, options)
            print(f"{size} {mode}: {results[size, mode]}", flush=True)
    print("\n" + table(results))


if __name__ == "__main__":
    main()
