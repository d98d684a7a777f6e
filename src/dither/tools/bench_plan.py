"""Benchmarks of a plan's cost while a model trains: SNIP's estimates, its solver, and what training waits for.

A Llama of `dither.tools.bench_train` trains in fp8-block. Each probe scores all options of all layers on some tokens of a
step's batch, uncompiled, in micro-batches of a quarter of it, as the trainer does. The peer is an ordinary step; the limit is
one forward and backward pass over the same tokens. Times are wall-clock times, including the host. Peaks of memory include the
model and its optimizer.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor, nn

from dither.nn import Conversion
from dither.snip import Goal, Scores, Snip, SnipSettings, TrainingSetup, choose, options, score
from dither.spec.random import Stream
from dither.tools.bench import Bench, Beside, Case, Row, seconds_of
from dither.tools.bench_train import build, check_size, settings_of

SUITE = "plan"
MODE, LEVELS = "recipe:fp8-block", "fp8-block,fp4-block"
TIMED: tuple[str, ...] = ("last", "direct")
INTERVAL = 1000
"""Steps between two plans."""
MOST = 24
"""Estimates that are spread over more steps are cut here, and their sum is extrapolated."""


class Trained:
    """A model in training, and the time of its ordinary steps."""

    def __init__(self, size: str, bench: Bench) -> None:
        self.settings, self.device = settings_of(bench), bench.device
        config, self.batch, self.sequence = self.settings.shape(size)
        self.built = build(size, MODE, self.settings)
        random = torch.Generator(self.device).manual_seed(1)
        shape = (self.batch, self.sequence + 1)
        self.text = torch.randint(config.vocab_size, shape, device=self.device, generator=random)
        for _ in range(4 if self.settings.cuda else 1):
            self.step()
        self.ordinary = statistics.median(seconds_of(self.step, self.device)[0] for _ in range(self.settings.steps))
        """The seconds of an ordinary step."""

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Return the loss of some rows of text."""
        with self.built.context:
            loss: Tensor = model(rows[:, :-1], rows[:, 1:])
        return loss

    def step(self) -> None:
        """Run an ordinary training step."""
        with self.built.step_context(0):
            self.built.passes(self.text[:, :-1], self.text[:, 1:])
        self.built.update()

    def parts(self, rows: int, length: int) -> Sequence[Tensor]:
        """Return micro-batches of some rows of text."""
        return self.text[:rows, : length + 1].chunk(math.ceil(rows / math.ceil(self.batch / 4)))

    def score(self, probe: str, parts: Sequence[Tensor], name: str = "cost") -> Scores:
        """Return the score of all options."""
        known, given = options(LEVELS), {"probe": probe, "stream": Stream(0, "snip", name), "forward": self.loss}
        return score(self.built.model, parts, self.built.optimizer, known, **given)  # type: ignore[arg-type]


def cases(bench: Bench, sizes: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the benchmarks of plans: by default at 1B, or at the tiny size on a CPU."""
    for size in tuple(sizes) or (("134m" if bench.quick else "1b",) if bench.cuda else ("tiny",)):
        check_size(size)
        trained = cache(partial(Trained, size, bench))
        measures = {f"{size}, SNIP's solver": _solver, f"{size}, waits for a plan every {INTERVAL} steps": _controller}
        _, batch, sequence = settings_of(bench).shape(size)
        for probe, rows in product(TIMED[: 1 if bench.quick else None], sorted({max(1, batch // 2), batch})):
            name = f"{size}, SNIP's estimates with probe={probe}, {rows} x {sequence} tokens"
            yield Case(SUITE, name, partial(_measure, trained, partial(_estimate, probe=probe, rows=rows), name))
        for name, measure in measures.items():
            yield Case(SUITE, name, partial(_measure, trained, measure, name))


def _measure(trained: Callable[[], Trained], measure: Callable[[Trained, str], Row], name: str) -> Row:
    """Measure a row with the model of its size, which the first row builds."""
    return measure(trained(), name)


def _estimate(trained: Trained, name: str, *, probe: str, rows: int) -> Row:
    parts = trained.parts(rows, trained.sequence)
    trained.score(probe, parts)  # the first call compiles kernels
    seconds, peak = seconds_of(partial(trained.score, probe, parts), trained.device)

    def passes() -> None:
        with torch.compiler.set_stance("force_eager"), trained.built.step_context(0):
            for part in parts:
                trained.built.passes(part[:, :-1], part[:, 1:])
        trained.built.optimizer.zero_grad()

    passes()
    limit = Beside("forward and backward of these tokens", seconds_of(passes, trained.device)[0] * 1e3)
    peers = (Beside("an ordinary step", trained.ordinary * 1e3),)
    return Row(suite=SUITE, name=name, ms=seconds * 1e3, peers=peers, limit=limit, peak_gib=peak)


def _solver(trained: Trained, name: str) -> Row:
    found = trained.score("last", trained.parts(1, trained.sequence))

    def solve() -> None:
        choose(found.harm(), found.statistics.layers, options(LEVELS), Goal(target=0.75))

    solve()
    ms = seconds_of(solve, trained.device)[0] * 1e3
    return Row(suite=SUITE, name=name, ms=ms, peers=(Beside("an ordinary step", trained.ordinary * 1e3),))


def _controller(trained: Trained, name: str) -> Row:
    """Return all that training waits for between two plans, with the defaults of `dither.snip.Snip`."""
    settings = SnipSettings(target=0.75, start=1, every=INTERVAL, delay=1)
    setup = TrainingSetup(step_tokens=trained.text[:, 1:].numel())
    built = trained.built
    snip = Snip(Conversion.of(built.model), built.optimizer, settings, forward=trained.loss, setup=setup)
    tokens, sequence = snip.effort.tokens or 0, trained.sequence
    parts = trained.parts(max(1, tokens // sequence), min(sequence, tokens))
    trained.score(snip.effort.probe if snip.effort.steps == 1 else "direct", parts, "warm")  # compiles kernels
    ordinary, waits = trained.ordinary, list[float]()
    for number in range(1, 1 + min(snip.effort.steps, MOST)):
        waits.append(seconds_of(partial(snip.before_step, number, parts), trained.device)[0])
        trained.step()
    ms = statistics.mean(waits[1:] or waits) * snip.effort.steps * 1e3
    return Row(suite=SUITE, name=name, ms=ms, peers=(Beside("the steps between plans", INTERVAL * ordinary * 1e3),))
