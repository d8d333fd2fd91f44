"""`make versions`: its page is that of its results, and a combination that does not run says why."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import versions

ROWS = json.loads(versions.RESULTS.read_text())
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_1"/>
<testcase classname="tests.a" name="test_2[x]"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_3"><error message="no"/></testcase>
<testcase classname="tests.a" name="test_4"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A file of no results, in place of docs/versions.json."""
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "ENVIRONMENTS", tmp_path)
    return tmp_path / "versions.json"


def test_the_page_is_that_of_the_results():
    assert versions.RESULTS.with_suffix(".md").read_text() == versions.page(ROWS), "run make versions"


def test_every_environment_was_run_and_no_test_failed():
    assert ROWS.keys() == versions.combinations().keys()
    assert not any(row.get("failed", True) for row in ROWS.values())


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_lower_bounds_are_those_that_were_tested(package):
    bound = versions.lower_bound(package)
    for name, combination in versions.combinations().items():
        if combination.oldest or (combination.pins and combination.pins[0].startswith(f"{package}==")):
            assert re.match(re.escape(bound) + r"\b", ROWS[name][package]), f"{name}: run make versions"


def test_the_sample_exists():
    for path in versions.SAMPLE:
        file, _, test = path.partition("::")
        assert (versions.ROOT / file).exists()
        assert not test or f"def {test}(" in (versions.ROOT / file).read_text()


def test_tests_are_counted(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    failed = ["tests.a.test_2[x]", "tests.a.test_3"]
    assert versions.counts(tmp_path / "report.xml") == {"passed": 1, "skipped": 1, "failed": failed}
    assert versions.counts(tmp_path / "absent.xml")["failed"] == ["pytest itself, before any test"]


def test_an_environment_that_cannot_be_made_has_a_row_with_the_reason(results, monkeypatch, capsys):
    def refuse(command, **_):
        raise subprocess.CalledProcessError(2, command, stderr="error: No interpreter found\n  for Python 3.10\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert versions.main(["py3.10-newest"]) == 1
    reason = "error: No interpreter found for Python 3.10"
    assert f"[1/1] py3.10-newest: not run: {reason}" in capsys.readouterr().out
    assert json.loads(results.read_text())["py3.10-newest"]["not_run"] == reason
    page = results.with_suffix(".md").read_text()
    assert f"- `py3.10-newest` was not run: {reason}\n- `py3.13-oldest` was not run: not run yet" in page


def test_a_row_replaces_only_its_own(results, monkeypatch, capsys):
    row = {"python": "3.10.1", "torch": "9", "transformers": "8", "accelerate": "7", "numpy": "6", "date": "2026-01-31"}
    row |= {"passed": 5, "failed": [], "skipped": 4, "cpu_seconds": 3}
    results.write_text(json.dumps({"py3.13-newest": row | {"failed": ["tests.a.test_2"]}}))
    monkeypatch.setattr(versions, "examine", lambda combination: row)
    assert versions.main(["py3.10-oldest"]) == 0
    assert "[1/1] py3.10-oldest: 5 passed, 0 failed, 4 skipped, 3 CPU seconds" in capsys.readouterr().out
    page = results.with_suffix(".md").read_text()
    assert "| `py3.10-oldest` | 3.10.1 | 9 | 8 | 7 | 6 | 5 | 0 | 4 | 3 | 2026-01-31 |" in page
    assert "- `py3.13-newest` fails `tests.a.test_2`" in page


def test_what_is_wrong_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        versions.main(["py3.9-oldest"])
    assert "no combination 'py3.9-oldest'; choose from py3.10-oldest, " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"gives no lower bound of 'flax': write \"flax>=VERSION\" in dependencies"):
        versions.lower_bound("flax")


def test_the_versions_of_an_environment_are_read():
    assert versions.installed_versions(Path(sys.executable))["python"] == ".".join(map(str, sys.version_info[:3]))
