"""Saved variants that several files of tests open."""

import json
import shutil

import pytest
from support.tiny_variants import bert_config, fresh_marian, shake

from hf_freeze import make_variant
from hf_freeze.methods import Freeze


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A variant with seeded tables and FFNs, and a trained output bias, on disk."""
    folder = tmp_path_factory.mktemp("variant")
    shake(fresh_marian(Freeze(embeddings="random", ffn="random", seed=13))).save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(saved, tmp_path):
    """A function: a copy of `saved` whose config has changed fields."""

    def change(**fields):
        folder = tmp_path / "damaged"
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return change


@pytest.fixture(scope="module")
def saved_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    model = make_variant(bert_config(), [Freeze(embeddings="random", ffn="random", seed=6)], task="masked-lm")
    shake(model).save_pretrained(folder)
    return folder, model
