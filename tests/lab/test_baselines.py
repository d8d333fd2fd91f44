"""All grids on a corpus compare with one dense model, trained as recipes/baselines chose."""

import pytest
from support import ROOT

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Data

RECIPES = ROOT / "recipes"
FIRST = {"recipes/factorized_embeddings/multi30k.yaml": "full", "recipes/fixed_attention/multi30k.yaml": "8L"}
OWN = {  # what row 0 of a grid may have of its own: where it is the subject of the grid
    "fixed_attention": {"encoder_attention_heads"},
    "theseus": {"encoder_layers", "decoder_layers"},
    "layerdrop": {"encoder_layers", "decoder_layers"},
    "recurrent_decoders": {"decoder_layers"},
}
OWN_TRAINING = {  # one decoder layer learns nothing at the rate of the other grids, as the page of the results shows
    "recurrent_decoders": {"learning_rate"},
}
BASELINES = {  # corpus -> the row of its sweep that was chosen
    "multi30k": "r2-d1",
    "wikitext2": "r3-d0",
    "sst2": "r10",
    "tatoeba": "r2-d1",
    "rte": "r5",
    "mnist": "r10",
}
ANOTHER_MODEL = {  # with another model, or amount of text or training, which their recipes or pages say
    "head_pruning/epochs_multi30k",
    "light_blocks/preprint_wikitext2",
    "served/multi30k",
    "factorized_embeddings/sst2",
    "glue/rte",
    "glue/sst2",
}


def load(recipe):
    return load_recipe(recipe, ["backbone.pretrained=FOLDER"] if recipe.stem.endswith(("sst2", "rte")) else [])


def row_of(recipe, name):
    run = next(run for run in expand(load(recipe)) if run.row == name)
    if recipe.stem == "mnist":  # no epoch is chosen: what is held out is for the sweep alone
        run = run.changed(data=Data(**{key: value for key, value in run.data.given().items() if key != "holdout"}))
    return run.given()


def differing(one, other):
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def grids(corpus):
    found = sorted(set(RECIPES.rglob(f"{corpus}.yaml")) | set(RECIPES.rglob(f"*_{corpus}.yaml")))
    found = [
        path
        for path in found
        if path.parent.name != "baselines" and f"{path.parent.name}/{path.stem}" not in ANOTHER_MODEL
    ]
    task = load(RECIPES / "baselines" / f"{corpus}.yaml").task
    return [path for path in found if load(path).task == task]


@pytest.mark.parametrize("corpus", BASELINES)
def test_row_0_of_every_grid_is_the_baseline(corpus):
    chosen = row_of(RECIPES / "baselines" / f"{corpus}.yaml", BASELINES[corpus])
    paths = grids(corpus)
    assert paths, "no grid on this corpus"
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        first = row_of(path, FIRST.get(name, "0"))
        own = OWN.get(path.parent.name, set())
        for section in ("data", "tokenizer", "decoding"):
            assert first.get(section) == chosen.get(section), (name, section)
        other = OWN_TRAINING.get(path.parent.name, set())
        assert differing(first["training"], chosen["training"]) == other, name
        config, theirs = first["backbone"].get("config", {}), chosen["backbone"].get("config", {})
        assert differing(config, theirs) <= own, name
        assert first["backbone"] | {"config": None} == chosen["backbone"] | {"config": None}, name
        assert first["methods"] == [], name


def test_no_grid_is_forgotten():
    paths = [path for corpus in BASELINES for path in grids(corpus)]
    assert len(paths) >= 16
    assert OWN.keys() <= {path.parent.name for path in paths}


def test_the_larger_model_of_the_ablation_differs_only_in_what_its_recipe_says():
    large, small = (row_of(RECIPES / "freeze_ablation" / f"{name}.yaml", "0") for name in ("multi30k_base", "multi30k"))
    for section in ("data", "tokenizer", "methods"):
        assert large[section] == small[section], section
    assert large["backbone"]["init"] == small["backbone"]["init"]
    assert large["decoding"] == {"num_beams": 1} | small["decoding"]
