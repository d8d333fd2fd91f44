"""Reports of hand-made runs: what is read, merged and refused, the tables, the plots and the page."""

import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console
from support.reports import ENVIRONMENT, EVIL, ROWS, SIGNATURE, Page, make_runs, write_lines
from typer.testing import CliRunner

from hf_freeze.cli import app
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.findings import answer, findings
from hf_freeze.lab.report.finished_runs import read_results, read_runs
from hf_freeze.lab.report.plots.draw import draw, svg_plots
from hf_freeze.lab.report.plots.style import SIZE, named
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.wording import pair_cells, setting_in_words
from hf_freeze.lab.report.write import write_report
from hf_freeze.lab.tasks.scoring import SCORING


def cells_of(report):
    """{row: {heading: cell}}"""
    headings, cells = table_cells(report)
    return {line[0]: dict(zip(headings, line, strict=True)) for line in cells}


def fail(text):
    pytest.fail(f"nothing to say, and yet: {text}")


# -- reading ---------------------------------------------------------------------------------------------------------------------


def test_a_report_needs_results(tmp_path):
    with pytest.raises(ValueError, match=r"results\.jsonl does not exist: run `hf-freeze run"):
        write_report(tmp_path)
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no finished run yet"):
        write_report(tmp_path)


@pytest.mark.parametrize("end", ['{"row": "2.1", "lab', '{"label": "✓'.encode()[:-1], '{"a": 1}}\n'])
def test_a_broken_last_line_is_removed_and_said(tmp_path, end):
    make_runs(tmp_path, seeds=(1,))
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + (end if isinstance(end, bytes) else end.encode()))
    said = []
    assert len(read_results(tmp_path, said.append)) == 3
    assert path.read_bytes() == whole
    assert len(said) == 1
    assert re.search(r"results\.jsonl: the last line was cut off and is removed", said[0])
    assert len(read_results(tmp_path, fail)) == 3
    path.write_bytes(whole.removesuffix(b"\n"))
    assert len(read_results(tmp_path, fail)) == 3, "a line that only lacks its end is whole"


def test_a_broken_earlier_line_is_an_error_and_the_file_stays(tmp_path):
    make_runs(tmp_path, seeds=(1,))
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"row":\n' + path.read_bytes())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1: not JSON"):
        read_results(tmp_path)
    assert path.read_bytes() == before


def test_folders_are_merged_in_their_order(tmp_path):
    make_runs(tmp_path / "a", seeds=(1, 2), rows={"0": ROWS["0"]})
    make_runs(tmp_path / "b", seeds=(3,), rows={"0": ROWS["0"], "2.1": ROWS["2.1"]})
    report = write_report(tmp_path / "a", tmp_path / "b", out=tmp_path / "c" / "d")
    assert [(row["row"], row["seeds"]) for row in report.rows] == [("0", 3), ("2.1", 1)]
    assert sorted(path.name for path in (tmp_path / "c" / "d").iterdir()) == ["report.html", "report.md", "report.png"]
    assert not (tmp_path / "a" / "report.md").exists()
    write_report(tmp_path / "b", tmp_path / "a")
    assert (tmp_path / "b" / "report.md").exists()


