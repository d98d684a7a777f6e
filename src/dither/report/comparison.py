"""Compare arms over seeds, with or without a sweep: tables, and sentences that name a winner only if it is significant.

`dither compare` makes a `Comparison` of its run folders; the terminal, the page, the figure and comparison.json show it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dither import files
from dither.errors import UserError
from dither.evaluate.estimates import Estimate, estimate, paired
from dither.report.charts import ABSENT, Group, Line, LineChart, Table, fixed, short, size
from dither.report.run_folder import RunFolder, text_of
from dither.report.run_table import precision_of, summarize

VERSION = 2
"""The version of comparison.json."""

Value = str | float
"""A value of the swept field."""

MOST_NAMED, LONGEST_IN_HEADER = 4, 24
"""Number of runs of an arm that a table names, and of letters of an arm's name in the header of a column."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of a comparison."""

    arm: str
    """The arm as the user wrote it."""
    value: Value | None = None
    """The value of the swept field; None without a sweep."""
    seed: int = 0
    """The seed of the initial weights, by which runs are paired."""
    run: str = ""
    """The name of the run's folder."""
    state: str = "done"
    """State in which the run ended."""
    loss: float | None = None
    """Held-out loss after the last step, in nats per token; None for a run that did not reach it."""
    bits_per_byte: float | None = None
    """The same loss per byte of text, in bits."""
    tokens_per_s: float | None = None
    """Median over the lines of metrics."""
    memory: float | None = None
    """Peak memory in bytes."""
    tokens: float | None = None
    """Number of training tokens."""
    data: str = ""
    """The training text: its SHA-256, or the settings that choose it."""
    evaluation: str = ""
    """The data on which its loss was measured."""

    @classmethod
    def of(cls, run: RunFolder, *, arm: str, seed: int, value: Value | None = None) -> "Entry":
        """Return the entry of a run.

        A run that stopped early has no final loss: its last measured loss belongs to an earlier step.
        """
        found = summarize(run)
        done = found.state == "done"
        return cls(
            arm=arm,
            value=value,
            seed=seed,
            run=run.name,
            state=found.state,
            loss=found.loss if done else None,
            bits_per_byte=found.bits_per_byte if done else None,
            tokens_per_s=found.tokens_per_s,
            memory=found.memory,
            tokens=found.tokens,
            data=text_of(run.environment.get("corpus_sha256")) or _settings(run, "data", "sources", "tokenizer", "kind"),
            evaluation=_settings(run, "data", "held_out", "sequence") + _settings(run, "run", "eval_sequences"),
        )


@dataclass(frozen=True)
class Row:
    """An arm, at one value of a sweep if there is one, over all its seeds."""

    arm: str
    value: Value | None
    loss: Estimate | None
    """Held-out loss; None if a run of the arm did not reach its last step."""
    difference: Estimate | None
    """Difference of the loss to the row it is compared with, paired by seed; None for that row itself."""
    bits_per_byte: float | None
    tokens_per_s: float | None
    memory: float | None
    """Peak bytes of the largest run."""
    state: str
    runs: tuple[str, ...]
    """Names of the runs."""


