"""Questions with four answers to choose from, on small folders in the format of RACE."""

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from support.recipes import encoder_recipe
from support.task_files import ANIMALS, write_race
from transformers import AutoModelForMultipleChoice, AutoTokenizer

from hf_freeze.lab.data import read_race
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.multiple_choice import load_data


@pytest.fixture
def folders(tmp_path):
    for split, count in {"train": 12, "dev": 4, "test": 4}.items():
        write_race(tmp_path / "RACE" / split, count)
    kinds = {split: [f"{split}/middle", f"{split}/high"] for split in ("train", "dev", "test")}
    return {"root": str(tmp_path / "RACE")} | kinds


def test_the_folders_of_race(folders, tmp_path):
    splits = load_data(Data(**folders))
    assert {name: len(split) for name, split in splits.items()} == {"train": 24, "dev": 8, "test": 8}
    assert splits["test"][1]["question"] == "The _ was happy."
    assert splits["test"][1]["options"] == ANIMALS[::-1]
    assert splits["test"][1]["answer"] == "D"
    with pytest.raises(FileNotFoundError, match=r"none holds no files \*\.txt of RACE"):
        read_race([tmp_path / "none"])
    (tmp_path / "0.txt").write_text('{"article": "a"}')
    with pytest.raises(ValueError, match=r"0\.txt: not a file of RACE's format: no field 'questions'"):
        read_race([tmp_path])


@pytest.mark.parametrize(
    ("options", "answer", "message"),
    [
        (["a", "b"], "C", r"the train split: answer 'C' to 'Q'; choose from 'AB'"),
        (["a"], "A", r"the train split: 'Q' has 1 options, others have 2"),
    ],
)
def test_impossible_answers_are_refused(tmp_path, options, answer, message):
    rows = [("T", "Q", ["a", "b"], "A"), ("T", "Q", options, answer)]
    pd.DataFrame(rows, columns=["article", "question", "options", "answer"]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=message):
        load_data(Data(hub=str(tmp_path), train="train", dev="train", test="train"))


def test_a_grid_scores_what_its_model_chooses(folders, tmp_path):
    recipe = encoder_recipe(tmp_path / "r.yaml", "multiple-choice", folders)
    (record,) = run_grid(recipe, tmp_path / "out", console=Console(quiet=True))
    run = tmp_path / "out" / "row-0-seed-1"
    model = AutoModelForMultipleChoice.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model", model_max_length=32)
    right = []
    for row in load_data(Data(**folders))["test"]:
        asked = [
            row["question"].replace("_", option) if "_" in row["question"] else f"{row['question']} {option}"
            for option in row["options"]
        ]
        inputs = tokenizer([row["article"]] * 4, asked, truncation="only_first", padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: value[None] for name, value in inputs.items()}).logits[0]
        right.append("ABCD"[int(logits.argmax())] == row["answer"])
    items = np.load(run / "items.npy")
    assert items[:, 0].tolist() == right
    assert items[:, 2].tolist() == [0, 3, 2, 1, 1, 2, 3, 0], "middle schools first"
    assert record["metrics"]["test_accuracy"] == np.mean(right)
    assert set(record["metrics"]) == {"test_accuracy", "test_loss", "dev_accuracy", "dev_loss"}
    headings, _ = table_cells(make_report([tmp_path / "out"], say=lambda text: None))
    assert headings[2:5] == ["accuracy %", "vs row 0", "dev accuracy %"]
