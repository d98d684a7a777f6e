"""Do SNIP's estimates rank the options of all layers as measurements do? The paper's Figure 13 and its section 4.3.

    dither train --out runs/truth-base --data peers/english8k --set model.preset=llama-3m precision.mode=fp32 optim.lr=2e-3 \\
        run.steps=1000 data.sequence=512 data.batch=8 run.eval_every=0 run.sample_every=0
    python reproduce/snip/truth.py runs/truth-base     # ten minutes on two cores; writes truth.json and figures

Each probe scores each option of each layer on one batch of training text. Each option is then measured alone, on batches of
held-out text: `--batches` for the loss and the next weights, `--more` for the loss alone. An estimate is compared with the
change of the loss of a batch, with that of the mean loss, in which the slopes of single batches cancel, and with the change of
the weights. The correlations are Spearman's, over all layers and options.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from dither import Stream
from dither.data import Batch, held_out, open_corpus
from dither.errors import UserError
from dither.report.charts import Line, LineChart
from dither.report.figures import draw_chart, write_drawing
from dither.settings import override
from dither.snip import TrainingSetup, options, score
from dither.snip.dry_run import DryRun
from dither.spec import LayerPrecision
from dither.train import config
from dither.train.config import CONFIG
from dither.train.ranks import joined
from dither.train.trainer import Trainer, restore_newest

PROBES = (("direct", False), ("direct", True), ("last", False), ("joint", False), ("measure", False))
"""Probes, and whether they take the errors of each row."""


def measured(
    trainer: Trainer, batches: list[Batch], whole: int, chosen: Any, setup: TrainingSetup
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Yield the loss of each batch, its rises and, for the first `whole`, the changes of weights: [layers, options]."""
    for number, batch in enumerate(batches):
        run = DryRun(
            trainer.model,
            [batch],
            trainer.training.optimizer,
            stream=Stream(trainer.config.run.seed, "snip", "truth"),
            forward=trainer.passes.loss,
            setup=setup,
        )
        rises, moves = np.zeros((2, len(run.names), len(chosen)))
        with run.borrowed():
            base = run.run() if number < whole else None
            updates = None if base is None else run.updates(base)
            plain = run.loss() if base is None else base.loss
            for row, layer in enumerate(run.names):
                known: dict[Any, float] = {}  # the cast of a gradient does not change the loss
                for column, option in enumerate(chosen):
                    casts = option.precision.casts("forward")
                    with run.cast(layer, option.precision if base is not None else LayerPrecision(*casts)):
                        if base is not None:
                            found = run.run()
                            rises[row, column] = float(found.loss - plain)
                            moves[row, column] = float(run.change(found, updates).mean())
                            continue
                        if casts not in known:
                            known[casts] = float(run.loss() - plain)
                        rises[row, column] = known[casts]
        print(f"batch {number + 1} of {len(batches)}: loss {float(plain):.4f}", flush=True)
        yield float(plain), rises, moves


def main() -> None:
    """Score, measure and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--options", default="fp8-block,fp4-block")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--more", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "truth.json")
    given = parser.parse_args()
    settings = {"run.out": str(given.run), "run.compile": False, "run.device": given.device}
    loaded, chosen = override(config.load(given.run / CONFIG), values=settings), options(given.options)
    with joined(given.device) as ranks:
        trainer = Trainer(loaded, open_corpus(loaded.data, given.run, once=ranks.once), ranks, initial=False)
        if (step := restore_newest(trainer, given.run / "checkpoints", print)) is None:
            raise UserError(f"The run {str(given.run)!r} has no checkpoint: train it to its end first.")
        setup = TrainingSetup(products=trainer.training.backward_context)
        seen = trainer.loader.batch(trainer.done).to(ranks.device).rows(0, given.rows)
        text = held_out(trainer.corpus.held_out, loaded.data.sequence, given.rows * (given.batches + given.more)).to(
            ranks.device
        )
        batches = [text.rows(first, first + given.rows) for first in range(0, len(text.tokens), given.rows)]
        scores = []
        for probe, rows in PROBES:
            found = score(
                trainer.model,
                [seen],
                trainer.training.optimizer,
                chosen,
                probe=probe,  # type: ignore[arg-type]
                rows=rows,
                stream=Stream(loaded.run.seed, "snip", probe),
                forward=trainer.passes.loss,
                setup=setup,
            )
            scores.append((f"{probe} by rows" if rows else probe, found))
            print(f"{scores[-1][0]}: {found.passes} passes, {found.seconds:.1f} s", flush=True)
        losses, rises, moves = map(np.array, zip(*measured(trainer, batches, given.batches, chosen, setup), strict=True))
        device = str(ranks.device)
    moves = moves[: given.batches].mean(0)
    truth = {"loss of a batch": np.abs(rises).mean(0), "mean loss": np.abs(rises.mean(0)), "weights": moves}
    halves = [np.abs(rises[first::2]).mean(0) for first in (0, 1)], [np.abs(rises[first::2].mean(0)) for first in (0, 1)]
    correlations = {
        name: {what: _rank(each, found.weights if what == "weights" else found.loss) for what, each in truth.items()}
        for name, found in scores
    }
    told = {
        "model": loaded.model.preset,
        "step": step,
        "tokens of a batch": given.rows * loaded.data.sequence,
        "batches": [given.batches, given.more],
        "commit": os.environ.get("DITHER_COMMIT"),
        "device": device,
        "correlations": correlations,
        "halves of the batches agree at": {"loss of a batch": _rank(*halves[0]), "mean loss": _rank(*halves[1])},
        "passes": {name: found.passes for name, found in scores},
        "seconds": {name: round(found.seconds, 2) for name, found in scores},
        "layers": scores[0][1].layers,
        "options": [option.name for option in chosen],
        "loss of each batch": np.round(losses, 4).tolist(),
        "rises of each batch": np.round(rises, 9).tolist(),
        "changes of the weights": np.round(moves, 9).tolist(),
        "estimates": {name: {"loss": found.loss, "weights": found.weights} for name, found in scores},
    }
    given.out.write_text(json.dumps(told) + "\n")
    draw(told, given.out)
    for name, each in correlations.items():
        print(f"{name:16}", "  ".join(f"{what} {value:.3f}" for what, value in each.items()))


def draw(told: dict[str, Any], path: Path) -> None:
    """Draw what probes estimate over what was measured, a point for each option of each layer."""
    rises = np.abs(told["rises of each batch"]).mean(0) / np.mean(told["loss of each batch"])
    for what, truth in (("loss", rises), ("weights", np.array(told["changes of the weights"]))):
        names = ("direct", "measure") if what == "loss" else ("direct", "last", "joint", "measure")  # others estimate as direct
        x = {"measured": tuple(truth.ravel().tolist())}
        lines = [
            Line(name, x, tuple(np.ravel(told["estimates"][name][what]).tolist()), colour, "dots")
            for colour, name in enumerate(names)
        ]
        title = "Change of a batch's loss, relative" if what == "loss" else "Change of the next weights, relative"
        chart = LineChart(title, "estimated", ("measured",), tuple(lines), log=True, log_x=True)
        print(write_drawing(draw_chart(chart), path.with_name(f"{path.stem}-{what}.svg")))


def _rank(one: Any, other: Any) -> float:
    return round(float(spearmanr(np.ravel(one), np.ravel(other)).statistic), 4)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
