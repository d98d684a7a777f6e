"""Results of `dither ladder`: read them, compare arms within seeds, fit a scaling law, write tables and figures.

Losses are held-out, in nats per token. Arms of a seed share initial weights and the order of the text, so that differences are
taken within seeds; their 95 % confidence intervals are those of Student's t.
"""

import importlib.util
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dither import files
from dither.console import printable
from dither.errors import UserError
from dither.evaluate.deployment import parse_cast, stored_bits
from dither.evaluate.estimates import Estimate, estimate
from dither.report.charts import Line, LineChart
from dither.settings import from_object

FORMAT, VERSION = "dither-ladder-run", 1
"""The format of a result's file; files of another version are refused."""

BITS = "bits per weight, with scales"
"""The x axis of losses after casts."""

MOST = 1e100
"""More than any loss: sums of smaller ones are finite."""

EXPONENTS = (0.03, 3.0)
"""Smallest and largest exponent of a fitted law."""


# Results ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of a ladder, stored as a JSON file."""

    arm: str
    """The arm as the ladder's file names it."""
    model: str
    """Name of the preset."""
    ratio: float
    """Tokens per parameter."""
    seed: int
    """Seed of the initial weights and of the order of the text."""
    kind: Literal["train", "speed"] = "train"
    """A whole run, or a short one that had the device to itself, for its tokens per second."""
    status: Literal["done", "diverged", "failed"]
    """How it ended; a failed run is tried again."""
    why: str = ""
    """The reason, if it is not done."""
    parameters: int
    tokens: int
    """Training tokens of the whole run."""
    loss: float | None = None
    """Held-out loss after the last step; None if the run is not done."""
    bits_per_byte: float | None = None
    casts: dict[str, float] = field(default_factory=dict)
    """Held-out losses after casts of the trained weights."""
    bitwidths: dict[str, float] = field(default_factory=dict)
    """Mean b_t of each sampled layer after the last step."""
    held_out: tuple[tuple[int, float], ...] = ()
    """Held-out losses during the run, each with the tokens before it."""
    curve: tuple[tuple[int, float], ...] = ()
    """Moving average of the training loss, with the tokens before it."""
    tokens_per_s: float | None = None
    """Median over the second half of the run."""
    jobs: int = 1
    """Number of runs that shared the device."""
    seconds: float = 0.0
    """Time of the whole run, with building and compiling the model."""
    memory: int | None = None
    """Peak memory of the device, in bytes."""
    machine: dict[str, Any]
    """Device, versions of torch, python and dither, the commit, and the SHA-256 of the tokens and of given initial weights."""
    config: dict[str, Any]
    """The settings of the run that do not have their default values."""

    def __post_init__(self) -> None:
        for cast in self.casts:
            parse_cast(cast)

    @property
    def final(self) -> bool:
        """True if the run need not be repeated."""
        return self.status != "failed"

    @property
    def start(self) -> tuple[int, str, str]:
        """Return what runs must share to be compared: the seed, the text, and the initial weights if a file gives them."""
        return self.seed, self.machine.get("corpus") or "", self.machine.get("weights") or ""

    @property
    def training(self) -> float | None:
        """Mean over the last tenth of the tokens of the training loss's moving average; None if the run is not done."""
        last = [loss for tokens, loss in self.curve if tokens > 0.9 * self.tokens]
        return statistics.fmean(last) if last and self.status == "done" else None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        curves = {name: [list(point) for point in getattr(self, name)] for name in ("held_out", "curve")}
        return {"format": FORMAT, "version": VERSION, **asdict(self), **curves}

    @classmethod
    def from_dict(cls, data: Any) -> "Result":
        """Return the result of a file's content; raise `Refused` for anything else."""
        files.check_version(data, FORMAT, VERSION, "dither ladder")
        found = from_object(cls, {key: value for key, value in data.items() if key not in ("format", "version")})
        if (found.status == "done") != (found.loss is not None):
            raise files.Refused("it is damaged: a run has a loss if it is done, and only then")
        losses = [found.loss, *found.casts.values(), *(loss for _, loss in (*found.held_out, *found.curve))]
        if any(loss is not None and not 0 <= loss < MOST for loss in losses):
            raise files.Refused("it is damaged: it has an impossible loss")
        return found


