"""The notebooks are valid, hold the outputs of one execution and nothing of a machine, and their links lead somewhere."""

import json
import re
import shutil
import sys

import nbformat
import pytest
from support import ROOT
from support.cases import ALL

sys.path.insert(0, str(ROOT / "docs" / "tooling"))
import notebooks as tooling

NAMES = sorted(path.name for path in tooling.FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("name", NAMES)
LARGEST = 300_000  # bytes, pictures included: GitHub shows larger ones slowly


def cells_of(name, kind):
    cells = json.loads((tooling.FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def test_there_are_three():
    assert len(NAMES) == 3


@every_notebook
def test_a_notebook_is_in_its_format(name):
    notebook = nbformat.read(tooling.FOLDER / name, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4


@every_notebook
def test_the_outputs_are_of_one_execution(name):
    cells = cells_of(name, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run: make notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("text/markdown" in output.get("data", {}) for output in outputs)


@every_notebook
def test_nothing_of_a_machine_and_no_error_is_kept(name):
    text = (tooling.FOLDER / name).read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert tooling.faults(notebook) == []
    cleaned = json.loads(text)
    tooling.clean(cleaned)
    assert cleaned == notebook, "run: make notebooks"
    assert len(text.encode()) < LARGEST


@every_notebook
def test_the_code_compiles_and_the_first_cell_says_how_long_it_takes(name):
    for number, cell in enumerate(cells_of(name, "code"), start=1):
        compile("".join(cell["source"]), f"{name}, code cell {number}", "exec")
    assert re.search(r"takes\sabout\s\w+\sminutes", "".join(cells_of(name, "markdown")[0]["source"]))


@every_notebook
def test_links_lead_somewhere(name):
    links = [
        link for cell in cells_of(name, "markdown") for link in re.findall(r"\]\(([^)#]+)", "".join(cell["source"]))
    ]
    files = [link for link in links if not link.startswith("http")]
    assert any(link.startswith("../docs/") for link in files)
    assert [link for link in files if not (tooling.FOLDER / link).exists()] == []


def test_the_outputs_of_the_sentence_encoder_are_not_of_its_stand_ins():
    cells = cells_of("sentence_encoder_of_11_mb.ipynb", "code")
    printed = "".join(text for cell in cells for output in cell["outputs"] for text in output.get("text", ""))
    assert "model: all-MiniLM-L6-v2, texts: captions of Multi30k" in printed, (
        "set CAPTIONS, see docs/tooling/notebooks.py"
    )


def cell(**output):
    return {
        "cells": [{"cell_type": "code", "source": ["1"], "metadata": {"a": 1}, "outputs": [output]}],
        "metadata": {},
    }


def test_faults_are_found():
    for path in ("/home/me/file.py", "/tmp/a1/", "C:\\Users\\me"):
        printed = cell(output_type="stream", name="stdout", text=[f"see '{path}'\n"])
        assert tooling.faults(printed) == [f"cell 1 has the path of a machine, {path}"]
    harmless = cell(output_type="stream", name="stdout", text=["https://a.org/b/c ../docs/a.md a/b/c </b> 1/2/3 // /"])
    assert tooling.faults(harmless) == []
    assert "kind stderr: 'careful'" in tooling.faults(cell(output_type="stream", name="stderr", text=["careful"]))[0]
    assert "kind error" in tooling.faults(cell(output_type="error", ename="ValueError", traceback=[]))[0]
    picture = cell(output_type="display_data", data={"image/png": "abc/tmp/def"}, metadata={})
    assert tooling.faults(picture) == []
    tooling.clean(picture)
    assert picture["cells"][0]["metadata"] == {}
    assert picture["metadata"] == tooling.METADATA


def test_a_page_has_text_code_and_outputs(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code",
            "source": ["print(1)\n", "2"],
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["1\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
                {"output_type": "execute_result", "data": {"text/plain": ["object"], "text/markdown": ["| a |"]}},
                {"output_type": "display_data", "data": {"text/plain": ["figure"], "image/png": "abc\n"}},
            ],
        },
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert tooling.page_of(tmp_path / "a.ipynb").split("\n\n") == [
        "# Title",
        "```python\nprint(1)\n2\n```",
        "```text\n1\n```",
        "```text\n2\n```",
        "| a |",
        '<img alt="The figure that the code above draws" src="data:image/png;base64,abc">\n',
    ]


@every_notebook
@pytest.mark.skipif(not ALL, reason="minutes for each notebook: run by make test-all and make notebooks")
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    pytest.importorskip("nbclient")  # of the extra notebooks
    monkeypatch.delenv("CAPTIONS", raising=False)  # built-in data
    shutil.copyfile(tooling.FOLDER / name, tmp_path / name)
    tooling.execute(tmp_path / name)
