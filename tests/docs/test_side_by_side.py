"""benchmarks/peers/side_by_side.py: what language models and classifiers are scored by, and what its table says."""

import gzip
import importlib
import json
import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cases import ALL
from support.text import SOURCE, TARGET, fast_tokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification


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


@pytest.fixture
def digits(benchmark, options):
    """Images and classes of a test set in the form of MNIST, whose texts are written to `options.keep`."""
    draw = np.random.default_rng(0)
    images, classes = draw.integers(0, 256, (40, 28, 28), np.uint8), draw.integers(0, 10, 40, np.uint8)
    for name in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", classes)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (options.data / f"{name}-{kind}-ubyte.gz").write_bytes(header + array.tobytes())
    for name, texts in zip(("learnt", "asked"), benchmark.KINDS["image-classifier"].texts(options), strict=True):
        (options.keep / f"{name}.json").write_text(json.dumps(texts))
    return images, classes


def test_tools_see_the_pixels_of_an_image_and_those_that_learn_its_class(benchmark, options, digits):
    learnt, asked = (json.loads((options.keep / f"{name}.json").read_text()) for name in ("learnt", "asked"))
    assert [image.split()[0] for image in learnt] == asked
    assert [int(image.split()[1]) for image in learnt] == digits[1].tolist()
    pixels = benchmark.see._pixels(learnt)
    assert pixels.shape == (40, 1, 28, 28)
    np.testing.assert_allclose((pixels[:, 0] + 1) * 127.5, digits[0], atol=1e-4)


@pytest.mark.skipif(not ALL, reason="exports models, which takes seconds: run by make test-all")
def test_image_classifiers_are_those_of_transformers_and_smaller(benchmark, options, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=28, patch_size=7, num_channels=1, num_labels=10))
    model.eval().save_pretrained(tmp_path / "given")
    benchmark.plain(str(tmp_path / "given"), tmp_path / "plain", type(model))
    one_tool, peers, found = importlib.import_module("one_tool"), benchmark.see.PEERS, {}
    for name in ("whole", "hf_freeze-ffn", "hf_freeze-halves"):
        (options.keep / name).mkdir()
        given = (peers[name], str(tmp_path / "plain"), options.keep, options.keep / name)
        found[name] = one_tool.made(*given) | one_tool.used(*given)
    rows, points = benchmark.table(benchmark.KINDS["image-classifier"], found, options)
    with torch.no_grad():
        expected = model(pixel_values=torch.from_numpy(benchmark.see.scaled(digits[0]))).logits.argmax(1).numpy()
    assert points["whole"][1] == pytest.approx((expected == digits[1]).mean())
    assert points["hf_freeze-halves"][0] < points["hf_freeze-ffn"][0] < points["whole"][0]
    assert [row[7] for row in rows] == ["yes"] * 3


def test_every_tool_has_an_environment(benchmark):
    for kind in benchmark.KINDS.values():
        assert {peer.environment for peer in kind.tools.PEERS.values()} - {""} == kind.tools.ENVIRONMENTS.keys()


def test_a_tokenizer_gets_the_name_that_its_class_had_before_transformers_5(benchmark, story_model, tmp_path):
    settings = json.loads((story_model / "tokenizer_config.json").read_text())
    (story_model / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "TokenizersBackend"}))
    benchmark.plain(str(story_model), tmp_path / "plain", GPT2LMHeadModel)
    named = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    assert named["tokenizer_class"] == "PreTrainedTokenizerFast"
