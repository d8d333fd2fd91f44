"""Colours, signs, sizes and legends that the plots of a report share."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hf_freeze.lab.report.finished_runs import Source
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import style_of

# Ink that the page replaces by its own text colour, so that plots follow a dark theme.
INK = "#010203"

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label may hold a $
    "font.size": 9,
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color"], INK
    ),
    "grid.alpha": 0.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

FRONT: dict[str, Any] = {"color": "#7f7f7f", "linewidth": 1, "linestyle": "--", "zorder": 0}
OTHER: dict[str, Any] = {"color": "#9a9a9a", "marker": ".", "markersize": 7, "linestyle": "", "zorder": 1}
_LETTERS = 14  # of a legend, in an inch
SIZE = (4.6, 3.3)  # inches, of a plot of the page: its letters stay readable on a telephone


def named(report: Report) -> dict[int, str]:
    """The number of each sign, and what it stands for: a row, or where the rows are many, a series of them."""
    signs, series = report.signs(), report.series()
    rows = [row["row"] for row in report.rows]
    if len(set(signs.values())) == len(rows):
        return {signs[name]: report.name_of(name) for name in rows}
    if not series:  # the rows of a grid have one sign
        return {number: _grid_name(source) for number, source in enumerate(report.sources)}
    names = {signs[one_series.rows[0]["row"]]: one_series.name for one_series in series}
    return names | {signs[name]: report.name_of(name) for name in rows if signs[name] not in names}


def _grid_name(source: Source) -> str:
    return f"{source.letter}: {', '.join(source.recipes)}" if source.letter else "all rows"


def draw_legend(figure: Figure, names: dict[int, str], report: Report, *, others: bool = False) -> None:
    """`names`: of signs. `others`: whether rows without one are drawn."""
    handles = [
        Line2D([], [], color=style_of(i)[0], marker=style_of(i)[1], linestyle="", label=f" {name}")
        for i, name in names.items()
    ]
    handles += [Line2D([], [], label=" other rows of the table", **OTHER)] * others
    if any(len(report.front(cost)) > 1 for cost in report.axes):
        handles.append(Line2D([], [], label=" Pareto front: no row is better and costs no more", **FRONT))
    columns = legend_columns(names, figure.get_figwidth())
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, columnspacing=1)


def legend_columns(names: dict[int, str], inches: float) -> int:
    longest = max(map(len, names.values())) + 6  # a sign and spaces
    return max(1, min(3, int(_LETTERS * inches / longest)))
