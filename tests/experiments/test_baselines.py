"""All grids on a corpus compare with one dense model, trained as recipes/baselines chose."""

from itertools import chain

import pytest
from support import ROOT

from hf_freeze.experiments.recipes.expand import expand
from hf_freeze.experiments.recipes.load import load_recipe

RECIPES = ROOT / "recipes"
FIRST = {"recipes/factorized_embeddings/multi30k.yaml": "full", "recipes/fixed_attention/multi30k.yaml": "8L"}
OWN = {  # what row 0 of a grid may have of its own: where it is the subject of the grid
    "fixed_attention": {"encoder_attention_heads"},
    "theseus": {"encoder_layers", "decoder_layers"},
    "layerdrop": {"encoder_layers", "decoder_layers"},
}
BASELINES = {"multi30k": "r2-d1", "wikitext2": "r3-d0"}  # corpus -> the row of its sweep that was chosen
ANOTHER_SIZE = {"served"}  # has a wider model, to be made smaller


def row_of(recipe, name):
    return next(run for run in expand(load_recipe(recipe)) if run["row"] == name)


def grids(corpus):
    found = sorted(set(RECIPES.rglob(f"{corpus}.yaml")) | set(RECIPES.rglob(f"*_{corpus}.yaml")))
    found = [path for path in found if path.parent.name not in {"baselines", *ANOTHER_SIZE}]
    return [
        path
        for path in found
        if load_recipe(path)["task"] == load_recipe(RECIPES / "baselines" / f"{corpus}.yaml")["task"]
    ]


CASES = [(corpus, path) for corpus in BASELINES for path in grids(corpus)]


@pytest.mark.parametrize(("corpus", "path"), CASES, ids=lambda value: getattr(value, "stem", value))
def test_row_0_of_every_grid_is_the_baseline(corpus, path):
    name = path.relative_to(ROOT).as_posix()
    chosen = row_of(RECIPES / "baselines" / f"{corpus}.yaml", BASELINES[corpus])
    first = row_of(path, FIRST.get(name, "0"))
    own = OWN.get(path.parent.name, set())
    for section in ("data", "tokenizer", "training", "decoding"):
        assert first[section] == chosen[section], section
    config, theirs = first["backbone"]["config"], chosen["backbone"]["config"]
    assert {key for key in config.keys() | theirs.keys() if config.get(key) != theirs.get(key)} <= own
    assert first["backbone"] | {"config": None} == chosen["backbone"] | {"config": None}
    assert first["methods"] == []


def test_every_corpus_with_a_baseline_has_grids():
    assert len(CASES) >= 8
    assert OWN.keys() <= {path.parent.name for path in chain.from_iterable(map(grids, BASELINES))}


def test_the_larger_model_of_the_ablation_differs_only_in_what_its_recipe_says():
    large, small = (row_of(RECIPES / "freeze_ablation" / f"{name}.yaml", "0") for name in ("multi30k_base", "multi30k"))
    for section in ("data", "tokenizer", "methods"):
        assert large[section] == small[section], section
    assert large["backbone"]["init"] == small["backbone"]["init"]
    assert large["decoding"] == {"num_beams": 1} | small["decoding"]
