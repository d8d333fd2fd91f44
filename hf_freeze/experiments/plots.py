"""The plots of a report: quality against cost, learning curves, parameters by component."""

import functools
import io
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from hf_freeze.experiments.results import Source
from hf_freeze.io import write_whole

if TYPE_CHECKING:
    from hf_freeze.experiments.report import Report

# Ink that the page replaces by its own text colour, so that plots follow a dark theme.
_INK = "#010203"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label may hold a $
    "font.size": 9,
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color"], _INK
    ),
    "grid.alpha": 0.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_COLOURS = (
    "#1f77b4",
    "#e8710a",
    "#2a9d4a",
    "#d62728",
    "#9467bd",
    "#a9745b",
    "#e377c2",
    "#7f7f7f",
    "#a8a410",
    "#17a5b8",
)
MARKERS = dict(zip("os^Dv<>Ph*X", "●■▲◆▼◀▶✚⬢★✖", strict=True))  # matplotlib's, and the signs like them
SIGNS = len(_COLOURS) * len(MARKERS)  # as many rows can be told apart
_COMPONENTS = ("embeddings", "attention", "ffn", "norm", "head")
# Where the name of a point may be written, in points from it, best first.
_SPOTS = [
    (d * x, d * y)
    for d in (8, 14, 22, 30, 40, 52, 66)
    for x, y in ((1, 0.5), (-1, 0.5), (1, -0.9), (-1, -0.9), (0, 1), (0, -1.2), (0.6, 1.4), (-0.6, 1.4))
]
_NEAR = 18  # points: from a name so near, no line to its point is needed
_MANY = 8  # rows, of which some may be called outliers
_FRONT: dict[str, Any] = {"color": "#7f7f7f", "linewidth": 1, "linestyle": "--", "zorder": 0}
_LETTERS = 14  # of a legend, in an inch
_SIZE = (4.6, 3.3)  # inches, of a plot of the page: its letters stay readable on a telephone


def draw(report: "Report", path: Path) -> None:
    """Quality against each cost, such as the share of parameters that is trained and what is stored, side by side."""
    with mpl.rc_context(_STYLE):
        costs = list(report.axes)
        series = report.series()
        width = 10 + 4 * bool(series)
        lines = len(named(report)) / _legend_columns(report, width)
        figure = Figure(figsize=(width, 4.6 + 0.2 * lines), layout="constrained")
        axes = list(figure.subplots(1, len(costs) + bool(series), squeeze=False)[0])
        if series:
            _draw_setting(axes.pop(), report)
        _quality(axes, report, costs)
        _legend(figure, report)
        _name_rows(axes, report, costs)
        _save(figure, path)


def draw_extra(report: "Report", out: Path) -> None:
    """`heads.png`, the heat-maps of the run whose heads were measured, and `schedules.png`, where there are such."""
    with mpl.rc_context(_STYLE):
        for name, plot in (("heads", _heads), ("schedules", _schedules)):
            if (figure := plot(report)) is not None:
                _save(figure, out / report.picture(name))


def _save(figure: Figure, path: Path) -> None:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, facecolor="white")
    write_whole(path, file.getvalue())


def svg_plots(report: "Report") -> dict[str, str]:
    """Name of each plot that the runs have data for, and its SVG."""
    before = f"{report.number}-" if report.number > 1 else ""
    plots: dict[str, Callable[[Report], Figure | None]] = {
        **{cost: functools.partial(_quality_figure, cost=cost) for cost in report.axes},
        "setting": _setting,
        "heads": _heads,
        "schedules": _schedules,
        "curves": _curves,
        "components": _components,
    }
    found = {}
    with mpl.rc_context(_STYLE):
        for name, plot in plots.items():
            if (figure := plot(report)) is not None:
                found[name] = _svg(figure, before + name)
    return found