def read_result(path: Path) -> Result | str:
    """Return the result in a file, or a sentence that says why it cannot be used."""
    try:
        return Result.from_dict(files.read_json(path)[0])
    except files.Refused as error:
        return f"The result {path.name!r} is not used: {error}. Remove the file to train this run again."


# The scaling law --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """A fitted loss L(N, D) = E + A / N^a + B / D^b of N parameters and D tokens; a term that was not fitted is 0."""

    E: float
    A: float
    a: float
    B: float
    b: float
    residual: float
    """Root mean square of the residuals, in nats."""
    points: int
    """Number of fitted losses."""

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of so many parameters after so many tokens."""
        return self.E + self.A / math.pow(parameters, self.a) + self.B / math.pow(tokens, self.b)

    def tokens_for(self, parameters: float, loss: float) -> float:
        """Return the tokens after which a model has that loss; infinity if it never has.

        >>> law = Law(E=2.0, A=0.0, a=1.0, B=1000.0, b=0.5, residual=0.0, points=3)
        >>> law.tokens_for(1e6, law.loss(1e6, 4e6)), law.tokens_for(1e6, 1.9)
        (4000000.0, inf)
        """
        rest = loss - self.loss(parameters, math.inf)
        return math.pow(self.B / rest, 1 / self.b) if rest > 0 and self.B > 0 else math.inf

    def __str__(self) -> str:
        terms = [f"{self.E:.4g}"]
        terms += [f"{self.A:.4g} / N^{self.a:.3f}"] if self.A else []
        terms += [f"{self.B:.4g} / D^{self.b:.3f}"] if self.B else []
        return f"L = {' + '.join(terms)}"


def fit_law(points: Sequence[tuple[float, float, float]]) -> Law | str:
    """Fit a law to points (N parameters, D tokens, loss); return a sentence if they are too few for any.

    Both terms need 3 sizes, one of them with 3 numbers of tokens, and 6 points. Else that of the tokens alone is fitted, if one
    size has 3 numbers of tokens.
    """
    sizes = sorted({size for size, _, _ in points})
    counts = {size: len({tokens for n, tokens, _ in points if n == size}) for size in sizes}
    longest = max(sizes, key=lambda size: (counts[size], size), default=0.0)
    if len(sizes) >= 3 and counts[longest] >= 3 and len(points) >= 6:
        return _least_squares(points, of_size=True)
    if counts.get(longest, 0) >= 3:
        return _least_squares([point for point in points if point[0] == longest], of_size=False)
    return (
        "No law is fitted: E + A / N^a + B / D^b needs 3 sizes, one of them with 3 numbers of tokens, and 6 losses; "
        "E + B / D^b needs one size with 3 numbers of tokens."
    )


def _least_squares(points: Sequence[tuple[float, float, float]], *, of_size: bool) -> Law:
    """Fit E, A, B >= 0 by least squares for each pair of exponents, and search for the exponents."""
    import numpy as np
    from scipy.optimize import minimize, nnls  # type: ignore[import-untyped]

    sizes, tokens, losses = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    centre_n, centre_d = np.exp(np.log(sizes).mean()), np.exp(np.log(tokens).mean())  # for well-conditioned columns
    low, high = np.log(EXPONENTS)

    def solved(logs: Any) -> tuple[Any, float]:
        a, b = np.exp(np.clip(logs, low, high))
        columns = [np.ones_like(losses), (sizes / centre_n) ** -a * of_size, (tokens / centre_d) ** -b]
        factors, norm = nnls(np.stack(columns, axis=1), losses)
        return factors, float(norm)

    def error(logs: Any) -> float:
        return solved(logs)[1]

    steps = np.linspace(low, high, 13)
    starts = sorted(itertools.product(steps if of_size else [0.0], steps), key=error)[:3]
    options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}
    best = min((minimize(error, start, method="Nelder-Mead", options=options) for start in starts), key=lambda each: each.fun)
    (E, A, B), norm = solved(best.x)
    a, b = (float(each) for each in np.exp(np.clip(best.x, low, high)))
    return Law(float(E), float(A * centre_n**a), a, float(B * centre_d**b), b, norm / math.sqrt(len(points)), len(points))


# Comparison of arms -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RungRow:
    """An arm on one rung: a model with a number of tokens."""

    model: str
    parameters: int
    tokens: int
    arm: str
    loss: Estimate | None
    """Held-out loss over the seeds that are done."""
    difference: Estimate | None
    """Loss minus that of the baseline, over the seeds that both have; None for the baseline itself."""
    training: Estimate | None
    """The same of the training losses at the end (`Result.training`)."""
    note: str
    """Runs that have no loss, and why; the learned bitwidths at the end."""


SpeedSource = Literal["measured", "given"]
"""The origin of a speed: runs alone on the device, or the file of the ladder."""


@dataclass(frozen=True)
class EqualQuality:
    """What an arm's speed is worth on one rung, at the loss of the baseline.

    The arm reaches the baseline's loss after `factor` times its tokens, so that its speed counts for 1 / factor. The factor
    follows from the baseline's law, shifted by the difference of the losses.
    """

    model: str
    parameters: int
    tokens: int
    arm: str
    factor: float
    """Tokens that the arm needs for the loss of the baseline, over those of the baseline; infinity if it never has it."""
    low: float | None
    """The factor at the lower end of the difference's confidence interval; None for a single seed."""
    high: float | None
    speed: float | None
    """Tokens per second over those of the baseline; None if only runs that shared the device have any."""
    source: SpeedSource

    @property
    def at_equal_quality(self) -> float | None:
        """The speed over that of the baseline, to the same loss."""
        return None if self.speed is None else self.speed / self.factor


