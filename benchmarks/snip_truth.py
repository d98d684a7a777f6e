"""Verify SNIP's estimates: how well each probe ranks the options of all layers of a trained Llama, and how long it takes.

    PYTHONPATH=src python3 benchmarks/snip_truth.py --train train.npy --held-out held_out.npy --json truth.json
    PYTHONPATH=src python3 benchmarks/snip_truth.py --device cpu --tiny  # random text, in a minute: the script runs

train.npy and held_out.npy hold token ids, uint16, as benchmarks/sampling_quality.py --prepare writes them. A Llama is trained
in BF16 autocast with float32 parameters (O1), uncast. Every probe then scores every option of every layer on batches of
training text, and `verify` measures all options, one layer at a time, on whole batches of held-out text.

--minutes bounds the verification: it takes as many held-out batches as fit, at least one, and then as many more for the loss
only, up to --loss-batches. --tokens also scores on the first tokens of the training text, to show the effect of fewer tokens.
--compute fp32 computes everything in float32: in BF16, everything after a change is rounded differently, which hides small
changes.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import rich
import torch
from rich import box
from rich.table import Table as RichTable
from sampling_quality import autocast, build, rate, token_ids
from scipy.stats import rankdata

import dither
from dither.models import Llama, compile_blocks
from dither.snip import PROBES, Option, Scores, TrainingSetup, options, score
from dither.snip.dry_run import DryRun, Forward, plain_forward

TINY = {"hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "words": 64, "sequence": 32, "batch": 4, "steps": 30, "warmup": 5}


class Text:
    """Token ids on the device, and windows of them for steps and probes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.length, self.batch, self.device = arguments.sequence, arguments.batch, arguments.device
        self.train, self.held_out = (
            torch.from_numpy(np.array(found, dtype=np.int32)).to(self.device) for found in token_ids(arguments)
        )

    def windows(self, ids: torch.Tensor, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and the tokens that follow them, int64[count, length] each, from random positions."""
        starts = torch.randint(len(ids) - self.length, (count,), generator=generator).to(self.device)
        found = ids[starts[:, None] + torch.arange(self.length + 1, device=self.device)].long()
        return found[:, :-1], found[:, 1:]


def forward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch under BF16 autocast; on a CPU without autocast, since BF16 products are slow there."""
    with autocast(batch[0].device.type):
        return model(*batch)


def exact_forward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch in float32."""
    return model(*batch)


def trained(text: Text, arguments: argparse.Namespace) -> tuple[Llama, torch.optim.Optimizer, float]:
    """Return a Llama after --steps steps, its optimizer, and the mean loss of the last tenth of them."""
    model = build(dither.Plan(default=dither.LayerPrecision()), arguments.seed, arguments)
    if arguments.device == "cuda":
        compile_blocks(model)
    fused = arguments.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    generator, losses = torch.Generator().manual_seed(arguments.seed), []
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * rate(step, arguments)
        loss = forward(model, text.windows(text.train, generator, arguments.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, optimizer, torch.stack(losses[-max(1, arguments.steps // 10) :]).mean().item()


@torch.no_grad()
def seconds_of(call: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of the second of two calls, uncompiled, as estimates and verification are."""
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            began = time.perf_counter()
            call().item()
    return time.perf_counter() - began


def with_slope(scores: Scores, closed: Scores, share: float) -> Scores:
    """Return scores of `measure` with the slope term of dL (the paper's formula) multiplied by `share`.

    On a batch of M tokens the slope is noise of size 1 / sqrt(M), so it is smaller for larger or more batches.
    """
    loss = tuple(
        tuple(math.sqrt(max(both**2 - slope**2, 0.0) + (share * slope) ** 2) for both, slope in zip(*rows, strict=True))
        for rows in zip(scores.loss, closed.loss, strict=True)
    )
    return replace(scores, probe=f"{scores.probe}, slope x {share:g}", loss=loss)


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
    loss: tuple[tuple[float, ...], ...]
    """Mean absolute change of a batch's loss, relative to the loss: one row per layer, one column per option."""
    mean_loss: tuple[tuple[float, ...], ...]
    """Signed change of the mean loss over all batches, relative to the loss."""
    weights: tuple[tuple[float, ...], ...]
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
        return {**vars(self), **plain}

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


def verify(
    model: torch.nn.Module,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    scores: Scores | Sequence[Scores],
    options: Sequence[Option],
    *,
    stream: dither.Stream,
    forward: Forward = plain_forward,
    more_for_loss: Sequence[Any] = (),
    setup: TrainingSetup | None = None,
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
    """
    chosen, given = tuple(options), (scores,) if isinstance(scores, Scores) else tuple(scores)
    names = tuple(option.name for option in chosen)
    if not given:
        raise dither.UserError("There are no scores to verify: give the scores of at least one probe.")
    began, count, base_loss = time.perf_counter(), 0, 0.0
    if not len(batches):
        raise dither.UserError("There are no batches to verify on: give at least one that the scores have not seen.")
    losses, changes = [], []
    total = len(batches) + len(more_for_loss)

    def over(batch: Any) -> DryRun:
        return DryRun(model, [batch], optimizer, stream=stream, forward=forward, setup=setup)

    for batch in batches:
        dry_run = over(batch)
        layers = tuple(dry_run.names)
        for each in given:
            if each.layers != layers or each.options != names:
                raise dither.UserError(
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
                        with dry_run.cast(layer, dither.LayerPrecision(*casts)):
                            known[casts] = dry_run.loss() - plain
                    rises.append(known[casts])
        base_loss += float(plain) / total
        losses.append(torch.stack(rises).view(len(layers), len(chosen)).cpu().numpy())
    loss, mean_loss, weights = _truth(losses, changes)
    agreement = None
    if len(batches) > 1:
        even, odd = (_truth(losses[first::2], changes[first::2]) for first in (0, 1))
        pairs = [(np.abs(one), np.abs(other)) for one, other in zip(even, odd, strict=True)]
        agreement = (spearman(*pairs[0]), spearman(*pairs[1]), spearman(*pairs[2]))
    estimates = tuple(
        ProbeAccuracy(
            each.probe,
            spearman(loss, each.loss),
            spearman(np.abs(mean_loss), each.loss),
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
    return np.mean(np.abs(losses), axis=0), np.mean(losses, axis=0), np.mean(changes, axis=0)


def _table(numbers: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in numbers.tolist())


def spearman(a: Any, b: Any) -> float:
    """Return Spearman's rank correlation of two tables; ties get their mean rank, and a constant table gives 0."""
    ranks = [rankdata(np.asarray(each, dtype=np.float64).ravel()) for each in (a, b)]
    if any(len(set(each.tolist())) < 2 for each in ranks):
        return 0.0
    found = float(np.corrcoef(ranks)[0, 1])
    return found if math.isfinite(found) else 0.0


def integers(text: str) -> list[int]:
    """Parse integers separated by commas, such as "2048,8192"."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0, help="approximate time for verification, after scoring")
    parser.add_argument("--probes", default=",".join(PROBES))
    parser.add_argument("--options", default="fp8-block,fp4-block")
    parser.add_argument("--micro", type=int, default=1, help="batches of training text for probes")
    parser.add_argument(
        "--compute",
        choices=("bf16", "fp32"),
        default="bf16",
        help="format of products in estimates and verification",
    )
    parser.add_argument(
        "--tokens", type=integers, default=[], help="also score on these numbers of tokens, separated by commas"
    )
    parser.add_argument("--fewer-probes", default="measure,last", help="the probes that do")
    parser.add_argument("--held-out-batches", type=int, default=4, help="batches of held-out text, at most")
    parser.add_argument("--loss-batches", type=int, default=16, help="more of them, at most, for the loss alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model and a text of nothing, to see the script run")
    for name, value in (("hidden", 512), ("layers", 8), ("heads", 8), ("ffn", 1408), ("words", 8192), ("sequence", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    arguments = parser.parse_args()
    if not arguments.tiny and (arguments.train is None or arguments.held_out is None):
        parser.error("--train and --held-out name the files of token ids, of sampling_quality.py --prepare")
    if arguments.held_out_batches < 1:
        parser.error(f"--held-out-batches is at least 1, not {arguments.held_out_batches}")
    text, chosen = Text(arguments), options(arguments.options)
    began = time.perf_counter()
    model, optimizer, loss = trained(text, arguments)
    print(f"trained {arguments.steps} steps in {time.perf_counter() - began:.0f} s, loss {loss:.4f}", flush=True)
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    seen = [text.windows(text.train, generator, arguments.batch) for _ in range(arguments.micro)]
    unseen = [text.windows(text.held_out, generator, arguments.batch) for _ in range(arguments.held_out_batches)]
    given = {"forward": forward if arguments.compute == "bf16" else exact_forward, "setup": TrainingSetup(max_norm=1.0)}
    scores = []
    for probe in arguments.probes.split(","):
        for rows in (False, True) if probe == "direct" else (False,):
            stream = dither.Stream(arguments.seed, "snip", probe)
            found = score(model, seen, optimizer, chosen, probe=probe, rows=rows, stream=stream, **given)
            scores.append(found)
            print(f"{probe}{' by rows' if rows else ''}: {found.passes} passes, {found.seconds:.1f} s", flush=True)
    for count in arguments.tokens:
        rows = max(1, count // arguments.sequence)
        fewer = [tuple(part[:rows] for part in seen[0])]
        for probe in arguments.fewer_probes.split(","):
            found = score(model, fewer, optimizer, chosen, probe=probe, stream=dither.Stream(0, "snip", probe), **given)
            scores.append(replace(found, probe=f"{probe}, {rows * arguments.sequence} tokens"))
            print(f"{scores[-1].probe}: {found.passes} passes, {found.seconds:.1f} s", flush=True)
    closed = [found for found in scores if found.probe == "direct"]
    tried = [found for found in scores if found.probe == "measure"] if closed else []
    scores += [with_slope(found, closed[0], share) for found in tried for share in (0.5, 0.25, 0.0)]
    stream = dither.Stream(arguments.seed, "snip", "truth")
    once = seconds_of(lambda: given["forward"](model, unseen[0])) * (1 + len(scores[0].layers) * len(chosen))
    room = 60 * arguments.minutes / once  # in forward passes over all options; a backward pass takes two of them
    whole = max(1, min(len(unseen), int(room / 3)))
    alone = max(0, min(arguments.loss_batches, int((room - 3 * whole) * 2)))  # casts of gradients do not change the loss
    more = [text.windows(text.held_out, generator, arguments.batch) for _ in range(alone)]
    truth = verify(model, unseen[:whole], optimizer, scores, chosen, stream=stream, more_for_loss=more, **given)
    rich.print(truth, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({**truth.to_dict(), "trained_loss": loss, "steps": arguments.steps}))


if __name__ == "__main__":
    try:
        main()
    except dither.UserError as error:
        raise SystemExit(str(error)) from None