def test_folders_that_cannot_be_merged_are_refused(tmp_path):
    make_runs(tmp_path / "a", seeds=(1, 2))
    make_runs(tmp_path / "b", seeds=(2,), rows={"3": ROWS["3"]})
    make_runs(tmp_path / "c", seeds=(3,), task="language-modelling")
    with pytest.raises(ValueError, match=r"/a and .*/b both hold row '3' with seed 2"):
        read_runs([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(
        ValueError, match=r"/a holds runs of translation and .*/c of language-modelling: a report is of"
    ):
        read_runs([tmp_path / "a", tmp_path / "c"])
    write_lines(tmp_path / "b", 2 * read_results(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"/b holds twice row '3' with seed 2"):
        read_runs([tmp_path / "b"])
    make_runs(tmp_path / "d", changes={("0", 1): {"task": "chess"}}, rows={"0": ROWS["0"]}, seeds=(1,))
    with pytest.raises(
        ValueError, match=r"holds runs of 'chess'; reports are made of \[.*'language-modelling', .*'translation'\]"
    ):
        make_report([tmp_path / "d"])


def test_seeds_of_unlike_settings_are_said(tmp_path):
    make_runs(tmp_path, seeds=(1, 2))
    assert make_report([tmp_path], fail).notes == []
    path = tmp_path / "row-3-seed-2" / "run.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps(settings | {"training": {"epochs": 9.0}, "data": {"root": "/there", "limit": 9}, "new": 1})
    )
    said = []
    assert make_report([tmp_path], said.append).notes == said
    assert said == ["Row 3: the seeds differ in training, so the mean is of unlike runs."]


# -- tables ----------------------------------------------------------------------------------------------------------------------


def test_the_table_of_translation(tmp_path):
    records = make_runs(tmp_path)
    report = write_report(tmp_path, say=fail)
    cells = cells_of(report)
    scores = [r["metrics"]["test_bleu"] for r in records if r["row"] == "0"]
    assert cells["0"]["BLEU"] == f"{np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}"
    assert cells["0"]["vs row 0"] == "–"
    assert re.fullmatch(r"−\d\d\.\d \*", cells["2.1"]["vs row 0"])
    assert re.fullmatch(r"[+−]?\d\.\d", cells["3"]["vs row 0"]), "no mark: the same quality"
    assert cells["3"] | {"BLEU": "", "vs row 0": ""} == {
        "row": "3",
        "trained": "✓✓✗ FFN random",
        "BLEU": "",
        "vs row 0": "",
        "chrF": "52.0 ± 1.0",
        "dev ppl": "7.39",
        "seeds": "3",
        "best epoch": "2.0",
        "share %": "60.0%",
        "stored MB": "0.00",
        "train min": "1.5",
    }
    difference, test = report.to_first(report.rows[1])
    assert test is not None
    assert difference == pytest.approx(report.rows[1]["bleu"][0] - report.rows[0]["bleu"][0])
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for line in cells.values():
        assert "| " + " | ".join(line.values()) + " |" in text
    for said in (
        SIGNATURE,
        "hf-freeze run tiny.yaml",
        "Seeds 1, 2, 3",
        "abc1234",
        "A Processor",
        "paired bootstrap",
        "±",
    ):
        assert said in text
    assert re.search(r"Significantly worse than row 0: row 2\.1 \(✓✗✓ attention random\) −", text)
    assert re.search(
        r"Not told apart from row 0: row 3 .*95 % interval −\d\.\d\d to \+\d\.\d\d\)\. Corrected .* above 1 BLEU is not excluded",
        text,
    )
    assert re.search(
        r"\| 2\.1 \| 0 \| −\d\d\.\d\d \| −\d\d\.\d\d to −\d\d\.\d\d \| [<.\d ]+ \| [<.\d ]+ \| significant \* \|", text
    )
    assert len(re.findall("not significant \\|$", text, re.MULTILINE)) == 1
    assert "seed may" not in text


def test_the_table_of_language_modelling_shows_ratios(tmp_path):
    make_runs(tmp_path, task="language-modelling")
    report = write_report(tmp_path, say=fail)
    cells = cells_of(report)
    assert "BLEU" not in cells["0"]
    means = [report.rows[i]["test_perplexity"][0] for i in (0, 1)]
    assert cells["2.1"]["vs row 0"] == f"×{means[1] / means[0]:.3f} *"
    assert float(cells["2.1"]["vs row 0"][1:-2]) == pytest.approx(np.exp(0.4), rel=0.02)
    assert "*" not in cells["3"]["vs row 0"]
    assert "dev ppl" in cells["0"]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Lowest test perplexity: " in text
    assert "scored by test perplexity (lower is better) on the same 200 test blocks of text" in text
    assert "more than 1 is worse" in text
    assert re.search(r"\| ×1\.\d{4} \| ×1\.\d{4} to ×1\.\d{4} \|", text)
    assert "Significantly worse than row 0: row 2.1" in text


def test_one_seed_is_said(tmp_path):
    make_runs(tmp_path, seeds=(1,))
    (note,) = write_report(tmp_path, say=lambda text: None).notes
    assert note == (
        "One seed: the intervals and significance cover the choice of the test items only; another seed may differ by more."
    )
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert note in text
        assert "others: too few seeds to test" in text
        assert "Too few seeds to test against row 0" in text
        assert "not significant" not in text
    assert "±" not in (tmp_path / "report.md").read_text(encoding="utf-8")
    make_runs(tmp_path / "more", seeds=(2,), rows={"0": ROWS["0"]})
    assert make_report([tmp_path, tmp_path / "more"]).notes[0].startswith("One seed of row 2.1, 3: ")


def test_the_answer_comes_with_its_interval_and_seeds(tmp_path, monkeypatch):
    """By what could be tested: the smallest row that loses nothing, else the one that loses least, else the best."""

    def answer_of(rows, **kwargs):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        make_runs(folder, rows=rows, **kwargs)
        return answer(make_report([folder], lambda text: None))

    row = (
        r": ✓✓✗ FFN random \(row 3\), 0\.00 MB, BLEU [+−]?\d\.\d against row 0 "
        r"\(95 % interval [+−]\d\.\d\d to [+−]\d\.\d\d; "
    )
    assert re.fullmatch(f"Smallest that is not told apart from row 0{row}" + r"3 seeds\)\.", answer_of(ROWS))
    few = r"Smallest without a significant loss \(too few seeds to test\)"
    assert re.fullmatch(few + row + r"one seed\)\.", answer_of(ROWS, seeds=(1,)))
    assert answer_of(ROWS | {"3": ("better", 0.95)}).startswith("Smallest without a loss, and better: better (row 3), ")
    monkeypatch.setitem(SCORING, "translation", replace(SCORING["translation"], margin=50.0))
    assert re.fullmatch(f"Smallest that loses less than 50 BLEU{row}" + r"3 seeds\)\.", answer_of(ROWS))
    worse = answer_of({"0": ROWS["0"], "1": ("bad", 0.3), "2": ("less bad", 0.5)})
    assert worse.startswith(
        "Every smaller row is measurably worse than ✓✓✓ all trained (row 0); closest: less bad (row 2), "
    )
    assert re.fullmatch(
        r"Highest BLEU: ✓✓✓ all trained \(row 0\), \d\d\.\d \(one seed\)\.", answer_of({"0": ROWS["0"]}, seeds=(1,))
    )
    one_size = sizes(1000, 1000, 1000)
    assert answer_of(ROWS | {"3": ("better", 0.95)}, seeds=(1,), changes=one_size).startswith(
        "Highest BLEU: better (row 3), "
    )
    assert answer_of(ROWS | {"3": ("bad", 0.3)}, seeds=(1,), changes=one_size).endswith(
        "(one seed); no smaller row was tested."
    )


@pytest.mark.parametrize("role", ["start", "teacher"])
def test_seeds_of_another_run_are_not_unlike_settings(tmp_path, role):
    make_runs(tmp_path, seeds=(1, 2))
    for seed in (1, 2):
        path = tmp_path / f"row-3-seed-{seed}" / "run.json"
        settings = json.loads(path.read_text())
        start = {"row": "0", "seed": seed, "training": {"epochs": 2.0}, "methods": settings["methods"]}
        path.write_text(json.dumps(settings | {role: start}))
    assert make_report([tmp_path], fail).notes == []
    path.write_text(json.dumps(settings | {role: start | {"training": {"epochs": 3.0}}}))
    assert make_report([tmp_path]).notes == [f"Row 3: the seeds differ in {role}, so the mean is of unlike runs."]


def sizes(*totals):
    """Changes of records: a row each of so many parameters, stored as they are."""
    count = {"trainable_share": 1.0, "by_component": {}}
    return {
        (row, 1): {"parameters": count | dict.fromkeys(("total", "trainable", "stored"), n) | {"stored_bytes": 4 * n}}
        for row, n in zip(ROWS, totals, strict=True)
    }


@pytest.mark.parametrize(
    ("work", "shown"), [((500, 400, 300), True), ((500, 500, 500), False), ((500, 400, None), False)]
)
def test_multiply_adds_are_shown_where_all_rows_have_them_and_they_differ(tmp_path, work, shown):
    make_runs(tmp_path, seeds=(1,), changes={(row, 1): {"multiply_adds": n} for row, n in zip(ROWS, work, strict=True)})
    report = write_report(tmp_path, say=lambda text: None)
    assert ("macs k" in table_cells(report)[0]) == shown == ("macs k" in (tmp_path / "report.md").read_text())


def test_rows_of_unlike_sizes_show_them(tmp_path):
    changes = sizes(2_345_678, 500_000, 400_000)
    changes["3", 1]["start"] = "0"
    changes["3", 1]["parameters"]["trainable_share"] = 0.5
    make_runs(tmp_path, seeds=(1,), changes=changes)
    report = write_report(tmp_path, say=lambda text: None)
    cells = cells_of(report)
    assert [cells[row]["total k"] for row in ROWS] == ["2,346", "500", "400"]
    assert list(cells["3"])[-4:] == ["share %", "total k", "stored MB", "train min"]
    assert cells["3"]["trained"] == "✓✓✗ FFN random, from 0"
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "Share %: trained parameters of all; total k: all parameters, in thousands; stored MB: " in text
    assert "Fewest trained parameters" not in text, "shares are of unlike totals"
    keys = re.findall(r'data-key="([^"]*)"', (tmp_path / "report.html").read_text("utf-8"))
    assert len(keys) == 3 * 12
    assert float(keys[9]) == 2345.678


def test_few_items_are_said(tmp_path):
    make_runs(tmp_path, count=20)
    assert make_report([tmp_path]).notes == ["Only 20 test sentences: too few to trust the intervals and marks."]


@pytest.mark.parametrize("lacking", [["3"], ["0"], ["0", "2.1", "3"]])
def test_rows_without_items_are_not_tested(tmp_path, lacking):
    make_runs(tmp_path)
    for row in lacking:
        (tmp_path / f"row-{row}-seed-2" / "items.npy").unlink()
    report = write_report(tmp_path, say=lambda text: None)
    assert report.notes[0].startswith(f"Not tested: row {', '.join(lacking)}. Its runs kept no test items (items.npy)")
    marked = {row for row, cells in cells_of(report).items() if "*" in cells["vs row 0"]}
    assert marked == ({"2.1"} if lacking == ["3"] else set())
    assert cells_of(report)["2.1"]["vs row 0"].startswith("−"), "the difference itself is known all the same"
    assert len(report.differences) == (0 if len(lacking) == 3 else 1)
    assert ("No difference was tested" in (tmp_path / "report.md").read_text("utf-8")) is (len(lacking) == 3)


def test_runs_of_other_test_sets_are_not_tested(tmp_path):
    make_runs(tmp_path, seeds=(1,))
    make_runs(tmp_path / "other", seeds=(1,), rows={"9": ROWS["3"]}, count=201)
    report = write_report(tmp_path, tmp_path / "other", say=lambda text: None)
    assert "the runs were scored on different test sets" in report.notes[0]
    assert report.differences == []


def test_bare_old_records_are_enough(tmp_path):
    records = make_runs(tmp_path / "whole", seeds=(1,))
    for record in records:
        for name in ("recipe", "task", "environment", "signatures", "resumed", "peak_memory_bytes"):
            del record[name]
        del record["parameters"]["by_component"]
    (tmp_path / "old").mkdir()
    write_lines(tmp_path / "old", records)
    report = write_report(tmp_path / "old", say=lambda text: None)
    assert report.title == "old"
    assert "BLEU" in cells_of(report)["0"]
    assert list(svg_plots(report)) == ["share", "stored"]
    assert "Learning curves" not in (tmp_path / "old" / "report.html").read_text("utf-8")


def test_a_single_row(tmp_path):
    make_runs(tmp_path, rows={"0": ROWS["0"]})
    report = write_report(tmp_path, say=fail)
    assert report.differences == []
    assert "vs row 0" in cells_of(report)["0"]


# -- plots and page --------------------------------------------------------------------------------------------------------------


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
    from hf_freeze.lab.report.plots.costs import cost_figure

    same = {str(i): (f"row {i}", 0.8) for i in range(6)}
    make_runs(tmp_path, rows=same, seeds=(1,))
    figure = cost_figure(make_report([tmp_path], lambda text: None), "share")
    names = [text for text in figure.axes[0].texts if text.get_text() in {label for label, _ in same.values()}]
    assert len(names) == 6
    boxes = [text.get_window_extent() for text in names]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("smallest", "scale"), [(60_000, "linear"), (10_000, "log"), (0, "linear")])
def test_sizes_far_apart_are_on_a_logarithmic_axis(tmp_path, smallest, scale):
    from hf_freeze.lab.report.plots.costs import cost_figure

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
    from matplotlib.figure import Figure

    from hf_freeze.lab.report.plots.costs import set_score_axis

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
    from hf_freeze.lab.report.plots.costs import cost_figure

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
    from hf_freeze.lab.report.plots.setting import setting_figure

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
    from hf_freeze.lab.report.plots.costs import cost_figure

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


def test_long_or_many_names_are_left_to_the_legend(tmp_path):
    from hf_freeze.lab.report.plots.costs import cost_figure

    long = {"0": ROWS["0"], "1": ("a label that is far too long to stand beside a point", 0.5)}
    make_runs(tmp_path / "long", rows=long, seeds=(1,))
    report = make_report([tmp_path / "long"], lambda text: None)
    assert not cost_figure(report, "stored").axes[0].texts
    assert list(named(report).values()) == [label for label, _ in long.values()]


def test_plots_name_rows_by_label_and_tell_equal_labels_apart(tmp_path):
    make_runs(tmp_path, rows={"0": ("alike", 0.8), "1": ("alike", 0.7), "2": ("other", 0.6)}, seeds=(1,))
    report = make_report([tmp_path], lambda text: None)
    assert [report.name_of(row) for row in ("0", "1", "2")] == ["alike (0)", "alike (1)", "other"]


def test_the_page_holds_all_it_shows(tmp_path, pictures):
    make_runs(tmp_path)
    write_report(tmp_path, say=fail)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.scripts == 1
    order = [text.index(part) for part in ('<p class="answer">', "<table", "<figure", "In words", "How it was made")]
    assert order == sorted(order), "what is looked for first comes first"
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)", text)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids), "the plots share no id"
    assert "default-src 'none'" in text
    assert text.count("<svg") == 4
    assert "#010203" not in text
    for said in (
        "Learning curves",
        "Where the parameters are",
        "Which differences are significant?",
        "hf-freeze run tiny.yaml",
    ):
        assert said in text
    assert text.count("<details>") == 1 + 9
    for said in ("abc1234", "123", "yes; its training time is that after the last restart", "&#34;epochs&#34;: 2.0"):
        assert said in text
    assert "/here" not in text, "where the data lies is nobody's business"
    # The table is sorted by numbers, not by how they are written.
    keys = re.findall(r'data-key="([^"]*)"', text)
    assert len(keys) == 3 * 11
    for row in range(3):
        assert keys[11 * row] == str(row)
        assert all(re.fullmatch(r"-?[\d.e-]+", key) for key in keys[11 * row + 2 : 11 * row + 11])


