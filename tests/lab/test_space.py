"""The space of a recipe, and runs that pause: what hf-freeze search is made of, without Optuna."""

from dataclasses import replace

import pytest
from support.recipes import TINY, figures, one_line_error, write_recipe

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.space import space_of
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.text_training import Paused
from hf_freeze.lab.tasks import translation

SPACE = {
    "methods": [
        {"method": "layer_sharing", "optional": True},
        {"method": "factorized_embedding", "rank": {"int": [2, 12]}, "optional": True},
        {"method": "freeze", "ffn": {"choices": ["random", "frozen"]}, "optional": True},
    ],
    "not_together": [["layer_sharing", "freeze"]],
    "backbone": {"config": {"d_model": {"int": [8, 16], "step": 4}, "encoder_ffn_dim": {"choices": [8, 16]}}},
    "training": {"learning_rate": {"float": ["1e-3", "1e-2"], "log": True}},
}


def recipe_of(folder, **changes):
    return load_recipe(write_recipe(folder / "r.yaml", TINY | {"space": SPACE}, **{"rows": ..., **changes}))


# -- spaces --------------------------------------------------------------------------------------------------------------------

BAD_SPACES = {
    "field": (
        {"space/x": 1},
        r"unknown field space\.x; choose from \['backbone', 'methods', 'not_together', 'training'\]",
    ),
    "method": (
        {"space/methods": [{"method": "prune"}]},
        r"space: unknown method 'prune'; choose from \['adaptive_embedding'",
    ),
    "no list": (
        {"space/methods": {"freeze": {}}},
        r"space\.methods must be a list, not \{",
    ),
    "setting": (
        {"space/methods": [{"method": "low_rank", "ranks": 3}]},
        r"space: unknown setting 'ranks' of 'low_rank'; choose from \[.*'rank'",
    ),
    "optional": (
        {"space/methods": [{"method": "layer_sharing", "optional": 1}]},
        "optional=1 of 'layer_sharing' must be true",
    ),
    "teacher": ({"space/methods": [{"method": "distillation"}]}, "'distillation' needs the row of a teacher"),
    "empty range": (
        {"space/methods": [{"method": "low_rank", "rank": {"int": [8, 4]}}]},
        r"low_rank\.rank: the range int=\[8, 4\] is empty: 8 is above 4",
    ),
    "one end": ({"space/training": {"learning_rate": {"float": [1]}}}, r"float=\[1\] must be \[low, high\]"),
    "no number": ({"space/training": {"learning_rate": {"float": [1, "x"]}}}, "learning_rate: 'x' is no number"),
    "infinite": ({"space/training": {"learning_rate": {"float": [1, ".inf"]}}}, "'.inf' is no number"),
    "no integer": (
        {"space/backbone": {"config": {"d_model": {"int": [8, 9.5]}}}},
        r"int=\[8, 9\.5\] step=1 must be integers",
    ),
    "log of 0": (
        {"space/training": {"weight_decay": {"float": [0, 1], "log": True}}},
        "needs a lower end above 0, not 0",
    ),
    "step of float": (
        {"space/training": {"weight_decay": {"float": [0, 1], "step": 1}}},
        "unknown field 'step' of a range of float",
    ),
    "no choice": ({"space/backbone": {"config": {"d_model": {"choices": []}}}}, "the range is empty without any"),
    "choice twice": (
        {"space/backbone": {"config": {"d_model": {"choices": [8, 8]}}}},
        r"choices=\[8, 8\] must be values, each once",
    ),
    "config": (
        {"space/backbone": {"config": {"width": {"int": [8, 9]}}}},
        r"unknown value backbone\.config\.width; choose from",
    ),
    "backbone": (
        {"space/backbone": {"model_type": "gpt2"}},
        r"space\.backbone must hold values of the config, such as",
    ),
    "epochs": (
        {"space/training": {"epochs": {"int": [1, 9]}}},
        r"training\.epochs cannot be searched; choose from \['learning_rate'",
    ),
    "stranger": (
        {"space/not_together": [["freeze", "tucker"]]},
        r"not_together: 'tucker' is not in the space; choose from \['layer_",
    ),
    "alone": (
        {"space/not_together": [["freeze"]]},
        "is not a value that it takes: a list of lists of two or more methods",
    ),
    "always refused": (
        {"space/methods": [{"method": "layer_sharing"}, {"method": "freeze", "ffn": {"choices": ["random"]}}]},
        "space: all trials are refused: not_together names 'layer_sharing' and 'freeze', and neither is optional",
    ),
    "nothing to choose": (
        {"space": {"methods": [{"method": "layer_sharing"}]}},
        "has nothing to choose: no range and no optional",
    ),
    "pretrained": (
        {"presets/small/backbone": {"pretrained": "me/model"}, "presets/small/tokenizer": ...},
        r"trials train from fresh weights, so there can be no 'start' or 'backbone\.pretrained'",
    ),
    "search field": (
        {"search": {"trials": 3}},
        r"unknown field search\.trials; choose from \['bounds', 'goals', 'keep', 'rungs'\]",
    ),
    "goal": (
        {"search": {"goals": ["dev_loss", "speed"]}},
        r"unknown search\.goals\.1='speed'; choose from \['dev_loss'",
    ),
    "no loss": ({"search": {"goals": ["stored_bytes"]}}, "must be a list with 'dev_loss' in it and nothing twice"),
    "bound": (
        {"search": {"bounds": {"bytes": 1}}},
        r"unknown search\.bounds 'bytes'; choose from \['parameters', 'stored_bytes'",
    ),
    "no bound": ({"search": {"bounds": {"parameters": 0}}}, r"bounds\.parameters=0 must be above 0"),
    "rungs": (
        {"search": {"rungs": [0.5, 1]}},
        r"rungs=\[0\.5, 1\.0\] must rise, each between 0 and training\.epochs=1",
    ),
    "keep": ({"search": {"keep": 1}}, r"search\.keep=1 must be above 0 and below 1"),
    "search alone": ({"space": ..., "rows": TINY["rows"], "search": {}}, "'search' needs a 'space' to search"),
}


