"""Sequence classification: data, scores, and grids that start from the runs of another one."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from support.recipes import CLASSIFICATION, MASKED, write_recipe
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from hf_freeze.lab.data import builtin_corpus, builtin_tenses, train_tokenizer
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.scored import items_of
from hf_freeze.lab.tasks.sequence_classification import encode, load_data

ROWS = {
    "0": {"label": "all", "methods": []},
    "small": {
        "label": "small",
        "methods": [{"method": "factorized_embedding", "rank": 4}, {"method": "freeze", "attention": "random"}],
    },
}


def recipe_of(path, task, **changes):
    return load_recipe(write_recipe(path, **task | {"rows": ROWS} | changes))


# -- data ------------------------------------------------------------------------------------------------------------------------


def test_the_builtin_labels_are_tenses():
    tenses, corpus = builtin_tenses(train=3000, dev=20, test=100), builtin_corpus(train=3000, dev=20, test=100)
    for name, split in tenses.items():
        assert list(split["sentence"]) == list(corpus[name]["target"])
    labels = np.array(tenses["train"]["label"])
    assert all(0.28 < (labels == label).mean() < 0.38 for label in range(3))
    for sentence, label in zip(tenses["train"]["sentence"], labels, strict=True):
        first = sentence.removeprefix("ka ").split(" und ")[0].split()
        assert (label == 2) == ("vil" in first)  # the word of the future
    # Regular pasts end in "iv" and the agreement; no present does.
    endings = ("ivet", "ivash", "ivom", "ivin", "ivain", "ivomin")
    marked = [
        any(word.rstrip(".?").endswith(endings) for word in s.split(" und ")[0].split())
        for s in tenses["train"]["sentence"]
    ]
    assert np.mean(labels[marked] == 1) > 0.95
    assert np.mean(np.array(marked)[labels == 1]) > 0.6


def write_examples(path, examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")


PAIRS = [{"a": f"word {i}", "b": f"other {i}", "gold": ("yes", "no", "yes")[i % 3]} for i in range(9)]


@pytest.fixture
def pairs(tmp_path):
    for name, examples in {"train": PAIRS[:6], "dev": PAIRS[6:8], "test": PAIRS[8:]}.items():
        write_examples(tmp_path / f"{name}.jsonl", examples)
    return {"root": str(tmp_path), "columns": ["a", "b"], "label": "gold"} | {
        split: [f"{split}.jsonl"] for split in ("train", "dev", "test")
    }


def test_pairs_with_labels_of_text(pairs):
    splits = load_data(Data(**pairs))
    assert {name: len(split) for name, split in splits.items()} == {"train": 6, "dev": 2, "test": 1}
    assert splits["train"].features["label"].names == ["no", "yes"]
    assert splits["train"][1] == {"sentence": "word 1", "second": "other 1", "label": 0}
    assert list(splits["dev"]["label"]) == [1, 0]


def test_a_label_that_is_not_trained_is_refused(pairs, tmp_path):
    write_examples(tmp_path / "test.jsonl", [PAIRS[0] | {"gold": "maybe"}])
    with pytest.raises(ValueError, match=r"the test split has label 'maybe'; the training split has \['no', 'yes'\]"):
        load_data(Data(**pairs))


LABELS = {
    "words": (["Good", "bad ", "Good"], ["Good", "bad"], [0, 1, 0]),
    "numbers": (["10", "9.0", "1.0"], ["1", "9", "10"], [2, 1, 0]),
    "booleans": (["TRUE", "False", "true"], ["false", "true"], [1, 0, 1]),
    "words beside numbers": (["1.0", "x", "007"], ["007", "1.0", "x"], [1, 2, 0]),
    "words beside booleans": (["True", "Half-true", "False"], ["False", "Half-true", "True"], [2, 1, 0]),
}


@pytest.mark.parametrize(("written", "names", "numbers"), LABELS.values(), ids=LABELS)
def test_labels_of_a_csv_file(tmp_path, written, names, numbers):
    (tmp_path / "a.csv").write_text("sentence,label\n" + "".join(f"a,{label}\n" for label in written))
    files = ["a.csv"]
    splits = load_data(Data(root=str(tmp_path), train=files, dev=files, test=files))
    assert splits["train"].features["label"].names == names
    assert splits["train"]["label"][:] == numbers


def test_the_text_is_copied_once(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.csv").write_text("sentence,label\n" + "".join(f"text {i},{i % 2}\n" for i in range(30)))
    splits = load_data(Data(root=str(tmp_path), train=["a.csv"], holdout=6, holdout_test=6))
    encoded = encode(splits["train"], train_tokenizer(splits["train"]["sentence"], 60, "wordpiece"))
    assert splits["train"].cache_files
    assert encoded["labels"][:] == splits["train"]["label"][:]
    files = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert files == ["rows.arrow"]


def test_a_label_that_is_not_trained_names_its_row(tmp_path):
    (tmp_path / "train.csv").write_text('sentence,label\na,1\n"b\nc",0\n')
    (tmp_path / "test.csv").write_text('sentence,label\n"b\nc",1.0\na,2\n')
    data = {"root": str(tmp_path), "train": ["train.csv"], "dev": ["train.csv"], "test": ["test.csv"]}
    with pytest.raises(
        ValueError,
        match=r"test\.csv, row 3 \(line 4\): the test split has label '2'; the training split has \['0', '1'\]$",
    ):
        load_data(Data(**data))


def test_a_sorted_file_has_its_classes_in_a_small_part_of_it_too(tmp_path):
    rows = [f"text {number},{'abc'[number // 20]}\n" for number in range(60)]
    (tmp_path / "a.csv").write_text("sentence,label\n" + "".join(rows))
    data = {"root": str(tmp_path), "train": ["a.csv"], "holdout": 6, "holdout_test": 6, "limit": 10}
    splits = load_data(Data(**data))
    assert set(splits["train"]["label"]) == {0}
    assert splits["train"].features["label"].names == ["a", "b", "c"]


def test_a_holdout_takes_the_place_of_dev(pairs):
    splits = load_data(Data(**{name: value for name, value in pairs.items() if name != "dev"} | {"holdout": 2}))
    assert (len(splits["train"]), len(splits["dev"])) == (4, 2)
    found = {text for name in ("train", "dev") for text in splits[name]["sentence"]}
    assert found == {example["a"] for example in PAIRS[:6]}


def test_a_model_that_numbers_the_classes_in_another_order_is_scored_by_their_names(pairs, tmp_path):
    train_tokenizer([pair["a"] for pair in PAIRS], 60, "wordpiece").save_pretrained(tmp_path / "model")
    config = BertConfig(
        vocab_size=60,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        id2label={0: "no", 1: "yes"},
    )
    model, split = BertForSequenceClassification(config), load_data(Data(**pairs))["train"]
    right = []
    for names in ({0: "no", 1: "yes"}, {0: "yes", 1: "no"}):
        model.config.id2label = names
        model.config.label2id = {name: number for number, name in names.items()}
        model.save_pretrained(tmp_path / "model")
        right.append(items_of(tmp_path / "model", "sequence-classification", split, {})[:, 0])
    assert right[0].tolist() == (1 - right[1]).tolist()


# -- runs ------------------------------------------------------------------------------------------------------------------------


def test_a_run_of_pairs_is_scored_as_its_model_answers(pairs, tmp_path):
    task = CLASSIFICATION | {"data": pairs | {"test": ["train.jsonl"]}, "presets/small/tokenizer/vocab_size": 60}
    (run,) = expand(recipe_of(tmp_path / "r.yaml", task, only=["0"]))
    record = execute(run, tmp_path / "run")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "no", 1: "yes"}
    right = []
    for example in PAIRS[:6]:
        with torch.no_grad():
            logits = model(**tokenizer(example["a"], example["b"], return_tensors="pt")).logits[0]
        right.append(model.config.id2label[int(logits.argmax())] == example["gold"])
    items = np.load(tmp_path / "run" / "items.npy")
    assert items[:, 0].tolist() == right
    assert items[:, 1].tolist() == [1] * 6
    assert items[:, 2].tolist() == [int(example["gold"] == "yes") for example in PAIRS[:6]]
    assert record["metrics"]["test_accuracy"] == np.mean(right)
    names = ("accuracy", "loss", "f1", "matthews")
    assert set(record["metrics"]) == {f"{split}_{name}" for split in ("dev", "test") for name in names}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets/small/tokenizer/kind": "unigram"}, r"tokenizer\.kind='unigram' does not fit task 'sequence-cl"),
        (
            {"data": {"train": ["t"], "dev": ["t"], "test": ["t"], "columns": "a"}},
            r"data\.columns='a' is not a value that it takes: a list of one or two names of columns",
        ),
        (
            {"data/unit": "lines"},
            r"data\.unit is for the tasks \['language-modelling', 'masked-lm'\], not for 'sequence-c",
        ),
        ({"data/label": "tense"}, r"data\.label is for data of the form \['files', 'hub'\], not 'builtin'"),
        ({"data/name": "sst2"}, r"data\.name is for data of the form \['hub'\], not 'builtin'"),
        ({"start": "there"}, "has both 'start' and 'backbone': it takes the backbone of the grid there"),
        ({"start": 3}, "start must be a str, not 3"),
        ({"presets/small/backbone": ...}, "'backbone' is missing"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        recipe_of(tmp_path / "r.yaml", CLASSIFICATION, **changes)


# -- from another grid -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """The folder of a masked-language-model grid, both rows with seed 1."""
    folder = tmp_path_factory.mktemp("masked")
    for run in expand(recipe_of(folder / "r.yaml", MASKED)):
        execute(run, run.folder(folder))
    return folder


def starting(folder, grid, **changes):
    task = {"task": "sequence-classification", "presets/small/tokenizer": ..., "presets/small/backbone": ...}
    rows = {name: row | {"methods": []} for name, row in ROWS.items()}
    return recipe_of(folder / "r.yaml", task, **{"start": str(grid), "rows": rows} | changes)


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_runs_start_from_the_same_row_and_seed_of_another_grid(masked, tmp_path):
    recipe = starting(tmp_path, masked, **{"presets/small/training/epochs": 0})
    runs = expand(recipe)
    assert [run.start.given() for run in runs] == [{"grid": str(masked), "row": row, "seed": 1} for row in ROWS]
    for run in runs:
        folder = run.folder(tmp_path)
        record = execute(run, folder)
        assert "start" not in record, "the row of another grid is no row of this one"
        before, after = weights(run.folder(masked)), weights(folder)
        encoder = [name for name in before if name.startswith("bert.")]
        assert len(encoder) > 10
        assert all(torch.equal(before[name], after[name]) for name in encoder)
        new = set(after) - set(before)
        assert new == {f"{name}.{kind}" for name in ("bert.pooler.dense", "classifier") for kind in ("weight", "bias")}
        config = json.loads((folder / "model" / "config.json").read_text())
        assert [m["method"] for m in config["methods"]] == [m["method"] for m in ROWS[run.row]["methods"]]
        assert len(config["id2label"]) == 3
        again, other = tmp_path / "again", tmp_path / "other"
        execute(run, again)
        assert all(torch.equal(after[name], weights(again)[name]) for name in after)
        execute(run.changed(seed=2), other)
        assert not torch.equal(after["classifier.weight"], weights(other)["classifier.weight"])


def test_a_grid_of_the_rows_of_another_one(masked, tmp_path):
    records = run_grid(starting(tmp_path, masked), tmp_path / "out", console=Console(quiet=True))
    assert [record["row"] for record in records] == list(ROWS)
    report = make_report([tmp_path / "out"], say=lambda text: None)
    assert report.items == 8
    assert [row["label"] for row in report.rows] == ["all", "small"]
    assert report.rows[0]["accuracy"][0] == 100 * records[0]["metrics"]["test_accuracy"]


def test_a_run_that_is_not_there_is_an_error_of_one_line(masked, tmp_path):
    for changes, row, seed in (({"seeds": [1, 2]}, "0", 2), ({"rows/new": ROWS["0"]}, "new", 1)):
        message = f"{masked} holds no finished run of row '{row}' with seed {seed} to start from: run that grid first"
        with pytest.raises(ValueError, match=message):
            run_grid(starting(tmp_path, masked, **changes), tmp_path / "out", console=Console(quiet=True))
    assert not (tmp_path / "out").exists(), "nothing is run before all is known to be there"