def _svg(figure: Figure, name: str) -> str:
    """Inline SVG, transparent, in the colours of the page; its ids are its own among the plots of a page."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>plot-{name}-", text)
    return text.replace(_INK, "currentColor")


def style_of(index: int) -> tuple[str, str]:
    """Colour and marker of a row."""
    return _COLOURS[index % len(_COLOURS)], list(MARKERS)[index % len(MARKERS)]


def named(report: "Report") -> dict[int, str]:
    """The number of each sign, and what it stands for: a row, or where the rows are many, a series of them."""
    signs, series = report.signs(), report.series()
    rows = [row["row"] for row in report.rows]
    if len(set(signs.values())) == len(rows):
        return {signs[row["row"]]: f"{row['row']}: {row['label']}" for row in report.rows}
    if not series:  # the rows of a grid have one sign
        return {number: _grid_name(source) for number, source in enumerate(report.sources)}
    names = {signs[each.rows[0]["row"]]: each.name for each in series}
    return names | {signs[name]: name for name in rows if signs[name] not in names}


def _grid_name(source: Source) -> str:
    return f"{source.letter}: {', '.join(source.recipes)}" if source.letter else "all rows"


def _legend(figure: Figure, report: "Report") -> None:
    handles = [
        Line2D([], [], color=style_of(i)[0], marker=style_of(i)[1], linestyle="", label=f" {name}")
        for i, name in named(report).items()
    ]
    if any(len(report.front(cost)) > 1 for cost in report.axes):
        handles.append(Line2D([], [], label=" Pareto front: no row is better and costs no more", **_FRONT))
    columns = _legend_columns(report, figure.get_figwidth())
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, columnspacing=1)


def _legend_columns(report: "Report", inches: float) -> int:
    longest = max(map(len, named(report).values())) + 6  # a sign and spaces
    return max(1, min(3, int(_LETTERS * inches / longest)))


def _quality_figure(report: "Report", cost: str) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = [figure.subplots()]
    _quality(axes, report, [cost])
    _name_rows(axes, report, [cost])
    return figure


def _quality(plots: list[Any], report: "Report", costs: list[str]) -> None:
    """One plot for each of `costs`: a point a row, with bars over seeds. Rows that are far worse than all
    others lie on the edge, or they would press the others together."""
    task = report.task
    edge, signs = _edge(report), report.signs()
    for axes, cost in zip(plots, costs, strict=True):
        for row in report.rows:
            (x, y, spread), (colour, marker) = _point(report, row, cost), style_of(signs[row["row"]])
            if _beyond(report, y, edge):
                axes.plot(x, edge, marker, color=colour, markersize=7, fillstyle="none", clip_on=False)
            elif spread is None:  # an error bar takes ten times as long, and rows may be thousands
                axes.plot(x, y, marker, color=colour, markersize=7, alpha=0.85)
            else:
                axes.errorbar(x, y, yerr=spread, fmt=marker, color=colour, markersize=7, capsize=4, alpha=0.85)
        points = [_point(report, row, cost)[:2] for row in report.front(cost)]
        front = [point for point in points if not _beyond(report, point[1], edge)]
        if len(front) > 1:
            axes.step(*zip(*front, strict=True), where="post", **_FRONT)
        axes.set_xlabel(task.axes[cost].label)
        _score_axis(axes, report)
        if edge is not None:
            axes.set_ylim(**{"bottom" if task.higher else "top": edge})
            axes.set_title("hollow: far beyond this edge, at the score in brackets", fontsize=8, loc="right")
        costs_of_rows = [_point(report, row, cost)[0] for row in report.rows]
        if cost != "share" and 0 < 10 * min(costs_of_rows) < max(costs_of_rows):
            axes.set_xscale("log")  # or the small ones would lie on each other
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.margins(x=0.1)
        else:
            axes.set_xlim(0, 1.1 * max(costs_of_rows))
        axes.grid()


def _score_axis(axes: Any, report: "Report") -> None:
    axes.set_ylabel(f"{report.task.name} ({'higher' if report.task.higher else 'lower'} is better)")
    if not report.task.higher:
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(ScalarFormatter())
    axes.margins(y=0.14)


def _setting(report: "Report") -> Figure | None:
    if not report.series():
        return None
    figure = Figure(figsize=_SIZE, layout="constrained")
    _draw_setting(figure.subplots(), report)
    return figure


def _draw_setting(axes: Any, report: "Report") -> None:
    """The score against the setting that the recipe names: a line for each series, dashed where the method is left out."""
    values, crowded = set(), len(named(report)) < len(report.rows)
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
    axes.set_xlabel(report.setting)
    _score_axis(axes, report)
    shares = max(values, default=1) <= 1
    if not shares and min(values) > 0 and max(values) >= 4 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if not shares:
        axes.set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)])
    axes.grid()
    if not crowded:  # else the legend of all plots names them
        axes.legend(fontsize=8)


def _heads(report: "Report") -> Figure | None:
    """A heat-map a score: an attention a line, a head a cell, with its number. Dark: more is lost without it, or, of one head
    alone, with it."""
    if report.measured is None:
        return None
    found = report.measured.head_scores
    most = max(len(values) for scores in found.values() for values in scores.values())
    lines = max(map(len, found.values()))
    figure = Figure(figsize=(2 + len(found) * (0.5 + 0.42 * most), 0.9 + 0.26 * lines), layout="constrained")
    plots = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, (name, scores) in zip(plots, found.items(), strict=True):
        cells = np.full((len(scores), most), np.nan)  # an attention may have fewer heads
        for line, values in enumerate(scores.values()):
            cells[line, : len(values)] = values
        low, high = min(0.0, float(np.nanmin(cells))), float(np.nanmax(cells))
        axes.imshow(cells, cmap="Blues", vmin=low, vmax=high, aspect="auto")
        for (line, head), value in np.ndenumerate(cells):
            if not np.isnan(value):
                dark = value > (low + high) / 2
                axes.text(
                    head,
                    line,
                    _short(value),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "#222222",
                )
        axes.set_xticks(range(most))
        axes.set_yticks(range(len(scores)), list(scores))
        axes.set(title=name.replace("_", " "), xlabel="head")
        axes.spines[:].set_visible(False)
    return figure


def _schedules(report: "Report") -> Figure | None:
    """What methods scheduled in training, a line for each row that does so: the first run of it."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    signs, drawn = report.signs(), set()
    for run in report.runs:
        for what, points in run.schedules().items() if run.row not in drawn else ():
            drawn.add(run.row)
            colour, label = style_of(signs[run.row])[0], f"{run.row}: {what}"
            axes.plot(*zip(*points, strict=True), color=colour, drawstyle="steps-post", label=label)
    if not drawn:
        return None
    axes.set(xlabel="share of training", ylabel="value", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.grid()
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, columnspacing=1)
    return figure


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def _edge(report: "Report") -> float | None:
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


