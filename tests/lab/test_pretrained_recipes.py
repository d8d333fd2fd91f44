"""Recipes that replace the fresh backbone of another recipe, or of a preset, by a pretrained one."""

import pytest
from support.recipes import TINY, write_recipe

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe

PRETRAINED = {"backbone": {"pretrained": "x"}}
LM = {"task": "language-modelling", "presets/small/backbone/model_type": "gpt2", "presets/small/backbone/config": {}}


def write_extending(folder, text, **changes):
    write_recipe(folder / "base.yaml", **changes)
    path = folder / "mine.yaml"
    path.write_text("extends: base.yaml\n" + text, encoding="utf-8")
    return path


def test_pretrained_replaces_the_backbone_and_tokenizer_of_the_extended_recipe(tmp_path):
    recipe = load_recipe(write_extending(tmp_path, "backbone: {pretrained: x}\n"))
    assert recipe.backbone.given() == {"pretrained": "x"}
    assert recipe.tokenizer is None
    for run in expand(recipe):
        assert run.backbone.given() == {"pretrained": "x"}
        assert run.tokenizer is None


def test_pretrained_may_be_set_on_the_command_line(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml"), ["backbone.pretrained=x"])
    assert recipe.backbone.given() == {"pretrained": "x"}
    assert recipe.tokenizer is None


def test_a_fresh_backbone_replaces_a_pretrained_one(tmp_path):
    text = "backbone: {model_type: marian, config: {d_model: 16}}\ntokenizer: {vocab_size: 100}\n"
    changes = {"presets/small/backbone": {"pretrained": "x"}, "presets/small/tokenizer": ...}
    recipe = load_recipe(write_extending(tmp_path, text, **changes))
    assert recipe.backbone.given() == {"model_type": "marian", "config": {"d_model": 16}}


def test_one_row_may_start_from_pretrained_weights(tmp_path):
    rows = TINY["rows"] | {"p": {"label": "pretrained", "methods": []} | PRETRAINED}
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", rows=rows))
    runs = {run.row: run for run in expand(recipe)}
    assert runs["p"].backbone.given() == {"pretrained": "x"}
    assert runs["p"].tokenizer is None
    assert runs["0"].backbone.given() == TINY["presets"]["small"]["backbone"]
    assert runs["0"].tokenizer.given() == TINY["presets"]["small"]["tokenizer"]


def test_a_row_with_another_tokenizer_is_refused_where_scores_are_per_token(tmp_path):
    rows = TINY["rows"] | {"p": {"label": "pretrained", "methods": []} | PRETRAINED}
    path = write_recipe(tmp_path / "r.yaml", rows=rows, **LM)
    with pytest.raises(ValueError, match="row 'p': perplexity is per token"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backbone: {pretrained: x, model_type: bert}\n", "both 'backbone.pretrained' and 'backbone.model_type'"),
        ("backbone: {pretrained: x}\ntokenizer: {vocab_size: 50}\n", "both 'backbone.pretrained' and 'tokenizer'"),
        (
            "rows: {'0': {backbone: {pretrained: x, init: marian}}}\n",
            "row '0'.* 'backbone.pretrained' and 'backbone.init'",
        ),
        ("rows: {'0': {backbone: {pretrained: x}, tokenizer: {vocab_size: 9}}}\n", "row '0'.* and 'tokenizer'"),
    ],
)
def test_contradictions_in_one_place_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(write_extending(tmp_path, text))
