"""The pictures of a report: the question that each answers, its words, and its drawing, as files and as SVG for the page."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from hf_freeze.analysis.ablation import HEAD_LEVEL
from hf_freeze.lab.report.plots.costs import cost_figure
from hf_freeze.lab.report.plots.draw import save_png, svg
from hf_freeze.lab.report.plots.heat_maps import heads_figure
from hf_freeze.lab.report.plots.maps import attention_of_rows, embeddings_of_rows
from hf_freeze.lab.report.plots.setting import setting_figure, setting_in_words
from hf_freeze.lab.report.plots.style import STYLE
from hf_freeze.lab.report.plots.training import curves_figure, has_dev, schedules_figure
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.table import further

_MAPS = {  # picture -> its title and what it shows
    "attention": (
        "Where the heads look",
        "Mean share of each head's attention by relative position, over the dev set, a line a head; darker is more.",
        attention_of_rows,
    ),
    "embeddings": (
        "Which embeddings are alike",
        "Cosine similarities of the most frequent tokens in training, similar ones side by side, and those of a random table.",
        embeddings_of_rows,
    ),
}


@dataclass(frozen=True)
class Picture:
    """`draw` gives None where the runs have no data for it. `kept`: beside the page as a PNG, which the Markdown shows."""

    name: str
    section: str
    title: str
    says: str
    draw: Callable[[Report], Figure | None]
    kept: bool = False


def pictures_of(report: Report) -> list[Picture]:
    """In the order of the page."""
    pictures = _of_costs(report)
    if report.measured:
        title, says = "What the heads are worth", head_scores(report)
        pictures.append(Picture("heads", "Attention heads", title, says, heads_figure, kept=True))
    for name, (title, says, draw) in _MAPS.items():
        if rows := report.mapped(name):
            says = f"{says} Row {', '.join(rows)}, the first seed."
            pictures.append(Picture(name, title, title, says, draw, kept=True))
    if any(run.schedules for run in report.runs):
        title = "What methods scheduled in training"
        pictures.append(Picture("schedules", "Schedules", title, "", schedules_figure, kept=True))
    curves = "Loss in training, a line a run."
    if has_dev(report):
        curves = "Marked lines: loss on the dev set at each evaluation, a line a run. "
        curves += "Faint: loss in training, which may be smoothed and so higher."
    return [*pictures, Picture("curves", "Training", "Learning curves", curves, curves_figure)]


def _of_costs(report: Report) -> list[Picture]:
    """The score against each cost that rows differ in, and against the setting that the recipe names."""
    name, axes = report.task.name, report.axes
    section = f"{name[0].upper()}{name[1:]} against cost"
    asks = {cost: axis.asks for cost, axis in axes.items()}
    for cost in further(report):
        if cost not in axes and cost != "test":
            asks[cost] = f"{name[0].upper()}{name[1:]} against {report.measures[cost].label}"
    pictures = []
    for cost, title in asks.items():
        says, measure = "", report.measures[cost]
        if cost == next(iter(axes)):
            bars = "; bars: standard deviation over seeds" if len(report.seeds) > 1 else ""
            says = f"Each point is a row of the table{bars}. "
            says += "No row of the table is better than one on the dashed line and costs no more."
        if measure.kind == "time":
            others = sum(not measure.drawn(row) for row in measure.values)
            says = f"Measured on: {measure.machine}." * bool(measure.machine)
            says += f" {others} {'row' if others == 1 else 'rows'} of other machines not drawn." if others else ""
        pictures.append(Picture(cost, section, title, says, functools.partial(cost_figure, cost=cost)))
    alike = "A line joins rows that are alike otherwise; dashed: without that method."
    title = f"{name} against {setting_in_words(report)}"
    return [*pictures, Picture("setting", section, title, alike, setting_figure)]


def head_scores(report: Report) -> str:
    """What the heat-maps of heads show; empty where no heads were measured."""
    run = report.measured
    if run is None:
        return ""
    meanings = {
        "importance": "Importance is that of Michel et al. (2019) on the training set, divided by its norm over the attention.",
        "ablation": f"Ablation is what {report.task.name} on the dev set loses without the head.",
        "one_head": f"One head is what {report.task.name} on the dev set loses where it alone is left of its attention.",
    }
    shown = [meaning for name, meaning in meanings.items() if name in run.head_scores]
    tested = (
        f" Underlined: significant, p < {HEAD_LEVEL} after Holm's correction over all heads." if run.head_tests else ""
    )
    return f"Of row {run.row}, seed {run.record['seed']}. {' '.join(shown)}{tested}"


def draw_kept(report: Report, out: Path) -> None:
    """Write the pictures that are kept into `out`, such as `heads.png`."""
    with mpl.rc_context(STYLE):
        for picture in pictures_of(report):
            if picture.kept and (figure := picture.draw(report)) is not None:
                save_png(figure, out / report.picture(picture.name))


def svg_plots(report: Report) -> dict[str, str]:
    """Name of each picture that the runs have data for, and its SVG."""
    before = f"{report.number}-" if report.number > 1 else ""
    with mpl.rc_context(STYLE):
        drawn = {picture.name: picture.draw(report) for picture in pictures_of(report)}
        return {name: svg(figure, before + name) for name, figure in drawn.items() if figure is not None}
