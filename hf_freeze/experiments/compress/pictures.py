"""Pictures of a compression: scores against bytes and time, what is kept of the model, and the curves of its trainings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_freeze.compression.budget import Budget
from hf_freeze.experiments.compress.shapes import Part
from hf_freeze.experiments.compress.trials import CANDIDATE, FINAL, MODEL, PART, TAUGHT, Trial
from hf_freeze.experiments.report.plots.draw import WIDTH, save_png
from hf_freeze.experiments.report.plots.point_names import name_points
from hf_freeze.experiments.report.plots.style import INK, SIZE, STYLE

# Okabe and Ito's colours, which people of any colour vision tell apart; markers differ too.
_STYLES: dict[str, dict[str, Any]] = {
    MODEL: {"color": "#0072B2", "marker": "s", "markersize": 9},
    PART: {"color": "#777777", "marker": "^", "markersize": 6, "fillstyle": "none"},
    CANDIDATE: {"color": "#E69F00", "marker": "o", "markersize": 8},
    FINAL: {"color": "#D55E00", "marker": "D", "markersize": 10},
}
_LINES = {MODEL: "#0072B2", TAUGHT: "#009E73", PART: "#777777", CANDIDATE: "#E69F00", FINAL: "#D55E00"}
_LEGEND = {
    MODEL: "the model as it was",
    PART: "half of one kind of part, short training; bytes estimated",
    CANDIDATE: "candidate within the budget, short training",
    FINAL: "compressed model, trained to the end",
}
_NAMED = (MODEL, CANDIDATE, FINAL)


def front_figures(trials: Sequence[Trial], budget: Budget, score: str) -> dict[str, Figure]:
    """`front`, the score against bytes, and `time`, against that of a text, where the budget limits it."""
    figures = {}
    for name in ("front", "time") if budget.max_ms is not None else ("front",):
        figures[name] = Figure(figsize=(SIZE[0], SIZE[1] + 0.5), layout="constrained")
        _draw_fronts({name: figures[name].subplots()}, trials, budget, score)
    return figures


def _draw_fronts(plots: Mapping[str, Any], trials: Sequence[Trial], budget: Budget, score: str) -> None:
    """Into the plots of these names, of one figure, as `front_figures` says."""
    unit, name = (1e6, "MB") if any(trial.bytes >= 1e6 for trial in trials) else (1e3, "kB")
    limits = {"front": budget.max_bytes and budget.max_bytes / unit, "time": budget.max_ms}
    named = []
    for cost, axes in plots.items():
        values: list[Any] = [trial.ms if cost == "time" else trial.bytes / unit for trial in trials]
        limit = limits[cost]
        points = [(x, trial.score, trial) for x, trial in zip(values, trials, strict=True)]
        points = [
            point for point in points if point[0] is not None and point[1] is not None and point[2].kind in _STYLES
        ]
        for kind, style in _STYLES.items():
            some = [(x, y) for x, y, trial in points if trial.kind == kind]
            if some:
                axes.plot(*zip(*some, strict=True), linestyle="", label=_LEGEND[kind], **style)
        if limit is not None:
            axes.axvline(limit, color=INK, linewidth=1.2, linestyle="--", label="budget")
        label = "time of one text alone, ms" if cost == "time" else f"size of the served folder, {name}"
        axes.set(xlabel=label, ylabel=f"{score}, dev split (higher is better)")
        axes.set_xlim(0, 1.12 * max([x for x, _, _ in points] + [limit or 0.0] + [1e-9]))
        axes.margins(y=0.2)
        axes.grid()
        named.append([(x, y, trial.label) for x, y, trial in points if trial.kind in _NAMED])
    figure = axes.figure
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=1, fontsize=8)
    figure.draw_without_rendering()  # or it is not known where the points lie
    for axes, points in zip(plots.values(), named, strict=True):
        name_points(axes, points)


def parts_figure(parts: Sequence[Part]) -> Figure:
    figure = Figure(figsize=(SIZE[0], 0.6 + 0.36 * len(parts)), layout="constrained")
    _draw_parts(figure.subplots(), parts)
    return figure


def _draw_parts(axes: Any, parts: Sequence[Part]) -> None:
    """A bar for each kind of part: what is kept of all."""
    names = [part.name for part in parts]
    axes.barh(names, [100] * len(parts), color="#cccccc", height=0.62, alpha=0.6)
    axes.barh(names, [100 * part.share for part in parts], color="#0072B2", height=0.62)
    for name, part in zip(names, parts, strict=True):
        axes.annotate(
            part.words, (100, name), xytext=(6, 0), textcoords="offset points", va="center", annotation_clip=False
        )
    axes.set(xlim=(0, 100), xlabel="kept, % of the model's")
    axes.invert_yaxis()


def curves_figure(trials: Sequence[Trial]) -> Figure | None:
    """Loss on the dev split of everything that is trained."""
    curves = [trial for trial in trials if trial.curve and trial.kind != MODEL]
    if not curves:
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    seen = set()
    for trial in curves:
        label = None if trial.kind in seen else trial.kind
        seen.add(trial.kind)
        width, size = (2.2, 5) if trial.kind == FINAL else (1.2, 3.5)
        style = _STYLES.get(trial.kind, {"marker": "v"})
        axes.plot(
            *zip(*trial.curve, strict=True),
            color=_LINES[trial.kind],
            marker=style["marker"],
            markersize=size,
            linewidth=width,
            label=label,
        )
    for trial in trials:
        if trial.kind == MODEL and trial.loss is not None:
            axes.axhline(trial.loss, color=_LINES[MODEL], linestyle=":", linewidth=1.2, label="the model as it was")
    axes.set(xlabel="epoch", ylabel="dev loss (lower is better)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid()
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def draw_picture(path: Path, trials: Sequence[Trial], budget: Budget, score: str, parts: Sequence[Part]) -> None:
    """One picture to show: scores against costs and, where a shape is chosen, what it is made of."""
    with mpl.rc_context(STYLE):
        fronts = ["front", "time"] if budget.max_ms is not None else ["front"]
        layout: list[Any] = [fronts] + [["parts"] * len(fronts)] * bool(parts)
        figure = Figure(figsize=(WIDTH, 4.2 + 2.6 * (len(layout) - 1)), layout="constrained")
        plots = figure.subplot_mosaic(layout)
        if parts:
            _draw_parts(plots["parts"], parts)
        _draw_fronts({name: plots[name] for name in fronts}, trials, budget, score)
        save_png(figure, path)
