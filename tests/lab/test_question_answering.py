"""Questions on a text, on small files in the format of SQuAD 1.1 and 2.0."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from support.cases import ALL
from support.recipes import encoder_recipe
from support.task_files import PLACES, write_squad

from hf_freeze.lab.data import read_squad, train_tokenizer
from hf_freeze.lab.recipes.settings import Data, Training
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.question_answering import answers_of, collator, encode, load_data
from hf_freeze.lab.training.question_answering import MOST_TOKENS
from hf_freeze.scores import squad


@pytest.fixture
def files(tmp_path):
    write_squad(tmp_path / "train-v1.1.json", 48)
    write_squad(tmp_path / "dev-v1.1.json", 6)
    return {"root": str(tmp_path), "train": ["train-v1.1.json"], "test": ["dev-v1.1.json"], "holdout": 8}


def test_the_files_of_squad(files, tmp_path):
    splits = load_data(Data(**files))
    assert {name: len(split) for name, split in splits.items()} == {"train": 40, "dev": 8, "test": 6}
    first = splits["test"][0]
    assert first["question"] == "Where did Ann move?"
    assert (first["answers"], first["starts"]) == (["Paris", "Paris"], [21, 21])
    write_squad(tmp_path / "v2.json", 4, unanswerable=True)
    assert read_squad([tmp_path / "v2.json"])["answers"][:2] == [["Paris", "Paris"], []], "plausible answers are none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"bad\.json: not a file of SQuAD's format: list indices must be"),
        ("{", r"bad\.json: not a file of SQuAD's format: Expecting property name"),
        ('{"data": [{"title": "a"}]}', r"bad\.json: not a file of SQuAD's format: no field 'paragraphs'"),
        ('{"data": []}', r"bad\.json: no questions"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_squad([tmp_path / "bad.json"])


def test_an_answer_that_is_not_there_is_refused(tmp_path):
    write_squad(tmp_path / "a.json", 1)
    text = (tmp_path / "a.json").read_text().replace('"answer_start": 21', '"answer_start": 20')
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json: question 'q0': 'Paris' does not begin at character 20"):
        read_squad([tmp_path / "a.json"])


def test_the_columns_of_the_hub(tmp_path):
    answers = [{"text": ["Paris"], "answer_start": [3]}, {"text": [], "answer_start": []}] * 3
    frame = pd.DataFrame(
        {"id": list("abcdef"), "title": "t", "context": "In Paris", "question": "Where?", "answers": answers}
    )
    frame.to_parquet(tmp_path / "train.parquet")
    splits = load_data(Data(hub=str(tmp_path), train="train", test="train", holdout=2))
    assert splits["test"]["answers"][:2] == [["Paris"], []]
    assert splits["test"]["starts"][:2] == [[3], []]


def test_windows_find_the_answer_again(files):
    splits = load_data(Data(**files))
    tokenizer = train_tokenizer([*splits["train"]["context"], *splits["train"]["question"]], 120, "wordpiece")
    encoded = encode(splits["test"], tokenizer, SimpleNamespace(training=Training(block_size=24)))
    assert len(encoded) > 6, "a text of more than one window"
    answered = 0
    for row in encoded:
        first, last = row["labels"]
        context = splits["test"][row["example"]]["context"]
        if last:
            answered += 1
            place = PLACES[row["example"] % 4]
            assert context[row["begins"][first] : row["ends"][last]] == place
    assert answered >= 6
    batch = collator(tokenizer, None)([encoded[0], encoded[len(encoded) - 1]])
    assert batch["labels"].shape == (2, 2)
    assert batch["context"].shape == batch["input_ids"].shape
    assert not batch["context"][:, 0].any(), "[CLS] is no part of an answer"
    for row, mask in zip((encoded[0], encoded[len(encoded) - 1]), batch["context"], strict=True):
        assert mask.sum() == sum(begin >= 0 for begin in row["begins"])


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("the Cat.", ["cat"], (1, 1)),
        ("black cat", ["cat", "dog"], (2 / 3, 0)),
        ("cat cat", ["cat"], (2 / 3, 0)),
        ("", [], (1, 1)),
        ("cat", [], (0, 0)),
        ("the", ["a"], (1, 1)),  # nothing is left of both
        ("", ["cat"], (0, 0)),
    ],
)
def test_scores_of_answers(answer, right, expected):
    assert squad(answer, right) == pytest.approx(expected)


def test_the_best_window_answers_and_none_may_win():
    encoded = [{"example": 0, "begins": [-1, 0, 3], "ends": [-1, 2, 5]}] * 2 + [
        {"example": 1, "begins": [-1, 0], "ends": [-1, 2]}
    ]
    windows = np.array([[0, 2, 0, 1, 1, 4.0, 3.0], [0, 2, 0, 1, 2, 5.0, 6.0], [0, 2, 0, 1, 1, 1.0, 2.0]])
    split = {"id": ["a", "b"], "context": ["ab cd", "ef"], "answers": [["x"], ["y"]]}
    split = pd.DataFrame(split)
    assert answers_of(windows, encoded, split) == ["ab cd", "ef"]
    split["answers"] = [["x"], []]
    assert answers_of(windows, encoded, split) == ["ab cd", ""], "the lowest score of none counts: 3, below 5"


@pytest.mark.parametrize("version", ["1.1", "2.0"] if ALL else ["2.0"])
def test_a_grid_reports_f1_of_words(files, tmp_path, version):
    if version == "2.0":
        for name, count in (("train", 48), ("dev", 6)):
            write_squad(tmp_path / f"{name}-v1.1.json", count, unanswerable=True)
    recipe = encoder_recipe(tmp_path / "r.yaml", "question-answering", files, epochs=1)
    (record,) = run_grid(recipe, tmp_path / "out", console=Console(quiet=True))
    run = tmp_path / "out" / "row-0-seed-1"
    given = json.loads((run / "answers.json").read_text())
    splits = load_data(Data(**files))
    scores = [squad(given[row["id"]], row["answers"]) for row in splits["test"]]
    items = np.load(run / "items.npy")
    assert items[:, [0, 2]].tolist() == [list(pair) for pair in scores]
    assert record["metrics"]["test_f1"] == pytest.approx(np.mean([f1 for f1, _ in scores]))
    assert all(len(answer.split()) <= MOST_TOKENS for answer in given.values())
    headings, (cells,) = table_cells(make_report([tmp_path / "out"], say=lambda text: None))
    assert headings[2:5] == ["F1 %", "vs row 0", "exact match %"]
    assert float(cells[2]) == pytest.approx(100 * record["metrics"]["test_f1"], abs=0.051)