@dataclass(frozen=True)
class Curve:
    """An arm over the values of a sweep."""

    arm: str
    rows: tuple[Row, ...]
    """One per value, in the order of the sweep; differences are to the row with the lowest mean."""
    lowest: Row | None
    """The row with the lowest mean loss; None if no value has one."""
    tied: tuple[Row, ...]
    """Other rows whose difference to the lowest is not decided."""

    @property
    def at_an_end(self) -> bool:
        """True if the best of several numbers is the smallest or the largest, so that a better one may lie beyond."""
        known = [row.value for row in self.rows if isinstance(row.value, float)]
        return self.lowest is not None and len(known) > 1 and self.lowest.value in (min(known), max(known))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of several arms, each with the same seeds and, in a sweep, the same values of one field.

    >>> from itertools import product
    >>> losses = {("o1", 0): 3.0, ("o1", 1): 3.2, ("bf16-sr", 0): 2.9, ("bf16-sr", 1): 3.1}
    >>> entries = tuple(Entry(arm=arm, seed=seed, loss=losses[arm, seed]) for arm, seed in product(("o1", "bf16-sr"), (0, 1)))
    >>> for row in Comparison(entries=entries).ranking():
    ...     print(row.arm, row.loss.text(), row.difference and row.difference.text(sign=True))
    bf16-sr 3.0000 ± 0.1000 -0.1000 ± 0.0000
    o1 3.1000 ± 0.1000 None
    """

    entries: tuple[Entry, ...]
    field: str | None = None
    """The path of the swept field; None without a sweep."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the arms in the order in which they were named."""
        return tuple(dict.fromkeys(entry.arm for entry in self.entries))

    @property
    def values(self) -> tuple[Value | None, ...]:
        """Return the values of the sweep in order; (None,) without a sweep."""
        return tuple(dict.fromkeys(entry.value for entry in self.entries))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds in order."""
        return tuple(dict.fromkeys(entry.seed for entry in self.entries))

    def runs(self, arm: str, value: Value | None) -> tuple[Entry, ...]:
        """Return the runs of an arm at a value, one per seed; a run that is missing is left out."""
        return tuple(entry for entry in self.entries if entry.arm == arm and entry.value == value)

    def losses(self, arm: str, value: Value | None) -> list[float | None]:
        """Return one loss per seed, None where there is none."""
        known = {entry.seed: entry.loss for entry in self.runs(arm, value)}
        return [known.get(seed) for seed in self.seeds]

    def ranking(self) -> tuple[Row, ...]:
        """Return a row per arm, in a sweep at its lowest loss, the lowest first; differences are to the first arm named.

        Arms without a loss come last.
        """
        best = {curve.arm: curve.rows[0].value if curve.lowest is None else curve.lowest.value for curve in self.curves()}
        base = self.losses(self.arms[0], best[self.arms[0]])
        rows = [self._row(arm, value, None if arm == self.arms[0] else base) for arm, value in best.items()]
        return tuple(sorted(rows, key=_by_loss))

    def curves(self) -> tuple[Curve, ...]:
        """Return each arm over the values of the sweep."""
        return tuple(self._curve(arm) for arm in self.arms)

    def _curve(self, arm: str) -> Curve:
        plain = [self._row(arm, value, None) for value in self.values]
        lowest = min((row for row in plain if row.loss is not None), key=_by_loss, default=None)
        if lowest is None:
            return Curve(arm, tuple(plain), None, ())
        base = self.losses(arm, lowest.value)
        rows = tuple(row if row is lowest else self._row(arm, row.value, base) for row in plain)
        return Curve(arm, rows, lowest, tuple(row for row in rows if row.difference and not row.difference.decided))

    def _row(self, arm: str, value: Value | None, base: Sequence[float | None] | None) -> Row:
        runs, losses = self.runs(arm, value), self.losses(arm, value)
        bits, speed = (estimate([getattr(run, name) for run in runs]) for name in ("bits_per_byte", "tokens_per_s"))
        return Row(
            arm=arm,
            value=value,
            loss=estimate(losses),
            difference=None if base is None else paired(losses, base),
            bits_per_byte=None if bits is None else bits.mean,
            tokens_per_s=None if speed is None else speed.mean,
            memory=max((run.memory for run in runs if run.memory is not None), default=None),
            state=", ".join(dict.fromkeys(run.state for run in runs)) or "not run",
            runs=tuple(run.run for run in runs),
        )

    def sentences(self) -> tuple[str, ...]:
        """Return sentences about the best value of each arm and the best arm, if the differences are significant over seeds."""
        if self.unequal:
            return (
                f"These losses do not compare, and no winner is named: the runs differ in {_listed(self.unequal)}. "
                "`dither compare` trains runs that do.",
            )
        found = [self._about(curve) for curve in self.curves()] if self.field is not None else []
        if len(self.arms) > 1:
            found.append(self._winner())
        if len(self.seeds) == 1 and len(self.entries) > 1:
            found.append("One seed: differences may be chance, and no winner is named. More seeds give standard errors.")
        return tuple(found)

    def _about(self, curve: Curve) -> str:
        if curve.lowest is None or curve.lowest.loss is None:
            return f"{curve.arm}: no value of {self.field} has a loss for every seed."
        lowest, loss = shown(curve.lowest.value), curve.lowest.loss.text()
        if curve.lowest.loss.count == 1:
            said = f"{curve.arm}: lowest held-out loss {loss} at {self.field} = {lowest}"
        elif curve.tied:
            others = _listed([shown(row.value) for row in curve.tied])
            said = f"{curve.arm}: lowest held-out loss {loss} at {self.field} = {lowest}, statistically tied with {others}"
        else:
            said = f"{curve.arm}: best at {self.field} = {lowest}, held-out loss {loss}"
        return said + (f"; {lowest} is an end of the sweep." if curve.at_an_end else ".")

    @property
    def unequal(self) -> tuple[str, ...]:
        """Return what differs between runs so that their losses do not compare."""
        known, found = [entry for entry in self.entries if entry.loss is not None], []
        for name, key in (("training tokens", "tokens"), ("data", "data"), ("evaluation", "evaluation")):
            if len(values := {getattr(entry, key) for entry in known} - {None, ""}) > 1:
                found.append(f"{name} ({_listed(list(map(short, sorted(values))))})" if key == "tokens" else name)
        return tuple(found)

    @property
    def winner(self) -> Row | None:
        """The row of the arm whose differences to all others have 95 % confidence intervals without 0; None if none does."""
        first, behind = self._behind()
        rivals = [difference for _, difference in behind]
        leads = bool(rivals) and all(difference is not None and difference.decided for difference in rivals)
        return first if leads and len(rivals) == len(self.arms) - 1 and not self.unequal else None

    def _behind(self) -> tuple[Row, list[tuple[Row, Estimate | None]]]:
        """Return the arm with the lowest loss, and the others that have one with their differences to it."""
        first, *others = self.ranking()
        base = self.losses(first.arm, first.value)
        return first, [(row, paired(self.losses(row.arm, row.value), base)) for row in others if row.loss is not None]

    def _winner(self) -> str:
        first, behind = self._behind()
        if first.loss is None:
            return "No arm has a loss for every seed."
        if first.loss.count == 1 or not behind:
            return f"Lowest held-out loss: {self._called(first)} with {first.loss.text()}."
        tied = [self._called(row) for row, difference in behind if difference and not difference.decided]
        if tied:
            return (
                f"No winner: {_listed([self._called(first), *tied])} are statistically tied: the 95 % confidence intervals of "
                f"their differences contain 0 (Student's t, {len(self.seeds)} seeds)."
            )
        nearest, difference = min(behind, key=lambda pair: _mean(pair[1]))
        assert difference is not None
        return (
            f"Lowest held-out loss: {self._called(first)} with {first.loss.text()}; {self._called(nearest)} is "
            f"{difference.text()} behind."
        )

    def _called(self, row: Row) -> str:
        return row.arm if row.value is None else f"{row.arm} at {shown(row.value)}"

    # Tables ------------------------------------------------------------------------------------------------------------

    def ranking_table(self) -> Table:
        """Return the ranking as texts; a winner is marked only if it is significant."""
        winner, rows = self.winner, self.ranking()
        texts = tuple(
            (
                row.arm,
                *([shown(row.value)] if self.field else []),
                ABSENT if row.loss is None else row.loss.text(),
                "" if row.difference is None else row.difference.text(sign=True),
                fixed(row.bits_per_byte),
                short(row.tokens_per_s),
                size(row.memory),
                row.state,
                _listed([*row.runs[:MOST_NAMED], *([f"{len(row.runs) - MOST_NAMED} more"] if row.runs[MOST_NAMED:] else [])]),
            )
            for row in rows
        )
        swept = [self.field] if self.field else []
        base = self.arms[0] if len(self.arms[0]) <= LONGEST_IN_HEADER else "the first arm"
        numbers = ("held-out loss", f"difference from {base}", "bits per byte", "tokens/s", "memory")
        columns = ("arm", *swept, *numbers, "how it ended", "runs")
        title = "Each arm at its lowest held-out loss" if self.field else "Held-out loss"
        best = tuple(at for at, row in enumerate(rows) if row == winner)
        title, right = f"{title}{self._seeds}, lowest first", tuple(range(1, len(columns) - 2))
        return Table(title, columns, texts, right, best, self._about_differences)

    def sweep_table(self) -> Table | None:
        """Return the losses at each value of the sweep as texts; None without a sweep."""
        if self.field is None:
            return None
        rows: list[tuple[str, ...]] = []
        best: list[int] = []
        for curve in self.curves():
            alone = len(self.seeds) > 1 and not (self.unequal or curve.tied or None in [row.loss for row in curve.rows])
            for row in curve.rows:
                best += [len(rows)] if alone and row == curve.lowest else []
                loss = ABSENT if row.loss is None else row.loss.text()
                above = "" if row.difference is None else row.difference.text(sign=True)
                rows.append((row.arm, shown(row.value), loss, above, row.state))
        columns = ("arm", self.field, "held-out loss", "above the arm's lowest", "how it ended")
        title = f"Held-out loss by {self.field}{self._seeds}"
        return Table(title, columns, tuple(rows), (1, 2, 3), tuple(best), self._about_differences)

    @property
    def _seeds(self) -> str:
        return f", mean of {len(self.seeds)} seeds ± standard error" if len(self.seeds) > 1 else ""

    @property
    def _about_differences(self) -> str:
        if len(self.seeds) == 1:
            return ""
        return "Differences are taken within each seed, since runs of one seed share weights and data."

    # Charts ------------------------------------------------------------------------------------------------------------

    def groups(self, runs: Sequence[RunFolder]) -> tuple[Group, ...]:
        """Return the runs that are drawn as one curve, an arm at a value each."""
        by_name = {run.name: run for run in runs}
        found: list[Group] = []
        for arm in self.arms:
            for value in self.values:
                if members := {e.seed: by_name[e.run] for e in self.runs(arm, value) if e.run in by_name}:
                    label = arm if value is None else f"{arm}, {self.field} = {shown(value)}"
                    found.append(Group(label, members, len(found)))
        return tuple(found)

    def sweep_chart(self) -> LineChart | None:
        """Return the losses of each arm over the values of the sweep; None without a sweep or without losses."""
        rows = [row for curve in self.curves() for row in curve.rows]
        if self.field is None or not any(row.loss for row in rows):
            return None
        numbers = [value for value in self.values if isinstance(value, float)]
        numeric = len(numbers) == len(self.values)
        places = {value: value if isinstance(value, float) and numeric else float(n) for n, value in enumerate(self.values)}
        lines = []
        for colour, curve in enumerate(self.curves()):
            points = sorted((places[row.value], row.loss) for row in curve.rows if row.loss is not None)
            means = [loss.mean for _, loss in points]
            low, high = (
                tuple(mean + sign * (loss.error or 0.0) for mean, (_, loss) in zip(means, points, strict=True))
                for sign in (-1, 1)
            )
            x = {self.field: tuple(x for x, _ in points)}
            lines += [Line(curve.arm, x, tuple(means), colour, "strong", low, high, marked=True)] if points else []
        seeds = len(self.seeds)
        about = f"the mean loss over {seeds} seeds, bands are ± its standard error" if seeds > 1 else "the loss of one run"
        missing = " Values at which a run did not reach its last step have no point." if None in [r.loss for r in rows] else ""
        return LineChart(
            f"Held-out loss by {self.field}",
            "held-out loss, nats per token",
            (self.field,),
            tuple(lines),
            f"A point is {about}.{missing}",
            log_x=numeric and min(numbers) > 0 and max(numbers) >= 4 * min(numbers),
            ticks=tuple((place, shown(value)) for value, place in places.items()),
        )

    # JSON --------------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; what follows from the entries is included for readers, and not read back."""
        rows = [row for curve in self.curves() for row in curve.rows]
        return {
            "version": VERSION,
            "field": self.field,
            "entries": [asdict(entry) for entry in self.entries],
            "rows": [{**asdict(row), "runs": list(row.runs)} for row in rows],
            "ranking": [{**asdict(row), "runs": list(row.runs)} for row in self.ranking()],
            "sentences": list(self.sentences()),
        }

    @classmethod
    def of_runs(cls, runs: Sequence[RunFolder]) -> "Comparison":
        """Return the comparison of runs: that of comparison.json beside them, or runs that differ only in seeds as one arm.

        The names of arms are their precisions if these differ, and else the names of their first runs.
        """
        parents = {run.folder.resolve().parent for run in runs}
        if len(parents) == 1 and (found := _recorded(next(iter(parents)))) is not None:
            known = {entry.run: entry for entry in found.entries}
            named = [(run, known[run.folder.resolve().name]) for run in runs if run.folder.resolve().name in known]
            if len(named) == len(runs):
                made = (Entry.of(run, arm=entry.arm, seed=entry.seed, value=entry.value) for run, entry in named)
                return cls(entries=tuple(made), field=found.field)
        groups: dict[str, list[RunFolder]] = {}
        for run in runs:
            same = repr(_without_seeds(run.config)) if run.config else f"{run.name} "
            groups.setdefault(same, []).append(run)
        precisions = [precision_of(members[0].config) for members in groups.values()]
        clear = all(precisions) and len(set(precisions)) == len(precisions)
        entries = []
        for members, precision in zip(groups.values(), precisions, strict=True):
            seeds = [_seed(run) for run in members]
            if len(set(seeds)) < len(seeds):  # the same run twice: as if their places were seeds
                seeds = list(range(len(seeds)))
            name = precision if clear else members[0].name
            entries += [Entry.of(run, arm=name, seed=seed) for run, seed in zip(members, seeds, strict=True)]
        return cls(entries=tuple(entries))

    @classmethod
    def from_dict(cls, data: object) -> "Comparison":
        """Return the comparison that `to_dict` wrote.

        >>> made = Comparison(entries=(Entry(arm="o1", loss=2.5),))
        >>> Comparison.from_dict(made.to_dict()) == made
        True
        """
        entries = data.get("entries") if isinstance(data, dict) and data.get("version") == VERSION else None
        known = {each.name for each in fields(Entry)}
        if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) and set(e) == known for e in entries):
            raise UserError(f"This is not a comparison.json of version {VERSION}, as `dither compare` writes it.")
        assert isinstance(data, dict)
        return cls(entries=tuple(Entry(**each) for each in entries), field=data.get("field"))


