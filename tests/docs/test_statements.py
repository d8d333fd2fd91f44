"""Sentences with figures that are filled in: from a grid made here, and from the output of a benchmark."""

import sys
from pathlib import Path

import pytest
from support import ROOT
from support.reports import make_runs

from hf_freeze.lab.report.build import make_report

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import results
import statements

OUTPUT = """|  | folder, MB | score | difference | ms |
| --- | ---: | ---: | ---: | ---: |
| whole | 91.61 (100%) | 0.3190 |  | 4.00 (1.00) |
| 12%, seed 1: heads | 10.93 (11.9%) | 0.3194 | +0.0004 (-0.0048 to +0.0058) | 1.00 (0.25) |
| whole, int8 | 23.5 (25.7%) | 0.3 | +0.0000 (-0.0010 to +0.0010) | 2.00 (0.50) |
| 12%, seed 2: heads | 10.95 (11.9%) | 0.3216 | -0.0020 (-0.0070 to +0.0026) | 1.00 (0.25) |

| time | s |
| --- | ---: |
| whole | 2.5 |

2 texts; 9.9 (not of the table)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    make_runs(folder)
    return {"tiny": make_report([folder], lambda _: None)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "tool.txt").write_text(OUTPUT)
    return tmp_path


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("mean1 tool | 12% | folder, MB", "10.9"),
        ("mean2 tool | 12% | folder, MB", "10.94"),  # of 10.93 and 10.95
        ("mean0 tool | whole | folder, MB", "92"),
        ("ends4 tool | 12% | difference", "−0.0008 (−0.0070 to +0.0058)"),  # the mean; the lowest and the highest end
        ("ends3 tool | 12%, seed 1 | difference", "0.000 (−0.005 to +0.006)"),  # no sign before a zero
        ("cell tool | whole | score", "0.3190"),
        ("share tool | 12%, seed 2 | ms", "0.25"),
        ("cell tool | whole | s", "2.5"),  # of another table
    ],
)
def test_figures_of_an_output(field, said, folder):
    assert statements.filled(f"It is {{{field}}}.", {}, folder) == f"It is {said}."


def test_figures_of_an_archive_are_those_of_its_report(reports, folder):
    report = reports["tiny"]
    rows = {row["row"]: row for row in report.rows}
    found = statements.compare(report, "2.1", "0")
    mean, saved, loss, signed = statements.filled(
        "{mean tiny 0}|{saved tiny 2.1 0}|{loss tiny 2.1 0}|{signed tiny 0 2.1}", reports, folder
    ).split("|")
    assert mean == f"{rows['0'][report.task.quality][0]:.1f}"
    assert saved == f"{100 - 100 * rows['2.1']['stored'][0] / rows['0']['stored'][0]:.0f} %"
    assert found.high < 0
    assert loss == f"{-found.difference:.1f} BLEU ({-found.high:.1f} to {-found.low:.1f}; 3 seeds)"
    assert signed == f"+{-found.difference:.1f} BLEU (+{-found.high:.1f} to +{-found.low:.1f}; 3 seeds)"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("loss tiny 0 2.1", r"row 0 gains: write \{signed \.\.\.\}"),
        ("mean tiny 99", r"tiny has no row '99'; choose from \['0', "),
        ("sum tiny 0", r"\{sum tiny 0\}: choose from \['score', .*'heads', .*'cell', "),
        ("cell tool | 12% | score", r"2 rows begin so: "),
        (
            "cell tool | 11% | score",
            r"tool has no row '11%'; choose from \['whole', '12%, seed 1: heads', 'whole, int8', ",
        ),
        ("cell tool | whole | grade", r"tool has no column 'grade'; choose from .*'score'"),
    ],
)
def test_a_figure_that_is_not_there(field, message, reports, folder):
    with pytest.raises(ValueError, match=message):
        statements.filled(f"{{{field}}}", reports, folder)


def test_a_changed_figure_of_a_statement_is_found(folder, monkeypatch):
    """On the front page too."""
    pages = folder / "docs" / "results"
    pages.mkdir(parents=True)
    (folder / "outputs").rename(pages / "outputs")
    monkeypatch.setattr(results, "RESULTS", pages)
    (pages / "statements.yaml").write_text('front: "- {mean1 tool | whole | folder, MB} MB\\n"\n')
    page = folder / "README.md"
    page.write_text("# A page\n\n<!-- statements front -->\n<!-- end -->\n\nMore.\n")

    def command(word):
        monkeypatch.setattr(sys, "argv", ["results.py", word])
        results.main()

    with pytest.raises(SystemExit, match=r"README\.md \(run: "):
        command("check")
    command("write")
    assert page.read_text() == "# A page\n\n<!-- statements front -->\n- 91.6 MB\n\n<!-- end -->\n\nMore.\n"
    command("check")
    page.write_text(page.read_text().replace("91.6", "90.6"))
    with pytest.raises(SystemExit, match=r"README\.md \(run: "):
        command("check")
    page.write_text(page.read_text().replace("statements front", "statements back"))
    with pytest.raises(ValueError, match=r"statements\.yaml has no 'back'; choose from \['front'\]"):
        command("check")


def test_every_statement_is_on_one_page():
    known = [found[2] for path in _pages() for found in results.STATED.finditer(path.read_text(encoding="utf-8"))]
    written = results.yaml.safe_load((ROOT / "docs" / "results" / "statements.yaml").read_text(encoding="utf-8"))
    assert sorted(known) == sorted(written)


def _pages() -> list[Path]:
    return [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
