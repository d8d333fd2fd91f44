"""Pictures of attention and of embeddings: of a run's report, or of any model from Python.

weights = analysis.attention_by_position(model, batches)
attention_figure({"my model": weights}).savefig("attention.png")
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_freeze.analysis.maps import EmbeddingCorrelations
from hf_freeze.lab.report.plots.style import WIDTH
from hf_freeze.lab.report.report import MAPPED, Report


def attention_of_rows(report: Report) -> Figure | None:
    """`attention_figure` of the rows whose attentions were mapped."""
    rows = {report.name_of(row): weights for row, weights in report.mapped("attention").items()}
    return attention_figure(rows) if rows else None


def embeddings_of_rows(report: Report) -> Figure | None:
    """`embeddings_figure` of the rows whose embeddings were compared, and of a random table."""
    rows = report.mapped("embeddings")
    if not rows:
        return None
    panels = {report.name_of(row): (values["similarity"], values["tokens"]) for row, values in rows.items()}
    return embeddings_figure(panels | {"random table": (next(iter(rows.values()))["random"], [])})


def attention_figure(models: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Where heads look: a line a head, grouped by layer, a column for each relative position; dark: much of the attention.

    `models`: name -> attention, such as "encoder.0.self" -> (N, 2R + 1), as `analysis.attention_by_position` gives; of more than
    three models, the first three.
    """
    models = dict(list(models.items())[:MAPPED])
    kinds = list(dict.fromkeys(_kind(name) for weights in models.values() for name in weights))
    parts = {  # of each kind and model
        kind: [
            {name: np.asarray(values) for name, values in weights.items() if _kind(name) == kind}
            for weights in models.values()
        ]
        for kind in kinds
    }
    heads = {kind: max(sum(map(len, part.values())) for part in parts[kind]) for kind in kinds}
    figure = Figure(figsize=(WIDTH, 0.8 + sum(0.5 + 0.13 * count for count in heads.values())), layout="constrained")
    ratios = [3 + heads[kind] for kind in kinds]
    plots = figure.subplots(len(kinds), len(models), squeeze=False, sharex=True, height_ratios=ratios)
    darkest = max(np.asarray(values).max() for weights in models.values() for values in weights.values())
    image = None
    for line, kind in enumerate(kinds):
        for axes, model, part in zip(plots[line], models, parts[kind], strict=True):
            if not part:
                axes.set_axis_off()
                continue
            cells = np.concatenate(list(part.values()))
            reach = cells.shape[1] // 2
            extent = (-reach - 0.5, reach + 0.5, len(cells) - 0.5, -0.5)
            image = _heat_map(axes, cells, vmin=0, vmax=darkest, aspect="auto", extent=extent)
            ends = np.cumsum([len(values) for values in part.values()])
            for end in ends[:-1]:
                axes.axhline(end - 0.5, color="#7f7f7f", linewidth=0.6)
            middles = [end - (len(values) + 1) / 2 for end, values in zip(ends, part.values(), strict=True)]
            axes.set_yticks(middles, [f"layer {name.split('.')[1]}" for name in part])
            named = [textwrap.fill(model, 66 // len(models))] if not line else []
            axes.set_title("\n".join([*named, kind]), fontsize=9)
    figure.supxlabel("position of the key minus that of the query, tokens", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=plots.ravel().tolist(), label="share of a head's attention", shrink=0.5, aspect=30)
    return figure


def sentence_figure(weights: Mapping[str, Any], queries: Sequence[str], keys: Sequence[str] | None = None) -> Figure:
    """The attention of each head in one sentence: a grid of layers and heads, each with a line a query and a column a key.

    `weights`: attentions of one kind -> (N, Q, K), as `analysis.attention_weights` gives; `queries`, `keys`: the tokens, Q and K;
    None: the keys are the queries. Raises ValueError where their numbers differ from those of the weights.
    """
    keys = queries if keys is None else keys
    grids = {name: np.asarray(values) for name, values in weights.items()}
    for name, values in grids.items():
        if values.shape[1:] != (len(queries), len(keys)):
            raise ValueError(
                f"sentence_figure: {name!r} has {values.shape[1]} queries and {values.shape[2]} keys, not {len(queries)} and "
                f"{len(keys)}; give attentions of one kind, and their tokens"
            )
    columns = max(map(len, grids.values()))
    side = max(WIDTH / (columns + 1), 0.35 + 0.13 * max(len(queries), len(keys)))
    figure = Figure(figsize=(max(WIDTH, side * columns + 1), side * len(grids) + 0.6), layout="constrained")
    plots = figure.subplots(len(grids), columns, squeeze=False, sharex=True, sharey=True)
    for line, (name, values) in zip(plots, grids.items(), strict=True):
        for axes in line[len(values) :]:
            axes.set_axis_off()
        for head, (axes, cells) in enumerate(zip(line, values, strict=False)):
            _heat_map(axes, cells, across=keys, down=queries, vmin=0, vmax=1)
            axes.set_title(f"layer {name.split('.')[1]}, head {head}", fontsize=8)
    return figure


def embeddings_figure(models: Mapping[str, tuple[Any, Sequence[str]]]) -> Figure:
    """Which embeddings are alike: for each model, a token a line and a column. Blue: opposed, white: unrelated, red: alike.

    `models`: name -> (cosine similarities (n, n), the n tokens, or none of a random table); of more than four, the first four.
    """
    models = dict(list(models.items())[: MAPPED + 1])
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(WIDTH, 0.7 + 3.6 * lines if columns > 1 else WIDTH), layout="constrained")
    plots = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in plots[len(models) :]:
        axes.set_axis_off()
    image = None
    for axes, (model, (similarity, tokens)) in zip(plots, models.items(), strict=False):
        cells = np.asarray(similarity)
        image = _heat_map(axes, cells, across=tokens, down=tokens, cmap="RdBu_r", vmin=-1, vmax=1)
        others, spread = cells[~np.eye(len(cells), dtype=bool)], ""
        if others.size:
            mean = round(float(others.mean()), 2) + 0.0
            spread = f"mean {mean:+.2f}, standard deviation {others.std():.2f}".replace("-", "−")
        axes.set_title(f"{textwrap.fill(model, 40)}\n{spread}", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=list(plots), label="cosine similarity", location="bottom", shrink=0.5, aspect=40)
    return figure


def correlations_figure(correlations: EmbeddingCorrelations) -> Figure:
    """How alike the layers of DeFINE are, and their groups. Left: the correlation of each two numbers, with lines between layers
    and thin ones between groups. Right: its mean size between groups. `correlations`: of `analysis.embedding_correlations`."""
    figure = Figure(figsize=(WIDTH, 0.62 * WIDTH), layout="constrained")
    numbers, groups = figure.subplots(1, 2)
    cells = correlations.values.numpy()
    image = _heat_map(numbers, cells, cmap="RdBu_r", vmin=-1, vmax=1, extent=(0, len(cells), len(cells), 0))
    figure.colorbar(image, ax=numbers, label="correlation of two numbers", location="bottom", shrink=0.8)
    place, middles = 0, []
    for sizes in correlations.groups.values():
        middles.append(place + sum(sizes) / 2)
        for number, size in enumerate(sizes):
            for line in (numbers.axhline, numbers.axvline) if place else ():
                line(place, color="black", linewidth=0.3 if number else 0.9)
            place += size
    layers = list(correlations.groups)
    numbers.set_xticks(middles, layers, rotation=90, fontsize=7)
    numbers.set_yticks(middles, layers, fontsize=7)
    names, means = correlations.means(of_groups=True)
    image = _heat_map(groups, means.numpy(), across=names, down=names, vmin=0)
    figure.colorbar(image, ax=groups, label="mean size of the correlation", location="bottom", shrink=0.8)
    for (line, column), value in np.ndenumerate(means.numpy()):
        color = "white" if value > 0.6 * float(means.max()) else "black"
        groups.text(column, line, f"{value:.2f}", ha="center", va="center", fontsize=5, color=color)
    return figure


def _heat_map(
    axes: Any, cells: np.ndarray, *, across: Sequence[str] | None = None, down: Sequence[str] | None = None, **look: Any
) -> Any:
    """Draw `cells` (lines, columns), which may be named, and return the image. `look`: of `imshow`."""
    image = axes.imshow(cells, **{"cmap": "Blues", "interpolation": "nearest"} | look)
    if across is not None:
        axes.set_xticks(range(len(across)), across, rotation=90, fontsize=7)
    if down is not None:
        axes.set_yticks(range(len(down)), down, fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _kind(name: str) -> str:
    """`encoder.0.self` is of "encoder, self-attention"."""
    stack, *_, kind = name.split(".")
    return f"{stack}, {kind}-attention"
