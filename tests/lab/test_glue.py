"""The recipes of GLUE's nine tasks, on small files in its format and in that of the Hub."""

import json
import shutil
import warnings

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from support import ROOT
from support.cases import ALL
from support.recipes import BERT, write_recipe
from support.task_files import CLASSES, FOLDERS, write_glue

from hf_freeze import scores
from hf_freeze.lab.data import read_labelled, read_table
from hf_freeze.lab.data.tables import TEXT
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.load import load_recipe, read_recipe
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.report.build import make_report, make_reports
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.lab.tasks.scoring import scoring_of

TINY = {
    "preset": "tiny",
    "presets": {
        "tiny": {
            "tokenizer": {"kind": "wordpiece", "vocab_size": 120},
            "backbone": BERT["presets/small/backbone"],
            "training": {"epochs": 1, "max_tokens": 200, "learning_rate": 0.01, "warmup_steps": 1, "bf16": False},
        }
    },
    "rows": {"0": {"label": "all", "methods": []}},
    "only": ["0"],
    "training": {"epochs": 2},
}


def tiny(folder, name, **changes):
    """The packaged recipe of a task with a model and files of seconds."""
    root = write_glue(folder / "glue", name)
    recipe = {
        "extends": str(ROOT / "recipes" / "glue" / f"{name}.yaml"),
        **TINY,
        "data": {"root": str(root), "holdout": 4},
    }
    return load_recipe(write_recipe(folder / "r.yaml", recipe, **changes))


@pytest.mark.parametrize("name", FOLDERS)
def test_each_task_reads_the_files_of_glue(tmp_path, name):
    recipe = tiny(tmp_path, name)
    splits = task_of(recipe.task).load(recipe.data)
    assert {split: len(splits[split]) for split in ("train", "dev", "test")} == {"train": 20, "dev": 4, "test": 9}
    assert len(splits.get("mismatched", ())) == (6 if name == "mnli" else 0)
    example = splits["test"][1]
    assert example["sentence"].startswith('the "cat sat on mat 1')
    assert ("second" in example) == (name not in ("cola", "sst2"))
    assert example.get("second", "a dog barked 1 times").startswith("a dog barked 1 times")
    if name == "stsb":
        assert splits["test"]["label"] == [number % 11 / 2 for number in range(9)]
    else:
        classes = CLASSES.get(name, ["0", "1"])
        assert splits["test"].features["label"].names == classes
        assert splits["test"]["label"] == [number % len(classes) for number in range(9)]


@pytest.mark.parametrize(
    ("name", "columns", "labels"),
    [("mnli", ["premise", "hypothesis"], [2, 0, 1]), ("stsb", ["sentence1", "sentence2"], [0.5, 2.5, 5.0])],
)
def test_the_columns_of_the_hub(tmp_path, name, columns, labels):
    one, two = columns
    for split in ("train", "test"):
        frame = pd.DataFrame(
            {one: ["a b", "c", "d"] * 4, two: ["x", "y", "z"] * 4, "label": labels * 4, "idx": range(12)}
        )
        frame.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    data = {"hub": str(tmp_path), "columns": columns, "train": "train", "test": "test", "holdout": 1}
    splits = task_of(read_recipe(f"glue/{name}")["task"]).load(Data(**data))
    assert splits["test"][0] == {"sentence": "a b", "second": "x", "label": labels[0]}


GRIDS = [("mrpc", "f1"), ("stsb", "pearson"), ("mnli", "accuracy"), ("cola", "matthews")]


@pytest.mark.parametrize(("name", "metric"), GRIDS if ALL else GRIDS[:2])
def test_a_grid_reports_the_score_of_its_task(tmp_path, name, metric):
    recipe, out = tiny(tmp_path, name), tmp_path / "out"
    (record,) = run_grid(recipe, out, console=Console(quiet=True))
    metrics, items = record["metrics"], np.load(out / "row-0-seed-1" / "items.npy")
    headings, (cells,) = table_cells(make_report([out], say=lambda text: None))
    assert headings[2] == {"f1": "F1 %", "pearson": "Pearson %", "matthews": "Matthews %"}.get(metric, "accuracy %")
    assert {"stsb": "Spearman %", "mnli": "mismatched %"}.get(name, "accuracy %") in headings
    assert float(cells[2]) == pytest.approx(100 * metrics[f"test_{metric}"], abs=0.051)
    assert f"dev_{metric}" in metrics
    score = scoring_of(recipe.task, recipe.metric).score(items.sum(0))
    assert score == pytest.approx(100 * metrics[f"test_{metric}"])
    if name == "mrpc":
        true, said = items[:, 4], items[:, 0] | items[:, 1]
        assert items[:, :4].sum(1).tolist() == [1] * 9
        assert true.tolist() == [number % 2 for number in range(9)]
        assert metrics["test_f1"] == pytest.approx(f1_score(true, said))
        assert metrics["test_matthews"] == pytest.approx(matthews_corrcoef(true, said))
        assert metrics["test_accuracy"] == pytest.approx(accuracy_score(true, said))
        _check_other_metrics_are_not_compared(out, record)