def _beyond(report: "Report", score: float, edge: float | None) -> bool:
    return edge is not None and (score < edge if report.task.higher else score > edge)


def _point(report: "Report", row: dict[str, Any], cost: str) -> tuple[float, float, float | None]:
    return report.task.axes[cost].unit * row[cost][0], *row[report.task.quality]


def _name_rows(plots: list[Any], report: "Report", costs: list[str]) -> None:
    plots[0].figure.draw_without_rendering()  # or it is not known where the points lie
    edge, form = _edge(report), report.task.columns[report.task.quality][2]
    crowded = len(named(report)) < len(report.rows)
    for axes, cost in zip(plots, costs, strict=True):
        points = []
        front = report.front(cost)
        for row in (row for row in report.rows if not crowded or row in front):
            x, y, _ = _point(report, row, cost)
            beyond = _beyond(report, y, edge)
            points.append((x, edge if beyond else y, f"{row['row']} ({y:{form}})" if beyond else row["row"]))
        _name_points(axes, points)


def _name_points(axes: Any, points: list[tuple[float, float, str]]) -> None:
    """Write each name beside its point, where it covers no other point and no other name, if there is such a place; with a line
    to the point where that is not near."""
    marks = [tuple(axes.transData.transform(point[:2])) for point in points]
    whole = axes.figure.bbox
    taken: list[Any] = []
    for (x, y, name), mark in zip(points, marks, strict=True):
        text = axes.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", va="center")

        def box(spot: tuple[float, float], text: Any = text) -> Any:
            text.xyann = spot
            text.set_ha("left" if spot[0] > 0 else "right" if spot[0] < 0 else "center")
            return text.get_window_extent().padded(1)

        def covers(spot: tuple[float, float], box: Any = box, mark: Any = mark) -> int:
            place = box(spot)
            near = place.padded(5)  # a mark is as wide
            outside = (
                place.x0 < axes.bbox.x0 or place.x1 > whole.x1 or place.y0 < axes.bbox.y0 or place.y1 > axes.bbox.y1
            )
            return (
                sum(near.contains(*other) for other in marks if other != mark)
                + 2 * sum(map(place.overlaps, taken))
                + 3 * outside
            )

        # The first that covers nothing, or the best: most names need few looks.
        spot = next((spot for spot in _SPOTS if not covers(spot)), None) or min(_SPOTS, key=covers)
        taken.append(box(spot))
        if max(map(abs, spot)) > _NEAR:
            line = {
                "arrowstyle": "-",
                "linewidth": 0.4,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (float(spot[0] < 0), float(spot[1] < 0)),
            }
            axes.annotate(
                name, (x, y), xytext=spot, textcoords="offset points", ha=text.get_ha(), va="center", arrowprops=line
            )
            text.remove()


