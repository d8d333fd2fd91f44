"""Reports of hand-made runs: what is read, merged and refused, the table, the notes and the findings in words."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support.reports import ROWS, SIGNATURE, make_runs, sizes, write_lines

from hf_freeze.lab.report.build import make_report, make_reports
from hf_freeze.lab.report.findings import answer, findings
from hf_freeze.lab.report.finished_runs import read_folder, read_results
from hf_freeze.lab.report.pictures import svg_plots
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.wording import pair_cells
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
    with pytest.raises(
        ValueError, match=r"/a, .*/c hold 2 groups of rows to compare, not one: Translation by BLEU: .*; "
    ):
        make_report([tmp_path / "a", tmp_path / "c"])
    with pytest.raises(ValueError, match=r"/a and .*/a both hold row '0' with seed 1"):
        make_report([tmp_path / "a", tmp_path / "a"])
    write_lines(tmp_path / "b", 2 * read_results(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"/b holds twice row '3' with seed 2"):
        read_folder(tmp_path / "b")
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
    few = r"Smallest without a significant loss \(too few seeds\)"
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
    assert 'data-value="2345.678">2,346<' in (tmp_path / "report.html").read_text("utf-8")


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


def test_runs_of_other_test_sets_are_not_compared(tmp_path):
    make_runs(tmp_path, seeds=(1,))
    make_runs(tmp_path / "other", seeds=(1,), rows={"9": ROWS["3"]}, count=201)
    reports = make_reports([tmp_path, tmp_path / "other"], say=lambda text: None)
    assert [[row["row"] for row in report.rows] for report in reports] == [[f"A {row}" for row in ROWS], ["B 9"]]


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


# -- findings -------------------------------------------------------------------------------------------------------------------


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
    assert answer(report).startswith("Smallest without a significant loss (too few seeds): bad (row 1), ")
