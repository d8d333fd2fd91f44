"""benchmarks/peers/side_by_side.py: what a language model and a classifier are scored by, and what its table says."""

import gzip
import importlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cases import ALL
from support.text import SOURCE, TARGET, fast_tokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel


@pytest.fixture
def benchmark(peer_script):
    return peer_script("side_by_side")


@pytest.fixture
def story_model(tmp_path):
    """The folder of a small GPT-2."""
    folder = tmp_path / "given"
    tokenizer = fast_tokenizer(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 1, 0
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def options(tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    for name, texts in {"learnt": TARGET, "asked": SOURCE}.items():
        (keep / f"{name}.json").write_text(json.dumps(texts))
    return SimpleNamespace(keep=keep, data=tmp_path)


def loss_of(folder):
    """Nats a token of SOURCE, by transformers."""
    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in SOURCE]
    with torch.no_grad():
        losses = [model(input_ids=each, labels=each).loss.item() * (each.shape[1] - 1) for each in ids]
    return sum(losses) / sum(each.shape[1] - 1 for each in ids)


@pytest.mark.skipif(not ALL, reason="exports a model, which takes seconds: run by make test-all")
def test_perplexities_and_their_ratio_are_those_of_transformers(benchmark, story_model, options, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)
    one_tool, peers, found = importlib.import_module("one_tool"), benchmark.predict.PEERS, {}
    for name in ("whole", "hf_freeze-int8"):
        (options.keep / name).mkdir()
        given = (peers[name], str(story_model), options.keep, options.keep / name)
        found[name] = one_tool.made(*given) | one_tool.used(*given)
    rows, points = benchmark.table(benchmark.KINDS["language-model"], found, options)
    assert points["whole"][1] == pytest.approx(np.exp(loss_of(story_model)), rel=1e-5)
    ratio, low, high = (float(part) for part in rows[1][3].replace("(", "").replace(")", "").replace("to ", "").split())
    assert ratio == pytest.approx(points["hf_freeze-int8"][1] / points["whole"][1], abs=6e-4)
    assert low <= ratio <= high
    assert [row[7] for row in rows] == ["yes", "yes"]


def test_a_text_costs_the_tokens_of_the_model_whatever_the_tool_splits_it_into(benchmark, options):
    (options.keep / "whole").mkdir()
    np.save(options.keep / "whole" / "answers.npy", np.array([[9.0, 3], [5.0, 2]]))
    items = benchmark.costs(np.array([[12.0, 6], [6.0, 4]]), options)
    assert items.tolist() == [[12.0, 3.0], [6.0, 2.0]]
    assert np.exp(benchmark.mean_of_first(items.sum(0))) == pytest.approx(np.exp(18 / 5))


def test_a_class_is_right_where_it_is_the_label_of_the_line(benchmark, options):
    with gzip.open(options.data / "dev.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"sentence": "a", "label": label}) + "\n" for label in (1, 0, 1))
    items = benchmark.right_classes(np.array([[0.2, 0.9], [-1.0, 3.0], [0.0, 0.1]]), options)
    assert benchmark.mean_of_first(items.sum(0)) == pytest.approx(2 / 3)


def test_every_tool_has_an_environment(benchmark):
    for kind in benchmark.KINDS.values():
        assert {peer.environment for peer in kind.tools.PEERS.values()} - {""} == kind.tools.ENVIRONMENTS.keys()


def test_a_tokenizer_gets_the_name_that_its_class_had_before_transformers_5(benchmark, story_model, tmp_path):
    settings = json.loads((story_model / "tokenizer_config.json").read_text())
    (story_model / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "TokenizersBackend"}))
    benchmark.plain(str(story_model), tmp_path / "plain", GPT2LMHeadModel)
    named = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    assert named["tokenizer_class"] == "PreTrainedTokenizerFast"
