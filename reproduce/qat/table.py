"""What does training for a format bring? Held-out losses of exported models, read by transformers without Dither.

    python reproduce/qat/table.py --data SOURCE --out results/qat --jobs 12 # 34M parameters, three seeds, on one GPU
    python reproduce/qat/table.py --out /tmp/qat --tiny                     # a try on a CPU

Each seed trains a model in BF16 and exports it, rounded to nearest. From the same weights, with as many more steps each, it
trains in BF16 and rounds to nearest, and for each format: with straight-through gradients, with the BF16 model as teacher too,
and after GaussWS noise. Complete runs are not repeated.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev

Losses = Iterator[tuple[str, str, float]]
"""Arms, formats and their losses."""

Results = dict[str, dict[str, dict[str, float]]]
"""Losses by arm, format and seed."""

FORMATS = ("int4-g32", "mxfp4", "nvfp4", "gguf-q4_0")
MORE = "more BF16, to nearest"
ARMS = {"QAT": [], "QAT, teacher": ["--teacher", "{base}"], "noise, then QAT": ["--set", "qat.noise_until=0.5"]}

FULL = {
    "seeds": 3,
    "model": "llama-34m",
    "steps": 3000,
    "more": 150,
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
    output_of([sys.executable, "-m", "dither", *map(str, words)])


def output_of(command: list[str]) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_held_out(run: Path, place: Path, count: int, sequence: int) -> None:
    """Write held-out sequences of a run as JSON, each with the token after it."""
    from dither.data import held_out
    from dither.data.corpus import open_corpus
    from dither.train.config import load

    tokens = open_corpus(load(run / "config.toml").data, run).held_out
    place.write_text(json.dumps(held_out(tokens, sequence, count).tokens.tolist()))


@dataclass(frozen=True)
class Seed:
    """A seed's runs and exports."""

    folder: Path
    number: int
    settings: dict

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def train(self, run: Path, steps: int, lr: float, *words: str) -> None:
        """Train a run, unless it is complete."""
        common = [f"run.device={self.settings['device']}", "run.sample_every=0", "run.eval_every=0", "run.save_every=0"]
        if not list((run / "checkpoints").glob(f"step-{steps:08}")):
            dither("train", *words, "--out", run, "--resume=auto", "--set", *common, f"run.steps={steps}", f"optim.lr={lr}")

    def train_base(self) -> None:
        """Train the BF16 model that all arms start from."""
        given = self.settings
        size = [f"model.preset={given['model']}", f"data.batch={given['batch']}", f"data.sequence={given['sequence']}"]
        data = ["--data", given["data"]] if given["data"] else []
        self.train(self.base, given["steps"], given["lr"], *data, "--set", *size, f"run.seed={self.number}")
        tokens = self.folder / "held_out.json"
        if not tokens.exists():
            write_held_out(self.base, tokens, given["count"], given["sequence"])
        if not (self.folder / "config").exists():
            dither("export", self.base, "-o", self.folder / "config", "--format", "bf16", "--sequences", 1)

    def exported_loss(self, run: Path, place: Path, format: str) -> float:
        """Export a run and return the loss that transformers computes, unless both are there."""
        if (known := place / "loss.json").exists():
            return json.loads(known.read_text())
        path, config = place / ("model.gguf" if format.startswith("gguf") else "model"), None
        if not path.exists():
            dither("export", run, "-o", path, "--format", format, "--sequences", 1)
        if path.is_file():
            config = json.loads((self.folder / "config" / "config.json").read_text())
            config = {
                key: value for key, value in config.items() if key not in ("architectures", "dtype", "transformers_version")
            }
        given = [str(path), str(self.folder / "held_out.json"), self.settings["device"], config]
        printed = output_of([sys.executable, "-c", LOSS, json.dumps(given)])
        known.write_text(loss := printed.strip().splitlines()[-1])
        return float(loss)

    def rounded(self) -> Losses:
        """Yield the losses of the base, in BF16 and rounded to nearest."""
        dense = self.exported_loss(self.base, self.folder / "bf16", "bf16")
        for format in self.settings["formats"]:
            yield "BF16", format, dense
            yield "to nearest", format, self.exported_loss(self.base, self.folder / f"nearest-{format}", format)

    def continued(self) -> Losses:
        """Yield the losses after more steps in BF16, rounded to nearest."""
        more = self.folder / "more"
        self.train(more, self.settings["more"], self.settings["lr"] / 10, "--from", str(self.base))
        for format in self.settings["formats"]:
            yield MORE, format, self.exported_loss(more, self.folder / f"more-{format}", format)

    def trained_for(self, format: str, arm: str) -> Losses:
        """Yield the loss of an arm of quantization-aware training."""
        run = self.folder / f"{arm.replace(', ', '-').replace(' ', '-')}-{format}"
        words = [word.format(base=self.base) for word in ARMS[arm]]
        lr = self.settings["lr"] / 10
        self.train(run, self.settings["more"], lr, "--from", str(self.base), "--qat", format, *words)
        yield arm, format, self.exported_loss(run, run / "exported", format)


def train_and_export(out: Path, settings: dict, jobs: int) -> Results:
    """Train and export all arms of all seeds whose losses are not known, `jobs` at a time. What fails says so."""
    file = out / "losses.json"
    results: Results = json.loads(file.read_text())["losses"] if file.exists() else {}
    seeds = [Seed(out / f"seed-{number}", number, settings) for number in range(settings["seeds"])]

    def record(seed: Seed, losses: Callable[[], Losses]) -> None:
        for arm, format, loss in losses():
            results.setdefault(arm, {}).setdefault(format, {})[str(seed.number)] = loss
            file.write_text(json.dumps({"settings": settings, "losses": results}, indent=1))

    def missing(seed: Seed) -> list[Callable[[], Losses]]:
        def known(arm: str, formats: list[str]) -> bool:
            return all(str(seed.number) in results.get(arm, {}).get(format, {}) for format in formats)

        formats = settings["formats"]
        tasks = [] if known("to nearest", formats) else [seed.rounded]
        tasks += [] if known(MORE, formats) else [seed.continued]
        arms = itertools.product(formats, ARMS)
        return tasks + [partial(seed.trained_for, format, arm) for format, arm in arms if not known(arm, [format])]

    with ThreadPoolExecutor(jobs) as pool:
        bases = {pool.submit(seed.train_base): (seed, tasks) for seed in seeds if (tasks := missing(seed))}
        arms = []
        for base in as_completed(bases):
            seed, tasks = bases[base]
            if base.exception() is None:
                arms += [pool.submit(record, seed, losses) for losses in tasks]
        for task in as_completed([*bases, *arms]):
            if error := task.exception():
                print(error, getattr(error, "stderr", ""), sep="\n", flush=True)
    return results


def table(results: Results, formats: list[str]) -> str:
    """Return a table of means over seeds, with standard deviations, in nats per token."""
    lines = ["| | " + " | ".join(formats) + " |", "|---" * (len(formats) + 1) + "|"]
    for arm in ("BF16", "to nearest", MORE, *ARMS):
        cells = []
        for format in formats:
            values = list(results.get(arm, {}).get(format, {}).values())
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.4f}{spread}" if values else "")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train, export, evaluate, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="text or prepared tokens; by default Python's standard library")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, one seed")
    parser.add_argument("--formats", nargs="+", help=f"by default {', '.join(FORMATS)}; with --tiny nvfp4")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs train at the same time")
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
    text = table(train_and_export(given.out, settings, given.jobs), formats)
    (given.out / "table.md").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