@pytest.mark.parametrize("name", BAD_SPACES)
def test_a_bad_space_is_refused_in_one_line(tmp_path, name):
    changes, message = BAD_SPACES[name]
    with pytest.raises(ValueError, match=message) as caught:
        recipe_of(tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_a_point_of_a_space_is_a_row(tmp_path):
    recipe = recipe_of(tmp_path)
    chosen = {
        "layer_sharing": False,
        "factorized_embedding": True,
        "factorized_embedding.rank": 5,
        "freeze": True,
        "freeze.ffn": "random",
        "backbone.config.d_model": 12,
        "backbone.config.encoder_ffn_dim": 8,
        "training.learning_rate": 0.002,
    }
    space = space_of(recipe, "r.yaml")
    assert set(space.ranges()) == set(chosen)
    row, refused = space.row(lambda name, _: chosen[name])
    assert not refused
    assert row.given() == {
        "label": "factorized_embedding rank=5, freeze ffn=random, d_model=12, encoder_ffn_dim=8, learning_rate=0.002",
        "methods": [{"method": "factorized_embedding", "rank": 5}, {"method": "freeze", "ffn": "random"}],
        "backbone": {"config": {"d_model": 12, "encoder_ffn_dim": 8}},
        "training": {"learning_rate": 0.002},
    }
    (run,) = expand(recipe.changed(rows={"t0": row}))
    assert run.backbone.config == TINY["presets"]["small"]["backbone"]["config"] | row.backbone.config
    assert run.training.learning_rate == 0.002
    assert run.methods[1]["seed"] == 1
    _, refused = space.row(lambda name, _: (chosen | {"layer_sharing": True})[name])
    assert refused == "not_together: freeze and layer_sharing"


def test_hf_freeze_run_says_that_a_space_is_searched(tmp_path):
    path = write_recipe(tmp_path / "r.yaml", TINY | {"space": SPACE}, rows=...)
    assert "tiny has no rows to run; its space is for hf-freeze search" in one_line_error(
        "run", path, "--out", tmp_path / "x"
    )


# -- runs that pause -----------------------------------------------------------------------------------------------------------


def test_a_run_that_pauses_ends_as_one_that_does_not_and_never_sees_the_test_split(tmp_path, monkeypatch):
    class Hidden:
        def __getattribute__(self, name):
            raise AssertionError("the test split was looked at")

    load = translation.TASK.load
    hiding = replace(translation.TASK, load=lambda data: load(data) | {"test": Hidden()})
    monkeypatch.setattr(translation, "TASK", hiding)
    changes = {"presets/small/training/epochs": 3, "presets/small/backbone/config/max_position_embeddings": 10}
    run = expand(load_recipe(write_recipe(tmp_path / "r.yaml", **changes)))[1].changed(scored_on="dev")
    whole = execute(run, tmp_path / "whole" / "row-2.1-seed-1")
    folder = tmp_path / "paused" / "row-2.1-seed-1"
    for epochs in (1, 2):
        with pytest.raises(Paused):
            execute(run, folder, until=epochs)
        assert not (folder / "metrics.json").exists()
    record = execute(run, folder)
    assert record["resumed"]
    assert record["scored_on"] == "dev"
    assert figures(record) == figures(whole)
