"""The README says what the code does."""

import re

import pytest
from support import ROOT

from hf_freeze.cli.methods import methods_by_architectures

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("recipes/**/*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_methods_is_the_registries():
    assert methods_by_architectures() in README


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
