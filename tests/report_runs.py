"""Run folders for the tests of reports: made by hand, trained for a few steps, or as large as they get."""

import json
import math
import zlib
from pathlib import Path

from dither.snip.options import options
from dither.spec.recipes import recipe
from dither.train import Config
from dither.train import config as configs
from dither.train.loop import train

NAMES = [f"model.layers.{i}.{kind}" for i in range(2) for kind in ("self_attn.q_proj", "mlp.down_proj")]
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
EVIL = "<script>alert(1)</script>\"'>&{{7*7}}"


def lines(steps=40, loss=lambda step: 2 + 3 * math.exp(-step / 10)):
    """Lines of metrics of a run."""
    yield {"kind": "start", "step": 0, "time": 0.0, "resumed_from": None}
    for step in range(1, steps + 1):
        yield {
            "kind": "train",
            "step": step,
            "time": step / 10,
            "loss": loss(step),
            "loss_ema": loss(step),
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tokens": 100 * step,
            "tokens_per_s": 1000.0 + step,
            "mfu": None,
            "memory": None,
            "skipped": 0,
        }
    yield {"kind": "eval", "step": steps, "time": steps / 10, "loss": loss(steps), "bits_per_byte": 3.25, "tokens": 64}
    yield {"kind": "sample", "step": steps, "time": steps / 10, "prompt": "def ", "text": "main():"}
    yield {"kind": "end", "step": steps, "time": steps / 10 + 1, "how": "done", "loss": loss(steps)}


def make(folder, entries=None, plan="fp8-block", names=NAMES, **files):
    """A run folder by the contract; `files` replace some of its files, None leaves one out."""
    folder.mkdir(parents=True)
    layers = [{"name": name, "precision": "e4m3", "engine": "fp32", "share": 1 / len(names)} for name in names]
    contents = {
        "config.toml": f'[precision]\nmode = "o1"\nrecipe = "{plan}"\n',
        "plan.json": recipe(plan).to_json(),
        "conversion.json": json.dumps({"layers": layers, "left": [{"name": "lm_head", "why": "the output layer"}]}),
        "environment.json": json.dumps({"torch": "2.13.0", "parameters": 1234, "command": ["dither", "train", "a b.toml"]}),
        "status.json": json.dumps({"state": "done", "step": 40, "why": ""}),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in (lines() if entries is None else entries)),
    }
    contents |= {name.replace("_", "."): text for name, text in files.items()}
    for name, text in contents.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def seeds(folder, losses):
    """Runs of several arms, {arm: losses by seed}, as `dither compare` would have trained them; return their folders."""
    found = []
    for arm, values in losses.items():
        for seed, loss in enumerate(values):
            config = f'[precision]\nmode = "{arm}"\n[run]\nseed = {seed}\nout = "x{seed}"\n[data]\nseed = {seed}\n'
            entries = lines(loss=lambda step, loss=loss: loss + 1 / step - 1 / 40)
            found.append(make(folder / f"{arm}-{seed}", entries, config_toml=config))
    return found


def trained(folder: Path) -> Path:
    """Train the tiny Llama with SNIP, GaussWS and the monitor for a few steps; return the run folder."""
    text = folder / "text"
    text.mkdir(parents=True)
    for i in range(30):
        (text / f"{i}.txt").write_text(f"{i} bottles of beer on the wall, {i} bottles of beer. " * 8)
    settings = [
        f'data.sources=["{text}"]', f'run.out="{folder / "run"}"', "data.sequence=16", "data.batch=2", "data.held_out=0.2",
        "run.steps=8", "run.eval_every=2", "run.sample_every=8", "run.sample_tokens=4", "run.log_every=1", "run.save_every=8",
        "run.eval_sequences=2", "run.device=cpu", "precision.recipe=fp8-block", "precision.sampling.parts=all",
        "precision.sampling.b_init=1.8", "precision.sampling.b_target=1.0", "snip.target=0.5", "snip.start=1",
        "snip.every=3", "snip.delay=1", "snip.probe=direct", "snip.stages=[1, 1]", "monitor.every=2",
    ]  # fmt: skip
    train(configs.override(Config(), settings), command=["dither", "train", "run.toml"])
    return folder / "run"


