"""Heat-maps of what attention heads are worth."""

import numpy as np
from matplotlib.figure import Figure

from hf_freeze.analysis.ablation import HEAD_LEVEL
from hf_freeze.lab.report.report import Report


def heads_figure(report: Report) -> Figure | None:
    """A heat-map a score: an attention a line, a head a cell, with its number. Dark: more is lost without it, or, of one head
    alone, with it. Significant numbers are underlined."""
    if report.measured is None:
        return None
    head_scores, head_tests = report.measured.head_scores, report.measured.head_tests
    most = max(len(values) for scores in head_scores.values() for values in scores.values())
    lines = max(map(len, head_scores.values()))
    figure = Figure(figsize=(2 + len(head_scores) * (0.5 + 0.42 * most), 0.9 + 0.26 * lines), layout="constrained")
    plots = figure.subplots(1, len(head_scores), squeeze=False, sharey=True)[0]
    for axes, (name, scores) in zip(plots, head_scores.items(), strict=True):
        cells = np.full((len(scores), most), np.nan)  # an attention may have fewer heads
        for line, values in enumerate(scores.values()):
            cells[line, : len(values)] = values
        low, high = min(0.0, float(np.nanmin(cells))), float(np.nanmax(cells))
        axes.imshow(cells, cmap="Blues", vmin=low, vmax=high, aspect="auto")
        tests = list(head_tests.get(name, {}).values())
        for (line, head), value in np.ndenumerate(cells):
            if not np.isnan(value):
                colour = "white" if value > (low + high) / 2 else "#222222"
                axes.text(head, line, _short(value), ha="center", va="center", fontsize=7, color=colour)
                if tests and tests[line][head] < HEAD_LEVEL:
                    axes.plot([head - 0.3, head + 0.3], [line + 0.32] * 2, color=colour, linewidth=0.9)
        axes.set_xticks(range(most))
        axes.set_yticks(range(len(scores)), list(map(_in_words, scores)))
        axes.set(title=name.replace("_", " ").capitalize(), xlabel="head")
        axes.spines[:].set_visible(False)
    return figure


def _in_words(name: str) -> str:
    """`encoder.0.self` as "encoder 0, self"; other names as they are."""
    stack, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    return f"{stack} {layer}, {kind}" if kind else name


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
