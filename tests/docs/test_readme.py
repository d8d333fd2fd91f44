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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link
