"""Estimates held against the truth: every option of every layer tried for real, on batches that no estimate has seen."""

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
from dither.precision import LayerPrecision
from dither.random import Stream
from dither.snip.divergence import Scores, Table
from dither.snip.dry_run import Forward, Passes, plain_forward
from dither.snip.layer_options import Option
from dither.snip.layer_options import options as all_options
from dither.snip.statistics import VERSION, check_version, load_json


@dataclass(frozen=True)
class Estimate:
    """How well one probe ranks the options of all layers."""

    probe: str
    loss: float
    """Spearman's correlation between estimated and actual changes of a batch's loss, over all layers and options."""
    mean_loss: float
    """The same for changes of the mean loss of all batches, in which their slopes cancel."""
    weights: float
    """The same for changes of the next weights."""
    passes: int
    """What the estimate cost, in passes over a micro-batch."""
    seconds: float


@dataclass(frozen=True)
class Verification:
    """Actual changes beside estimated ones; prints as a table with a line for each probe."""

    layers: tuple[str, ...]
    options: tuple[str, ...]
    batches: int
    more_for_loss: int
    """Batches that only the loss was looked at of, besides."""
    base: float
    """The loss without casts, the mean over all batches."""
    loss: Table
    """Actual changes of a batch's loss, the mean of their magnitudes, in units of it: one row a layer, one column an option."""
    mean_loss: Table
    """Actual changes of the mean loss of all batches, with their signs, in units of it."""
    weights: Table
    """Actual changes of what the next step does to the weights, in units of them, the mean over all layers."""
    agreement: tuple[float, float, float] | None
    """The same correlations, of loss, mean loss and weights, between two halves of the batches: no estimate is much better.

    None for a single batch, which has no halves."""
    estimates: tuple[Estimate, ...]
    scores: tuple[Scores, ...]
    passes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {"estimates": [dict(vars(each)) for each in self.estimates], "scores": [each.to_dict() for each in self.scores]}
        return {"version": VERSION, **vars(self), **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Verification":
        """The inverse of `to_dict`."""
        check_version("results of a verification", data)
        fields = {key: value for key, value in data.items() if key != "version"}
        try:
            for key in ("layers", "options", "agreement"):
                fields[key] = fields[key] and tuple(fields[key])
            for key in ("loss", "mean_loss", "weights"):
                fields[key] = tuple(tuple(row) for row in fields[key])
            fields["estimates"] = tuple(Estimate(**each) for each in fields["estimates"])
            fields["scores"] = tuple(Scores.from_dict(each) for each in fields["scores"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise UserError(f"These are not the results of a verification as this version writes them: {error}.") from None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Verification":
        """The inverse of `to_json`."""
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
    max_norm: float | None = None,
    more_for_loss: Sequence[Any] = (),
    group: torch.distributed.ProcessGroup | None = None,
    pipeline: torch.distributed.ProcessGroup | None = None,
) -> Verification:
    """Try every option on one layer at a time, and say how well `scores` of the same model and options ranked them.

    Give batches that the scores have not seen: each is a step of its own, and changes are means over them. The actual change of
    the loss is compared by its magnitude, as SNIP defines it: in a batch, and of the mean over all batches, in which what lies
    in one batch alone cancels. `more_for_loss` are further batches that only the loss is looked at of, which takes a sixth of
    the time. Other arguments are those of `score`; the model is left as it was.

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
    chosen, given = all_options(options), (scores,) if isinstance(scores, Scores) else tuple(scores)
    names = tuple(option.name for option in chosen)
    if not given:
        raise UserError("There are no scores to verify: give those of one probe or more.")
    began, count, base_loss = time.perf_counter(), 0, 0.0
    if not len(batches):
        raise UserError("There are no batches to verify on: give at least one that the scores have not seen.")
    losses, changes = [], []
    total = len(batches) + len(more_for_loss)

    def over(batch: Any) -> Passes:
        how: dict[str, Any] = {"forward": forward, "max_norm": max_norm, "group": group, "pipeline": pipeline}
        return Passes(model, [batch], optimizer, stream=stream, **how)

    for batch in batches:
        passes = over(batch)
        layers = tuple(passes.names)
        for each in given:
            if each.layers != layers or each.options != names:
                raise UserError(
                    f"The scores of the probe {each.probe!r} are of {len(each.layers)} layers and {len(each.options)} options "
                    f"({', '.join(each.options[:2])}, ...), and these are {len(layers)} and {len(names)}: score it anew."
                )
        with passes.borrowed():
            base = passes.run()
            updates = passes.updates(base)
            rises, moves = [], []
            for layer in layers:
                for option in chosen:
                    with passes.cast(layer, option.precision):
                        found = passes.run()
                    rises.append(found.loss - base.loss)
                    moves.append(passes.change(found, updates).mean())
        shape = len(layers), len(chosen)
        base_loss += float(base.loss) / total
        losses.append(torch.stack(rises).view(shape).cpu().numpy())
        changes.append(torch.stack(moves).view(shape).cpu().numpy())
        count += passes.count
    for batch in more_for_loss:
        passes = over(batch)
        with passes.borrowed():
            plain, rises = passes.loss(), []
            for layer in layers:
                known: dict[Any, torch.Tensor] = {}  # a gradient's cast changes no loss
                for option in chosen:
                    casts = option.precision.casts("forward")
                    if casts not in known:
                        with passes.cast(layer, LayerPrecision(*casts)):
                            known[casts] = passes.loss() - plain
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
        Estimate(
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
    """Magnitude of the change of a batch's loss, change of the mean loss, and change of the weights, the means over batches."""
    return numpy.mean(numpy.abs(losses), axis=0), numpy.mean(losses, axis=0), numpy.mean(changes, axis=0)


def _table(numbers: Any) -> Table:
    return tuple(tuple(row) for row in numbers.tolist())


def spearman(a: Any, b: Any) -> float:
    """Spearman's rank correlation of two tables of numbers, ties at their mean rank; 0 where one of them is constant.

    >>> round(spearman([[1.0, 5.0], [2.0, 3.0]], [[10.0, 40.0], [30.0, 20.0]]), 6)
    0.8
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # it takes most of a second, which no other command needs

    ranks = [rankdata(numpy.asarray(each, dtype=numpy.float64).ravel()) for each in (a, b)]
    if any(len(set(each.tolist())) < 2 for each in ranks):
        return 0.0
    found = float(numpy.corrcoef(ranks)[0, 1])
    return found if math.isfinite(found) else 0.0
