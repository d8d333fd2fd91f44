"""The page of one grid, and `hf-freeze report`."""

import re

import pytest
from rich.console import Console
from support.reports import ENVIRONMENT, EVIL, ROWS, SIGNATURE, Page, make_runs
from typer.testing import CliRunner

from hf_freeze.cli import app
from hf_freeze.lab.report.pictures import svg_plots
from hf_freeze.lab.report.write import write_report


def fail(text):
    pytest.fail(f"nothing to say, and yet: {text}")


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
    assert text.count("<svg") == 3
    assert "#010203" not in text
    for said in (
        "Learning curves",
        "Which differences are significant?",
        "hf-freeze run tiny.yaml",
    ):
        assert said in text
    assert text.count("<details>") == 1 + 9
    for said in ("abc1234", "123000000", "&#34;resumed&#34;: true", "&#34;epochs&#34;: 2.0", "&#34;by_component&#34;"):
        assert said in text
    assert "/here" not in text, "where the data lies is nobody's business"
    # The table is sorted by numbers, not by how they are written: by all of its columns but the label.
    values = re.findall(r'data-value="([^"]*)"', text)
    assert len(values) == 3 * 10
    assert values[:20:10] == ["0", "1"]
    assert all(re.fullmatch(r"-?[\d.e-]+", value) for value in values)


def test_what_records_hold_is_only_text(tmp_path):
    rows = {"0": ("plain", 0.8), "_1": (EVIL, 0.5)}
    evil = {
        "label": EVIL,
        "recipe": EVIL,
        "environment": ENVIRONMENT | {"device": EVIL},
        "signatures": {"test_bleu": SIGNATURE, "a": EVIL},
    }
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