def shown(value: Value | None) -> str:
    """Return a value of a sweep as text.

    >>> shown(5e-4), shown("wsd"), shown(8.0)
    ('0.0005', 'wsd', '8')
    """
    return "" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _recorded(folder: Path) -> Comparison | None:
    """Return the comparison that `dither compare` wrote into a folder; None if there is none that can be read."""
    path = folder / "comparison.json"
    if not os.path.lexists(path):
        return None
    try:
        return Comparison.from_dict(files.read_json(path)[0])
    except (files.Refused, UserError, TypeError):
        return None


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what differs between seeds of one arm: seeds and the folder."""
    left_out = {"run": ("seed", "out"), "data": ("seed",)}
    return {
        name: {key: value for key, value in section.items() if key not in left_out.get(name, ())}
        if isinstance(section, dict)
        else section
        for name, section in config.items()
    }


def _settings(run: RunFolder, section: str, *keys: str) -> str:
    """Return some settings of a section as text; "" if the run has no such section."""
    found = run.section(section)
    return f"{ {key: found.get(key) for key in keys} } " if found else ""


def _seed(run: RunFolder) -> int:
    seed = run.section("run").get("seed", 0)
    return seed if type(seed) is int else 0


def _by_loss(row: Row) -> float:
    return _mean(row.loss)


def _mean(found: Estimate | None) -> float:
    return float("inf") if found is None else found.mean


def _listed(words: Sequence[str]) -> str:
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"
