"""Verify estimates: measure every option of every layer on batches that the estimates have not seen."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from rich import box
from rich.table import Table as RichTable
from torch import nn

from dither.errors import UserError
from dither.nn.deployment import _printed
from dither.snip.divergence import Scores, Table
from dither.snip.dry_run import DryRun, Forward, plain_forward
from dither.snip.options import Option
from dither.snip.options import options as all_options
from dither.snip.settings import TrainingSetup, with_old_keywords
from dither.snip.statistics import VERSION, check_version, load_json
from dither.spec import LayerPrecision
from dither.spec.random import Stream


@dataclass(frozen=True)
class ProbeAccuracy:
    """Rank correlations of one probe's estimates with measured changes."""

    probe: str
    loss: float
    """Spearman correlation of estimated and measured changes of a batch's loss, over all layers and options."""
    mean_loss: float
    """The same for changes of the mean loss over all batches, in which the slopes of single batches cancel."""
    weights: float
    """The same for changes of the next weights."""
    passes: int
    """Passes over a micro-batch that the estimate took."""
    seconds: float
    """Seconds that the estimate took."""


@dataclass(frozen=True)
class Verification:
    """Measured changes next to estimated ones; prints as a table with one line per probe."""

    layers: tuple[str, ...]
    options: tuple[str, ...]
    batches: int
    more_for_loss: int
    """Extra batches used for the loss only."""
    base: float
    """Loss without casts, averaged over all batches."""
    loss: Table
    """Mean absolute change of a batch's loss, relative to the loss: one row per layer, one column per option."""
    mean_loss: Table
    """Signed change of the mean loss over all batches, relative to the loss."""
    weights: Table
    """Change of the next weights relative to the weights, averaged over all layers."""
    agreement: tuple[float, float, float] | None
    """The same correlations (loss, mean loss, weights) between two halves of the batches: about the best possible.

    None for a single batch."""
    estimates: tuple[ProbeAccuracy, ...]
    scores: tuple[Scores, ...]
    passes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        plain = {"estimates": [dict(vars(each)) for each in self.estimates], "scores": [each.to_dict() for each in self.scores]}
        return {"version": VERSION, **vars(self), **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Verification":
        """Return the object that `to_dict` described."""
        check_version("results of a verification", data)
        fields = {key: value for key, value in data.items() if key != "version"}
        try:
            for key in ("layers", "options", "agreement"):
                fields[key] = fields[key] and tuple(fields[key])
            for key in ("loss", "mean_loss", "weights"):
                fields[key] = tuple(tuple(row) for row in fields[key])
            fields["estimates"] = tuple(ProbeAccuracy(**each) for each in fields["estimates"])
            fields["scores"] = tuple(Scores.from_dict(each) for each in fields["scores"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise UserError(f"These are not the results of a verification as this version writes them: {error}.") from None

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Verification":
        """Return the object that `to_json` described."""
        return cls.from_dict(load_json("results of a verification", text))

    def __rich__(self) -> RichTable:
        halves = "halves of them agree at {:.3f}, {:.3f} and {:.3f}; ".format(*self.agreement) if self.agreement else ""
        more = f" and {self.more_for_loss} more for the loss" if self.more_for_loss else ""
        caption = (
            f"{len(self.layers)} layers x {len(self.options)} options on {self.batches} batches{more}, loss {self.base:.4f}; "
            f"{halves}the truth took {self.passes} passes, {self.seconds:.1f} s"
        )
        columns = ("Spearman's correlation", "loss of a batch", "mean loss", "weights", "passes", "seconds")
        table = RichTable(*columns, box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for each in self.estimates:
            correlations = (f"{found:.3f}" for found in (each.loss, each.mean_loss, each.weights))
            table.add_row(each.probe, *correlations, str(each.passes), f"{each.seconds:.1f}")
        return table

    def __str__(self) -> str:
        return _printed(self)


def verify(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    scores: Scores | Sequence[Scores],
    options: "str | Sequence[str | LayerPrecision | Option]",
    *,
    stream: Stream,
    forward: Forward = plain_forward,
    more_for_loss: Sequence[Any] = (),
    setup: TrainingSetup | None = None,
    **old: Any,
) -> Verification:
    """Measure every option on one layer at a time, and compare the ranking with that of `scores` of the same model.

    Each batch is a step of its own, and changes are averaged over batches. The change of the loss is compared by its magnitude,
    as SNIP defines it, in two ways: in a single batch, and of the mean over all batches, in which the slopes of single batches
    cancel. The model is left as it was.

    Args:
        model: The model, as for `score`.
        batches: Batches that the scores have not seen.
        optimizer: The optimizer, as for `score`.
        scores: Scores of one probe, or of several.
        options: The options of the scores.
        stream: Source of the bits of stochastic casts.
        forward: Function of (model, batch) that returns the loss, as for `score`.
        more_for_loss: Extra batches used for the loss only, which takes a sixth of the time.
        setup: Clipping and process groups of the training loop.

    >>> import dither
    >>> from dither.snip import score
    >>> model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))
    >>> _ = dither.convert(model, "bf16")
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.randn(64, 32)).square().mean().backward()
    >>> optimizer.step()
    >>> how = {"stream": dither.Stream(0, "snip", ""), "forward": lambda model, x: model(x).square().mean()}
    >>> scores = score(model, [torch.randn(64, 32)], optimizer, "fp8,fp4", **how)
    >>> found = verify(model, [torch.randn(64, 32)], optimizer, scores, "fp8,fp4", **how)
    >>> found.layers, len(found.loss[0]), found.estimates[0].probe
    (('0', '2'), 8, 'measure')
    """
    (setup,) = with_old_keywords("verify", old, setup or TrainingSetup())
    chosen, given = all_options(options), (scores,) if isinstance(scores, Scores) else tuple(scores)
    names = tuple(option.name for option in chosen)
    if not given:
        raise UserError("There are no scores to verify: give the scores of at least one probe.")
    began, count, base_loss = time.perf_counter(), 0, 0.0
    if not len(batches):
        raise UserError("There are no batches to verify on: give at least one that the scores have not seen.")
    losses, changes = [], []
    total = len(batches) + len(more_for_loss)

    def over(batch: Any) -> DryRun:
        return DryRun(model, [batch], optimizer, stream=stream, forward=forward, setup=setup)

    for batch in batches:
        dry_run = over(batch)
        layers = tuple(dry_run.names)
        for each in given:
            if each.layers != layers or each.options != names:
                raise UserError(
                    f"The scores of the probe {each.probe!r} have {len(each.layers)} layers and {len(each.options)} options "
                    f"({', '.join(each.options[:2])}, ...); here there are {len(layers)} and {len(names)}: score again."
                )
        with dry_run.borrowed():
            base = dry_run.run()
            updates = dry_run.updates(base)
            rises, moves = [], []
            for layer in layers:
                for option in chosen:
                    with dry_run.cast(layer, option.precision):
                        found = dry_run.run()
                    rises.append(found.loss - base.loss)
                    moves.append(dry_run.change(found, updates).mean())
        shape = len(layers), len(chosen)
        base_loss += float(base.loss) / total
        losses.append(torch.stack(rises).view(shape).cpu().numpy())
        changes.append(torch.stack(moves).view(shape).cpu().numpy())
        count += dry_run.count
    for batch in more_for_loss:
        dry_run = over(batch)
        with dry_run.borrowed():
            plain, rises = dry_run.loss(), []
            for layer in layers:
                known: dict[Any, torch.Tensor] = {}  # the cast of a gradient does not change the loss
                for option in chosen:
                    casts = option.precision.casts("forward")
                    if casts not in known:
                        with dry_run.cast(layer, LayerPrecision(*casts)):
                            known[casts] = dry_run.loss() - plain
                    rises.append(known[casts])
        base_loss += float(plain) / total
        losses.append(torch.stack(rises).view(len(layers), len(chosen)).cpu().numpy())
    loss, mean_loss, weights = _truth(losses, changes)
    agreement = None
    if len(batches) > 1:
        even, odd = (_truth(losses[first::2], changes[first::2]) for first in (0, 1))
        pairs = [(numpy.abs(one), numpy.abs(other)) for one, other in zip(even, odd, strict=True)]
        agreement = (spearman(*pairs[0]), spearman(*pairs[1]), spearman(*pairs[2]))
    estimates = tuple(
        ProbeAccuracy(
            each.probe,
            spearman(loss, each.loss),
            spearman(numpy.abs(mean_loss), each.loss),
            spearman(weights, each.weights),
            each.passes,
            each.seconds,
        )
        for each in given
    )
    return Verification(
        layers,
        names,
        len(batches),
        len(more_for_loss),
        base_loss,
        _table(loss / abs(base_loss)),
        _table(mean_loss / abs(base_loss)),
        _table(weights),
        agreement,
        estimates,
        given,
        count,
        time.perf_counter() - began,
    )


def _truth(losses: Sequence[Any], changes: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return means over batches: |change of the loss|, change of the loss, change of the weights."""
    return numpy.mean(numpy.abs(losses), axis=0), numpy.mean(losses, axis=0), numpy.mean(changes, axis=0)


def _table(numbers: Any) -> Table:
    return tuple(tuple(row) for row in numbers.tolist())


def spearman(a: Any, b: Any) -> float:
    """Return Spearman's rank correlation of two tables; ties get their mean rank, and a constant table gives 0.

    >>> round(spearman([[1.0, 5.0], [2.0, 3.0]], [[10.0, 40.0], [30.0, 20.0]]), 6)
    0.8
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # takes most of a second to import

    ranks = [rankdata(numpy.asarray(each, dtype=numpy.float64).ravel()) for each in (a, b)]
    if any(len(set(each.tolist())) < 2 for each in ranks):
        return 0.0
    found = float(numpy.corrcoef(ranks)[0, 1])
    return found if math.isfinite(found) else 0.0
