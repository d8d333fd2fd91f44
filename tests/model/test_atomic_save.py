"""`save_pretrained` over a saved model: whatever ends it, the folder holds the old model or the new one."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.processes import run_child
from transformers import AutoConfig, AutoModelForCausalLM

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.model import atomic_save

CONFIG = AutoConfig.for_model("gpt2", **ARCHITECTURES["gpt2"].tiny)


def variant(seed):
    return make_variant(CONFIG, [methods.Freeze(ffn="random", seed=seed)], task="causal-lm", seed=seed)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_save_that_is_stopped_anywhere(tmp_path):
    found = run_child("saving", tmp_path)
    assert found.pop("full_disk") == {"failed": 5}
    assert list(found) == ["kills", "adapters"]
    for counts in found.values():
        assert counts["kills"] > 12
        assert counts["old"] > 3
        assert counts["new"] > 3


@pytest.mark.parametrize(("before", "after"), [("50GB", "6KB"), ("6KB", "50GB"), ("6KB", "3KB")])
def test_what_is_left_is_the_usual_layout(before, after, tmp_path):
    fresh = tmp_path / "fresh"
    variant(2).save_pretrained(fresh, max_shard_size=after)
    over = tmp_path / "over"
    variant(1).save_pretrained(over, max_shard_size=before)
    variant(2).save_pretrained(over, max_shard_size=after)
    assert names(over) == names(fresh)
    assert all((over / name).read_bytes() == (fresh / name).read_bytes() for name in names(fresh))
    assert all((over / name).stat().st_nlink == 1 for name in names(over))


def test_without_hard_links_files_are_copied(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for seed in (1, 2):
        variant(seed).save_pretrained(tmp_path)
    assert names(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.methods[0]["seed"] == 2


def test_another_process_writes_nothing(tmp_path):
    variant(1).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    variant(2).save_pretrained(tmp_path, is_main_process=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_state_dict_given_stays_whole(tmp_path):
    model = variant(1)
    state = model.state_dict()
    before = set(state)
    model.save_pretrained(tmp_path, state_dict=state)
    assert set(state) == before


def test_weights_of_another_precision_lie_beside(tmp_path):
    model = variant(1)
    model.save_pretrained(tmp_path)
    variant(1).bfloat16().save_pretrained(tmp_path, variant="bf16")
    assert {"model.safetensors", "model.bf16.safetensors"} <= set(names(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path, variant="bf16").dtype == torch.bfloat16
    variant(1).bfloat16().save_pretrained(tmp_path, variant="bf16", max_shard_size="3KB")
    assert "model.bf16.safetensors" not in names(tmp_path)
    assert "model.safetensors.index.bf16.json" in names(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, variant="bf16")
    for options in ({}, {"variant": "fp16"}):
        message = r"holds 'model.*' of a model with other settings \(digests, methods\).*save to another folder"
        with pytest.raises(ValueError, match=message):
            variant(2).save_pretrained(tmp_path, **options)
        assert not list(tmp_path.glob(".*"))
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_hub_gets_the_files_of_the_model_alone(tmp_path, monkeypatch):
    pushed = {}

    def save_pretrained(self, folder, is_main_process=True, state_dict=None, push_to_hub=False, **kwargs):
        native(self, folder, is_main_process, state_dict, **kwargs)
        if push_to_hub:
            pushed[kwargs["repo_id"]] = names(Path(folder))

    model = variant(1)
    owner = next(
        c for c in type(model).__mro__ if "save_pretrained" in vars(c) and c.__module__.startswith("transformers")
    )
    native = owner.save_pretrained
    monkeypatch.setattr(owner, "save_pretrained", save_pretrained)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "secret.txt").write_text("not of the model")
    model.save_pretrained(folder, push_to_hub=True)
    assert pushed == {"mine": ["config.json", "generation_config.json", "model.safetensors"]}
    assert names(folder) == ["config.json", "generation_config.json", "model.safetensors", "secret.txt"]
    model.save_pretrained(folder, push_to_hub=True, repo_id="me/other")
    assert "me/other" in pushed


def test_an_interrupted_switch_is_read_and_then_completed(tmp_path, monkeypatch):
    """After the rename of config.json and before anything else; also by what reads a folder without completing it."""
    variant(1).save_pretrained(tmp_path)

    def stopped(*args):
        raise KeyboardInterrupt

    new = variant(2)
    new.generation_config.max_new_tokens = 9
    with monkeypatch.context() as patch:
        patch.setattr(atomic_save, "_give_usual_names", stopped)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(tmp_path, max_shard_size="6KB")
    for path in tmp_path.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(read.state_dict()[name], value) for name, value in new.state_dict().items())
    assert read.generation_config.max_new_tokens == 9
    assert not hasattr(read.config, "transformers_weights")
    for path in tmp_path.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    atomic_save.finish_model(tmp_path)
    assert "transformers_weights" not in (tmp_path / "config.json").read_text()
    assert "model.safetensors" not in names(tmp_path)
    shards = [load_file(path) for path in tmp_path.glob("model-*.safetensors")]
    assert sum(map(len, shards)) == len(load_file_names(tmp_path))
    assert not list(tmp_path.glob(".*"))


def load_file_names(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_a_config_that_names_a_place_of_its_own_touches_nothing(tmp_path):
    """A config from elsewhere may name any file: only a subfolder that a save has left is completed."""
    model = tmp_path / "model"
    variant(1).save_pretrained(model)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_bytes(b"precious")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "../elsewhere/model.safetensors"}))
    atomic_save.finish_model(model)
    assert names(model) == ["config.json", "generation_config.json", "model.safetensors"]
    assert (tmp_path / "elsewhere" / "model.safetensors").read_bytes() == b"precious"
