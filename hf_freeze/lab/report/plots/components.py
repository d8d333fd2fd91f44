"""A plot of the parameters of each row by component."""

import textwrap
from typing import Any

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hf_freeze.lab.report.plots.style import SIZE
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import COLOURS, SIGNS

_COMPONENTS = {
    "embeddings": "embeddings",
    "attention": "attention",
    "ffn": "FFN",
    "norm": "layer norms",
    "head": "task head",
}


def components_figure(report: Report) -> Figure | None:
    """A bar a row: parameters of each component, by whether they are trained, stored frozen, or made again from a seed."""
    first: dict[str, dict[str, Any]] = {}
    for run in report.runs:
        if components := run.record["parameters"].get("by_component"):
            first.setdefault(run.row, components)
    if not first or len(first) > SIGNS:
        return None
    names = list(dict.fromkeys([*_COMPONENTS, *(name for parts in first.values() for name in parts)]))
    names = [name for name in names if any(parts.get(name, {}).get("total") for parts in first.values())]
    figure = Figure(figsize=(SIZE[0], 1.5 + 0.32 * len(first)), layout="constrained")
    axes = figure.subplots()
    states = {"trained": 1.0, "frozen, stored": 0.4, "frozen, from a seed": 0.0}
    for y, parts in enumerate(first.values()):
        left = 0.0
        for name in names:
            part = parts.get(name, {"total": 0, "trainable": 0, "stored": 0})
            amounts = (part["trainable"], part["stored"] - part["trainable"], part["total"] - part["stored"])
            for amount, alpha in zip(amounts, states.values(), strict=True):
                if amount:
                    axes.barh(y, amount / 1e6, left=left, height=0.7, **_look(COLOURS[names.index(name)], alpha))
                    left += amount / 1e6
    axes.set_yticks(range(len(first)), [textwrap.fill(report.name_of(row), 30) for row in first])
    axes.invert_yaxis()
    axes.set_xlabel("parameters, millions")
    axes.grid(axis="x")
    handles = [Patch(facecolor=COLOURS[i], label=_COMPONENTS.get(name, name)) for i, name in enumerate(names)]
    handles += [Patch(label=state, **_look("#7f7f7f", alpha)) for state, alpha in states.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, columnspacing=1)
    return figure


def _look(colour: str, alpha: float) -> dict[str, Any]:
    face = to_rgba(colour, alpha) if alpha else "none"
    return {"facecolor": face, "edgecolor": colour, "linewidth": 0.6, "hatch": None if alpha else "///"}
