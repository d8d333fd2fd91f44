"""docs/results/published_rows.md: its rows exist, its figures are those of records, its verdicts follow from intervals."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import yaml
from support import ROOT
from support.reports import make_runs

from hf_freeze.analysis.significance import Difference
from hf_freeze.lab.recipes.load import read_recipe
from hf_freeze.lab.tasks.scoring import SCORING

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import published_rows
import results
import statements

TABLES = yaml.safe_load((ROOT / "docs" / "results" / "published_rows.yaml").read_text("utf-8"))["tables"]
KNOWN = {"title", "source", "unit", "recipe", "archives", "base", "note", "rows"}
OWN = {"recipe", "archives", "published_base", "record", "expects", "measured", "verdict"}


@pytest.mark.parametrize("table", TABLES, ids=[table["title"] for table in TABLES])
def test_every_row_is_one_of_its_recipe_and_every_record_is_kept(table):
    assert table.keys() <= KNOWN
    assert table.get("unit", "BLEU") in published_rows.UNITS
    for _, _, row, *more in table["rows"]:
        own = more[0] if more else {}
        assert own.keys() <= OWN
        recipe = read_recipe(own.get("recipe", table["recipe"]))
        preset = recipe["presets"][recipe["preset"]] if "preset" in recipe else {}
        assert row in recipe.get("rows", {}) | preset.get("rows", {})
        for archive in own.get("archives", table["archives"]):
            folder = ROOT / "docs" / "results"
            assert (folder / f"{archive}_runs.tar.gz").exists() or (folder / f"{archive}.jsonl").exists()


@pytest.mark.parametrize(
    ("figure", "base", "unit", "expected"),
    [
        (23.2, 24.3, "BLEU", ("−1.1", "a loss", -1.1 / 24.3)),
        ("96.20", 97.7, "points", ("−1.5", "a loss", -1.5 / 97.7)),
        (29.6, 29.3, "BLEU", ("+0.3", "no loss", 0.3 / 29.3)),
        (27.01, 25.01, "BLEU", ("+2.0", "a gain", 2 / 25.01)),
        (50.3, 37.4, "perplexity", ("×1.345", "a loss", math.log(50.3 / 37.4))),
        (37.0, 37.4, "perplexity", ("×0.989", "no loss", math.log(37.0 / 37.4))),
        (46.3, 48.58, "perplexity", ("×0.953", "a gain", math.log(46.3 / 48.58))),
    ],
)
def test_what_a_published_difference_is(figure, base, unit, expected):
    change = published_rows._published_change(figure, base, unit)
    assert (change.words, change.expects) == expected[:2]
    assert change.size == pytest.approx(expected[2])


@pytest.mark.parametrize(("figure", "base", "unit"), [("no loss", 24.3, "BLEU"), (24.3, None, "BLEU"), (1, 2, None)])
def test_what_is_no_published_difference(figure, base, unit):
    assert published_rows._published_change(figure, base, unit) is None


@pytest.mark.parametrize(
    ("task", "expects", "size", "low", "high", "agreement"),
    [  # of a base of 40: 5 % are 2 BLEU
        ("translation", "a loss", -0.05, -3.0, -1.2, "agrees"),
        ("translation", "a loss", -0.05, -5.0, -3.1, "loses more here"),
        ("translation", "a loss", -0.5, -5.0, -3.1, "loses less here"),
        ("translation", "a loss", -0.05, -3.0, 0.5, "not told apart"),
        ("translation", "a loss", -0.05, -0.5, 0.5, "disagrees"),
        ("translation", "a gain", 0.05, 0.1, 0.5, "gains less here"),
        ("translation", "a gain", 0.05, -3.0, -1.0, "disagrees"),
        ("translation", "no loss", 0.01, -0.9, 0.3, "agrees"),
        ("translation", "no loss", 0.01, -1.9, -0.3, "disagrees"),
        ("translation", "no loss", None, -1.9, 0.3, "not told apart"),
        ("language-modelling", "a loss", math.log(1.3), math.log(1.2), math.log(1.4), "agrees"),
        ("language-modelling", "a loss", math.log(1.3), math.log(1.4), math.log(1.5), "loses more here"),
        ("language-modelling", "a loss", math.log(1.3), math.log(1.1), math.log(1.2), "loses less here"),
    ],
)
def test_the_direction_and_the_size_of_a_difference_agree_or_not(task, expects, size, low, high, agreement):
    scoring = SCORING[task]
    found = Difference("0", "1", (low + high) / 2, low, high, 0.04, 0.04, True)
    change = published_rows.Change("", expects, size)
    report = SimpleNamespace(task=scoring)
    assert published_rows._agreement(report, found, change, {scoring.quality: (40.0, None)}) == agreement


def test_heads_that_stay_and_heads_that_are_left_alone_are_counted(tmp_path):
    """Two attentions of two heads in two runs; of `cross`, head 1 alone is the better one in both."""
    files = {}
    for seed, removed, alone in ((1, [0], [9.0, 4.0]), (2, [0, 1], [3.0, 2.0])):
        names = ("decoder.0.self", "decoder.0.cross", "decoder.1.cross")
        scores = {"importance": {name: [0.5, 0.5] for name in names}}
        scores["one_head"] = dict(zip(names, ([0.5, 0.1], alone, [1.0, 1.5]), strict=True))
        files[f"row-scored-seed-{seed}/head_scores.json"] = scores
        methods = [{"method": "head_pruning", "heads": {"decoder.1.cross": removed}}, {"method": "freeze"}]
        files[f"row-half-seed-{seed}/model/config.json"] = {"methods": methods}
        files[f"row-half-tuned-seed-{seed}/model/config.json"] = {"methods": []}  # another row
    encoded = {name: json.dumps(content).encode() for name, content in files.items()}
    results._write_archive(tmp_path / "tiny_runs.tar.gz", encoded)
    said = statements.filled("{heads tiny half}; {alone tiny scored}", {}, tmp_path)
    kept, alone = said.split(" (2 seeds, one number each); ")
    assert kept == "decoder.self 2, 2 of 2; decoder.cross 3, 2 of 4"
    assert alone == "−3.0 for `decoder.0.cross`, then −1.0 for `decoder.1.cross` (2 seeds)"


def test_the_page_is_what_the_records_give(tmp_path, monkeypatch):
    make_runs(tmp_path / "grid")
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(results, "RESULTS", folder)
    monkeypatch.setattr(results, "CLAIMS", folder / "claims.yaml")
    results.keep(tmp_path / "grid", "tiny")
    records = [{"row": row, "metrics": {"test_accuracy": score}} for row, score in (("a", 0.9), ("a", 0.8), ("b", 0.7))]
    (folder / "old.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    table = {"title": "T", "source": "S et al.", "unit": "BLEU", "recipe": "r", "archives": ["tiny"]}
    table["rows"] = [["all", 24.3, "0"], ["attention", 22.3, "2.1"], ["new", 20, "9"], ["words", "worse", "2.1"]]
    old = {"title": "O", "source": "S", "unit": "points", "recipe": "r", "archives": ["old"]}
    old["rows"] = [["all", 90, "a"], ["less", 80, "b"]]
    said = {"text": "It keeps {kept tiny 2.1 0}: {score tiny 2.1}.", "kind": "agrees"}
    written = {"findings": [said], "tables": [table, old]}
    (folder / "published_rows.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    reports = results.Reports()
    rows = {row["row"]: row for row in reports["tiny"].rows}
    score, whole = (rows[name]["bleu"][0] for name in ("2.1", "0"))
    finding = results.published("findings", reports)
    assert finding.startswith(f"- It keeps {100 * score / whole:.0f} %: {score:.1f} ± ")
    assert finding.endswith(" BLEU (3 seeds). *(agrees)*")
    lines = results.published("tables", reports).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    by_name = {row[0]: row for row in cells if row[2].startswith("r: ")}
    assert by_name["attention"][1:3] == ["22.3 (−2.0)", "r: `2.1`"]
    found = published_rows.compare(reports["tiny"], "2.1", "0")
    low, high = (f"{end:+.2f}".replace("-", "−") for end in (found.low, found.high))
    assert f"(95 % interval {low} to {high}; 3 seeds), [tiny](tiny_runs.tar.gz) `2.1`" in by_name["attention"][3]
    assert by_name["new"][3:] == ["–", "not run"]
    assert by_name["words"][1] == "worse"
    assert by_name["words"][4] == "–"
    assert by_name["less"][3:] == ["70.00 %; −15.00 (one seed), [old](old.jsonl) `b`", "no interval"]
    said["text"] = "{kept tiny 2.1 7}"
    (folder / "published_rows.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    with pytest.raises(ValueError, match=r"tiny has no row '7'; choose from \['0', "):
        results.published("findings", reports)
