"""Rows that start without some of the layers of another one, which the dev set chooses."""

import json
from pathlib import Path

import pytest
from support.recipes import SHORT, write_recipe
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

import hf_freeze
from hf_freeze import analysis
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.rows import Layers
from hf_freeze.lab.runs.chosen_layers import selection
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.tasks.translation import encode, load_data

KEEP = {"encoder": 1, "decoder": 1}
ALL = {"label": "all", "methods": [{"method": "layer_drop", "p": 0.2}]}


def fewer(by, **more):
    return {
        "label": by,
        "methods": [],
        "start": "0",
        "training": {"epochs": 0},
        "layers": {"by": by, "keep": KEEP} | more,
    }


LEARNT = {
    "label": "learnt",
    "methods": [{"method": "layer_drop", "p": 0.2, "learned": True}],
    "training": {"epochs": 1, "learning_rates": {"gates": 0.1}},
}
ROWS = {"0": ALL, "learnt": LEARNT, "rates": fewer("rates") | {"start": "learnt"}} | {
    by: fewer(by) for by in ("removal", "search")
}
DEEPER = {"presets/small/backbone/config/encoder_layers": 3, "presets/small/backbone/config/decoder_layers": 2}


def test_the_dev_set_chooses_the_layers(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=ROWS, **DEEPER | SHORT))
    out = tmp_path / "runs"
    for run in expand(recipe):
        execute(run, run.folder(out))
    found = {}
    for by in ROWS.keys() - {"0", "learnt"}:
        config = json.loads((out / f"row-{by}-seed-1" / "model" / "config.json").read_text())
        assert [config["encoder_layers"], config["decoder_layers"]] == [1, 1]
        (found[by],) = [m["keep"] for m in config["methods"] if m["method"] == "layer_selection"]
    learnt = AutoModelForSeq2SeqLM.from_pretrained(out / "row-learnt-seed-1" / "model")
    assert found.pop("rates") == analysis.select_layers(analysis.keep_rates(learnt), KEEP).keep
    assert len(set(learnt.methods[0].rates["encoder"])) == 3
    folder = out / "row-0-seed-1" / "model"
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    run = expand(recipe)[0]
    dev = encode(load_data(run.data)["dev"], tokenizer, run, lambda *_: None)
    batches = [DataCollatorForSeq2Seq(tokenizer, model=model)([dev[number] for number in range(len(dev))])]
    expected = {
        "every_other": analysis.extract_depth(model, KEEP),
        "search": analysis.search_layers(model, KEEP, batches),
    } | {
        by: analysis.select_layers(analysis.layer_importance(model, batches, measure=by), KEEP)
        for by in ("removal", "similarity")
    }
    for by, choice in expected.items():
        assert found.get(by, choice.keep) == choice.keep
        assert selection(Layers(by=by, keep=KEEP), model, batches) == choice


BAD_ROWS = {
    "no start": ({"methods": [], "layers": {"by": "search", "keep": KEEP}}, r"row '1' has 'layers' but no 'start'"),
    "no keep": (fewer("search") | {"layers": {"by": "search"}}, r"row '1': layers\.keep is missing"),
    "choice": (
        fewer("size"),
        r"unknown layers\.by='size'; choose from \['every_other', 'removal', 'similarity', 'rates', 'search'\]",
    ),
    "number": (
        fewer("search", keep={"encoder": 0}),
        r"layers\.keep=\{'encoder': 0\} is not a value that it takes: numbers of layers by stack",
    ),
    "trials": (fewer("removal", trials=3), r"layers\.trials=3 is for by: search, not for 'removal'"),
    "heads": (fewer("search") | {"heads": {"by": "random", "fraction": 0.5}}, r"row '1' has both 'layers' and 'heads'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_refused(tmp_path, case):
    fields, message = BAD_ROWS[case]
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path / "r.yaml", rows={"0": ALL, "1": {"label": "one"} | fields}))


def test_the_recipe_has_the_deep_encoder_of_the_paper():
    path = Path(hf_freeze.__file__).parents[1] / "recipes" / "layerdrop" / "parts.yaml"
    runs = {run.row: run for run in expand(load_recipe(path))}
    sizes = runs["12-6-p2"].backbone.config
    assert [sizes["encoder_layers"], sizes["decoder_layers"]] == [12, 6]
    assert runs["12-6-p2"].methods == runs["p2"].methods
    assert runs["search"].layers.trials == 60
    assert runs["search"].start.row == "p2"
