"""What a report page tells a keyboard and a screen reader, without a browser (docs/tooling/reports.mjs has one)."""

import re
from html.parser import HTMLParser

import pytest
from support import ROOT
from support.reports import make_runs

from hf_freeze.lab.report.write import write_report, write_reports

PUBLISHED = sorted((ROOT / "docs" / "results").glob("*.html"))


class Outline(HTMLParser):
    """Collects faults: headings that skip a level, tables without a caption, drawings and places to scroll without a name."""

    def __init__(self, text):
        super().__init__()
        self.faults, self.level, self.open, self.ids = [], 0, [], set(re.findall(r' id="([^"]*)"', text))
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        named = values.get("aria-label") or values.get("aria-labelledby") in self.ids
        if tag in ("h1", "h2", "h3", "h4"):
            if int(tag[1]) > self.level + 1:
                self.faults.append(f"{tag} after h{self.level}")
            self.level = int(tag[1])
        if values.get("role") in ("img", "region", "search") and not named:
            self.faults.append(f"{tag} without a name")
        if tag == "svg" and not any(name == "figure" and role == "img" for name, role in self.open):
            self.faults.append("a drawing outside of a named figure")
        if self.open and self.open[-1][0] == "table" and self.open[-1][1] is None:
            if tag != "caption":
                self.faults.append("a table without a caption")
            self.open[-1] = ("table", "known")
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append((tag, values.get("role")))

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        self.open.pop()


def check(text):
    assert Outline(text).faults == []
    assert text.count("<h1") == 1
    assert '<html lang="en">' in text
    order = [
        text.index(part) for part in ("<h1", 'class="answer"', "<table", "<figure", ">In words<", ">How it was made<")
    ]
    assert order == sorted(order), "what is looked for first comes first"
    codes = re.findall(r">((?:encoder|decoder)\.\d+\.\w+|\w+_\w+\.\w+)</text>", text)
    assert codes == [], "labels of drawings are words"


def test_a_page_has_an_order_and_names(tmp_path):
    make_runs(tmp_path / "a", seeds=(1,))
    write_report(tmp_path / "a", say=lambda _: None)
    check((tmp_path / "a" / "report.html").read_text("utf-8"))


def test_a_page_of_several_groups_lists_their_answers(tmp_path):
    make_runs(tmp_path / "a", seeds=(1,))
    make_runs(tmp_path / "b", task="language-modelling", seeds=(1,))
    write_reports(tmp_path / "a", tmp_path / "b", out=tmp_path / "c", say=lambda _: None)
    text = (tmp_path / "c" / "report.html").read_text("utf-8")
    assert Outline(text).faults == []
    assert len(re.findall(r'<li><a href="#group-\d">.*rows: Smallest without ', text)) == 2
    assert text.index("<li>") < text.index("<table")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_page_has_an_order_and_names(path):
    check(path.read_text("utf-8"))


def test_faults_are_found():
    text = '<h1>a</h1><h3>b</h3><table><tr><td></td></tr></table><div role="region"></div><svg></svg>'
    faults = ["h3 after h1", "a table without a caption", "div without a name", "a drawing outside of a named figure"]
    assert Outline(text).faults == faults
