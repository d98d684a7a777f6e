"""Take the screenshots of README.md and docs/reports.md from real runs, into docs/pictures/.

    python docs/screenshots.py [RUN]

Without a run, a small Llama is trained with SNIP and GaussWS first, which takes about a minute of a CPU core. Needs Chromium.
"""

import email
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import chromium  # noqa: E402

from dither import report  # noqa: E402
from dither.train import Config, train  # noqa: E402
from dither.train import config as configs  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
"""The model: eight blocks, so that maps have columns."""

SETTINGS = (
    "data.sequence=32", "data.batch=2", "data.held_out=0.15", "precision.recipe=fp8-block", "precision.sampling.parts=all",
    "optim.lr=5e-3",
    "precision.sampling.guidance=[{kind='bitwidth_loss', weight=1.0}]", "snip.target=0.6", "snip.start=6", "snip.every=6",
    "snip.delay=2", "snip.probe=direct", "snip.stages=[2, 2, 2, 2]", "monitor.every=6", "run.steps=24", "run.eval_every=4",
    "run.eval_sequences=2", "run.sample_every=24", "run.sample_tokens=16", "run.log_every=1", "run.save_every=0",
    "run.device=cpu",
)  # fmt: skip


def example(folder: Path) -> Path:
    """Train the run of the screenshots, on the source code of Python's email package."""
    (folder / "llama").mkdir(parents=True)
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    out = folder / "llama-snip-gaussws"
    paths = [
        f'model.hf="{folder / "llama" / "config.json"}"',
        f'data.sources=["{Path(email.__file__).parent}"]',
        f'run.out="{out}"',
    ]
    train(configs.override(Config(), [*paths, *SETTINGS]), command=["dither", "train", "run.toml"])
    return out


def take(run: Path) -> None:
    """Write the screenshots of the page of a run."""
    browser = chromium.find()
    if browser is None:
        sys.exit("There is no Chromium here: apt-get install chromium.")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium.Chromium(browser) as page:
        path = report.write([run], Path(folder) / "report.html")
        for name, first, last, width, dark in (
            ("report", "#run-0-precision", "[data-chart=run-0-frontier]", 1000, False),
            ("report-dark", "#run-0-bitwidths", "[data-chart=run-0-histogram]", 1000, True),
            ("report-phone", "#loss", "[data-chart=loss]", 380, False),
        ):
            page.resize(width, 900)
            page.mode(dark)
            page.open(path)
            edges = page.run(
                f"[document.querySelector('{first} h2').getBoundingClientRect().top + scrollY + 8,"
                f" document.querySelector('{last}').getBoundingClientRect().bottom + scrollY + 16]"
            )
            clip = {"x": 0, "y": edges[0], "width": width, "height": edges[1] - edges[0]}
            page.screenshot(FOLDER / f"{name}.png", clip)


def main() -> None:
    """Take the screenshots of the run that is named, or of a new one."""
    if len(sys.argv) > 1:
        take(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        take(example(Path(folder)))


if __name__ == "__main__":
    main()
