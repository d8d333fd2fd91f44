"""Plots of quality against one setting of a method."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from hf_freeze.lab.report.plots.costs import set_score_axis
from hf_freeze.lab.report.plots.style import SIZE
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import style_of

_SETTINGS = {"heads.fraction": "fraction of heads removed", "layer_selection.share": "share of layers kept"}


def setting_in_words(report: Report) -> str:
    """Such as "rank of factorized embedding"; empty where no setting is drawn."""
    name, _, setting = (report.setting or "").partition(".")
    words = f"{setting} of {name}".replace("_", " ") if setting else ""
    return _SETTINGS.get(report.setting or "", words)


def setting_figure(report: Report) -> Figure | None:
    if not report.series():
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    draw_setting(figure.subplots(), report)
    return figure


def draw_setting(axes: Any, report: Report) -> None:
    """The score against the setting that the recipe names: a line for each series, dashed where the method is left out."""
    values = set()
    for index, series in enumerate(report.series()):
        colour, marker = style_of(index)
        for row in series.without:
            axes.axhline(row[report.task.quality][0], color=colour, linestyle="--", linewidth=1, label=row["label"])
        if series.points:
            x, scores = zip(*((value, row[report.task.quality]) for value, row in series.points), strict=True)
            means, spreads = zip(*scores, strict=True)
            bars = [spread or 0 for spread in spreads] if any(spreads) else None
            axes.errorbar(x, means, yerr=bars, color=colour, marker=marker, markersize=6, capsize=4, label=series.name)
            values |= set(x)
    axes.set_xlabel(setting_in_words(report))
    set_score_axis(axes, report)
    shares = max(values, default=1) <= 1
    if not shares and min(values) > 0 and max(values) >= 4 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if not shares:
        axes.set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)])
    axes.grid()
    axes.legend(
        fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1)
    )  # above the lines, of which it may hide none
