"""The recipes for IWSLT'14 and WMT read parallel text of their formats: two files of lines, and a `translation` column."""

import datasets
import pytest
from support.recipes import TINY

from hf_freeze.lab.recipes.find import packaged_recipes
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.translation import load_data

IWSLT = [name for name in packaged_recipes() if name.endswith("/iwslt14")]
WMT = [name for name in packaged_recipes() if "/wmt" in name]


@pytest.mark.parametrize("name", IWSLT)
def test_iwslt_is_two_files_of_lines(tmp_path, name):
    for split, count in {"train": 5, "valid": 2, "test": 3}.items():
        for language in ("de", "en"):
            lines = [f"{language} &apos;s sentence {number} , so .\n" for number in range(count)]
            (tmp_path / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
    splits = load_data(load_recipe(name, [f"data.root={tmp_path}"]).data)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 5, "dev": 2, "test": 3}
    assert splits["test"][2] == {"source": "de &apos;s sentence 2 , so .", "target": "en &apos;s sentence 2 , so ."}


@pytest.mark.parametrize("name", WMT)
def test_wmt_is_a_column_of_translations(tmp_path, name):
    data = load_recipe(name).data.given()
    pair = dict.fromkeys((data["source"], data["target"]))
    for split in ("train", "validation", "test"):
        rows = [{language: f"{language} {split} {number}" for language in pair} for number in range(3)]
        datasets.Dataset.from_dict({"translation": rows}).to_parquet(str(tmp_path / f"{split}-00000-of-00001.parquet"))
    splits = load_data(Data(**{key: data[key] for key in data if key != "name"} | {"hub": str(tmp_path)}))
    assert splits["dev"][1] == {"source": f"{data['source']} validation 1", "target": f"{data['target']} validation 1"}


def test_every_recipe_of_published_data_is_of_a_full_size():
    assert len(IWSLT) == 4
    assert len(WMT) == 3
    for name in IWSLT + WMT:
        recipe = load_recipe(name)
        assert recipe.preset == "base"
        assert recipe.backbone.config["d_model"] >= 512
        assert recipe.task == TINY["task"]
