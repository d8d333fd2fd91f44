"""The plots of a report as files and as SVG for its page."""

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from hf_freeze.experiments.report.plots.components import components_figure
from hf_freeze.experiments.report.plots.costs import cost_figure, draw_costs, name_rows
from hf_freeze.experiments.report.plots.heat_maps import heads_figure
from hf_freeze.experiments.report.plots.setting import draw_setting, setting_figure
from hf_freeze.experiments.report.plots.style import INK, STYLE, draw_legend, legend_columns, named
from hf_freeze.experiments.report.plots.training import curves_figure, schedules_figure
from hf_freeze.experiments.report.report import Report
from hf_freeze.io import write_whole


def draw(report: Report, path: Path) -> None:
    """Quality against each cost, such as the share of parameters that is trained and what is stored, side by side."""
    with mpl.rc_context(STYLE):
        costs = list(report.axes)
        series = report.series()
        width = 10 + 4 * bool(series)
        lines = len(named(report)) / legend_columns(report, width)
        figure = Figure(figsize=(width, 4.6 + 0.2 * lines), layout="constrained")
        axes = list(figure.subplots(1, len(costs) + bool(series), squeeze=False)[0])
        if series:
            draw_setting(axes.pop(), report)
        draw_costs(axes, report, costs)
        draw_legend(figure, report)
        name_rows(axes, report, costs)
        save_png(figure, path)


def draw_extra(report: Report, out: Path) -> None:
    """`heads.png`, the heat-maps of the run whose heads were measured, and `schedules.png`, where there are such."""
    with mpl.rc_context(STYLE):
        for name, plot in (("heads", heads_figure), ("schedules", schedules_figure)):
            if (figure := plot(report)) is not None:
                save_png(figure, out / report.picture(name))


def save_png(figure: Figure, path: Path) -> None:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, facecolor="white")
    write_whole(path, file.getvalue())


def svg_plots(report: Report) -> dict[str, str]:
    """Name of each plot that the runs have data for, and its SVG."""
    before = f"{report.number}-" if report.number > 1 else ""
    plots: dict[str, Callable[[Report], Figure | None]] = {
        **{cost: functools.partial(cost_figure, cost=cost) for cost in report.axes},
        "setting": setting_figure,
        "heads": heads_figure,
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