@dataclass(frozen=True)
class LadderReport:
    """The tables and figures of a ladder."""

    baseline: str
    arms: tuple[str, ...]
    results: tuple[Result, ...]
    problems: tuple[str, ...] = ()
    """Sentences about results that are not used."""
    missing: int = 0
    """Number of runs that are not trained yet."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Tokens per second of arms over those of the baseline, if they are not those of these runs."""

    @cached_property
    def rungs(self) -> list[tuple[int, str, int]]:
        """The rungs as (parameters, model, tokens), from small to large."""
        return sorted({(each.parameters, each.model, each.tokens) for each in self.runs()})

    def runs(self, arm: str | None = None, rung: tuple[int, str, int] | None = None) -> list[Result]:
        """Return the whole runs, of an arm and on a rung if these are given."""
        return [
            each
            for each in self.results
            if each.kind == "train" and arm in (None, each.arm) and rung in (None, (each.parameters, each.model, each.tokens))
        ]

    @cached_property
    def rows(self) -> list[RungRow]:
        """One row per rung and arm that has a run."""
        found = []
        for rung in self.rungs:
            base = self.runs(self.baseline, rung)
            for arm in self.arms:
                if not (runs := self.runs(arm, rung)):
                    continue
                losses = [run.loss for run in runs if run.loss is not None]
                notes = [
                    f"seed {run.seed} {run.status}: {printable(run.why)}" for run in runs if run.why or run.status != "done"
                ]
                if len({run.machine.get("corpus") for run in runs if run.loss is not None}) > 1:
                    notes.append("its seeds were trained on different texts")
                if learned := [bits for run in runs for bits in run.bitwidths.values()]:
                    notes.append(f"b_t of layers: {statistics.fmean(learned):.2f} ({min(learned):.2f} to {max(learned):.2f})")
                difference, training = (_paired(runs, base, name) for name in ("loss", "training"))
                parameters, model, tokens = rung
                found.append(RungRow(model, parameters, tokens, arm, estimate(losses), difference, training, "; ".join(notes)))
        return found

    @cached_property
    def cast_rows(self) -> list[tuple[str, ...]]:
        """One row per rung, arm and cast: the loss, minus the same run's as trained, minus the baseline's with the cast."""
        found: list[tuple[str, ...]] = []
        for rung, arm in itertools.product(self.rungs, self.arms):
            runs = [run for run in self.runs(arm, rung) if run.loss is not None]
            base = {run.start: run.casts for run in self.runs(self.baseline, rung)}
            for cast in dict.fromkeys(cast for run in runs for cast in run.casts):
                losses = {run.start: run.casts[cast] for run in runs if cast in run.casts}
                own = [losses[run.start] - run.loss for run in runs if run.start in losses and run.loss is not None]
                pairs = [loss - base[start][cast] for start, loss in losses.items() if cast in base.get(start, {})]
                loss, change = estimate(list(losses.values())), estimate(own)
                other = _interval(estimate(pairs), True) if arm != self.baseline else ""
                place = (rung[1], count(rung[2]), f"`{arm}`", cast, str(len(losses)))
                found.append((*place, _interval(loss, False), _interval(change, True), other))
        return found

    def law_of(self, model: str) -> Law | None:
        """Return the baseline's law of a model's tokens: the model's own, or else that of all sizes."""
        laws = fit_law(self.points(self.baseline, model)), self.laws.get(self.baseline)
        return next((law for law in laws if isinstance(law, Law) and law.B), None)

    def points(self, arm: str, model: str | None = None) -> list[tuple[float, float, float]]:
        """Return (parameters, tokens, mean loss) of an arm on every rung that it has, for `fit_law`."""
        return [
            (float(row.parameters), float(row.tokens), row.loss.mean)
            for row in self.rows
            if row.arm == arm and row.loss is not None and model in (None, row.model)
        ]

    @cached_property
    def laws(self) -> dict[str, Law | str]:
        """The law of each arm, or a sentence that says what is missing."""
        return {arm: fit_law(points) for arm in self.arms if (points := self.points(arm))}

    def alone(self, model: str, arm: str) -> dict[tuple[Any, Any], float]:
        """Return tokens per second alone on a device, by device and torch: of runs with --speed, or else of whole runs."""
        runs = [run for run in self.results if (run.model, run.arm, run.jobs, run.status) == (model, arm, 1, "done")]
        speeds: dict[tuple[Any, Any], list[float]] = {}
        for run in [run for run in runs if run.kind == "speed"] or runs:
            if run.tokens_per_s:
                speeds.setdefault((run.machine.get("device"), run.machine.get("torch")), []).append(run.tokens_per_s)
        return {machine: statistics.median(values) for machine, values in speeds.items()}

    @cached_property
    def equal_quality(self) -> list[EqualQuality]:
        """What each arm's speed is worth on each rung, where the baseline has a law of the tokens."""
        found = []
        for row in self.rows:
            if row.difference is None or (law := self.law_of(row.model)) is None:
                continue
            base = law.loss(row.parameters, row.tokens)

            def factor(difference: float, law: Law = law, row: RungRow = row, base: float = base) -> float:
                return law.tokens_for(row.parameters, base - difference) / row.tokens

            mean, half = row.difference.mean, row.difference.interval
            low, high = (None, None) if half is None else (factor(mean - half), factor(mean + half))
            source: SpeedSource = "measured"
            own, other = self.alone(row.model, row.arm), self.alone(row.model, self.baseline)
            speed = next((own[machine] / other[machine] for machine in own if machine in other), None)
            if row.arm in self.speeds:
                speed, source = self.speeds[row.arm], "given"
            place = row.model, row.parameters, row.tokens, row.arm
            found.append(EqualQuality(*place, factor(mean), low, high, speed, source))
        return found

    # Outputs -----------------------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Return the tables as Markdown."""
        header = ("model", "parameters", "tokens", "arm", "seeds", "held-out loss", f"minus {self.baseline}")
        parts = [
            markdown_table((*header, f"training loss minus {self.baseline}", "note"), [_cells(row) for row in self.rows]),
            "± is the 95 % confidence interval by Student's t; differences are taken within seeds. Bold: it excludes 0. "
            "Training losses are moving averages over some 20 steps, on average over the last tenth of the tokens, with the "
            "noise of arms that train with noise.",
        ]
        if self.missing:
            parts.append(f"{self.missing} runs of this ladder are not trained yet.")
        parts += self.problems
        if self.cast_rows:
            titles = ("model", "tokens", "arm", "weights cast to", "seeds", "held-out loss", "minus as trained")
            parts += ["## After casts of the weights", markdown_table((*titles, f"minus {self.baseline}"), self.cast_rows)]
        parts.append("## Scaling law" if self.laws else "")
        fitted = {arm: law for arm, law in self.laws.items() if isinstance(law, Law)}
        laws = [(f"`{arm}`", str(law), str(law.points), f"{law.residual:.4f}") for arm, law in fitted.items()]
        parts.append(markdown_table(("arm", "N parameters, D tokens", "losses", "residual"), laws) if laws else "")
        parts += list(dict.fromkeys(law for law in self.laws.values() if isinstance(law, str)))
        parts.append("## Speed at equal quality")
        if not self.equal_quality:
            parts.append("It needs a law of the tokens: three numbers of tokens of the baseline on one size.")
        else:
            rows = [
                (each.model, count(each.tokens), f"`{each.arm}`", _times(each.factor, each.low, each.high),
                 "" if each.speed is None else f"{each.speed:.3f}" + ("" if each.source == "measured" else f" ({each.source})"),
                 "" if each.at_equal_quality is None else f"{each.at_equal_quality:.3f}")
                for each in self.equal_quality
            ]  # fmt: skip
            columns = (
                "model",
                "tokens",
                "arm",
                "tokens for the baseline's loss",
                "tokens per second",
                "speed at equal quality",
            )
            parts += [markdown_table(columns, rows), f"All three are relative to `{self.baseline}`."]
        machines = sorted(
            {", ".join(f"{k} {printable(str(v))}" for k, v in run.machine.items() if v and k != "plans") for run in self.runs()}
        )
        return "\n\n".join(part for part in (*parts, *machines) if part) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as plain values; the runs are in their own files."""
        laws = {arm: asdict(law) if isinstance(law, Law) else law for arm, law in self.laws.items()}
        halves = [{f"{name}_interval": getattr(row, name) for name in ("loss", "difference", "training")} for row in self.rows]
        rows = [
            {**asdict(row), **{name: value and value.interval for name, value in half.items()}}
            for row, half in zip(self.rows, halves, strict=True)
        ]
        equal = [{**asdict(each), "at_equal_quality": each.at_equal_quality} for each in self.equal_quality]
        for row in equal:  # JSON has no infinity
            row.update({key: None for key, value in row.items() if value == math.inf})
        tables = {"rows": rows, "laws": laws, "equal_quality": equal, "problems": list(self.problems), "missing": self.missing}
        return {"format": "dither-ladder", "version": VERSION, "baseline": self.baseline, **tables}


def count(number: float) -> str:
    """Return a number of parameters or tokens.

    >>> count(1536), count(2_950_272), count(680e6)
    ('1.5 k', '3.0 M', '680 M')
    """
    return f"{number / 1e6:.0f} M" if number >= 1e8 else f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.1f} k"


def _paired(runs: Sequence[Result], base: Sequence[Result], name: str) -> Estimate | None:
    """Return the difference of a number from that of the baseline with the same start; None for the baseline itself."""
    if runs == base:
        return None
    one, two = ({run.start: value for run in some if (value := getattr(run, name)) is not None} for some in (runs, base))
    return estimate([one[start] - two[start] for start in sorted(one.keys() & two.keys())])


def _cells(row: RungRow) -> tuple[str, ...]:
    rung, seeds = (row.model, count(row.parameters), count(row.tokens)), str(row.loss.count if row.loss else 0)
    losses = _interval(row.loss, False), _interval(row.difference, True), _interval(row.training, True)
    return *rung, f"`{row.arm}`", seeds, *losses, row.note


def _interval(value: Estimate | None, sign: bool) -> str:
    """Return a mean with its 95 % confidence interval, in bold if it is a difference that the interval tells from 0."""
    if value is None:
        return ""
    mean, half = f"{value.mean:{'+' if sign else ''}.4f}", value.interval
    text = mean if half is None else f"{mean} ± {half:.4f}"
    return f"**{text}**" if sign and half is not None and abs(value.mean) > half else text


def _times(factor: float, low: float | None, high: float | None) -> str:
    def text(value: float) -> str:
        return "never" if math.isinf(value) else f"{value:.3f}"

    return text(factor) if low is None or high is None else f"{text(factor)} ({text(low)} to {text(high)})"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


# Files and figures --------------------------------------------------------------------------------------------------------


def write_ladder(report: LadderReport, folder: Path) -> list[Path]:
    """Write ladder.md, ladder.json and, if matplotlib is installed, the figures; return the paths."""
    paths = [folder / "ladder.md", folder / "ladder.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(paths[0], report.markdown().encode())
        files.replace(paths[1], files.to_json(report.to_dict(), "ladder.json"))
    except OSError as error:
        raise UserError(f"The report cannot be written into {str(folder)!r}: {files.reason(error, folder)}.") from None
    if report.rows and importlib.util.find_spec("matplotlib") is not None:
        from dither.report.figures import draw_chart, write_drawing

        paths += [write_drawing(draw_chart(chart), folder / f"{name}.svg") for name, chart in charts(report).items()]
    return paths


def charts(report: LadderReport) -> dict[str, LineChart]:
    """Return the charts by their file names: final losses over tokens; differences and training losses by model; speed."""
    models = list(dict.fromkeys(model for _, model, _ in report.rungs))
    lines = []
    for (colour, arm), model in itertools.product(enumerate(report.arms), models):
        sizes, tokens, losses = zip(*report.points(arm, model), strict=True) if report.points(arm, model) else ((), (), ())
        if not sizes:
            continue
        # One entry of the legend for the curves of an arm.
        lines.append(Line(arm if model == models[0] else "", {"tokens": tokens}, losses, colour, marked=True))
        if arm == report.baseline and (law := report.law_of(model)) is not None:
            further = tuple(tokens[0] * (2 * tokens[-1] / tokens[0]) ** (at / 40) for at in range(41))
            fitted = tuple(law.loss(sizes[0], each) for each in further)
            lines.append(Line(f"law of {model}", {"tokens": further}, fitted, colour, "dashed"))
    title = "Final losses, and the baseline's law"
    found = {"losses": LineChart(title, "nats per token", ("tokens",), tuple(lines), log_x=True)}
    for rung in {model: (parameters, model, tokens) for parameters, model, tokens in report.rungs}.values():
        drawn = [line for colour, arm in enumerate(report.arms) for line in _difference(report, arm, rung, colour)]
        title = f"{rung[1]}, {count(rung[2])} tokens: held-out loss minus {report.baseline}"
        chart = LineChart(title, "nats per token", ("tokens",), tuple(drawn))
        found |= {f"differences-{rung[1]}": chart} if drawn else {}
        drawn = [line for colour, arm in enumerate(report.arms) for line in _curve(report, arm, rung, colour)]
        chart = LineChart(f"{rung[1]}, {count(rung[2])} tokens: training loss", "nats per token", ("tokens",), tuple(drawn))
        found |= {f"curves-{rung[1]}": chart} if drawn else {}
        casts = {cast for arm in report.arms for run in report.runs(arm, rung) for cast in run.casts}
        bits = {cast: round(stored_bits(cast), 2) for cast in sorted(casts)}
        steps = [*sorted(set(bits.values())), 16.0]  # evenly spaced, since most are near 4
        drawn = [line for colour, arm in enumerate(report.arms) for line in _over_bits(report, arm, rung, bits, steps, colour)]
        title = f"{rung[1]}, {count(rung[2])} tokens: lowest loss after a cast to at most so many bits"
        ticks = tuple((at, "\n" * (at % 2) + f"{step:g}") for at, step in enumerate(steps))  # so that none overlap
        chart = LineChart(title, "nats per token", (BITS,), tuple(drawn), ticks=ticks)
        found |= {f"bits-{rung[1]}": chart} if drawn else {}
    drawn = [line for colour, arm in enumerate(report.arms) for line in _worth(report, arm, colour)]
    chart = LineChart(f"Speed at equal quality, over {report.baseline}", "", ("parameters",), tuple(drawn), log_x=True)
    return found | ({"equal-quality": chart} if drawn else {})


def _worth(report: LadderReport, arm: str, colour: int) -> list[Line]:
    """Return an arm's speed at equal quality over the sizes, each with its most tokens, with 95 % confidence intervals."""
    found = [each for each in report.equal_quality if each.arm == arm]
    last = {each.parameters: (each.speed, each) for each in found if each.speed is not None}
    rows = [last[parameters] for parameters in sorted(last)]
    low = tuple(speed / each.high for speed, each in rows if each.high is not None)
    high = tuple(speed / each.low for speed, each in rows if each.low is not None)
    low, high = (low, high) if len(low) == len(rows) else ((), ())  # sizes with a single seed have no interval
    x, y = {"parameters": tuple(map(float, sorted(last)))}, tuple(speed / each.factor for speed, each in rows)
    return [Line(arm, x, y, colour, "plain", low, high, marked=True)] if rows else []


