"""Labels: the score of each task against one computed here, a compression from files of them, and what is refused."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.small import small_config
from support.text import SOURCE
from support.tokenizers_of_each_kind import byte_level, wordpiece
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    ViTImageProcessor,
)
from typer.testing import CliRunner

from hf_freeze import scores
from hf_freeze.cli import app
from hf_freeze.compression import compression
from hf_freeze.compression.labels import Labels, check_labels, score_of
from hf_freeze.data import entities
from hf_freeze.publish.export.served import answers, opened

WORDS = sorted({word for text in SOURCE for word in text.split()})
NAMES = {0: "bad", 1: "good"}
TAGS = ["B-PER", "I-PER", "O"]


def texts(count, seed=0):
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(3, 9))) for _ in range(count)]


def saved(folder, auto_class, model_type="bert", tokenizer=None, **changes):
    """A random model whose answers differ from text to text, as `opened`."""
    tokenizer = wordpiece(None) if tokenizer is None else tokenizer
    torch.manual_seed(1)
    config = small_config(model_type, vocab_size=len(tokenizer), max_position_embeddings=80, **changes)
    model = auto_class.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return opened(folder)


def score(served, pairs, **settings):
    """Of a model beside itself, whose difference is nothing."""
    labels = Labels(dev=pairs, test=pairs, **settings)
    check_labels(served, labels)
    found = served, answers(served, [item for item, _ in pairs])
    result = score_of(labels, pairs, found, found)
    assert (result.value, result.difference, result.low, result.high) == (result.original, 0, 0, 0)
    assert result.count == len(pairs)
    return result


@torch.no_grad()
def outputs(served, *item, **options):
    encoded = served.tokenizer(*item, return_tensors="pt", **options)
    kept = {
        name: value for name, value in encoded.items() if name not in ("offset_mapping", "overflow_to_sample_mapping")
    }
    return served.model(**kept), encoded


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("", lambda said, true: 100 * (said == true).mean()),
        ("f1", lambda said, true: 200 * (said & true).sum() / (said.sum() + true.sum())),
        ("matthews", lambda said, true: 100 * np.corrcoef(said, true)[0, 1]),
    ],
)
def test_classes_go_by_their_names(metric, expected, tmp_path):
    """The data have them in another order than the model."""
    served = saved(tmp_path, AutoModelForSequenceClassification, id2label=NAMES, label2id={"bad": 0, "good": 1})
    items = texts(40)
    true = np.random.default_rng(2).integers(2, size=40)
    said = np.array([int(outputs(served, item)[0].logits.argmax()) for item in items])
    assert 0 < said.sum() < 40
    pairs = [(item, 1 - int(label)) for item, label in zip(items, true, strict=True)]
    assert score(served, pairs, classes=["good", "bad"], metric=metric).value == pytest.approx(expected(said, true))


def test_a_regression_correlates(tmp_path):
    served = saved(tmp_path, AutoModelForSequenceClassification, num_labels=1)
    pairs = [((first, second), float(len(first))) for first, second in zip(texts(30), texts(30, 1), strict=True)]
    said = [float(outputs(served, *item)[0].logits) for item, _ in pairs]
    expected = 100 * np.corrcoef(said, [label for _, label in pairs])[0, 1]
    assert score(served, pairs).value == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("tokenizer", [wordpiece, byte_level])
def test_a_word_has_the_tag_of_its_first_token(tokenizer, tmp_path):
    model_type = {wordpiece: "bert", byte_level: "gpt2"}[tokenizer]
    names = dict(enumerate(reversed(TAGS)))
    served = saved(tmp_path, AutoModelForTokenClassification, model_type, tokenizer(None), id2label=names, label2id={})
    draw, right, found, total, pairs = np.random.default_rng(4), 0, 0, 0, []
    for text in texts(30):
        words, tags = text.split(), []
        result, encoded = outputs(served, text, return_offsets_mapping=True)
        starts = [sum(len(word) + 1 for word in words[:i]) for i in range(len(words))]
        places = encoded["offset_mapping"][0].tolist()
        firsts = [next(n for n, (a, b) in enumerate(places) if a <= start < b) for start in starts]
        said = [names[int(result.logits[0, n].argmax())] for n in firsts]
        tags = [one if draw.random() < 0.6 else "O" for one in said]
        pairs.append((text, tags))
        mine, true = entities(said), entities(tags)
        right, found, total = right + len(mine & true), found + len(mine), total + len(true)
    assert right
    assert score(served, pairs, classes=TAGS).value == pytest.approx(100 * 2 * right / (found + total))


def test_an_answer_is_the_most_probable_span_of_the_text(tmp_path):
    served = saved(tmp_path, AutoModelForQuestionAnswering)
    expected, pairs = [], []
    for question, context in zip(texts(25), texts(25, 1), strict=True):
        result, encoded = outputs(served, question, context, return_offsets_mapping=True)
        places = [
            (n, at) for n, at in enumerate(encoded["offset_mapping"][0].tolist()) if encoded.sequence_ids(0)[n] == 1
        ]
        spans = [
            (float(result.start_logits[0, n] + result.end_logits[0, m]), context[a:b])
            for n, (a, _) in places
            for m, (_, b) in places
            if m >= n
        ]
        right = [" ".join(context.split()[:2]), context.split()[-1]]
        pairs.append(((question, context), right))
        expected.append(scores.squad(max(spans)[1], right)[0])
    assert 0 < np.mean(expected) < 1
    assert score(served, pairs).value == pytest.approx(100 * np.mean(expected))


def test_a_choice_is_right_or_wrong(tmp_path):
    served = saved(tmp_path, AutoModelForMultipleChoice)
    pairs, right = [], 0
    for number, (text, options) in enumerate(zip(texts(20), np.reshape(texts(60, 1), (20, 3)).tolist(), strict=True)):
        encoded = served.tokenizer([text] * 3, options, padding=True, return_tensors="pt")
        with torch.no_grad():
            said = int(served.model(**{name: value[None] for name, value in encoded.items()}).logits.argmax())
        pairs.append(((text, options), number % 3))
        right += said == number % 3
    assert score(served, pairs).value == pytest.approx(100 * right / 20)


def test_a_language_model_has_its_perplexity(tmp_path):
    served = saved(tmp_path, AutoModelForCausalLM, "gpt2", byte_level(None))
    nats, count = 0.0, 0
    for text in texts(10):
        ids = served.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            nats += float(served.model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    result = score(served, [(text, None) for text in texts(10)])
    assert float(result.shown(result.value)) == pytest.approx(math.exp(nats / count), rel=1e-3)


def test_images_have_classes(tmp_path):
    torch.manual_seed(0)
    config = small_config("vit", image_size=16, patch_size=8, num_channels=3, id2label={i: str(i) for i in range(4)})
    AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(12)]
    served = opened(tmp_path)
    said = [int(answer["log_probs"].argmax()) for answer in answers(served, images).items]
    labels = [label if number % 3 else (label + 1) % 4 for number, label in enumerate(said)]
    pairs = list(zip(images, labels, strict=True))
    assert score(served, pairs).value == pytest.approx(100 * 8 / 12)


# -- from files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    names = {"id2label": NAMES, "label2id": {"bad": 0, "good": 1}}
    served = saved(folder, AutoModelForSequenceClassification, **sizes, **names)
    with (folder / "reviews.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Review", "Sentiment"])
        items = texts(200)
        for item, answer in zip(items, answers(served, items).items, strict=True):
            rows.writerow([item, NAMES[int(answer["log_probs"].argmax())]])  # the model is always right
    return folder


def command(folder: Path, out: Path, *options: str) -> list[str]:
    data = ["--data", str(folder / "reviews.csv"), "--columns", "Review", "--label", "Sentiment"]
    settings = ["--engine", "torch", "--heal", "0", "--samples", "48"]
    return ["compress", str(folder), *data, "--out", str(out), *settings, *options]


FEW_PARTS = ("--native", "--keep-vocabulary")  # neither heads nor tokens go, of which less is measured


def test_a_csv_file_gives_a_score_on_what_nothing_was_chosen_by(classifier, tmp_path):
    out = tmp_path / "small"
    found = CliRunner().invoke(app, command(classifier, out, "--max-bytes", "45%", "--max-loss", "50"))
    assert found.exit_code == 0, found.output
    assert "accuracy 100.0 before" in " ".join(found.output.split())
    assert "texts, whose labels are not used, in" in " ".join(found.output.split())
    record = json.loads((out / "compressed.json").read_text())
    after = record["after"]
    assert after["score"]["count"] == 20
    assert 50 < after["score"]["value"] < 100
    assert after["score"]["low"] <= after["score"]["difference"] <= after["score"]["high"] <= 0
    assert after["score"]["difference"] == pytest.approx(after["score"]["value"] - 100)
    (row,) = [row for row in (out / "README.md").read_text().splitlines() if "compressed, in" in row]
    assert f" {after['score']['value']:.1f} " in row
    assert json.loads((Path(record["model"]) / "hf_freeze_compression.json").read_text())["engine"] == "torch"


def test_bytes_are_fewest_for_points_of_the_score(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "_HALVINGS", 2)
    result = CliRunner().invoke(app, command(classifier, tmp_path, "--max-loss", "60", *FEW_PARTS))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "compressed.json").read_text())
    dev = json.loads((tmp_path / "phases.json").read_text())["results"][f"dev-{Path(record['after']['folder']).name}"]
    assert 0 < -dev["score"]["difference"] <= 60
    assert record["after"]["bytes"] < record["whole"]["bytes"]


def test_a_loss_above_the_limit_is_refused(classifier, tmp_path):
    options = ["--max-bytes", "80%", "--max-loss", "0.5", *FEW_PARTS]
    found = CliRunner().invoke(app, command(classifier, tmp_path / "small", *options))
    assert found.exit_code == 2
    assert "points on the inputs that shapes are chosen by; give more bytes" in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"dev": []}, r"labels need inputs to choose by \(dev\) and for the final score \(test\)"),
        ({"metric": "f2"}, r"metric='f2': choose accuracy, or for texts of two classes \['f1', 'matthews'\]"),
        ({"dev": [("a", 2)]}, r"label 2 is no class: they have the numbers 0 to 1"),
        ({"classes": ["a", "b", "c"]}, r"the labels have the classes \['a', 'b', 'c'\], the model \['bad', 'good'\]"),
    ],
)
def test_labels_that_do_not_fit(classifier, labels, message):
    given = {"dev": [("a", 1)], "test": [("b", 0)]} | labels
    with pytest.raises(ValueError, match=message):
        check_labels(opened(classifier), Labels(**given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "theseus"], "--data theseus is for 'translation', and the model for 'sequence-classification'"),
        (["--data", "classification", "--label", "x"], "--label is for files, and --data classification is a recipe"),
        (["--data", "reviews.csv", "--set", "a=1"], "--set a=1 is for a recipe, and --data reviews.csv names files"),
        (["--data", "nothing"], "no recipe 'nothing'"),
    ],
)
def test_data_that_do_not_fit(classifier, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(classifier)
    found = CliRunner().invoke(app, ["compress", ".", "--out", str(tmp_path), "--max-bytes", "50%", *options])
    assert found.exit_code == 2
    assert message in found.output


def test_a_model_without_a_metric_is_refused(tmp_path):
    saved(tmp_path, AutoModel)
    found = CliRunner().invoke(
        app, ["compress", str(tmp_path), "--data", "theseus", "--out", str(tmp_path / "o"), "--max-bytes", "1MB"]
    )
    assert found.exit_code == 2
    assert "there are no labels for a feature-extraction model" in found.output