def large(folder: Path, steps: int = 10_000, blocks: int = 32) -> Path:
    """A run of 10,000 steps and 224 layers with plans, estimates, bitwidths and numerics, as the trainer writes them."""
    names = [f"model.layers.{i}.{kind}" for i in range(blocks) for kind in KINDS]
    made = options("fp8-block,fp4-block")
    entries = list(lines(steps))

    def number(*key):
        return zlib.crc32(repr(key).encode()) / (1 << 32)

    for at in range(100, steps + 1, 100):
        operand = {"cast": "e4m3 tile(128) fp32 nearest", "subnormal": 0.01, "zeros": 0.02, "nonfinite": 0.0}
        layers = []
        for n, name in enumerate(names):
            each = {
                key: {**operand, "clipped": number(at, n, key) / 9, "flushed": number(n, key, at) / 3,
                      "amax": 1 + number(n, at), "scale": [1e-4, 2e-4, 3e-4 + number(n, at) / 1e3]}
                for key in ("input", "weight", "grad")
            }  # fmt: skip
            update = {"format": "bf16", "rounding": "stochastic", "ratio": 0.5, "stagnant": number(n), "elements": 9}
            layers.append({"name": name, **each, "update": update})
        entries.append({"kind": "numerics", "step": at, "time": at / 10, "layers": layers, "problems": []})
        bits = {name: {"weights": 1024, "mean": 5 + number(n, at), "deviation": 0.1, "min": 4.5, "max": 6.5,
                       "histogram": [[5, 0.25], [6, 0.75]], "bins": [[5.0, 0.25], [5.5, 0.75]],
                       "formats": {"e4m3": 0.25, "bf16": 0.75}} for n, name in enumerate(names)}  # fmt: skip
        entries.append({"kind": "bitwidths", "step": at, "time": at / 10, "layers": bits})
    for at in range(500, steps + 1, 500):
        chosen = [int(8 * number(at, n)) for n in range(len(names))]
        plan = recipe("fp8-block").to_dict()
        plan["layers"] = [[name, made[o].precision.to_dict()] for name, o in zip(names, chosen, strict=True)]
        plan["provenance"] = {"method": "snip", "target": 0.5}
        tables = {key: [[number(key, at, n) * 1e-6 * (o + 1) for o in range(8)] for n in range(len(names))]
                  for key in ("loss", "weights")}  # fmt: skip
        scores = {"version": 1, "step": at - 10, "probe": "last", "layers": names, "options": [o.name for o in made], **tables}
        saved = [[0.0, 0.0, 0.0, 1 / 3, 0.0, 1 / 3, 1 / 3, 1.0]] * len(names)
        choice = {"savings": [[x / len(names) for x in row] for row in saved], "chosen": chosen,
                  "costs": [[(0.5 - x / 4) / len(names) for x in row] for row in saved]}  # fmt: skip
        entries.append({"kind": "plan", "step": at, "time": at / 10, "plan": plan, "reason": "chosen", "changed": True,
                        "scores": scores, "choice": choice})  # fmt: skip
    blocks_of = {name: {"blocks": [128, 344], "values": [[5 + number(n, i, j) for j in range(32)] for i in range(32)]}
                 for n, name in enumerate(names)}  # fmt: skip
    config = '[precision]\nmode = "bf16-sr"\n[snip]\ntarget = 0.5\nstages = [8, 8, 8, 8]\n'
    files = {"bitwidths_json": json.dumps({"version": 1, "step": steps, "layers": blocks_of}), "config_toml": config}
    return make(folder, entries, names=names, **files)
