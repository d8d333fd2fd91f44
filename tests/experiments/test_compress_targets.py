"""`hf-freeze compress --targets model`: a translator that learns from its original's translations, made once in the engine."""

import json

import datasets
import pytest
import torch
from rich.console import Console
from support.cases import ALL
from support.recipes import cli, write_recipe
from transformers import MarianConfig, MarianMTModel

from hf_freeze.data import train_tokenizer
from hf_freeze.experiments.compress import targets
from hf_freeze.experiments.compress.serving import ENGINES, serve
from hf_freeze.experiments.tasks.translation import load_data
from hf_freeze.training import decoding

DECODING = {"num_beams": 2, "max_tokens": 200}


TEXTS = ["one day", "two days", "a day or two", "two or one", "one or a day or two"]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """Untrained; each text has its own translation."""
    folder = tmp_path_factory.mktemp("targets") / "model"
    tokenizer = train_tokenizer(TEXTS, 40)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
    sizes |= dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1
    )
    ids = {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": pad, "forced_eos_token_id": eos}
    torch.manual_seed(5)
    model = MarianMTModel(MarianConfig(vocab_size=len(tokenizer), **sizes, **ids)).eval()
    for parameter in (one for one in model.parameters() if one.requires_grad):
        parameter.data += 0.6 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_stopped_translation_goes_on_and_the_other_splits_stay(translator, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_CHUNK", 2)
    splits = {
        name: datasets.Dataset.from_dict({"source": TEXTS[:count], "target": [f"{count}"] * count})
        for name, count in (("train", 5), ("dev", 2), ("test", 1))
    }
    engine = ENGINES["ctranslate2"]
    served = serve(translator, engine, tmp_path / "served")
    given = {"model": "digest", "console": Console(quiet=True)}
    calls, opened = [], targets.translator_of

    def stopping(*arguments):
        translate = opened(*arguments)

        def translated(some):
            calls.append(some)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return translate(some)

        return translated

    monkeypatch.setattr(targets, "translator_of", stopping)
    with pytest.raises(KeyboardInterrupt):
        targets.taught_data(served, engine, splits, DECODING, tmp_path / "taught", **given)
    section = targets.taught_data(served, engine, splits, DECODING, tmp_path / "taught", **given)
    assert calls == [TEXTS[:2], TEXTS[2:4], TEXTS[2:4], TEXTS[4:]], "what was translated is not translated again"
    found = load_data(section)
    translate = opened(served, engine, DECODING)
    assert list(found["train"]["target"]) == [text for some in (calls[0], *calls[2:]) for text in translate(some)]
    assert list(found["train"]["source"]) == TEXTS
    for name in ("dev", "test"):
        assert found[name].to_dict() == splits[name].to_dict()
    with pytest.raises(ValueError, match=r"is of another decoding"):
        targets.taught_data(served, engine, splits, {"num_beams": 1}, tmp_path / "taught", **given)


@pytest.mark.skipif(not ALL, reason="a minute, since each training is a process: HF_FREEZE_TESTS=all")
def test_a_translator_learns_from_its_own_translations_within_a_share_of_its_bytes(tmp_path):
    data = {"data": {"builtin": {"seed": 0, "train": 200, "dev": 20, "test": 20}}, "presets/small/training/epochs": 1}
    recipe = write_recipe(tmp_path / "recipe.yaml", **data)
    cli("run", recipe, "--out", tmp_path / "whole", "--set", 'only=["0"]')
    out, model = tmp_path / "small", tmp_path / "whole" / "row-0-seed-1" / "model"
    limits = ("--max-bytes", "90%", "--targets", "model")
    said = cli("compress", model, "--data", recipe, *limits, "--epochs", 2, "--out", out).output
    assert "translating 200 training texts by the model, in the engine" in said
    assert "(90 % of the model's)" in said
    assert "the model's own translations of the 200 training texts" in (out / "README.md").read_text()
    record = json.loads((out / "compressed.json").read_text())
    assert record["after"]["bytes"] <= 0.9 * record["before"]["bytes"]
    assert record["budget"]["max_bytes"] == "90%"
    assert record["command"].count("--max-bytes 90%") == record["command"].count("--targets model") == 1
    run = json.loads((out / "trainings" / "row-final-seed-1" / "run.json").read_text())
    assert run["data"]["train"] == ["train.jsonl"]
