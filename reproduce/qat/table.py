"""What does training for a format bring? Held-out losses of exported models, read by transformers without Dither.

    python reproduce/qat/table.py --data SOURCE --out results/qat           # 34M parameters, three seeds, on one GPU
    python reproduce/qat/table.py --out /tmp/qat --tiny                     # a try on a CPU

Each seed trains a model in BF16 and exports it, rounded to nearest. From the same weights, with as many more steps each, it
trains in BF16 and rounds to nearest, and for each format: with straight-through gradients, with the BF16 model as teacher too,
and after GaussWS noise. Complete runs are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

FORMATS = ("int4-g32", "mxfp4", "nvfp4", "gguf-q4_0")
MORE = "more BF16, to nearest"
ARMS = {"QAT": [], "QAT, teacher": ["--teacher", "{base}"], "noise, then QAT": ["--set", "qat.noise_until=0.5"]}

FULL = {
    "seeds": 3,
    "model": "llama-34m",
    "steps": 5200,
    "more": 520,
    "lr": 2e-3,
    "batch": 64,
    "sequence": 512,
    "device": "cuda",
}
TINY = {"seeds": 1, "model": "tiny", "steps": 60, "more": 20, "lr": 3e-3, "batch": 8, "sequence": 64, "device": "cpu"}

LOSS = """
import json, sys
import torch, transformers
path, tokens, device, config = json.loads(sys.argv[1])
options = {"dtype": torch.float32}
if config:  # a GGUF file
    kind = config.pop("model_type")
    folder, _, file = path.rpartition("/")
    options |= {"gguf_file": file, "config": transformers.AutoConfig.for_model(kind, **config)}
    path = folder
model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).to(device).eval()
if hasattr(model, "hf_quantizer") and hasattr(model.hf_quantizer, "compressor"):
    model.hf_quantizer.compressor.decompress_model(model=model)
for parameter in model.parameters():  # weights of NVFP4 are decoded to BF16
    parameter.data = parameter.data.float()
assert not any(name.split(".")[0] == "dither" for name in sys.modules)
losses = []
with torch.no_grad():
    for sequence in torch.tensor(json.load(open(tokens)), device=device):
        logits = model(sequence[None, :-1], use_cache=False).logits[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits, sequence[1:]).item())
print(sum(losses) / len(losses))
"""
"""The held-out loss of a folder or a GGUF file, in a process that does not import Dither."""


def dither(*words: str | Path) -> None:
    """Run a command of Dither."""
    print("dither", *words, flush=True)
    subprocess.run([sys.executable, "-m", "dither", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def write_held_out(run: Path, place: Path, count: int, sequence: int) -> None:
    """Write held-out sequences of a run as JSON, each with the token after it."""
    from dither.data import held_out
    from dither.data.corpus import open_corpus
    from dither.train.config import load

    tokens = open_corpus(load(run / "config.toml").data, run).held_out
    place.write_text(json.dumps(held_out(tokens, sequence, count).tokens.tolist()))


def exported_loss(run: Path, place: Path, format: str, settings: dict, *words: str) -> float:
    """Export a run, unless it is there, and return the loss that transformers computes."""
    path = place / ("model.gguf" if format.startswith("gguf") else "model")
    if not path.exists():
        dither("export", run, "-o", path, "--format", format, *words, "--sequences", 1)
    config = None
    if path.is_file():
        dense = place.parent / "config"
        if not dense.exists():
            dither("export", run, "-o", dense, "--format", "bf16", "--sequences", 1)
        config = json.loads((dense / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in ("architectures", "dtype", "transformers_version")}
    tokens = place.parent / "held_out.json"
    if not tokens.exists():
        write_held_out(run, tokens, settings["count"], settings["sequence"])
    given = [str(path), str(tokens), settings["device"], config]
    found = subprocess.run([sys.executable, "-c", LOSS, json.dumps(given)], check=True, capture_output=True, text=True)
    return float(found.stdout.strip().splitlines()[-1])


def losses(seed: int, out: Path, settings: dict) -> dict[str, dict[str, float]]:
    """Train and export all arms of a seed. Return {arm: {format: loss}}."""
    folder = out / f"seed-{seed}"
    base, found = folder / "base", {arm: {} for arm in ("BF16", "to nearest", MORE, *ARMS)}
    common = [f"run.device={settings['device']}", "run.sample_every=0", "run.eval_every=0", "run.save_every=0"]

    def train(run: Path, steps: int, lr: float, *words: str) -> None:
        if not list((run / "checkpoints").glob(f"step-{steps:08}")):
            dither("train", *words, "--out", run, "--resume=auto", "--set", *common, f"run.steps={steps}", f"optim.lr={lr}")

    size = [f"model.preset={settings['model']}", f"data.batch={settings['batch']}", f"data.sequence={settings['sequence']}"]
    data = ["--data", settings["data"]] if settings["data"] else []
    train(base, settings["steps"], settings["lr"], *data, "--set", *size, f"run.seed={seed}")
    more = folder / "more"
    train(more, settings["more"], settings["lr"] / 10, "--from", str(base))
    dense = exported_loss(base, folder / "bf16", "bf16", settings)
    for format in settings["formats"]:
        found["BF16"][format] = dense
        found["to nearest"][format] = exported_loss(base, folder / f"nearest-{format}", format, settings)
        found[MORE][format] = exported_loss(more, folder / f"more-{format}", format, settings)
        for arm, words in ARMS.items():
            run = folder / f"{arm.replace(', ', '-').replace(' ', '-')}-{format}"
            words = [word.format(base=base) for word in words]
            train(run, settings["more"], settings["lr"] / 10, "--from", str(base), "--qat", format, *words)
            found[arm][format] = exported_loss(run, run / "exported", format, settings)
    return found


def table(results: list[dict[str, dict[str, float]]]) -> str:
    """Return a table of means over seeds, with standard deviations, in nats per token."""
    formats = list(results[0]["BF16"])
    lines = ["| | " + " | ".join(formats) + " |", "|---" * (len(formats) + 1) + "|"]
    for arm in results[0]:
        cells = []
        for format in formats:
            values = [each[arm][format] for each in results]
            cells.append(f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else ""))
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train, export, evaluate, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="text or prepared tokens; by default Python's standard library")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, one seed")
    parser.add_argument("--formats", nargs="+", help=f"by default {', '.join(FORMATS)}; with --tiny nvfp4")
    parser.add_argument("--set", nargs="*", default=[], help="other sizes, such as steps=200 seeds=1")
    given = parser.parse_args()
    formats = given.formats or (["nvfp4"] if given.tiny else list(FORMATS))
    settings = dict(TINY if given.tiny else FULL) | {
        "data": given.data,
        "formats": formats,
        "count": 16 if given.tiny else 512,
    }
    for word in given.set:
        key, _, value = word.partition("=")
        settings[key] = type(settings[key])(value)
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(settings["seeds"]):
        results.append(losses(seed, given.out, settings))
        (given.out / "losses.json").write_text(json.dumps({"settings": settings, "losses": results}, indent=1))
    text = table(results)
    (given.out / "table.md").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
