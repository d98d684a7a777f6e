"""Write the tables and figures of `dither ladder`: Markdown, JSON, and SVG if matplotlib is installed."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from dither import safe_files
from dither.errors import UserError
from dither.evaluate.ladder import LadderReport, count
from dither.report.charts import PALETTE
from dither.report.estimates import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_ladder(report: LadderReport, folder: Path) -> list[Path]:
    """Write ladder.md, ladder.json and, if matplotlib is installed, losses.svg and differences.svg; return the paths."""
    paths = [folder / "ladder.md", folder / "ladder.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        safe_files.replace(paths[0], report.markdown().encode())
        safe_files.replace(paths[1], safe_files.to_json(report.to_dict(), "ladder.json"))
    except OSError as error:
        raise UserError(f"The report cannot be written into {str(folder)!r}: {safe_files.reason(error, folder)}.") from None
    if not report.rows or importlib.util.find_spec("matplotlib") is None:
        return paths
    from dither.report.plots import write_drawing

    for name, draw in (("losses", draw_losses), ("differences", draw_differences)):
        paths.append(folder / f"{name}.svg")
        write_drawing(lambda figure, draw=draw: draw(report, figure), paths[-1], name, "svg")  # type: ignore[misc]
    return paths


def draw_losses(report: LadderReport, figure: "Figure") -> None:
    """Draw final losses over tokens, a curve for each model and arm, and the baseline's law."""
    axes = figure.add_subplot()
    models = list(dict.fromkeys(model for _, model, _ in report.rungs))
    for arm, colour in _colours(report).items():
        for model in models:
            points = report.points(arm, model)
            tokens, losses = [point[1] for point in points], [point[2] for point in points]
            axes.plot(
                tokens, losses, "o-", color=colour, markersize=3, linewidth=0.8, label=arm if model == models[0] else None
            )
            if arm == report.baseline and points and (law := report.law_of(model)) is not None:
                further = [tokens[0] * (2 * tokens[-1] / tokens[0]) ** (at / 40) for at in range(41)]
                fitted = [law.loss(points[0][0], each) for each in further]
                axes.plot(further, fitted, "--", color=colour, linewidth=0.8)
                axes.annotate(model, (further[-1], fitted[-1]), fontsize=7)
    axes.set(
        xscale="log", xlabel="tokens", ylabel="held-out loss, nats per token", title="Final losses, and the baseline's law"
    )
    axes.legend()


def draw_differences(report: LadderReport, figure: "Figure") -> None:
    """Draw held-out losses minus those of the baseline during each model's longest runs, with 95 % confidence bands."""
    longest = {model: (parameters, model, tokens) for parameters, model, tokens in report.rungs}
    figure.set_size_inches(3.6 * len(longest) + 1.6, 3.2)
    panels = figure.subplots(1, len(longest), squeeze=False)[0]
    for axes, rung in zip(panels, longest.values(), strict=True):
        for arm, colour in _colours(report).items():
            _draw_difference(report, axes, arm, rung, colour)
        axes.set(title=f"{rung[1]}, {count(rung[2])} tokens", xlabel="tokens")
    panels[0].set_ylabel(f"held-out loss minus {report.baseline}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")


def _draw_difference(report: LadderReport, axes: "Axes", arm: str, rung: tuple[int, str, int], colour: str) -> None:
    base = {run.seed: dict(run.held_out) for run in report.runs(report.baseline, rung)}
    pairs: dict[int, list[float]] = {}
    for run in report.runs(arm, rung):
        for tokens, loss in run.held_out:
            if tokens in base.get(run.seed, {}):
                pairs.setdefault(tokens, []).append(loss - base[run.seed][tokens])
    most = max(map(len, pairs.values()), default=0)
    means = {tokens: mean for tokens, values in sorted(pairs.items()) if len(values) == most and (mean := estimate(values))}
    axes.plot(list(means), [mean.mean for mean in means.values()], color=colour, linewidth=1.1, label=arm)
    if most > 1 and arm != report.baseline:
        low = [mean.mean - (mean.interval or 0.0) for mean in means.values()]
        high = [mean.mean + (mean.interval or 0.0) for mean in means.values()]
        axes.fill_between(list(means), low, high, color=colour, alpha=0.12, linewidth=0)


def _colours(report: LadderReport) -> dict[str, str]:
    return {arm: PALETTE[number % len(PALETTE)] for number, arm in enumerate(report.arms)}