def _check_other_metrics_are_not_compared(folder, record):
    other = shutil.copytree(folder, folder.parent / "other")
    (other / "results.jsonl").write_text(json.dumps(record | {"metric": "accuracy"}) + "\n")
    assert len(make_reports([folder, other], say=lambda text: None)) == 2
    with pytest.raises(
        ValueError, match=r"out, .*other hold 2 groups of rows to compare, not one: .* by F1 score: .* by accuracy: "
    ):
        make_report([folder, other], say=lambda text: None)


def test_scores_of_sums_are_those_of_scikit_learn_and_scipy():
    rng = np.random.default_rng(0)
    true, said = rng.integers(2, size=50), rng.integers(2, size=50)
    counts = np.stack([said & true, said & ~true & 1, ~said & true & 1, (1 - said) & (1 - true)], axis=1)
    x = rng.normal(size=50)
    y = x + rng.normal(size=50)
    sums = np.stack([np.ones(50), x, x * x, x * y, y * y, y], axis=1)
    for which in (slice(None), rng.integers(50, size=50)):  # the test set, and a resample of it
        assert scores.f1(counts[which].sum(0)) == pytest.approx(f1_score(true[which], said[which]))
        assert scores.matthews(counts[which].sum(0)) == pytest.approx(matthews_corrcoef(true[which], said[which]))
        assert scores.pearson(sums[which].sum(0)) == pytest.approx(pearsonr(x[which], y[which]).statistic)
    assert scores.matthews([[3, 2, 0, 0], [0, 0, 2, 3]]).tolist() == [0, 0], "one class only"
    assert scores.f1([0, 0, 0, 4]) == 0
    assert (
        scores.pearson(
            np.stack([np.ones(9), np.full(9, 0.1), np.full(9, 0.1**2), 0.1 * y[:9], y[:9] ** 2, y[:9]]).sum(1)
        )
        == 0
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "rte",
            {"metric": "bleu"},
            r"task 'sequence-classification' has no metric 'bleu'; choose from \['accuracy', 'f1', 'ma",
        ),
        ("stsb", {"metric": "f1"}, r"task 'regression' has no metric 'f1'; it has one metric"),
        (
            "stsb",
            {"training/label_smoothing": 0.1},
            r"training\.label_smoothing is for the tasks .*, not for 'regression'",
        ),
        ("rte", {"data/header": "a"}, r"data\.header must be a list, not 'a'"),
        ("rte", {"data/mismatched": "a"}, r"data\.mismatched must be a list, not 'a'"),
        (
            "stsb",
            {"data/mismatched": ["a"]},
            r"data\.mismatched is for task 'sequence-classification', not for 'regression'",
        ),
        ("stsb", {"data": {"builtin": {}}}, r"task 'regression' has no built-in data"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(tmp_path, name, **changes)


def test_f1_of_three_classes_is_refused(tmp_path):
    (run,) = expand(tiny(tmp_path, "mnli", metric="f1"))
    with pytest.raises(
        ValueError, match=r"metric='f1' is of two classes, but the training split has \['contradiction', 'ent"
    ):
        execute(run, tmp_path / "run")


def test_labels_that_are_no_numbers_are_refused(tmp_path):
    recipe = tiny(tmp_path, "stsb")
    data = recipe.data.changed(label="genre")
    with pytest.raises(
        ValueError, match=r"train\.tsv, row 2: genre must be a number, such as 2\.5, not 'main-captions'"
    ):
        task_of("regression").load(data)
    path = tmp_path / "a.jsonl"
    path.write_text('{"sentence": "a", "label": 1}\n{"sentence": "b", "label": 2.5}\n')
    assert read_labelled([path], numbers=True)["label"][:] == [1.0, 2.5]
    path.write_text('{"sentence": "a", "label": "much"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: label must be a number, such as 2\.5, not 'much'"):
        read_labelled([path], numbers=True)


def test_lines_of_a_tsv_file(tmp_path):
    def read(columns, header=None):
        return read_table([path], dict.fromkeys(columns, TEXT), header)

    path = tmp_path / "a.tsv"
    path.write_bytes(b'one\ttwo\n"a\tb"\r\nlonely\n\nc\td\textra\n')
    with pytest.warns(UserWarning, match=r"a\.tsv: 1 of 3 lines are too short and left out"):
        assert read(["two", "one"])[:] == {"two": ['b"', "d"], "one": ['"a', "c"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(["one"])["one"][:] == ['"a', "lonely", "c"]
        assert read(["x"], ["x"])["x"][:2] == ["one", '"a']
    with pytest.raises(ValueError, match=r"a\.tsv has no column 'three'; choose from \['one', 'two'\]"):
        read(["three"])
    path.write_bytes(b"one\ttwo\na\n")
    with pytest.raises(ValueError, match=r"a\.tsv: no line has the columns \['two'\]"):
        read(["two"])
    path.write_bytes(b"one\n\xff\n")
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: not UTF-8 \(invalid start byte at byte 0\)"):
        read(["one"])
