"""Rows whose methods are calibrated with texts when they take over the model of another row."""

import json

import pytest
from support.recipes import LM, SHORT, write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_freeze import make_variant, methods
from hf_freeze.lab import data
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.tasks.translation import load_data

ALL = {"label": "all", "methods": []}
HALF = {"methods": [{"method": "ffn_pruning", "width": 8}], "start": "0", "training": {"epochs": 0}}
CALIBRATED = {
    "pairs": {"texts": ["texts.de", "texts.en"], "samples": 20},
    "sources": {"texts": "texts.de", "samples": 20},
    "training data": {"samples": 20},
}

AUTO = [{"method": "head_pruning", "share": "auto"}, {"method": "ffn_pruning", "share": "auto"}]
SHARED = {"label": "auto"} | HALF | {"methods": AUTO, "calibration": {"samples": 20, "budget": 0.6}}


def row(calibration=None):
    return {"label": "half"} | HALF | ({} if calibration is None else {"calibration": calibration})


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The runs of rows that differ in their calibration, and the folder of the texts."""
    folder = tmp_path_factory.mktemp("calibrated")
    settings = {"builtin": {"seed": 0, "train": 60, "dev": 8, "test": 8}, "root": str(folder)}
    split = load_data(Data(builtin=settings["builtin"]))["train"]
    for side, name in (("source", "de"), ("target", "en")):
        (folder / f"texts.{name}").write_text("\n".join(split[side]) + "\n", encoding="utf-8")
    named = {name.replace(" ", "-"): row(calibration) for name, calibration in CALIBRATED.items()}
    rows = {"0": ALL, "none": row(), "auto": SHARED, **named}
    recipe = load_recipe(write_recipe(folder / "r.yaml", rows=rows, **SHORT))
    for run in expand(recipe):
        run.data.root = str(folder)
        execute(run, run.folder(folder))
    return folder


def model_of(grid, name):
    return AutoModelForSeq2SeqLM.from_pretrained(grid / f"row-{name}-seed-1" / "model")


def record_of(grid, name):
    return json.loads((grid / f"row-{name}-seed-1" / "metrics.json").read_text())


def test_the_record_says_what_was_used(grid):
    for name in CALIBRATED:
        used = record_of(grid, name.replace(" ", "-"))["calibration"]
        assert used.keys() == {"texts", "tokens"}
        assert 0 < used["texts"] <= 20 < used["tokens"]
    assert "calibration" not in record_of(grid, "none")
    assert "calibration" not in record_of(grid, "0")


def test_the_model_is_that_of_make_variant(grid):
    model, tokenizer = model_of(grid, "0"), AutoTokenizer.from_pretrained(grid / "row-0-seed-1" / "model")
    pairs = data.read_pairs([grid / "texts.de", grid / "texts.en"])
    texts = data.sample(list(zip(pairs["source"], pairs["target"], strict=True)), 20, 1)
    for name, calibration in (("pairs", texts), ("sources", [source for source, _ in texts])):
        expected = make_variant(model, [methods.FFNPruning(width=8)], calibration=calibration, tokenizer=tokenizer)
        found = model_of(grid, name).state_dict()
        assert all((value - found[key]).abs().max() < 1e-5 for key, value in expected.state_dict().items())


def test_heads_and_neurons_share_the_budget_of_a_row(grid):
    applied = model_of(grid, "auto").methods
    assert "auto" not in str(applied)
    assert any(method.name == "ffn_pruning" and method.keep for method in applied)


def test_each_calibration_is_another_model(grid):
    weights = [
        model_of(grid, name.replace(" ", "-")).model.decoder.layers[0].fc2.weight for name in ("none", *CALIBRATED)
    ]
    for number, one in enumerate(weights):
        assert all(not one.equal(other) for other in weights[number + 1 :])


def test_what_starts_from_a_calibrated_row_is_another_run(tmp_path):
    rows = {"0": ALL, "1": row({}), "2": {"label": "on", "methods": [], "start": "1"}}
    runs = {run.row: run for run in expand(load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows)))}
    assert runs["2"].start.calibration.given() == {}
    assert runs["2"].calibration is None


def test_blocks_of_running_text(tmp_path):
    """Of a language model, a text is a block."""
    rows = {"0": ALL, "1": row({"samples": 9})}
    for run in expand(load_recipe(write_recipe(tmp_path / "r.yaml", **LM, rows=rows))):
        record = execute(run, run.folder(tmp_path))
    assert 0 < record["calibration"]["texts"] <= 9


BAD_ROWS = {
    "no start": (
        {"methods": [], "calibration": {}},
        r"row '1' has 'calibration' but neither 'start' nor 'backbone.pre",
    ),
    "no dict": (row(3), r"row '1': calibration must be a dict, not 3"),
    "unknown": (
        row({"text": "a"}),
        r"row '1': unknown field calibration\.text; choose from .*; did you mean 'texts'\?",
    ),
    "files": (row({"texts": [3]}), r"calibration\.texts=\[3\] is not a value that it takes: a file or a list of files"),
    "no budget": (SHARED | {"calibration": {}}, r"row '1': head_pruning\(share='auto'\): give a budget"),
    "no texts": ({"methods": AUTO}, r"row '1': head_pruning\(share='auto'\): give a budget"),
    "budget": (
        SHARED | {"calibration": {"budget": 2}},
        r"row '1': calibration\.budget=2 must be above 0 and at most 1",
    ),
    "samples": (row({"samples": 0}), r"calibration\.samples=0 must be at least 1"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused(tmp_path, case):
    fields, message = BAD_ROWS[case]
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", rows={"0": ALL, "1": {"label": "one"} | fields}))
