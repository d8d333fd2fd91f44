"""`make results-check`, on a grid made here: published figures are those that the kept records give."""

import json
import shutil
import sys

import pytest
import yaml
from support import ROOT
from support.reports import make_runs

from hf_freeze.analysis.significance import Difference
from hf_freeze.lab.tasks.scoring import SCORING
from hf_freeze.run_folder import HEAD_TESTS, MAPS

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import results

PAGE = "# A page\n\n<!-- table tiny -->\n\n<!-- end -->\n\nMore.\n"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a grid, and with what is kept of it in results/."""
    folder = tmp_path_factory.mktemp("kept")
    make_runs(folder / "grid")
    (folder / "results").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "RESULTS", folder / "results")
        results.keep(folder / "grid", "tiny")
    return folder


@pytest.fixture
def folder(kept, tmp_path, monkeypatch):
    """In place of docs/results: a kept grid, a page with its table and one with a claim about it."""
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    out = tmp_path / "results"
    monkeypatch.setattr(results, "RESULTS", out)
    monkeypatch.setattr(results, "CLAIMS", out / "claims.yaml")
    (out / "page.md").write_text(PAGE)
    (out / "README.md").write_text("<!-- claims -->\n\n<!-- end -->\n")
    claim = {"claim": "Random attention costs little", "source": "Somebody, 2020", "published": "−1 BLEU"}
    claim |= {"compare": {"grid": "tiny", "row": "2.1"}, "expects": "no loss"}
    other = {"claim": "All is well", "source": "Nobody", "published": "–"}
    (out / "claims.yaml").write_text(yaml.safe_dump([{"question": "Which parts?", "claims": [claim, other]}]))
    return out


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["results.py", *map(str, arguments)])
    results.main()


def test_a_page_is_written_and_a_changed_figure_is_found(folder, monkeypatch):
    with pytest.raises(SystemExit, match=r"README\.md \(run: .*\npage\.md \(run: "):
        command(monkeypatch, "check")
    command(monkeypatch, "write")
    text = (folder / "page.md").read_text("utf-8")
    assert text.startswith("# A page\n\n<!-- table tiny -->\n\n**")
    assert text.endswith("\n\n<!-- end -->\n\nMore.\n")
    assert "| 2.1 | ✓✗✓ attention random |" in text
    assert "](tiny.png)" in text
    assert (folder / "tiny.png").exists()
    assert not list(folder.glob("*.html")), "only the site has them"
    command(monkeypatch, "html", folder / "new" / "html")
    assert "<h1" in (folder / "new" / "html" / "tiny.html").read_text("utf-8")
    claimed = (folder / "README.md").read_text("utf-8")
    assert "### Which parts?" in claimed
    assert "3 seeds), row 2.1 of [tiny](page.md) | does not hold |" in claimed
    assert "| All is well (Nobody) | – | – | not tested |" in claimed
    command(monkeypatch, "check")
    for page in ("page.md", "README.md"):
        right = (folder / page).read_text("utf-8")
        (folder / page).write_text(right.replace("3 seeds", "4 seeds"))
        with pytest.raises(SystemExit, match=f"Not what the records give:\n{page} \\(run: "):
            command(monkeypatch, "check")
        (folder / page).write_text(right)


def test_a_stated_interval_that_no_table_has_is_found(folder, monkeypatch):
    reports = results.Reports()
    first = reports["tiny"].differences[0]
    low, high = (f"{end:+.1f}".replace("-", "−") for end in (first.low, first.high))
    lost, size = f"{-first.high:.1f} to {-first.low:.1f}", f"{abs(first.difference):.1f}"
    right = f"Random attention has ({low} to {high}; 3 seeds), a loss of {size} ({lost})."
    page = PAGE + f"{right} Not these: rows 0 to 6, 1.2 to 1.4 times as long (9.1 to 9.3 ms).\n"
    assert results.unknown_intervals(page, reports) == []
    wrong = f"An interval +8.2 to +8.9, ({low} to +7.5), (3.1 points lost to 8.8 gained; 2 to 3 ms), 9{size} ({lost})."
    unknown = ["+8.2 to +8.9", f"{low} to +7.5", "−3.1 to +8.8", lost]
    assert results.unknown_intervals(page + wrong, reports) == unknown
    (folder / "page.md").write_text(page + wrong)
    with pytest.raises(SystemExit, match=r"page\.md: no two rows have the interval \+8\.2 to \+8\.9, "):
        command(monkeypatch, "write")


def test_an_archive_is_the_same_again_and_names_no_folder_of_a_machine(folder, tmp_path):
    first = (folder / "tiny_runs.tar.gz").read_bytes()
    results.keep(tmp_path / "grid", "tiny")
    assert (folder / "tiny_runs.tar.gz").read_bytes() == first
    with results._unpacked("tiny") as unpacked:
        assert '"root": "DIRECTORY"' in (unpacked / "row-0-seed-1" / "run.json").read_text()
    for name in (HEAD_TESTS, MAPS):  # what pictures are drawn from
        (tmp_path / "grid" / "row-0-seed-1" / name).write_text("{}")
    results.keep(tmp_path / "grid", "tiny")
    with results._unpacked("tiny") as unpacked:
        assert {HEAD_TESTS, MAPS} <= {path.name for path in (unpacked / "row-0-seed-1").iterdir()}
    settings = tmp_path / "grid" / "row-0-seed-1" / "run.json"
    settings.write_text('{"teacher": "/home/me/runs/teacher"}')
    with pytest.raises(ValueError, match=r'run\.json names a folder .*: "/home/me/runs/teacher"'):
        results.keep(tmp_path / "grid", "tiny")


def test_further_runs_are_added_to_an_archive(folder, tmp_path, monkeypatch):
    """Rows and seeds that it lacks, from another folder, give the archive of all in one."""
    whole = (folder / "tiny_runs.tar.gz").read_bytes()
    first, later = tmp_path / "first", tmp_path / "later"
    for part, others in ((first, "3"), (later, "12")):
        shutil.copytree(tmp_path / "grid", part, ignore=shutil.ignore_patterns(f"row-*-seed-[{others}]"))
        records = (part / "results.jsonl").read_text().splitlines()
        some = [record for record in records if str(json.loads(record)["seed"]) not in others]
        (part / "results.jsonl").write_text("\n".join(some) + "\n")
    (later / "row-3-seed-3" / "model").mkdir(exist_ok=True)
    (later / "row-3-seed-3" / "model" / "model.safetensors").write_bytes(b"weights")
    command(monkeypatch, "keep", first, "tiny")
    assert (folder / "tiny_runs.tar.gz").read_bytes() != whole
    command(monkeypatch, "add", later, "tiny")
    assert (folder / "tiny_runs.tar.gz").read_bytes() == whole
    with pytest.raises(ValueError, match=r"tiny has all runs of .*later"):
        results.add(later, "tiny")
    (later / "precision.txt").write_text("bf16\n")
    with pytest.raises(ValueError, match=r"tiny has runs in fp32, .*later in bf16"):
        results.add(later, "tiny")


def test_what_cannot_be_compared_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match=r"'a b': a name is letters"):
        results.keep(tmp_path / "grid", "a b")
    with pytest.raises(ValueError, match=r"nothing has no results\.jsonl"):
        results.keep(tmp_path / "nothing", "tiny")
    reports = results.Reports()
    with pytest.raises(ValueError, match=r"other_runs\.tar\.gz does not exist; choose from tiny"):
        results.measure(reports, grid="other", row="3", expects="no loss")
    with pytest.raises(ValueError, match="tiny does not compare row 4 with row 0"):
        results.measure(reports, grid="tiny", row="4", expects="no loss")
    with pytest.raises(ValueError, match="expects: 'a win': choose from"):
        results.measure(reports, grid="tiny", row="3", expects="a win")
    forwards, backwards = (
        results.measure(reports, grid="tiny", row=row, base=base, expects="a gain")
        for row, base in (("2.1", "0"), ("0", "2.1"))
    )
    assert forwards[1] == "does not hold"
    assert backwards[1] == "holds"
    for fewer, holds in ((1, "holds"), (2, "does not hold")):  # all rows have 1,000 parameters
        words, found = results.measure(reports, grid="tiny", row="0", base="2.1", expects="a gain", fewer=fewer)
        assert "; 3 seeds), with 1/1 of the parameters, row 0 of [tiny]" in words
        assert found == holds
    (folder / "claims.yaml").write_text("[{question: a, claims: [{claim: b, sauce: c}]}]")
    with pytest.raises(ValueError, match=r"'b': unknown \['sauce'\]"):
        results.claims(reports)


@pytest.mark.parametrize(
    ("expects", "low", "high", "holds"),
    [
        ("no loss", -0.9, 3.0, "holds"),
        ("no loss", -0.9, -0.1, "holds"),  # a loss, below the margin
        ("no loss", -1.1, 3.0, "not told apart"),
        ("no loss", -3.0, -0.1, "does not hold"),
        ("a loss", -3.0, -0.1, "holds"),
        ("a loss", -0.9, 0.1, "does not hold"),
        ("a loss", -3.0, 0.1, "not told apart"),
        ("a gain", 0.1, 3.0, "holds"),
        ("a gain", -3.0, 0.9, "does not hold"),
        ("a gain", -3.0, 1.1, "not told apart"),
    ],
)
def test_a_verdict_goes_by_the_interval(expects, low, high, holds):
    bleu, perplexity = SCORING["translation"], SCORING["language-modelling"]
    assert results.verdict(bleu, Difference("0", "1", 0.0, low, high, 0.5), expects) == holds
    scale = perplexity.margin  # of which lower is better
    assert results.verdict(perplexity, Difference("0", "1", 0.0, -high * scale, -low * scale, 0.5), expects) == holds
