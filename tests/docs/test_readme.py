"""The README says what the code does."""

import re
import sys

import pytest
import yaml
from support import ROOT

from hf_freeze import __version__
from hf_freeze.methods.registry import METHODS

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import method_guides as guides

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("recipes/**/*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_methods_is_the_registrys():
    assert guides.replaced(README, "methods", guides.summary()) == README, "run: python docs/tooling/method_guides.py"
    assert all(f"`{method.__name__}`" in README for method in METHODS.values())


def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"


def anchors_of(page):
    """Those of the headings, as GitHub makes them: lower case, punctuation left out, dashes for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if not link.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page):
    """Those of the repository, such as `tests/support/cases.py`. Of `methods/<name>.py` it is the folder."""
    folders = "hf_freeze|tests|recipes|benchmarks|docs|model_cards"
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*)", page.read_text(encoding="utf-8")):
        assert (ROOT / path.rstrip(".")).exists(), path