def _curve(report: LadderReport, arm: str, rung: tuple[int, str, int], colour: int) -> list[Line]:
    """Return the training losses of an arm, the means of its seeds."""
    losses: dict[int, list[float]] = {}
    for run in report.runs(arm, rung):
        for tokens, loss in run.curve:
            losses.setdefault(tokens, []).append(loss)
    means = tuple(statistics.fmean(values) for _, values in sorted(losses.items()))
    return [Line(arm, {"tokens": tuple(map(float, sorted(losses)))}, means, colour)] if means else []


def _over_bits(
    report: LadderReport, arm: str, rung: tuple[int, str, int], bits: Mapping[str, float], steps: Sequence[float], colour: int
) -> list[Line]:
    """Return an arm's lowest loss with at most so many bits per weight, with 95 % intervals; the last are as trained."""
    runs = [run for run in report.runs(arm, rung) if run.loss is not None and run.casts]
    losses = [(step, [run.casts[cast] for run in runs if cast in run.casts]) for cast, step in bits.items()]
    losses += [(steps[-1], [run.loss for run in runs if run.loss is not None])]
    lowest: dict[float, Estimate] = {}
    for step, values in sorted(losses):
        if (mean := estimate(values)) and mean.mean <= min((each.mean for each in lowest.values()), default=math.inf):
            lowest[float(steps.index(step))] = mean
    if not lowest:
        return []
    y, half = zip(*((mean.mean, mean.interval or 0.0) for mean in lowest.values()), strict=True)
    low, high = (tuple(mean + sign * each for mean, each in zip(y, half, strict=True)) for sign in (-1, 1))
    return [Line(arm, {BITS: tuple(lowest)}, y, colour, "plain", low, high, marked=True)]


def _difference(report: LadderReport, arm: str, rung: tuple[int, str, int], colour: int) -> list[Line]:
    """Return the differences from the baseline during the runs of an arm, with their 95 % confidence intervals."""
    base = {run.start: dict(run.held_out) for run in report.runs(report.baseline, rung)}
    pairs: dict[int, list[float]] = {}
    for run in report.runs(arm, rung):
        for tokens, loss in run.held_out:
            if tokens in base.get(run.start, {}):
                pairs.setdefault(tokens, []).append(loss - base[run.start][tokens])
    most = max(map(len, pairs.values()), default=0)
    means = {tokens: mean for tokens, values in sorted(pairs.items()) if len(values) == most and (mean := estimate(values))}
    banded = most > 1 and arm != report.baseline
    low, high = (
        tuple(mean.mean + sign * (mean.interval or 0.0) for mean in means.values()) if banded else () for sign in (-1, 1)
    )
    x, y = {"tokens": tuple(map(float, means))}, tuple(mean.mean for mean in means.values())
    return [Line(arm, x, y, colour, "plain", low, high)] if means else []