def _curves(report: "Report") -> Figure | None:
    """Dev loss after each epoch, a line a run; train loss faint behind it, or alone."""
    if not any(run.log for run in report.runs) or len(report.rows) > SIGNS:
        return None
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    signs = report.signs()
    highest, faint = 0.0, 0.25 if has_dev(report) else 0.7
    for run in report.runs:
        colour, marker = style_of(signs[run.row])
        train = [(entry["epoch"], entry["loss"]) for entry in run.log if "loss" in entry]
        # The last evaluation of an epoch may be of the best model, after training; the first is of that epoch.
        dev = {entry["epoch"]: entry["eval_loss"] for entry in reversed(run.log) if "eval_loss" in entry}
        if train:
            axes.plot(*zip(*train, strict=True), color=colour, alpha=faint, linewidth=0.7)
        if dev:
            epochs = sorted(dev)
            losses = [dev[epoch] for epoch in epochs]
            axes.plot(epochs, losses, color=colour, marker=marker, markersize=3.5, linewidth=1.2)
            highest = max(highest, *losses, losses[0])
    axes.set(xlabel="epoch", ylabel="loss (lower is better)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    if highest:
        axes.set_ylim(top=1.1 * highest)  # the first steps in training would press all that follows together
    axes.grid()
    return figure


def has_dev(report: "Report") -> bool:
    """Whether any run was evaluated while it trained."""
    return any("eval_loss" in entry for run in report.runs for entry in run.log)


def _components(report: "Report") -> Figure | None:
    """A bar a row: parameters of each component, by whether they are trained, stored frozen, or made again from a seed."""
    first: dict[str, dict[str, Any]] = {}
    for run in report.runs:
        if components := run.record["parameters"].get("by_component"):
            first.setdefault(run.row, components)
    if not first or len(first) > SIGNS:
        return None
    names = list(dict.fromkeys([*_COMPONENTS, *(name for parts in first.values() for name in parts)]))
    names = [name for name in names if any(parts.get(name, {}).get("total") for parts in first.values())]
    figure = Figure(figsize=(_SIZE[0], 1.5 + 0.28 * len(first)), layout="constrained")
    axes = figure.subplots()
    states = {"trained": 1.0, "frozen, stored": 0.4, "frozen, from a seed": 0.0}
    for y, parts in enumerate(first.values()):
        left = 0.0
        for name in names:
            part = parts.get(name, {"total": 0, "trainable": 0, "stored": 0})
            amounts = (part["trainable"], part["stored"] - part["trainable"], part["total"] - part["stored"])
            for amount, alpha in zip(amounts, states.values(), strict=True):
                if amount:
                    axes.barh(y, amount / 1e6, left=left, height=0.7, **_look(_COLOURS[names.index(name)], alpha))
                    left += amount / 1e6
    axes.set_yticks(range(len(first)), [f"row {row}" for row in first])
    axes.invert_yaxis()
    axes.set_xlabel("parameters, millions")
    axes.grid(axis="x")
    handles = [Patch(facecolor=_COLOURS[i], label=name) for i, name in enumerate(names)]
    handles += [Patch(label=state, **_look("#7f7f7f", alpha)) for state, alpha in states.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, columnspacing=1)
    return figure


def _look(colour: str, alpha: float) -> dict[str, Any]:
    face = to_rgba(colour, alpha) if alpha else "none"
    return {"facecolor": face, "edgecolor": colour, "linewidth": 0.6, "hatch": None if alpha else "///"}
