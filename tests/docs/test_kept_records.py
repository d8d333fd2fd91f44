"""Tables of pages without an archive: their cells are those of records, or what a command has printed."""

import json
import shutil
import sys

import pytest
from support import ROOT
from support.reports import make_runs

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import kept_records
import results


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """In place of docs/results: records of a grid, and what a command has printed."""
    make_runs(tmp_path / "grid")
    out = tmp_path / "results"
    (out / "outputs").mkdir(parents=True)
    monkeypatch.setattr(results, "RESULTS", out)
    shutil.copy(tmp_path / "grid" / "results.jsonl", out / "tiny.jsonl")
    (out / "outputs" / "sizes.txt").write_text(
        "| a |\n| --- |\n| 1 |\n\nall 3 passed; {'hf_freeze': '0.1.0'}\n", "utf-8"
    )
    return out


def bleu(folder, row):
    lines = (folder / "tiny.jsonl").read_text("utf-8").splitlines()
    scores = [record["metrics"]["test_bleu"] for record in map(json.loads, lines) if record["row"] == row]
    mean = sum(scores) / len(scores)
    return mean, (sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)) ** 0.5


def page(cell, row="2.1", name="tiny"):
    table = f"| row | BLEU | mine |\n| --- | ---: | --- |\n| {row} | {cell} | anything |\n"
    return f"<!-- records {name} -->\n\n{table}\n<!-- end -->\n"


def test_a_cell_is_what_the_records_give(folder):
    mean, spread = bleu(folder, "2.1")
    right = f"{mean:.1f} ± {spread:.1f}"
    assert kept_records.wrong_cells(page(right), folder) == []
    assert kept_records.wrong_cells(page(f"{right} *"), folder) == []
    wrong = f"{mean + 0.1:.1f} ± {spread:.1f}"
    assert kept_records.wrong_cells(page(wrong), folder) == [f"tiny, row 2.1, BLEU: {wrong}, not {right}"]
    with pytest.raises(ValueError, match="tiny has no row and column of the table below its name"):
        kept_records.wrong_cells(page(right, row="none"), folder)


def test_a_score_is_the_mean_over_the_choices_of_texts(folder):
    rows = [("translator", "half", "ZipLM", 30.0, 4.0), ("translator", "half", "ZipLM", 31.0, 5.0)]
    rows += [("translator", "half", "hf_freeze, calibrated", 35.25, 9.0), ("other", "half", "ZipLM", 1.0, 1.0)]
    names = ("model", "cut", "method", "BLEU", "cpu_seconds")
    kept = {str(number): dict(zip(names, row, strict=True)) for number, row in enumerate(rows)}
    for row in kept.values():
        row["scores"] = {"BLEU": row.pop("BLEU")}
    kept["failed"] = {"model": "translator", "cut": "half", "method": "ZipLM", "error": "none"}
    (folder / "cuts.json").write_text(json.dumps(kept), "utf-8")
    table = "| cut | method | BLEU | kept | CPU s |\n| --- | --- | ---: | ---: | ---: |\n"
    table += "| half | ZipLM | 30.5 | 0.5 | 4.5 |\n| half | calibrated | 35.25 | 0.5 | 9.0 |\n"
    text = f"<!-- records cuts translator -->\n\n{table}\n<!-- end -->\n"
    assert kept_records.wrong_cells(text, folder) == []
    wrong = kept_records.wrong_cells(text.replace("30.5", "30.6").replace("35.25", "35.3"), folder)
    assert wrong == ["cuts, row half, ZipLM, BLEU: 30.6, not 30.5", "cuts, row half, calibrated, BLEU: 35.3, not 35.2"]


def test_the_check_finds_a_wrong_cell_and_another_output(folder, monkeypatch):
    mean, spread = bleu(folder, "2.1")
    monkeypatch.setattr(sys, "argv", ["results.py", "check"])
    text = (
        page(f"{mean:.1f} ± {spread:.1f}")
        + "\nA time (0.9 to 1.1).\n\n<!-- output sizes -->\n\n| a |\n\n<!-- end -->\n"
    )
    (folder / "page.md").write_text(text, "utf-8")
    with pytest.raises(SystemExit, match=r"page\.md \(run: python docs/tooling/results\.py write\)"):
        results.main()
    monkeypatch.setattr(sys, "argv", ["results.py", "write"])
    results.main()
    written = (folder / "page.md").read_text("utf-8")
    assert written.endswith("<!-- output sizes -->\n\n| a |\n| --- |\n| 1 |\n\nall 3 passed\n\n<!-- end -->\n")
    (folder / "page.md").write_text(written.replace(f"| 2.1 | {mean:.1f} ", "| 2.1 | 99.9 "), "utf-8")
    monkeypatch.setattr(sys, "argv", ["results.py", "check"])
    with pytest.raises(SystemExit, match=r"page\.md: tiny, row 2\.1, BLEU: 99\.9 ± "):
        results.main()
