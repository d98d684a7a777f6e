"""The sections of a page about one run: what it shows, each part only if the run has it."""

import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dither.report.bitwidth_view import BitwidthView, bitwidth_view
from dither.report.charts import Chart, Line, LineChart, PartChart, Table, plain
from dither.report.maps import PlanHistory, plan_history
from dither.report.numbers import duration, fixed, share, short, size
from dither.report.numerics_view import NumericsView, first_nonfinite, new_problems, numerics_view
from dither.report.run_folder import RunFolder, number
from dither.report.snip_view import SnipView, snip_view, verification_charts
from dither.report.summary import Summary, summarize

MOST_SHOWN = 200
"""Maximum number of samples and of events per run; the last ones are shown."""

LONGEST_SHOWN = 4000
"""Maximum number of characters of a sample."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Contents of a page about one run. Charts are named by their ids; what a run does not have is None or empty."""

    id: str
    run: RunFolder
    summary: Summary
    lead: str
    tiles: tuple[tuple[tuple[str, str], ...], ...]
    """Key figures as (value, label), in rows of nearly equal length."""
    again: str
    """Command that trains the run again."""
    plans: PlanHistory | None
    plan_text: str
    changes: Table | None
    """Layers whose precision differs between the first plan and the plan in force."""
    snip: SnipView | None
    bitwidths: BitwidthView | None
    numerics: NumericsView | None
    nonfinite: str
    samples: tuple[Mapping[str, Any], ...]
    events: Table | None
    command: str
    environment: Table
    layers: Table
    left: Table
    missing: tuple[str, ...]
    charts: Mapping[str, Chart] = field(default_factory=dict)
    snip_charts: tuple[str, ...] = ()
    pipeline: str = ""
    bitwidth_charts: tuple[str, ...] = ()
    numerics_charts: tuple[str, ...] = ()
    part_charts: tuple[str, ...] = ()

    @property
    def contents(self) -> tuple[tuple[str, str], ...]:
        """Return the ids and names of the parts that the page of this run has."""
        parts = (
            ("overview", "Overview", True),
            ("", "Loss and speed", bool(self.run.curve("train", "loss") or self.run.curve("eval", "loss"))),
            ("precision", "Precision", self.plans is not None),
            ("bitwidths", "Bitwidths", self.bitwidths is not None),
            ("numerics", "Numerics", self.numerics is not None or bool(self.nonfinite)),
            ("parts", "Memory and time", bool(self.part_charts)),
            ("text", "Text", bool(self.samples)),
            ("events", "Events", self.events is not None),
            ("setup", "Setup", True),
        )
        return tuple((f"{self.id}-{part}" if part else "loss", name) for part, name, there in parts if there)

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws about the run, with its key figures in full precision."""
        found: dict[str, Any] = {}
        if self.plans is not None:
            found |= {"grid": self.plans.grid, "plans": self.plans.to_dict()}
        if self.snip is not None:
            found["sensitivities"] = self.snip.sensitivities
        if self.bitwidths is not None:
            found["bitwidths"] = self.bitwidths.to_dict()
        if self.numerics is not None:
            found["numerics"] = self.numerics.to_dict()
        return {**asdict(self.summary), **plain(found)}


def section_of(run: RunFolder, at: int = 0) -> Section:
    """Return the contents of a page about a run, which is the `at`-th of the page."""
    name, missing = f"run-{at}", list(run.missing)
    plans, unread = plan_history(run)
    missing += unread
    snip: SnipView | None = None
    if plans is not None:
        snip, unread = snip_view(run, plans)
        missing += unread
    verified, unread = verification_charts(run)
    missing += unread
    bitwidths, numerics = bitwidth_view(run), numerics_view(run)
    charts: dict[str, Chart] = {}
    if snip is not None and snip.frontier is not None:
        charts[f"{name}-frontier"] = snip.frontier
    charts |= {f"{name}-verified-{number}": chart for number, chart in enumerate(verified)}
    snip_charts = tuple(charts)
    if snip is not None and snip.pipeline is not None:
        charts[f"{name}-pipeline"] = snip.pipeline
    bitwidth_charts: dict[str, Chart] = {}
    if bitwidths is not None:
        bitwidth_charts = {f"{name}-spread": spread_chart(bitwidths), f"{name}-histogram": bitwidths.histogram}
    updates: dict[str, Chart] = {}
    if numerics is not None:
        updates = {f"{name}-updates-{number}": chart for number, chart in enumerate(numerics.updates)}
    parts: dict[str, Chart] = {f"{name}-parts-{number}": chart for number, chart in enumerate(part_charts(run))}
    summary = summarize(run)
    return Section(
        id=name,
        run=run,
        summary=summary,
        lead=_lead(run, summary),
        tiles=_tiles(run, summary, plans, bitwidths),
        again=f"dither train {shlex.quote(str(run.folder / 'config.toml'))} --out {shlex.quote(f'{run.folder}-again')}"
        if run.config_text
        else "",
        plans=plans,
        plan_text=_plan_text(plans),
        changes=None if plans is None else _changes(plans),
        snip=snip,
        bitwidths=bitwidths,
        numerics=numerics,
        nonfinite=first_nonfinite(run),
        samples=tuple(
            {"step": line["step"], "prompt": _words(line.get("prompt")), "text": _words(line.get("text"))}
            for line in run.of("sample")[-MOST_SHOWN:]
        ),
        events=_events(run),
        command=_command(run),
        environment=_environment(run),
        layers=_layers(run),
        left=Table("Left as they were", ("module", "why"), tuple((each.name, each.why) for each in run.left)),
        missing=tuple(missing),
        charts={**charts, **bitwidth_charts, **updates, **parts},
        snip_charts=snip_charts,
        pipeline=f"{name}-pipeline" if f"{name}-pipeline" in charts else "",
        bitwidth_charts=tuple(bitwidth_charts),
        numerics_charts=tuple(updates),
        part_charts=tuple(parts),
    )


# Overview ----------------------------------------------------------------------------------------------------------------


def _lead(run: RunFolder, summary: Summary) -> str:
    """Return a line about what was trained, in which precision, and how it ended."""
    model = run.config.get("model")
    model = model if isinstance(model, dict) else {}
    trained = next((model[key] for key in ("preset", "hf") if isinstance(model.get(key), str)), "")
    sources = (run.config.get("data") or {}).get("sources") if isinstance(run.config.get("data"), dict) else None
    words = [each for each in sources if isinstance(each, str)] if isinstance(sources, list) else []
    on = f" on {words[0]}{f' and {len(words) - 1} more' if len(words) > 1 else ''}" if words else ""
    ended = f"{summary.state} after {summary.steps:,} steps"
    parts = (f"{trained}{on}" if trained else on.strip(), summary.precision or "precision not known", ended)
    return _words(" · ".join(part for part in parts if part))


def _tiles(
    run: RunFolder, summary: Summary, plans: PlanHistory | None, bitwidths: BitwidthView | None
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the key figures that the run has, in rows of nearly equal length."""
    precision = None
    if plans is not None:
        work = {layer.name: layer.share for layer in run.layers}
        shares = [work.get(name) for name in plans.grid.names]
        known = [1.0 if each is None else each for each in shares]
        precision = plans.bits(len(plans.states) - 1, known if any(known) else [1.0] * len(known))
    found = (
        (fixed(summary.loss), "held-out loss, nats per token", summary.loss),
        (fixed(summary.bits_per_byte), "bits per byte", summary.bits_per_byte),
        (short(summary.tokens_per_s), "tokens per second, median", summary.tokens_per_s),
        (size(summary.memory), "peak memory", summary.memory),
        (f"{precision or 0.0:.1f} bits", "per operand of a product", precision),
        (f"{0.0 if bitwidths is None else bitwidths.mean:.2f} bits", "learned, per weight", bitwidths),
        (short(summary.parameters), "parameters", summary.parameters),
        (short(summary.tokens), "tokens of training", summary.tokens),
        (duration(summary.seconds), "time", summary.seconds),
    )
    there = [(text, label) for text, label, value in found if value is not None]
    rows = -(-len(there) // 5)
    ends = [round(len(there) * row / rows) for row in range(rows + 1)] if there else [0]
    return tuple(tuple(there[begin:end]) for begin, end in itertools.pairwise(ends))


def _plan_text(plans: PlanHistory | None) -> str:
    if plans is None:
        return ""
    changes = sum(state.changed for state in plans.states[1:])
    if len(plans.states) == 1:
        return "The plan did not change."
    return f"The plan changed {'once' if changes == 1 else f'{changes} times'}; the map shows the plan in force."


def _changes(plans: PlanHistory) -> Table | None:
    """Return the layers whose precision differs between the first and the last plan."""
    first, last = plans.states[0].cells, plans.states[-1].cells
    rows = []
    for at, name in enumerate(plans.grid.names):
        texts = ["/".join(plans.entries[row[at]].text for row in cells) for cells in (first, last)]
        if texts[0] != texts[1]:
            rows.append((name, *texts))
    if not rows:
        return None
    title = f"Difference between the first plan and the plan in force: {len(rows)} of {len(plans.grid.names)} layers"
    return Table(title, ("layer", "input/weight/gradient at first", "in force"), tuple(rows))


# Bitwidths, memory and time ------------------------------------------------------------------------------------------------


def spread_chart(view: BitwidthView) -> LineChart:
    """Return the bitwidths of all layers at the end: mean and deviation, smallest and largest (GaussWS, Figure 6)."""
    order = [at for at, mean in enumerate(view.means[-1]) if mean is not None]
    x = {"layer": tuple(float(n) for n in range(len(order)))}
    means, lows, highs = ([table[-1][at] or 0.0 for at in order] for table in (view.means, view.lows, view.highs))
    deviations = [view.deviations[-1][at] for at in order]
    known = all(each is not None for each in deviations)
    low, high = (
        tuple(mean + sign * (each or 0.0) for mean, each in zip(means, deviations, strict=True)) if known else ()
        for sign in (-1, 1)
    )
    blocks = [view.grid.columns[view.grid.places[at][1]] for at in order]
    ticks = tuple((float(n), block or "other") for n, block in enumerate(blocks) if n == 0 or block != blocks[n - 1])
    lines = (
        Line("mean ± deviation" if known else "mean", x, tuple(means), 0, "strong", low, high, marked=len(order) <= 64),
        Line("largest", x, tuple(highs), 0, "plain"),
        Line("smallest", x, tuple(lows), 0, "dashed"),
    )
    about = f"Blocks of each layer at step {view.steps[-1]:,}; layers in the order of the model, labelled by their block."
    return LineChart("Bitwidths of all layers", "bits", ("layer",), lines, about, ticks=ticks)


def part_charts(run: RunFolder) -> tuple[PartChart, ...]:
    """Return the memory and the time of a run by part, as far as they are recorded."""
    found = []
    lines = run.of("memory")
    if lines and (parts := _parts(lines[-1].get("parts"))):
        peak = summarize(run).memory
        about = "Between steps, on one rank." + ("" if peak is None else " The rest up to the peak: activations and workspace.")
        rest = 0.0 if peak is None else peak - sum(parts.values())
        parts |= {"activations, workspace": rest} if rest > 0 else {}
        found.append(PartChart("Memory by part", tuple((name, value, size(value)) for name, value in parts.items()), about))
    times: dict[str, float] = {}
    for line in run.of("seconds"):
        for name, value in _parts(line.get("parts")).items():
            times[name] = times.get(name, 0.0) + value
    if times:
        rows = tuple((name, value, duration(value)) for name, value in sorted(times.items(), key=lambda each: -each[1]))
        about = (
            "Forward, backward and optimizer are those of all steps, with compilation; on a GPU they are the times on its "
            "stream. The rest of training has data and launches. Steps done again after a resume count twice."
        )
        found.append(PartChart("Time by part", rows, about))
    return tuple(found)


def _parts(value: object) -> dict[str, float]:
    known = {name: number(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {name: each for name, each in known.items() if each is not None and each > 0}


# Events and setup ------------------------------------------------------------------------------------------------------------


def _events(run: RunFolder) -> Table | None:
    """Return events in the order of steps: messages of the guard, plans, resumes, new problems, and how the run ended."""
    found = []
    for line in run.of("guard"):
        found.append((line["step"], _words(line.get("event")) or "guard", _words(line.get("text"))))
    for line in run.of("plan"):
        if line["step"] > 0:
            found.append((line["step"], "plan", _words(line.get("reason"))))
    for line in run.of("start"):
        if line.get("resumed_from") is not None:
            found.append((line["step"], "resumed", f"from the checkpoint of step {_words(line['resumed_from'])}"))
    found += [(step, "numerics", _words(text)) for step, text in new_problems(run)]
    found.sort(key=lambda event: event[0])
    if run.status.get("why"):
        found.append((run.steps, run.state, _words(run.status["why"])))
    rows = tuple((f"{step:,}", kind, text) for step, kind, text in found[-MOST_SHOWN:])
    return Table("Events", ("step", "event", "details"), rows, (0,)) if rows else None


def _command(run: RunFolder) -> str:
    command = run.environment.get("command")
    return shlex.join([word for word in command if isinstance(word, str)] if isinstance(command, list) else [])


def _environment(run: RunFolder) -> Table:
    rows = tuple((str(key), _words(value)) for key, value in run.environment.items() if key != "command")
    return Table("Machine and versions", ("", ""), rows)


def _layers(run: RunFolder) -> Table:
    rows = tuple(
        (each.name, each.precision, each.engine, "" if each.share is None else share(each.share)) for each in run.layers
    )
    return Table("Layer by layer", ("layer", "precision at first", "computed by", "share of work"), rows, (3,))


def _words(value: object) -> str:
    """Return a value from a file as text of bounded length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ... ({len(text):,} characters)"
