"""Plots of quality against what a row costs."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from hf_freeze.lab.report.plots.names import name_points
from hf_freeze.lab.report.plots.style import FRONT, SIZE
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import style_of

_MANY = 8  # rows, of which some may be called outliers
_FEW, _BRIEF = 10, 24  # rows, and letters in their names, that have room beside the points; else the legend names them


@dataclass(frozen=True)
class Point:
    """A row of a plot. `edge`: it lies far beyond the plot, and is drawn on its edge, or it would press the others together."""

    row: str
    x: float
    y: float
    spread: float | None
    edge: float | None

    @property
    def shown(self) -> float:
        return self.y if self.edge is None else self.edge


def cost_figure(report: Report, cost: str) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    signs = report.signs()
    draw_cost(axes, report, cost, signs)
    name_rows(axes, report, cost, signs)
    return figure


def points_of(report: Report, cost: str) -> list[Point]:
    """The rows that have this cost, of times those of one machine."""
    score, measure, edge = report.measures[report.task.quality], report.measures[cost], _edge(report)
    points = []
    for row in filter(measure.drawn, measure.values):
        y, spread = score.values[row]
        beyond = edge is not None and (y < edge if report.task.higher else y > edge)
        points.append(Point(row, measure.unit * measure.values[row][0], y, spread, edge if beyond else None))
    return points


def draw_cost(axes: Any, report: Report, cost: str, signs: dict[str, int]) -> None:
    """A point a row, with bars over seeds. `signs`: of the rows that stand out; the others are grey dots."""
    points, numbers = {point.row: point for point in points_of(report, cost)}, row_numbers(report)
    for point in points.values():
        colour, marker = style_of(signs.get(point.row))
        look: dict[str, Any] = {"color": colour, "markersize": 7}
        if point.row not in signs:
            drawn = axes.plot(point.x, point.shown, marker, zorder=1, clip_on=False, **look)
        elif point.edge is not None:
            drawn = axes.plot(point.x, point.edge, marker, fillstyle="none", clip_on=False, **look)
        elif point.spread is None:  # an error bar takes ten times as long, and rows may be thousands
            drawn = axes.plot(point.x, point.y, marker, alpha=0.85, **look)
        else:
            drawn = axes.errorbar(
                point.x, point.y, yerr=point.spread, fmt=marker, capsize=4, alpha=0.85, **look
            ).get_children()
        for part, artist in enumerate(drawn):  # the script of the page shows and hides the marks of a row
            artist.set_gid(f"row-{numbers[point.row]}-{part}")
    front = [points[row["row"]] for row in report.front(cost)]
    inside = [(point.x, point.y) for point in front if point.edge is None]
    if len(inside) > 1:
        axes.step(*zip(*inside, strict=True), where="post", **FRONT)
    measure = report.measures[cost]
    axes.set_xlabel(measure.label)
    set_score_axis(axes, report)
    if (edge := _edge(report)) is not None:
        axes.set_ylim(**{"bottom" if report.task.higher else "top": edge})
        told = any(point.edge is not None and point.row in signs for point in points.values())
        hint = "hollow: far beyond this edge, at the score in brackets" if told else "on the edge: far worse"
        axes.set_title(hint, fontsize=8, loc="right")
    _set_cost_axis(axes, [point.x for point in points.values()], logarithmic=cost != "share")
    axes.grid()


def row_numbers(report: Report) -> dict[str, int]:
    """By which the marks of a row are found in the drawings."""
    return {row["row"]: number for number, row in enumerate(report.rows)}


def _set_cost_axis(axes: Any, costs: Sequence[float], *, logarithmic: bool) -> None:
    if not logarithmic or not 0 < 10 * min(costs) < max(costs):
        axes.set_xlim(0, 1.1 * max(costs))
        return
    axes.set_xscale("log")  # or the small ones would lie on each other
    digits = (1, 2, 5) if max(costs) < 10_000 else (1, 3)  # long numbers need room
    axes.xaxis.set_major_locator(LogLocator(subs=digits))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.1)


def set_score_axis(axes: Any, report: Report) -> None:
    axes.set_ylabel(f"{report.task.name} ({'higher' if report.task.higher else 'lower'} is better)")
    if not report.task.higher:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_FewTicks())
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.14)


class _FewTicks(Locator):
    """Of a logarithmic axis of any length: some round numbers, so few that their labels do not overlap."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None, "matplotlib sets it"
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        if vmax < 5 * vmin:
            return MaxNLocator(6).tick_values(vmin, vmax)
        return LogLocator(subs=(1, 2, 5) if vmax < 300 * vmin else (1,)).tick_values(vmin, vmax)


def _edge(report: Report) -> float | None:
    """Beyond which a row is an outlier, on the bad side; None where none is. By the outer fence of the box plot (Tukey, 1977):
    three times the distance of the quartiles from the nearer of them."""
    scores = [row[report.task.quality][0] for row in report.rows]
    if len(scores) < _MANY:
        return None
    scale = report.task.scale
    low, high = np.quantile([scale(score) for score in scores], [0.25, 0.75])
    edge = float(low - 3 * (high - low) if report.task.higher else high + 3 * (high - low))
    edge = math.exp(edge) if scale is math.log else edge
    return edge if (min(scores) < edge if report.task.higher else max(scores) > edge) else None


def name_rows(axes: Any, report: Report, cost: str, rows: Collection[str]) -> None:
    """Write names of `rows` beside their points where there is room, and the scores of those on the edge in brackets."""
    form, numbers = report.task.columns[report.task.quality][2], row_numbers(report)
    names = {row: report.name_of(row) for row in rows}
    if len(names) > _FEW or max(map(len, names.values())) > _BRIEF:
        names = dict.fromkeys(names, "")
    named = []
    for point in points_of(report, cost):
        score = f" ({point.y:{form}})" if point.edge is not None else ""
        if name := f"{names.get(point.row, '')}{score}".strip() if point.row in names else "":
            named.append((point.x, point.shown, name, f"row-{numbers[point.row]}-name"))
    name_points(axes, named)
