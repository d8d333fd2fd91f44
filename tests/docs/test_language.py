"""docs/tooling/language/check.py finds riddles, marketing and long sentences. `make quality` runs it on all public texts."""

import importlib.util
import json
import re
import sys

import pytest
from support import ROOT

SCRIPT = ROOT / "docs" / "tooling" / "language" / "check.py"
SHORT = "# Tool\n\nIt cuts a model. You get a small model back.\n\n```python\nx = 1\n```\n"


@pytest.fixture(scope="module")
def language():
    spec = importlib.util.spec_from_file_location("language_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # where dataclasses look for their module
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def faults(language, tmp_path):
    def check(text, name="page.md", **options):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return [fault.replace(f"{tmp_path}/", "") for fault in language.check(tmp_path / name, **options)]

    return check


@pytest.mark.parametrize(
    "riddle",
    [
        "Ray gives way to all else that a machine does.",
        "The marks know the choice of test sentences.",
        "What cannot be merged cannot be exported.",
        "It has a quarter of the perplexity.",
        "A difference may be chance.",
        "All are exported but for BERT.",
        "The front of theirs.",
        "A blazingly fast tool.",
        "It costs .3 BLEU.",
        "It runs on Pytorch.",
        "Use it in order to win.",
    ],
)
def test_a_phrase_that_we_do_not_write_is_found_with_its_place(faults, riddle):
    (fault, *_) = faults(f"# Page\n\nA good line.\n\n- {riddle}\n")
    assert fault.startswith("page.md:5: ")


def test_a_plain_page_has_no_faults(faults):
    assert not faults(SHORT + "\n| a | b |\n| --- | --- |\n| 0.3 BLEU | `huggingface` |\n\nBERT is 24 % smaller.\n")


def test_a_sentence_ends_at_a_name_in_code_and_not_at_an_abbreviation(faults):
    words = " ".join(["word"] * 20)
    assert not faults(f"It has {words}. `name` has {words}.\n")
    assert faults(f"Fan et al. {words} {words}.\n") == [
        "page.md:1: 43 words in a sentence, at most 35: Fan et al word word word word word …"
    ]


def test_literals_of_a_module_are_read(faults):
    module = 'name = "x"\nhelp = f"All of {name} but for one"\nerror = "use `but for` here"\n# but for\n'
    assert faults(module, "module.py") == ["module.py:2: 'but for': except for"]


def test_text_of_a_notebook_is_read_and_its_code_is_not(faults):
    cells = [("code", "# but for"), ("markdown", "A good line."), ("markdown", "All but for one.")]
    notebook = json.dumps({"cells": [{"cell_type": kind, "source": [text]} for kind, text in cells]})
    assert faults(notebook, "a.ipynb") == ["a.ipynb:3: 'but for': except for"]


def test_a_front_door_is_short(faults):
    pytest.importorskip("textstat")
    assert not faults(SHORT, front_door=True)
    code = "```\n" + "word " * 800 + "\n```\n"
    assert not faults(SHORT + code, front_door=True), "code does not count"
    table = "\n| word |\n| --- |\n" + "| a word of a cell |\n" * 150
    assert faults(SHORT + table, front_door=True) == ["page.md: 762 words, at most 700"]
    cell = "\n| " + "word " * 31 + "|\n| --- |\n"
    assert faults(SHORT + cell, front_door=True) == [
        "page.md:9: 31 words in a sentence, at most 30: word word word word word word word word …"
    ]


def test_a_front_door_is_easy_to_read(faults):
    pytest.importorskip("textstat")
    hard = "Parametrisation methodologies necessitate considerable computational experimentation. " * 3
    (fault,) = faults(f"# Tool\n\n{hard}\n", front_door=True)
    assert re.fullmatch(r"page\.md: Flesch-Kincaid grade \d+\.\d, at most 10", fault)


def test_the_command_says_what_it_found(language, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(SHORT, encoding="utf-8")
    assert language.main([str(page)]) == 0
    page.write_text("All but for one.\n", encoding="utf-8")
    assert language.main([str(page)]) == 1
    assert capsys.readouterr().out.splitlines() == ["no faults of language", f"{page}:1: 'but for': except for"]


def test_all_kinds_of_public_texts_are_checked(language):
    paths = {str(path.relative_to(ROOT)) for path in language.public_texts()}
    assert {"docs/tour.md", "docs/methods/freeze.md", "recipes/theseus/README.md", "hf_freeze/io.py"} <= paths
    assert any(path.startswith("notebooks/") for path in paths)
