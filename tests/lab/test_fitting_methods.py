"""Methods that do not fit their model are found before the first run of a grid; those of all recipes of hf_freeze fit."""

import re

import pytest
from support.recipes import TINY, one_line_error, write_recipe
from transformers import BertConfig

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.find import packaged_recipes
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.runs.backbones import check_methods

PARTS = ("translation", "classification")  # what other recipes extend
WRONG = {"label": "wrong", "methods": [{"method": "low_rank", "rank": 2, "layers": {"encodre": [0]}}]}
NONE_LEFT = {"label": "wrong", "methods": [{"method": "layer_selection", "keep": {"encoder": [3]}}]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (WRONG, r"row 'late': .*'encodre'.*decoder.*encoder"),
        ({**WRONG, "start": "0"}, "row 'late': .*'encodre'"),
        (NONE_LEFT, "row 'late': .*3.*'encoder'"),
    ],
)
def test_a_row_that_cannot_be_made_is_refused_before_any_is_trained(row, why, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.yaml", rows={**TINY["rows"], "late": row})
    line = one_line_error("run", recipe, "--out", tmp_path / "out")
    assert re.search(why, line), line
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=100
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in packaged_recipes() if name not in PARTS])
def test_the_recipes_of_hf_freeze_fit(name, bert):
    path = packaged_recipes()[name]
    try:
        recipe = load_recipe(path)
    except ValueError:  # it names no model, or else it is wrong with one, too
        recipe = load_recipe(path, [f"backbone.pretrained={bert}"])
    for run in {run.row: run for run in expand(recipe)}.values():
        check_methods(run)
