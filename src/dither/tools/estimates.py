"""Estimate what options of precision do to a run, at one of its checkpoints, for `dither plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dither.console import ProgressBars, counter
from dither.errors import UserError
from dither.settings import override
from dither.snip.settings import Estimator
from dither.spec import Plan
from dither.spec.random import Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dither.data import Batch
    from dither.snip.divergence import Scores
    from dither.snip.options import Option
    from dither.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The batches and the device of estimates at a checkpoint."""

    batches: int = 1
    """Number of micro-batches for the estimates."""
    seed: int = 0
    """Seed of the noise and of stochastic casts."""
    device: str | None = None
    """Device, in place of that of the run."""
    emulate: bool = False
    """Multiply dequantized numbers in float32 on a GPU too, in place of the setting of the run."""
    fallback: Literal["error", "bf16", "emulate"] | None = None
    """For a layer whose casts no matrix units support: error, bf16 or emulate, in place of the setting of the run."""


class RunEstimates(NamedTuple):
    """Estimates at a checkpoint, with what a choice needs besides."""

    scores: Scores
    options: tuple[Option, ...]
    plan: Plan
    """The plan in force at the checkpoint."""
    device: torch.device


def estimate_run(path: str, estimator: Estimator, chosen: RunOptions, bars: ProgressBars) -> RunEstimates:
    """Estimate the harm of options at a checkpoint of a run, on its next micro-batches.

    `path` is a run, whose newest whole checkpoint is taken, or a checkpoint. The probe "auto" measures each option.
    """
    from dither.nn import Linear
    from dither.snip.dry_run import TrainingSetup
    from dither.snip.effort import passes_of
    from dither.snip.options import options as combinations
    from dither.snip.probes import check_probe, score

    batches = chosen.batches
    if batches < 1:
        raise UserError(f"--batches is a number of micro-batches of at least 1, not {batches}.")
    options = combinations(estimator.options)
    probe: Any = "measure" if estimator.probe == "auto" else estimator.probe
    check_probe(probe)
    with _restored(path, chosen, bars) as trainer:
        parts: list[Batch] = []
        while len(parts) < batches:
            step = trainer.done + trainer.offset + len(parts) // trainer.parts
            parts += trainer.loader.batch(step).to(trainer.ranks.device).split(trainer.parts)
        parts = parts[:batches]
        layers = sum(isinstance(module, Linear) for module in trainer.model.modules())
        with bars.stage(f"Estimating with the probe {probe}") as tick:
            add = counter(tick, len(parts) * passes_of(probe, layers, options))

            def forward(model: nn.Module, part: Batch) -> Tensor:
                loss = trainer.passes.loss(model, part)
                add(1)
                return loss

            scores = score(
                trainer.model,
                parts,
                trainer.training.optimizer,
                options,
                stream=Stream(chosen.seed, "snip", str(trainer.done)),
                forward=forward,
                probe=probe,
                rows=estimator.rows,
                step=trainer.done,
                setup=TrainingSetup(products=trainer.training.backward_context),
            )
        return RunEstimates(scores, options, trainer.conversion.plan, trainer.ranks.device)


@contextmanager
def _restored(path: str, chosen: RunOptions, bars: ProgressBars) -> Iterator[Trainer]:
    """Restore the newest whole checkpoint of a run, or the checkpoint at the path."""
    from dither.data import open_corpus
    from dither.models.open import find_model
    from dither.train import config
    from dither.train.config import CONFIG
    from dither.train.ranks import joined
    from dither.train.trainer import Trainer

    found = find_model(path)
    found.tell()
    folder = found.run
    if folder is None:
        kinds = f"neither the folder of a run, with a {CONFIG}, nor a checkpoint of one"
        raise UserError(f"{path!r} is {kinds}: name what `dither train` wrote.")
    given = {
        "run.device": chosen.device,
        "precision.emulate": chosen.emulate or None,
        "precision.fallback": chosen.fallback,
    }
    changes = {path: value for path, value in given.items() if value is not None}
    run = override(config.load(folder / CONFIG), values={"run.out": str(folder), "run.compile": False, **changes})
    with joined(run.run.device) as ranks:
        if ranks.world > 1:
            raise UserError("dither plan runs in one process: start it without torchrun.")
        with bars.stage(f"Reading {path}"):
            trainer = Trainer(run, open_corpus(run.data, folder, once=ranks.once), ranks, initial=False)
            trainer.restore(found.path)
        yield trainer
