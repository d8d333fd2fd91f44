"""The typed models of recipes: help for every field, the JSON schema, the tables of the docs, messages about wrong input."""

import json
import re

import jsonschema
import pytest
import yaml
from support import ROOT
from support.recipes import TINY, cli, write_recipe

from hf_freeze.lab.recipes.describe import _sections, fields_as_markdown, json_schema
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.find import packaged_recipes
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.recipe import Recipe, Run
from hf_freeze.methods.registry import METHODS

MODELS = {way or "recipe": model for model, way in _sections(Recipe).items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_field_has_a_sentence_of_help(name):
    for field, info in MODELS[name].model_fields.items():
        assert info.description, field
        assert info.description.endswith("."), field
        assert info.description[0].isupper() or field == "kind", field


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_recipe_fulfils_the_schema(name):
    """Also as a part, which another one completes."""
    text = re.sub(r"\b(\d+\.\d+)e(\d+)\b", r"\1e+\2", packaged_recipes()[name].read_text(encoding="utf-8"))
    recipe = yaml.safe_load(text)  # 1.2e6 is a number in YAML 1.2, which editors read, but not for PyYAML
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(json.dumps(recipe)))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"optimiser": "sgd"}, []),
        ({"training": {"epochs": "many"}}, ["training", "epochs"]),
        ({"training": {"lr": 1}}, ["training"]),
        ({"presets": {"small": {"training": {"lr": 1}}}}, ["presets", "small", "training"]),
        ({"smoke": {"data": {"limits": 1}}}, ["smoke", "data"]),
        ({"rows": {"0": {"label": "x", "methods": [{"method": "magic"}]}}}, ["rows", "0", "methods", 0]),
        ({"rows": {"0": {"methods": [{"method": "freeze", "fnn": "random"}]}}}, ["rows", "0", "methods", 0]),
        ({"task": "parsing"}, ["task"]),
    ],
)
def test_the_schema_finds_what_is_wrong(changes, path):
    (error,) = jsonschema.Draft202012Validator(json_schema()).iter_errors(TINY | changes)
    assert list(error.absolute_path) == path


def test_the_schema_knows_every_method_and_its_settings():
    methods = json_schema()["$defs"]["Row"]["properties"]["methods"]["items"]["anyOf"]
    assert {method["title"] for method in methods} == set(METHODS)
    (low_rank,) = [method for method in methods if method["title"] == "low_rank"]
    assert low_rank["properties"]["rank"]["description"] == "int | dict[str, int]; required"
    assert low_rank["properties"]["solver"]["description"] == "str; default 'exact'"


def test_the_command_prints_the_schema():
    assert json.loads(cli("recipes", "--schema").output) == json_schema()


def test_the_docs_have_the_tables_of_the_models():
    page = (ROOT / "docs" / "recipe_fields.md").read_text(encoding="utf-8")
    assert fields_as_markdown() in page, "hf-freeze recipes --markdown makes them"
    assert cli("recipes", "--markdown").output.strip() == fields_as_markdown()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.epoch=3", r"unknown field training\.epoch; choose from \[.*'epochs'.*\]; did you mean 'epochs'\?"),
        ("traning={}", r"unknown field 'traning'; choose from .*; did you mean 'training'\?"),
        ("task=translations", r"unknown task='translations'; choose from .*; did you mean 'translation'\?"),
        ("only=['2.2']", r"no row '2\.2'; choose from \['0', '2\.1'\]; did you mean '2\.1'\?"),
        ("rows.0.label=[a]", r"row '0': label must be a str, not \['a'\]"),
        ("decoding.num_beams=x", r"decoding\.num_beams='x' is not a value that it takes: an integer"),
        ("data.builtin.trian=3", r"unknown field data\.builtin\.trian; choose from .*; did you mean 'train'\?"),
        ("data.limit=many", r"data\.limit='many' is not a value that it takes: an integer"),
        ("report_to=wandbb", r"unknown report_to='wandbb'; choose from \[.*\]; did you mean 'wandb'\?"),
        ("rows.0.start='9'", r"row '0': start='9' is no row; choose from \['0', '2\.1'\]"),
        ("training.masking=0.2", r"training\.masking is for task 'masked-lm', not for 'translation'; choose from"),
    ],
)
def test_a_message_names_field_value_and_choices(tmp_path, setting, message):
    with pytest.raises(ValueError, match=rf"r\.yaml: {message}") as caught:
        load_recipe(write_recipe(tmp_path / "r.yaml"), [setting])
    assert "\n" not in str(caught.value)


def test_a_run_is_read_by_its_fields(tmp_path):
    """And what is written is what was set, no defaults: files of earlier runs stay equal to it."""
    run = expand(load_recipe(write_recipe(tmp_path / "r.yaml")))[1]
    assert (run.training.epochs, run.training.patience, run.backbone.pretrained, run.start) == (1, 10, None, None)
    assert set(run.given()["training"]) == set(TINY["presets"]["small"]["training"])
    assert Run.model_validate(json.loads(json.dumps(run.given()))) == run
