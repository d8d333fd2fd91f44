"""One page of several grids: what is compared with what, the Pareto fronts, and what the page does in a browser."""

import base64
import hashlib
import html
import itertools
import json
import re
import shutil

import numpy as np
import pytest
from support.browser import dump_page, needs_browser
from support.reports import ENVIRONMENT, EVIL, Page, make_runs, write_lines

from hf_freeze.analysis.significance import compare
from hf_freeze.lab.report.build import make_report, make_reports
from hf_freeze.lab.report.finished_runs import read_results
from hf_freeze.lab.report.groups import sources_of
from hf_freeze.lab.report.measures import Measure, front
from hf_freeze.lab.report.page import page
from hf_freeze.lab.report.pictures import pictures_of
from hf_freeze.lab.report.plots.costs import points_of
from hf_freeze.lab.report.write import write_reports
from hf_freeze.lab.runs.collect import write_results
from hf_freeze.lab.tasks.items import bleu, digest_of_test_set
from hf_freeze.run_folder import LATENCY

TWO = {"0": ("plain", 0.8), "1": ("random", 0.5)}


def quiet(*folders, **arguments):
    return make_reports(folders, lambda text: None, **arguments)


def change_settings(folder, **changes):
    for path in folder.glob("row-*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_grid(folder, recipe, **arguments):
    names = [(row, seed) for row in arguments.get("rows", TWO) for seed in arguments.get("seeds", (1,))]
    more = arguments.pop("changes", {})
    changes = {name: {"recipe": recipe} | more.get(name, {}) for name in names}
    return make_runs(folder, **{"rows": TWO, "seeds": (1,), "changes": changes} | arguments)


def groups_of(*folders):
    return [[row["row"] for row in report.rows] for report in quiet(*folders)]


# -- what is compared ------------------------------------------------------------------------------------------------------------


def test_rows_of_several_recipes_are_compared_where_they_may_be(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    make_grid(a, "one")
    make_grid(b, "two", seeds=(1, 2))
    make_grid(c, "three", task="language-modelling")
    found = quiet(a, b, c)
    assert [[row["row"] for row in report.rows] for report in found] == [["A 0", "A 1", "B 0", "B 1"], ["C 0", "C 1"]]
    items = {}
    for row in found[0].rows:
        letter, name = row["row"].split()
        folder = {"A": a, "B": b}[letter]
        items[row["row"]] = [np.load(run / "items.npy") for run in sorted(folder.glob(f"row-{name}-seed-*"))]
    assert [(d.base, d.row) for d in found[0].differences] == list(itertools.combinations(items, 2))
    assert found[0].differences == compare(items, bleu), "as if they were rows of one grid"
    assert found[0].tested_on.startswith('Data: {"limit": 9}. Test set: 200 items, ')
    assert found[1].title.startswith("Language modelling by test perplexity: ")


@pytest.mark.parametrize("differs", ["data", "test set", "metric", "no items", "nothing"])
def test_what_keeps_rows_of_one_task_apart(tmp_path, differs):
    a, b = tmp_path / "a", tmp_path / "b"
    make_grid(a, "one")
    signature = {(row, 1): {"signatures": {"test_bleu": "tok:zh"}} for row in TWO} if differs == "metric" else {}
    make_grid(b, "two", count=201 if differs == "test set" else 200, changes=signature)
    if differs == "data":
        change_settings(b, data={"root": "/here", "limit": 10})
    if differs == "no items":
        for path in b.glob("*/items.npy"):
            path.unlink()
    together = [["A 0", "A 1", "B 0", "B 1"]]
    assert groups_of(a, b) == (together if differs == "nothing" else [["A 0", "A 1"], ["B 0", "B 1"]])


@pytest.mark.parametrize("task", ["translation", "language-modelling"])
def test_a_tokenizer_keeps_perplexities_apart(tmp_path, task):
    """And not BLEU, which is of words."""
    for name, size in (("a", 300), ("b", 400)):
        make_grid(tmp_path / name, name, task=task)
        change_settings(tmp_path / name, tokenizer={"vocab_size": size})
    assert len(groups_of(tmp_path / "a", tmp_path / "b")) == (1 if task == "translation" else 2)


def test_a_run_without_items_is_with_its_grid(tmp_path):
    make_grid(tmp_path / "a", "one")
    make_grid(tmp_path / "b", "two")
    (tmp_path / "b" / "row-1-seed-1" / "items.npy").unlink()
    assert groups_of(tmp_path / "a", tmp_path / "b") == [["A 0", "A 1", "B 0", "B 1"]]


def test_records_alone_say_what_they_may_be_compared_with(tmp_path):
    """`data` and `test_set`, which new ones have; old ones are compared with none but their own grid."""
    for name, more in (("a", True), ("b", True), ("c", False)):
        records = make_grid(tmp_path / "whole" / name, name)
        digest = digest_of_test_set(np.load(tmp_path / "whole" / name / "row-0-seed-1" / "items.npy"))
        (tmp_path / name).mkdir()
        write_lines(
            tmp_path / name, [r | ({"data": {"limit": 9}, "test_set": digest} if more else {}) for r in records]
        )
    assert groups_of(*(tmp_path / name for name in "abc")) == [["A 0", "A 1", "B 0", "B 1"], ["C 0", "C 1"]]
    assert groups_of(tmp_path / "whole" / "c", tmp_path / "a") == [["A 0", "A 1", "B 0", "B 1"]]


def test_folders_of_one_recipe_are_one_grid_unless_they_hold_the_same_runs(tmp_path):
    for name, seed, recipe in (("a", 1, "one"), ("b", 2, "one"), ("again", 1, "one"), ("other", 3, "two")):
        make_grid(tmp_path / name, recipe, seeds=(seed,))
    found = sources_of([tmp_path / name for name in ("a", "b", "again", "other")])
    assert [[folder.name for folder in source.folders] for source in found] == [["a", "b"], ["again"], ["other"]]
    assert [source.letter for source in found] == ["A", "B", "C"]
    (report,) = quiet(tmp_path / "a", tmp_path / "b")
    assert report.rows == make_report([tmp_path / "a", tmp_path / "b"], lambda text: None).rows
    with pytest.raises(ValueError, match=r"/a and .*/a both hold row '0' with seed 1"):
        sources_of([tmp_path / name for name in ("a", "other", "a")])


def test_many_grids_have_letters(tmp_path):
    for number in range(28):
        (tmp_path / str(number)).mkdir()
    records = make_grid(tmp_path / "whole", "x", rows={"0": TWO["0"]})
    for number in range(28):
        write_lines(tmp_path / str(number), [records[0] | {"recipe": str(number)}])
    letters = [source.letter for source in sources_of([tmp_path / str(number) for number in range(28)])]
    assert letters[:2] + letters[-3:] == ["A", "B", "Z", "AA", "AB"]


# -- fronts ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_what_its_definition_says(seed):
    rng = np.random.default_rng(seed)
    names = [str(i) for i in range(40)]
    axes = []
    for higher, kind in ((True, "score"), (False, "cost"), (False, "time")):
        values = {
            name: (float(rng.integers(8)), None) for name in names if rng.random() < 0.9
        }  # ties, and some are missing
        on = {name: str(rng.integers(2)) for name in values} if kind == "time" else {}
        axes.append(Measure("", "", "", kind, values, higher, on=on))
    known = [name for name in names if all(name in axis.values for axis in axes)]

    def beats(one, other):
        gains = [(1 if axis.higher else -1) * (axis.values[one][0] - axis.values[other][0]) for axis in axes]
        return axes[2].on[one] == axes[2].on[other] and min(gains) >= 0 and max(gains) > 0

    expected = {name: not any(beats(other, name) for other in known) for name in known}
    assert front(axes, names) == expected
    assert 0 < sum(expected.values()) < len(known) < len(names)


def write_latency(folder, ratio, device="A Processor", first_ms=50.0):
    decoding = {batch: {"ratio": ratio, "first_ms": first_ms} for batch in ("1", "64")}
    measured = {"decoding": decoding, "conditions": "9 sentences", "environment": ENVIRONMENT | {"device": device}}
    (folder / LATENCY).write_text(json.dumps(measured))


def test_measured_latency_is_an_axis(tmp_path):
    make_runs(tmp_path, seeds=(1,))
    report = make_report([tmp_path], lambda text: None)
    assert not {"latency_1", "latency_64", "work"} & set(report.measures)
    assert report.weighed_by == ["bleu", "stored"]
    for row, ratio in (("0", 1.0), ("3", 0.5)):
        write_latency(tmp_path / f"row-{row}-seed-1", ratio)
    report = make_report([tmp_path], lambda text: None)
    found = report.measures
    assert found["latency_1"].values == {"0": (50.0, None), "3": (25.0, None)}
    assert report.weighed_by == ["bleu", "stored", "latency_1"]
    assert set(found["latency_1"].on.values()) == {"A Processor, 1 of 2 cores: 9 sentences"}
    kept = {record["row"]: record.get("latency") for record in write_results(tmp_path, [])}
    assert {row for row, latency in kept.items() if latency} == {"0", "3"}
    for path in tmp_path.glob("row-*"):
        shutil.rmtree(path)
    assert read_results(tmp_path)[0]["latency"]["decoding"]["1"]["ratio"] == 1.0
    assert make_report([tmp_path], lambda text: None).measures["latency_1"].values == found["latency_1"].values


def test_memory_of_inference_is_an_axis(tmp_path):
    memory = {
        ("0", 1): {"resident": 8_000_000, "read": 4_000_000},
        ("3", 1): {"resident": 2_000_000, "read": 1_000_000},
    }
    make_runs(tmp_path, seeds=(1,), changes={key: {"memory": value} for key, value in memory.items()})
    report = make_report([tmp_path], lambda text: None)
    found = report.measures
    assert found["resident"].values == {"0": (8.0, None), "3": (2.0, None)}
    assert found["read"].values == {"0": (4.0, None), "3": (1.0, None)}
    assert "read MB: weights that a decoding step reads from memory, likewise." in page([report])


def test_a_resumed_or_unlike_time_is_no_time(tmp_path):
    """A resumed run knows only what it took after its last restart; measuring heads is no decoding."""
    make_runs(tmp_path, seeds=(1, 2))
    assert "minutes" not in make_report([tmp_path], lambda text: None).measures
    make_runs(tmp_path / "one", seeds=(1,))
    found = make_report([tmp_path / "one"], lambda text: None).measures
    assert found["minutes"].values["0"] == (1.5, None)
    assert found["test"].values["0"] == (1.0, None)
    change_settings(tmp_path / "one", head_scores=["importance"])
    assert "test" not in make_report([tmp_path / "one"], lambda text: None).measures


# -- the page --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Three grids, of which two may be compared, one with a page of its own; labels and recipes want to be HTML."""
    folder = tmp_path_factory.mktemp("compared")
    other = {"device": "Another Processor", "commit": "def5678"}
    rows = {str(i): (f"row number {i}", quality) for i, quality in enumerate((0.8, 0.5, 0.7, 0.9, 0.6))}
    work = {(row, 1): {"multiply_adds": 9000 - 1000 * int(row)} for row in rows if row != "2"}
    make_grid(folder / "a", "one", rows=rows, changes=work)
    evil = {"environment": ENVIRONMENT | other, "multiply_adds": 5000}
    make_grid(folder / "b", EVIL, rows={"0": (EVIL, 0.75)}, changes={("0", 1): evil | {"label": EVIL}})
    make_grid(folder / "c", "three", task="language-modelling")
    (folder / "a" / "report.html").write_text("its own")
    change_settings(folder / "b", methods=[{"method": "low_rank", "name": EVIL}])
    reports = write_reports(*(folder / name for name in "abc"), out=folder / "out", say=lambda text: None)
    return reports, folder / "out"


def test_the_page_of_several_grids_holds_all_it_shows(compared):
    reports, out = compared
    assert sorted(path.name for path in out.iterdir()) == ["report-2.png", "report.html", "report.md", "report.png"]
    text = (out / "report.html").read_text("utf-8")
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.links) - {link for link in page.links if link.startswith("#")} == {"../a/report.html"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html.unescape(policy)
    assert "default-src 'none'; img-src data:;" in policy
    assert not re.search(r"https?:", policy)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\b *\(", script)
    assert not re.search(r"url\((?!#)|@import", text)
    for said in ("Another Processor, 1 of 2 cores", "def5678", "abc1234", "A 3", "low_rank"):
        assert said in text
    assert text.count("<caption") == text.count("<table")
    assert str(out.parent) not in text, "where the folders lie is nobody's business"
    markdown = (out / "report.md").read_text("utf-8")
    for report in reports:
        assert f"# {report.title}\n" in markdown
        assert f"]({report.picture('report')})" in markdown


def test_labels_of_several_grids_are_only_text(compared):
    text = (compared[1] / "report.html").read_text("utf-8")
    assert Page(text).scripts == 1
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") > 8


def rows_of(page, table="table-1"):
    """{row: {name of a column: text}} of the rows that are shown, in their order."""
    (body,) = re.findall(rf'<table class="rows[^>]*id="{table}">(.*?)</table>', page, re.DOTALL)
    names = re.findall(r'<th scope="col"[^>]*data-name="(\w+)"', body)
    found = {}
    for attributes, line in re.findall(r"<tr([^>]*)>(.*?)</tr>", body.split("<tbody>")[1], re.DOTALL):
        cells = [html.unescape(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL)]
        if "hidden" not in attributes:
            found[cells[0]] = dict(zip(names, cells, strict=True))
            found[cells[0]]["grey"] = "beaten" in attributes
    return found


def test_the_page_marks_the_front_without_a_script(compared):
    reports, out = compared
    axes = reports[0].weighed_by
    assert axes == ["bleu", "stored", "work"]
    names = [row["row"] for row in reports[0].rows]
    on = front([reports[0].measures[name] for name in axes], names)
    shown = rows_of((out / "report.html").read_text("utf-8"))
    assert list(shown) == names
    for name, cells in shown.items():
        assert cells["front"] == ("front" if on.get(name) else "–")
        assert cells["grey"] == (on.get(name) is False)
    assert 0 < sum(on.values()) < len(on)
    assert "A 2" not in on, "its multiply-adds are not known, so it is not judged"
    assert shown["A 2"]["work"] == "–"


def test_the_search_suggests_what_rows_differ_in(compared):
    text = (compared[1] / "report.html").read_text("utf-8")
    suggested = [html.unescape(word) for word in re.findall(r'<option value="([^"]*)">', text)]
    assert suggested == [
        "freeze",
        "low_rank",
        "one",
        EVIL,
        "three",
        *(f"{a} Processor, 1 of 2 cores" for a in ("A", "Another")),
    ]


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """The page after its script, as Chromium has it; what it says to the console is an error."""
    profile = tmp_path_factory.mktemp("profile")

    def browsed(path, fragment=""):
        dumped, log = dump_page(f"{path.as_uri()}#{fragment}", profile)
        assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
        return dumped

    return browsed


@needs_browser
def test_the_script_finds_the_front_of_the_page(compared, browse):
    """Two implementations: the page as written, and the page as the script leaves it."""
    path = compared[1] / "report.html"
    page, before = browse(path), path.read_text("utf-8")
    for table in ("table-1", "table-2"):
        assert rows_of(page, table) == rows_of(before, table)
    assert "8 of 8 rows shown" in page
    # The script adds the label as text: to the mark of its row in each of three pictures.
    assert page.count("<title>B 0: &lt;script&gt;alert") == 3
    assert page.count("alert") == before.count("alert") + 3


@needs_browser
def test_what_the_reader_chooses_is_in_the_address(compared, browse):
    reports, out = compared
    address = "sort1=-bleu&find=NUMBER+row&show1=bleu.to_first.stored&over1=bleu.stored"
    page = browse(out / "report.html", address)
    scores = {row["row"]: row["bleu"][0] for row in reports[0].rows if row["row"].startswith("A")}
    shown = rows_of(page)
    assert list(shown) == sorted(scores, key=lambda row: -scores[row])
    assert re.findall(r'data-name="(\w+)"[^>]*aria-sort="(\w+)"', page) == [("bleu", "descending")]
    assert "5 of 8 rows shown" in page
    (classes,) = re.findall(r'<table class="rows ([^"]*)" id="table-1">', page)
    left = {name.removeprefix("no-") for name in classes.split()}
    assert left == set(next(iter(shown.values()))) - {"row", "label", "bleu", "to_first", "stored", "grey"}
    columns = list(next(iter(shown.values())))
    assert f"#table-1.no-chrf tr > :nth-child({1 + columns.index('chrf')})" in page
    on = front([reports[0].measures[name] for name in ("bleu", "stored")], list(scores))
    assert {name for name, cells in shown.items() if cells["front"] == "front"} == {name for name in on if on[name]}
    assert '<span class="front">BLEU, stored MB</span>' in page
    assert re.search(r'<section[^>]*data-group="2"[^>]*hidden', page)
    (drawing,) = re.findall(r'<g id="plot-stored-row-5-0"[^>]*>', page)
    assert "display: none" in drawing, "a row that is not shown is not in the pictures"
    assert "display: none" not in re.findall(r'<g id="plot-stored-row-4-0"[^>]*>', page)[0]


@needs_browser
def test_what_is_missing_is_last_either_way(compared, browse):
    for sign, first in (("", "A 4"), ("-", "A 0")):
        shown = rows_of(browse(compared[1] / "report.html", f"sort1={sign}work&find=number&unknown=nonsense"))
        assert list(shown)[-1] == "A 2"
        assert next(iter(shown)) == first
    shown = rows_of(browse(compared[1] / "report.html", "find=low_rank"))
    assert list(shown) == ["B 0"]


@needs_browser
def test_times_of_unlike_machines_do_not_beat_each_other(compared, browse):
    page = browse(compared[1] / "report.html", "over1=bleu.minutes")
    assert rows_of(page)["B 0"]["front"] == "front", "no row of its machine beats it"


def test_times_of_unlike_machines_are_not_drawn_together(tmp_path):
    changes = {(row, 1): {"seconds": {"train": 60 + 30 * int(row)}} for row in "012"}
    changes["2", 1]["environment"] = ENVIRONMENT | {"device": "Another Processor"}
    make_runs(tmp_path, rows={row: (f"row {row}", 0.5) for row in "012"}, seeds=(1,), changes=changes)
    report = make_report([tmp_path], lambda text: None)
    (picture,) = [picture for picture in pictures_of(report) if picture.name == "minutes"]
    assert picture.title == "BLEU against minutes of training"
    assert picture.says == "Measured on: A Processor, 1 of 2 cores. 1 row of other machines not drawn."
    assert [(point.row, point.x) for point in points_of(report, "minutes")] == [("0", 1.0), ("1", 1.5)]


def test_hundreds_of_rows_stay_small(tmp_path):
    """Four kilobytes a row at most, beside the pictures; the settings of so many runs are not in the page."""
    (tmp_path / "a").mkdir()
    records = make_grid(tmp_path / "whole", "x", rows={"0": TWO["0"]})
    many = [
        records[0] | {"row": str(n), "metrics": {**records[0]["metrics"], "test_bleu": 90 - n / 10}} for n in range(320)
    ]
    write_lines(tmp_path / "a", many)
    text = page(quiet(tmp_path / "a"))
    assert len(rows_of(text)) == 320
    assert len(text) < 4000 * 320
    assert "too many to show what each was set to" in text
