"""Plots of quality against what a row costs."""

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from hf_freeze.lab.report.plots.point_names import name_points
from hf_freeze.lab.report.plots.style import FRONT, OTHER, SIZE
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import style_of

_MANY = 8  # rows, of which some may be called outliers
_FEW, _BRIEF = 10, 24  # rows, and letters in their names, that have room beside the points; else the legend names them


def cost_figure(report: Report, cost: str) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = [figure.subplots()]
    draw_costs(axes, report, [cost])
    name_rows(axes, report, [cost])
    return figure


def draw_costs(plots: list[Any], report: Report, costs: list[str], signs: dict[str, int] | None = None) -> None:
    """One plot for each of `costs`: a point a row, with bars over seeds. Rows that are far worse than all others lie on the edge,
    or they would press the others together. `signs`: of the rows that stand out, all if not given; the others are grey dots."""
    task = report.task
    edge, signs = _edge(report), report.signs() if signs is None else signs
    for axes, cost in zip(plots, costs, strict=True):
        for row in report.rows:
            (x, y, spread), sign = _point(report, row, cost), signs.get(row["row"])
            if sign is None:
                axes.plot(x, y if edge is None or not _beyond(report, y, edge) else edge, clip_on=False, **OTHER)
                continue
            colour, marker = style_of(sign)
            if _beyond(report, y, edge):
                axes.plot(x, edge, marker, color=colour, markersize=7, fillstyle="none", clip_on=False)
            elif spread is None:  # an error bar takes ten times as long, and rows may be thousands
                axes.plot(x, y, marker, color=colour, markersize=7, alpha=0.85)
            else:
                axes.errorbar(x, y, yerr=spread, fmt=marker, color=colour, markersize=7, capsize=4, alpha=0.85)
        points = [_point(report, row, cost)[:2] for row in report.front(cost)]
        front = [point for point in points if not _beyond(report, point[1], edge)]
        if len(front) > 1:
            axes.step(*zip(*front, strict=True), where="post", **FRONT)
        axes.set_xlabel(task.axes[cost].label)
        set_score_axis(axes, report)
        if edge is not None:
            axes.set_ylim(**{"bottom" if task.higher else "top": edge})
            told = any(row["row"] in signs and _beyond(report, row[task.quality][0], edge) for row in report.rows)
            hint = "hollow: far beyond this edge, at the score in brackets" if told else "on the edge: far worse"
            axes.set_title(hint, fontsize=8, loc="right")
        costs_of_rows = [_point(report, row, cost)[0] for row in report.rows]
        if cost != "share" and 0 < 10 * min(costs_of_rows) < max(costs_of_rows):
            axes.set_xscale("log")  # or the small ones would lie on each other
            digits = (1, 2, 5) if max(costs_of_rows) < 10_000 else (1, 3)  # long numbers need room
            axes.xaxis.set_major_locator(LogLocator(subs=digits))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.margins(x=0.1)
        else:
            axes.set_xlim(0, 1.1 * max(costs_of_rows))
        axes.grid()


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
    if len(report.rows) < _MANY:
        return None
    scale = report.task.scale
    low, _, high = statistics.quantiles([scale(row[report.task.quality][0]) for row in report.rows], method="inclusive")
    sign = 1 if report.task.higher else -1
    edge = (low if sign > 0 else high) - sign * 3 * (high - low)
    edge = math.exp(edge) if scale is math.log else edge
    return edge if any(_beyond(report, row[report.task.quality][0], edge) for row in report.rows) else None


def _beyond(report: Report, score: float, edge: float | None) -> bool:
    return edge is not None and (score < edge if report.task.higher else score > edge)


def _point(report: Report, row: dict[str, Any], cost: str) -> tuple[float, float, float | None]:
    return report.task.axes[cost].unit * row[cost][0], *row[report.task.quality]


def name_rows(plots: list[Any], report: Report, costs: list[str], rows: Collection[str] | None = None) -> None:
    """Write names beside the points where there is room, and the scores of those on the edge in brackets. `rows`: which; all if
    not given."""
    plots[0].figure.draw_without_rendering()  # or it is not known where the points lie
    edge, form = _edge(report), report.task.columns[report.task.quality][2]
    names = {row["row"]: report.name_of(row["row"]) for row in report.rows if rows is None or row["row"] in rows}
    if len(names) > _FEW or max(map(len, names.values())) > _BRIEF:
        names = dict.fromkeys(names, "")
    for axes, cost in zip(plots, costs, strict=True):
        points = []
        for row in [row for row in report.rows if row["row"] in names]:
            x, y, _ = _point(report, row, cost)
            beyond = _beyond(report, y, edge)
            name = f"{names[row['row']]} ({y:{form}})".lstrip() if beyond else names[row["row"]]
            if name:
                points.append((x, edge if beyond else y, name))
        name_points(axes, points)
