"""The recipes of GLUE, CoNLL-2003, SQuAD and RACE: with files of their formats, every row runs to its end."""

import pytest
from rich.console import Console
from support.cases import ALL
from support.recipes import BERT, write_recipe
from support.task_files import FOLDERS, SENTENCES, write_conll, write_glue, write_race, write_squad

from hf_freeze.lab.recipes.load import load_recipe, read_recipe
from hf_freeze.lab.runs.grid import run_grid

READING = ["conll2003", "squad", "squad2", "race"]
RECIPES = [*(f"glue/{name}" for name in FOLDERS), *(f"reading/{name}" for name in READING)]


def write_files(folder, name):
    """What `data.root` of the recipe names."""
    task = name.partition("/")[2]
    if task in FOLDERS:
        return write_glue(folder, task)
    for split, count in {"train": 20, "dev": 6, "test": 6}.items():
        if task == "race":
            write_race(folder / split, count)
        elif task == "conll2003":
            name = {"train": "eng.train", "dev": "eng.testa", "test": "eng.testb"}[split]
            write_conll(folder / name, SENTENCES * count)
        else:
            version = 1 + (task == "squad2")
            write_squad(
                folder / f"{split}-v{version}.{1 if version == 1 else 0}.json", count, unanswerable=version == 2
            )
    return folder


@pytest.mark.skipif(not ALL, reason="thirteen grids of eight rows; HF_FREEZE_TESTS=all")
@pytest.mark.parametrize("name", RECIPES)
def test_every_row_runs(tmp_path, name):
    root = write_files(tmp_path, name)
    six = BERT["presets/small/backbone"]["config"] | {"num_hidden_layers": 6, "max_position_embeddings": 48}
    training = {"max_tokens": 400, "learning_rate": 0.01, "warmup_steps": 1, "bf16": False, "epochs": 1}
    recipe = {"extends": name, "preset": "tiny", "training": training, "data": {"root": str(root)}}
    recipe["presets"] = {
        "tiny": {
            "tokenizer": {"kind": "wordpiece", "vocab_size": 150},
            "backbone": {"model_type": "bert", "config": six},
            "training": training,
        }
    }
    if "holdout" in read_recipe(name)["data"]:
        recipe["data"]["holdout"] = 4
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", recipe))
    records = run_grid(recipe, tmp_path / "out", console=Console(quiet=True))
    assert [record["row"] for record in records] == [str(row) for row in recipe.only or recipe.rows]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_a_model_and_a_folder_only(tmp_path, name):
    recipe = load_recipe(name, [f"data.root={tmp_path}", f"backbone.pretrained={tmp_path}"])
    assert recipe.data.train
    assert recipe.name.startswith(name.replace("/", "-")[:5])
