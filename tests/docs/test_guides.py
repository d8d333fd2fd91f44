"""Every method has a guide with all sections in words, and its generated tables are those of the registry."""

import json
import re
import sys

import pytest
from support import ROOT

from hf_freeze.cli import facts
from hf_freeze.methods.registry import METHODS

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import commands
import method_guides as guides
from registry_facts import from_registries

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
WRITE = "run: python docs/tooling/method_guides.py"


@every_method
def test_the_tables_of_a_guide_are_the_registrys(method):
    text = guides.guide_of(method).read_text(encoding="utf-8")
    assert guides.with_generated(text, method) == text, WRITE


@every_method
def test_a_guide_is_written(method):
    text = guides.guide_of(method).read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == guides.SECTIONS
    assert all(guides.meanings_of(text).values()), "a setting without a meaning"
    for section, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        assert len(body.split()) > 5, f"{section!r} is empty"
    assert "```python" in text


def test_the_table_of_methods_is_the_registrys():
    text = guides.INDEX.read_text(encoding="utf-8")
    assert guides.replaced(text, "methods", guides.overview()) == text, WRITE


def test_the_facts_that_commands_tell_are_the_registrys():
    assert facts.read() == json.loads(json.dumps(from_registries())), WRITE


def test_a_guide_that_is_out_of_date_is_found():
    method = METHODS["low_rank"]
    text = guides.guide_of(method).read_text(encoding="utf-8")
    changed = text.replace("| `solver` | str | `'exact'` |", "| `solver` | str | `'fast'` |")
    assert text == guides.with_generated(changed, method) != changed
    assert "| `rank` |" in guides.with_generated(text.replace("| `rank` |", "| `gone` |"), method)


def test_the_page_of_commands_is_their_help():
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), "run: python docs/tooling/commands.py"
