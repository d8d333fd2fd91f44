"""The plots of a report: costs, fronts, settings, and names that do not collide."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from support.reports import ROWS, make_runs, sizes

from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.findings import findings
from hf_freeze.lab.report.pictures import svg_plots
from hf_freeze.lab.report.plots.costs import cost_figure, set_score_axis
from hf_freeze.lab.report.plots.draw import draw
from hf_freeze.lab.report.plots.setting import setting_figure, setting_in_words
from hf_freeze.lab.report.plots.style import SIZE
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.tasks.scoring import SCORING


def test_the_picture(tmp_path):
    make_runs(tmp_path)
    draw(make_report([tmp_path]), tmp_path / "report.png")
    pixels = image.imread(tmp_path / "report.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1000
    assert pixels.std() > 0.05, "an empty picture"


def test_a_picture_of_many_rows_names_seven(tmp_path, monkeypatch):
    """The first, the best for their size, then the best; the others are grey."""
    figures = []
    monkeypatch.setattr("hf_freeze.lab.report.plots.draw.save_png", lambda figure, path: figures.append(figure))
    rows = {str(i): (f"label {i}", 0.9 - i / 20) for i in range(10)}
    make_runs(tmp_path, rows=rows, seeds=(1,))
    draw(make_report([tmp_path], lambda text: None), tmp_path / "report.png")
    (legend,) = figures[0].legends
    names = [text.get_text().strip() for text in legend.get_texts()]
    assert names[:8] == [*(f"label {i}" for i in (0, 1, 2, 3, 4, 5)), "label 9", "other rows of the table"]
    assert {text.get_text() for text in figures[0].axes[0].texts} == set(names[:7])
    assert figures[0].get_figwidth() <= 7.5, "letters would be too small at 600 pixels"


def test_names_of_points_do_not_collide(tmp_path):
    same = {str(i): (f"row {i}", 0.8) for i in range(6)}
    make_runs(tmp_path, rows=same, seeds=(1,))
    figure = cost_figure(make_report([tmp_path], lambda text: None), "share")
    names = [text for text in figure.axes[0].texts if text.get_text() in {label for label, _ in same.values()}]
    assert len(names) == 6
    boxes = [text.get_window_extent() for text in names]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("smallest", "scale"), [(60_000, "linear"), (10_000, "log"), (0, "linear")])
def test_sizes_far_apart_are_on_a_logarithmic_axis(tmp_path, smallest, scale):
    make_runs(tmp_path, seeds=(1,), changes=sizes(500_000, 250_000, smallest))
    report = make_report([tmp_path], lambda text: None)
    (axes,) = cost_figure(report, "stored").axes
    assert axes.get_xscale() == scale
    assert {text.get_text() for text in axes.texts} == {label for label, _ in ROWS.values()}
    low, high = axes.get_xlim()
    assert low <= 4e-6 * smallest <= 2.0 < high
    if scale == "log":
        assert {"0.05", "1"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert cost_figure(report, "share").axes[0].get_xscale() == "linear"
    assert "stored" in svg_plots(report)


@pytest.mark.parametrize("worst", [37.6, 45, 100, 130, 4000, 1e6])
def test_the_labels_of_a_logarithmic_axis_do_not_overlap(worst):
    axes = Figure(figsize=SIZE).subplots()
    axes.plot([1, 2], [37.5, worst])
    set_score_axis(axes, SimpleNamespace(task=SCORING["language-modelling"]))
    axes.figure.draw_without_rendering()
    labels = axes.yaxis.get_ticklabels(minor=True) + axes.yaxis.get_ticklabels()
    low, high = axes.get_ylim()
    boxes = sorted((one.get_window_extent() for one in labels if one.get_text()), key=lambda box: box.y0)
    boxes = [box for box in boxes if axes.bbox.y0 <= (box.y0 + box.y1) / 2 <= axes.bbox.y1]
    assert len(boxes) >= 2, (low, high)
    assert all(one.y1 < other.y0 for one, other in itertools.pairwise(boxes))


def test_plots_show_the_parameters_where_all_rows_train_the_same_share(tmp_path):
    changes = {
        (row, 1): {
            "parameters": {"total": total, "stored_bytes": 4 * total, "trainable": total, "trainable_share": 1.0}
        }
        for row, total in zip(ROWS, (3000, 2000, 1000), strict=True)
    }
    make_runs(tmp_path / "sizes", seeds=(1,), changes=changes)
    report = write_report(tmp_path / "sizes", say=lambda text: None)
    assert list(svg_plots(report)) == ["total", "stored", "curves"]
    assert "share %" not in table_cells(report)[0]
    assert "total k" in table_cells(report)[0]
    assert "BLEU against parameters and stored size" in (tmp_path / "sizes" / "report.md").read_text("utf-8")
    make_runs(tmp_path / "shares", seeds=(1,))
    assert list(make_report([tmp_path / "shares"], lambda text: None).axes) == ["share", "stored"]


@pytest.mark.parametrize("task", ["translation", "language-modelling"])
def test_the_pareto_front(tmp_path, task):
    """By its definition: no row costs no more and is as good; two that are alike count once."""
    qualities, stored = [0.5, 0.9, 0.7, 0.9, 0.6, 0.8, 0.55, 0.85], [10, 80, 40, 80, 50, 60, 10, 90]
    rows = {str(i): (f"row {i}", quality) for i, quality in enumerate(qualities)}
    changes = {
        (str(i), 1): {"parameters": {"total": n, "stored_bytes": 4 * n, "trainable": n, "trainable_share": 1.0}}
        for i, n in enumerate(stored)
    }
    make_runs(tmp_path, task=task, rows=rows, seeds=(1,), changes=changes)
    report = make_report([tmp_path], lambda text: None)
    sign = 1 if report.task.higher else -1
    points = {row["row"]: (row["stored"][0], sign * row[report.task.quality][0]) for row in report.rows}
    best = {
        row
        for row, (cost, score) in points.items()
        if not any(other != row and c <= cost and s >= score for other, (c, s) in points.items())
    }
    front = [row["row"] for row in report.front("stored")]
    assert set(front) == best
    assert [points[row] for row in front] == sorted(points[row] for row in best)
    (line,) = [line for line in cost_figure(report, "stored").axes[0].lines if line.get_linestyle() == "--"]
    assert len(line.get_xdata()) == len(front) > 2
    assert any(what.startswith("Best at their size") for what, _ in findings(report))


@pytest.mark.parametrize("task", ["translation", "language-modelling"])
def test_scores_against_a_setting(tmp_path, task, pictures):
    """Two series, of which one has a row without the method; the methods are those of the model where there is one."""
    ranks = {"full": None, "e8": 8, "e2": 2, "e4-shared": 4, "e8-shared": 8}
    rows = {row: (f"row {row}", 0.5 + index / 10) for index, row in enumerate(ranks)}
    make_runs(tmp_path, task=task, rows=rows, seeds=(1,))
    assert make_report([tmp_path], lambda text: None).series() == []
    for row, rank in ranks.items():
        folder = tmp_path / f"row-{row}-seed-1"
        settings = json.loads((folder / "run.json").read_text()) | {"axis": "factorized_embedding.rank", "methods": []}
        (folder / "run.json").write_text(json.dumps(settings))
        methods = [{"method": "layer_sharing", "seed": 3}] if "shared" in row else []
        methods += [{"method": "factorized_embedding", "rank": rank}] if rank else []
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"methods": methods}))
    report = write_report(tmp_path, say=lambda text: None)
    own, shared = report.series()
    assert [(value, row["row"]) for value, row in own.points] == [(2, "e2"), (8, "e8")]
    assert [row["row"] for row in own.without] == ["full"]
    assert [(value, row["row"]) for value, row in shared.points] == [(4, "e4-shared"), (8, "e8-shared")]
    (axes,) = setting_figure(report).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["row full", "row e2 …", "row e4-shared …"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "4", "8"]
    scores = {row["row"]: row[report.task.quality][0] for row in report.rows}
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert [scores["full"]] * 2 in drawn
    assert [scores["e2"], scores["e8"]] in drawn
    assert "against rank of factorized embedding" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("factorized_embedding.rank", "rank of factorized embedding"),
        ("heads.fraction", "fraction of heads removed"),
        ("layer_selection.share", "share of layers kept"),
        (None, ""),
    ],
)
def test_a_setting_is_named_in_words(setting, words):
    assert setting_in_words(SimpleNamespace(setting=setting)) == words


def test_no_line_joins_rows_of_unlike_recipes(tmp_path):
    """And a value that is no number, such as None, is not drawn."""
    ranks = {"a": 2, "b": 4, "c": 8, "d": None}
    rows = {row: (f"row {row}", 0.5) for row in ranks}
    make_runs(tmp_path, rows=rows, seeds=(1,))
    for row, rank in ranks.items():
        path = tmp_path / f"row-{row}-seed-1" / "run.json"
        methods = [{"method": "factorized_embedding", "rank": rank}]
        settings = {"axis": "factorized_embedding.rank", "methods": methods}
        settings |= {"tokenizer": {"vocab_size": 200 if row == "c" else 800}}
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    report = write_report(tmp_path, say=lambda text: None)
    assert [[(value, row["row"]) for value, row in each.points] for each in report.series()] == [
        [(2, "a"), (4, "b")],
        [(8, "c")],
    ]


def test_no_line_joins_rows_of_other_settings_of_the_method(tmp_path):
    """The row without it is with the first of them, wherever it stands."""
    settings = {"a": (2, False), "full": None, "b": (2, True), "c": (4, False), "d": (4, True)}
    make_runs(tmp_path, rows={row: (f"row {row}", 0.5) for row in settings}, seeds=(1,))
    for row, found in settings.items():
        path = tmp_path / f"row-{row}-seed-1" / "run.json"
        methods = [{"method": "factorized_embedding", "rank": found[0], "share": found[1]}] if found else []
        changes = {"axis": "factorized_embedding.rank", "methods": methods}
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    series = make_report([tmp_path], lambda text: None).series()
    assert [[row["row"] for _, row in each.points] for each in series] == [["a", "c"], ["b", "d"]]
    assert [[row["row"] for row in each.without] for each in series] == [["full"], []]


@pytest.mark.parametrize(("task", "worst"), [("translation", 0.1), ("language-modelling", -9)])
def test_rows_far_worse_than_the_others_lie_on_the_edge(tmp_path, task, worst):
    """By hand: what lies beyond the box plot's outer fence, on the bad side only."""
    qualities = [0.8 + i / 100 for i in range(8)]
    rows = {str(i): (f"row {i}", quality) for i, quality in enumerate([*qualities, worst])}
    make_runs(tmp_path / "one", task=task, rows=rows, seeds=(1,))
    report = make_report([tmp_path / "one"], lambda text: None)
    (axes,) = cost_figure(report, "stored").axes
    scores = {row["row"]: row[report.task.quality][0] for row in report.rows}
    limits = sorted(axes.get_ylim())
    inside = [limits[0] <= score <= limits[1] for score in scores.values()]
    assert inside == [True] * 8 + [False]
    scale = np.log if task == "language-modelling" else np.asarray
    low, high = np.quantile(scale(list(scores.values())), [0.25, 0.75])
    edge = low - 3 * (high - low) if task == "translation" else np.exp(high + 3 * (high - low))
    assert limits[task != "translation"] == pytest.approx(edge)
    names = {text.get_text() for text in axes.texts}
    assert {name for name in names if "(" in name} == {
        f"row 8 ({scores['8']:{'.1f' if task == 'translation' else '.2f'}})"
    }

    rows["8"] = ("far better", 0.999 if task == "translation" else 9)
    make_runs(tmp_path / "other", task=task, rows=rows, seeds=(1,))
    (axes,) = cost_figure(make_report([tmp_path / "other"], lambda text: None), "stored").axes
    assert {text.get_text() for text in axes.texts} == {label for label, _ in rows.values()}


def test_long_or_many_names_are_left_to_the_legend(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("hf_freeze.lab.report.plots.draw.save_png", lambda figure, path: figures.append(figure))
    long = {"0": ROWS["0"], "1": ("a label that is far too long to stand beside a point", 0.5)}
    make_runs(tmp_path / "long", rows=long, seeds=(1,))
    report = make_report([tmp_path / "long"], lambda text: None)
    assert not cost_figure(report, "stored").axes[0].texts
    draw(report, tmp_path / "report.png")
    (legend,) = figures[0].legends
    assert [text.get_text().strip() for text in legend.get_texts()][:2] == [label for label, _ in long.values()]


def test_plots_name_rows_by_label_and_tell_equal_labels_apart(tmp_path):
    make_runs(tmp_path, rows={"0": ("alike", 0.8), "1": ("alike", 0.7), "2": ("other", 0.6)}, seeds=(1,))
    report = make_report([tmp_path], lambda text: None)
    assert [report.name_of(row) for row in ("0", "1", "2")] == ["alike (0)", "alike (1)", "other"]
