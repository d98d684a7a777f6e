"""The cost of checkpoints in training: steps with and without saves, and the time of one save compared with `torch.save`.

    PYTHONPATH=src python3 benchmarks/checkpoints.py --preset llama-134m --steps 200 --every 100 --folder FOLDER
    PYTHONPATH=src python3 benchmarks/checkpoints.py --device cpu --preset tiny --batch 2 --sequence 64 --steps 20 --every 10

A step is forward, backward and `dither.optim.AdamW` (`o1`: float32 parameters and states, bfloat16 autocast on a GPU) on random
tokens, blocks not compiled. Runs with saves end when the last save is on the disk. The script removes its files from FOLDER.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import dither
from dither import checkpoint
from dither.checkpoint import Saver, pack
from dither.models import PRESETS, Llama


def wait(device: torch.device) -> float:
    """Return the time at which the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="llama-134m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; by default a temporary folder")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = Llama(PRESETS[options.preset]).to(device)
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-4, betas=(0.9, 0.95), max_norm=1.0, nonfinite="skip")
    vocabulary = model.config.vocab_size

    def step() -> None:
        tokens = torch.randint(vocabulary, (options.batch, options.sequence), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(saver: Saver | None) -> tuple[float, list[float]]:
        """Return the seconds of all steps, and the host's seconds in each save."""
        calls, start = [], wait(device)
        for number in range(1, options.steps + 1):
            step()
            if saver is not None and number % options.every == 0:
                before = time.perf_counter()
                tensors, plain = pack(model, optimizer, step=number)
                saver.save(number, tensors=tensors, plain=plain)
                calls.append(time.perf_counter() - before)
        end = wait(device)
        if saver is not None:
            saver.wait()
            print(f"the last save was on the disk {time.perf_counter() - end:.2f} s after the last step")
        return end - start, calls

    for _ in range(5):
        step()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, Saver(folder, last=1) as saver:
        tensors, plain = pack(model, optimizer, step=0)
        size = sum(tensor.nbytes for tensor in tensors.values())
        first = time.perf_counter()
        saver.save(0, tensors=tensors, plain=plain)
        called = time.perf_counter()
        saver.wait()
        print(f"{options.preset}: {size / 1e9:.2f} GB a checkpoint; first save: the host waits {called - first:.2f} s, written")
        print(f"in {time.perf_counter() - called:.2f} s more")
        for name, work in {
            "save": lambda: checkpoint.save(folder, 1, tensors=tensors, plain=plain),
            "verify": lambda: checkpoint.verify(Path(folder) / "step-00000001"),
            "load": lambda: checkpoint.load(Path(folder) / "step-00000001"),
            "torch.save": lambda: torch.save(tensors, Path(folder) / "torch.pt"),  # neither hashes nor syncs
            "torch.load": lambda: torch.load(Path(folder) / "torch.pt", map_location="cpu", weights_only=True),
        }.items():
            before = wait(device)
            work()
            seconds = wait(device) - before
            print(f"{name:12} {seconds:7.2f} s {size / seconds / 1e9:6.2f} GB/s")
        (Path(folder) / "torch.pt").unlink()
        plain_seconds, _ = train(None)
        saved_seconds, calls = train(saver)
        again_seconds, _ = train(None)  # the spread of the machine
        print(
            f"{options.steps} steps: {plain_seconds:.2f} s and {again_seconds:.2f} s without saves, {saved_seconds:.2f} s with"
        )
        print(f"{len(calls)} saves ({', '.join(f'{1000 * call:.0f}' for call in calls)} ms of the host each)")
        print(f"lost: {100 * (saved_seconds / min(plain_seconds, again_seconds) - 1):.2f} %")


if __name__ == "__main__":
    main()
