"""Colours, signs, sizes and legends that the plots of a report share."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
_LETTERS = 14  # of a legend, in an inch
SIZE = (4.6, 3.3)  # inches, of a plot of the page: its letters stay readable on a telephone
WIDTH = 7.2  # inches, of a picture beside the page: shown 600 pixels wide, its letters are 10 pixels high


def draw_legend(figure: Figure, report: Report, signs: dict[str, int]) -> None:
    named: dict[str, int | None] = {report.name_of(row): sign for row, sign in signs.items()}
    named |= {"other rows of the table": None} if len(signs) < len(report.rows) else {}
    looks = {name: dict(zip(("color", "marker"), style_of(sign), strict=True)) for name, sign in named.items()}
    handles = [Line2D([], [], linestyle="", label=f" {name}", **look) for name, look in looks.items()]
    if any(len(report.front(cost)) > 1 for cost in report.axes):
        handles.append(Line2D([], [], label=" Pareto front: no row is better and costs no more", **FRONT))
    columns = legend_columns(report, signs)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, columnspacing=1)


def legend_columns(report: Report, signs: dict[str, int]) -> int:
    longest = max(len(report.name_of(row)) for row in signs) + 6  # a sign and spaces
    return max(1, min(3, int(_LETTERS * WIDTH / longest)))
