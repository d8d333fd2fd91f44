"""The picture that a report begins with, and how figures become files and drawings of its page."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from hf_freeze.io import write_whole
from hf_freeze.lab.report.plots.costs import draw_cost, name_rows
from hf_freeze.lab.report.plots.setting import draw_setting
from hf_freeze.lab.report.plots.style import INK, STYLE, WIDTH, draw_legend, legend_columns
from hf_freeze.lab.report.report import FEW, Report


def draw(report: Report, path: Path) -> None:
    """Quality against each cost, such as the share of parameters that is trained and what is stored, side by side."""
    with mpl.rc_context(STYLE):
        costs, series, signs = list(report.axes), report.series(), report.signs(FEW)
        lines = len(signs) / legend_columns(report, signs)
        figure = Figure(figsize=(WIDTH, 3.6 + 3.2 * bool(series) + 0.2 * lines), layout="constrained")
        layout: list[Any] = [["setting"] * len(costs)] * bool(series) + [costs]
        plots = figure.subplot_mosaic(layout)
        if series:
            draw_setting(plots["setting"], report)
        for number, cost in enumerate(costs):
            draw_cost(plots[cost], report, cost, signs)
            if number:
                plots[cost].set_ylabel("")
        draw_legend(figure, report, signs)
        for cost in costs:
            name_rows(plots[cost], report, cost, signs)
        save_png(figure, path)


def save_png(figure: Figure, path: Path) -> None:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, facecolor="white")
    write_whole(path, file.getvalue())


def svg(figure: Figure, name: str) -> str:
    """Inline SVG, transparent, in the colours of the page; its ids are its own among the plots of a page."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>plot-{name}-", text)
    return text.replace(INK, "currentColor")