def test_what_records_hold_is_only_text(tmp_path):
    rows = {"0": ("plain", 0.8), "_1": (EVIL, 0.5)}
    evil = {"label": EVIL, "recipe": EVIL, "environment": ENVIRONMENT | {"device": EVIL}, "signatures": {"a": EVIL}}
    changes = {("_1", seed): evil for seed in (1, 2)}
    make_runs(tmp_path, rows=rows, seeds=(1, 2), changes=changes)
    (tmp_path / "command.txt").write_text(EVIL)
    report = write_report(tmp_path, say=fail)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert Page(text).scripts == 1
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") > 8
    assert any("_1" in svg for svg in svg_plots(report).values())
    table = [line for line in (tmp_path / "report.md").read_text("utf-8").splitlines() if line.startswith("| _1")]
    assert r"&lt;script>alert('x')&lt;/script> & " in table[0]
    assert r"\| b |" in table[0]


# -- the command line ------------------------------------------------------------------------------------------------------------


def run_report(*arguments, code=0):
    arguments = ["report", *map(str, arguments)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr("hf_freeze.terminal.console", Console(width=300))


def test_the_command_says_what_it_found_and_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path / "a", seeds=(1,), rows={"0": ROWS["0"], "2.1": ("[red]x[/red]", 0.3)})
    make_runs(tmp_path / "b", seeds=(1,), rows={"3": ROWS["3"]})
    with (tmp_path / "b" / "results.jsonl").open("a") as file:
        file.write('{"row"')
    output = run_report("a", "b", "--out", "c").output
    assert "b/results.jsonl: the last line was cut off" in output
    assert "One seed: " in output
    assert "[red]x[/red]" in output
    assert "* marks a significant difference" in output
    assert "Written: c/report.html, c/report.md, c/report.png" in output
    assert "Written: a/report.html" in run_report("a").output


