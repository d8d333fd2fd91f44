"""The plots of a report as files and as SVG for its page."""

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from hf_freeze.io import write_whole
from hf_freeze.lab.report.plots.components import components_figure
from hf_freeze.lab.report.plots.costs import cost_figure, draw_costs, name_rows
from hf_freeze.lab.report.plots.heat_maps import heads_figure
from hf_freeze.lab.report.plots.maps import attention_of_rows, embeddings_of_rows
from hf_freeze.lab.report.plots.setting import draw_setting, setting_figure
from hf_freeze.lab.report.plots.style import INK, STYLE, draw_legend, legend_columns, named
from hf_freeze.lab.report.plots.training import curves_figure, schedules_figure
from hf_freeze.lab.report.report import Report

FEW = 7  # rows that a picture can name and a reader can tell apart
WIDTH = 7.2  # inches: shown 600 pixels wide, its letters are 10 pixels high


def draw(report: Report, path: Path) -> None:
    """Quality against each cost, such as the share of parameters that is trained and what is stored, side by side."""
    with mpl.rc_context(STYLE):
        costs, series = list(report.axes), report.series()
        signs, names = report.signs(), named(report)
        if FEW < len(names) == len(report.rows):
            signs = {row: number for number, row in enumerate(outstanding_rows(report))}
            names = {number: report.name_of(row) for row, number in signs.items()}
        lines = len(names) / legend_columns(names, WIDTH)
        figure = Figure(figsize=(WIDTH, 3.6 + 3.2 * bool(series) + 0.2 * lines), layout="constrained")
        layout: list[Any] = [["setting"] * len(costs)] * bool(series) + [costs]
        plots = figure.subplot_mosaic(layout)
        if series:
            draw_setting(plots["setting"], report)
        axes = [plots[cost] for cost in costs]
        draw_costs(axes, report, costs, signs)
        for beside in axes[1:]:
            beside.set_ylabel("")
        draw_legend(figure, names, report, others=len(signs) < len(report.rows))
        name_rows(axes, report, costs, signs)
        save_png(figure, path)


def outstanding_rows(report: Report) -> list[str]:
    """Up to `FEW` rows that the picture names: the first, the best for their size, and then the best."""
    front = report.front("stored")
    best = sorted(report.rows, key=lambda row: row[report.task.quality][0], reverse=report.task.higher)
    ends = [report.rows[0], *front[:1], *front[::-1], *best]
    chosen = list(dict.fromkeys(row["row"] for row in ends))[:FEW]
    return [row["row"] for row in report.rows if row["row"] in chosen]


def draw_extra(report: Report, out: Path) -> None:
    """`heads.png`, the heat-maps of the run whose heads were measured, `attention.png` and `embeddings.png` of rows with such
    pictures, and `schedules.png`, where there are such."""
    with mpl.rc_context(STYLE):
        plots = {"heads": heads_figure, "attention": attention_of_rows, "embeddings": embeddings_of_rows}
        for name, plot in (plots | {"schedules": schedules_figure}).items():
            if (figure := plot(report)) is not None:
                save_png(figure, out / report.picture(name))


def save_png(figure: Figure, path: Path) -> None:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, facecolor="white")
    write_whole(path, file.getvalue())


def svg_plots(report: Report) -> dict[str, str]:
    """Name of each plot that the runs have data for, and its SVG."""
    before = f"{report.number}-" if report.number > 1 else ""
    plots: dict[str, Callable[[Report], Figure | None]] = {
        **{cost: functools.partial(cost_figure, cost=cost) for cost in report.axes},
        "setting": setting_figure,
        "heads": heads_figure,
        "attention": attention_of_rows,
        "embeddings": embeddings_of_rows,
        "schedules": schedules_figure,
        "curves": curves_figure,
        "components": components_figure,
    }
    svgs = {}
    with mpl.rc_context(STYLE):
        for name, plot in plots.items():
            if (figure := plot(report)) is not None:
                svgs[name] = svg(figure, before + name)
    return svgs


def svg(figure: Figure, name: str) -> str:
    """Inline SVG, transparent, in the colours of the page; its ids are its own among the plots of a page."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>plot-{name}-", text)
    return text.replace(INK, "currentColor")