def test_what_cannot_be_reported_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_runs(tmp_path / "a", seeds=(1,))
    make_runs(tmp_path / "b", seeds=(1,), task="language-modelling")
    make_runs(tmp_path / "c", seeds=(2,), changes={(row, 2): {"task": "chess"} for row in ROWS})
    for folders, message in {
        ("nowhere",): "nowhere/results.jsonl does not exist",
        ("a", "b", "a"): "a and a both hold row '0' with seed 1",
        ("a", "c"): "c holds runs of 'chess'; reports are made of",
    }.items():
        (line,) = run_report(*folders, code=2).stderr.strip().splitlines()
        assert message in line
        assert line.startswith("Error: ")
    assert not (tmp_path / "a" / "report.md").exists()


def test_a_row_that_has_learned_nothing_loses_nothing(tmp_path):
    make_runs(tmp_path, rows={"0": ("all trained", 0.01), "3": ("random", 0.01)})
    report = make_report([tmp_path], lambda text: None)
    assert re.fullmatch(
        r"all trained \(row 0\) has BLEU 0\.\d ± 0\.\d: it learned too little to compare .*", answer(report)
    )
    assert not any(what.startswith("Loses less") for what, _ in findings(report))


def test_what_counts_as_no_loss():
    """The interval must exclude every loss above the margin: 1 point, 1 BLEU, 2 % of a perplexity."""
    translation, language_model = SCORING["translation"], SCORING["language-modelling"]
    assert translation.loses_at_most(-0.99, 3.0)
    assert not translation.loses_at_most(-1.01, 3.0)
    assert language_model.loses_at_most(-1.0, np.log(1.019))
    assert not language_model.loses_at_most(-1.0, np.log(1.021))
    words = [task.margin_in_words for task in (translation, language_model, SCORING["image-classification"])]
    assert words == ["1 BLEU", "2 %", "1 point"]


def test_a_difference_of_nothing_is_not_called_significant(tmp_path):
    """Two models that give nonsense for every sentence may differ by 0.004 BLEU in every draw."""
    make_runs(tmp_path)
    report = make_report([tmp_path])
    tiny, real = (replace(report.differences[0], low=x, difference=x, high=x, p_corrected=0.01) for x in (0.004, 0.4))
    report.differences[:2] = [tiny, real]
    _, cells = pair_cells(report)
    assert [line[-1] for line in cells[:2]] == ["too small to show", "significant *"]
    assert cells[0][2:4] == ["0.00", "0.00 to 0.00"]


@pytest.mark.parametrize(("loss", "mark"), [(0.04, ""), (0.06, " *")])
def test_a_difference_is_marked_where_its_digits_show_it(tmp_path, loss, mark):
    make_runs(tmp_path)
    report = make_report([tmp_path])
    row, number = report.rows[1], next(i for i, d in enumerate(report.differences) if d.base == report.rows[0]["row"])
    row[report.task.quality] = (report.rows[0][report.task.quality][0] - loss, 0.0)
    report.differences[number] = replace(
        report.differences[number], row=row["row"], low=-loss, difference=-loss, high=-loss, p_corrected=0.01
    )
    assert table_cells(report)[1][1][3] == f"{report.task.signed(-loss)}{mark}"
    assert any(kind.startswith("Significantly worse") for kind, _ in findings(report)) is bool(mark)
    verdict = pair_cells(report)[1][number][-1]
    assert verdict == ("significant *" if mark else "too small to show"), "one pair, one verdict"


def test_a_row_that_loses_much_is_no_answer_for_want_of_seeds(tmp_path):
    """Its interval may say what its p, corrected over many rows, cannot."""
    make_runs(tmp_path, rows={"0": ROWS["0"], "1": ("bad", 0.3)}, seeds=(1,))
    report = make_report([tmp_path], lambda text: None)
    report.differences[0] = replace(report.differences[0], low=-5.8, difference=-4.6, high=-3.5, p_corrected=0.2)
    assert answer(report).startswith("The smaller row is measurably worse than ✓✓✓ all trained (row 0): bad (row 1), ")
    report.differences[0] = replace(report.differences[0], low=-1.8, difference=-0.9, high=0.1)
    assert answer(report).startswith("Smallest without a significant loss (too few seeds to test): bad (row 1), ")
