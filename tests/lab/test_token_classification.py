"""Named entities, on small files in the format of CoNLL-2003."""

import datasets
import numpy as np
import pytest
from rich.console import Console
from support.recipes import encoder_recipe
from support.task_files import SENTENCES, write_conll

from hf_freeze.lab.data import entities, read_conll, train_tokenizer
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.tasks.token_classification import encode, load_data


@pytest.fixture
def files(tmp_path):
    """The folder of CoNLL-2003: eng.train, eng.testa and eng.testb."""
    write_conll(tmp_path / "eng.train", SENTENCES * 40)
    write_conll(tmp_path / "eng.testa", SENTENCES)
    write_conll(tmp_path / "eng.testb", SENTENCES * 2)
    return {"root": str(tmp_path), "train": ["eng.train"], "dev": ["eng.testa"], "test": ["eng.testb"]}


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-A I-A O B-A", {("A", 0, 1), ("A", 3, 3)}),
        ("I-A I-A B-A I-B", {("A", 0, 1), ("A", 2, 2), ("B", 3, 3)}),  # IOB1: B only between two of a type
        ("S-A B-B I-B E-B O I-A", {("A", 0, 0), ("B", 1, 3), ("A", 5, 5)}),
        ("E-A E-A", {("A", 0, 0), ("A", 1, 1)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities_follow_conlleval(tags, expected):
    assert entities(tags.split()) == expected


def test_the_files_of_conll(files, tmp_path):
    splits = load_data(Data(**files))
    assert {name: len(split) for name, split in splits.items()} == {"train": 120, "dev": 3, "test": 6}
    names = splits["train"].features["tags"].feature.names
    assert names == ["B-LOC", "B-PER", "I-LOC", "I-MISC", "I-ORG", "I-PER", "O"]
    assert splits["dev"][1]["tokens"] == ["Peter", "Blackburn"]
    assert [names[tag] for tag in splits["dev"][1]["tags"]] == ["B-PER", "I-PER"]
    write_conll(tmp_path / "bad", [[("a", "NP")]])
    with pytest.raises(ValueError, match=r"bad: tag 'NP' is none of O, B-TYPE, I-TYPE, E-TYPE, S-TYPE"):
        read_conll([tmp_path / "bad"])
    (tmp_path / "bad").write_text("a O\nb\n")
    with pytest.raises(ValueError, match="bad: 'b' has no tag; a line is a word and, in its last column, a tag"):
        read_conll([tmp_path / "bad"])


def test_the_columns_of_the_hub(files, tmp_path):
    names = ["O", "B-PER", "I-PER"]
    features = datasets.Features(
        tokens=datasets.Sequence(datasets.Value("string")), ner_tags=datasets.Sequence(datasets.ClassLabel(names=names))
    )
    rows = {"tokens": [["Ann", "Lee", "sings"]] * 4, "ner_tags": [[1, 2, 0]] * 4}
    folder = tmp_path / "hub"
    folder.mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(str(folder / "train.parquet"))
    splits = load_data(Data(hub=str(folder), train="train", test="train", holdout=1))
    feature = splits["test"].features["tags"].feature
    assert list(map(feature.int2str, splits["test"][0]["tags"])) == ["B-PER", "I-PER", "O"]


def test_a_grid_reports_f1_of_whole_entities(files, tmp_path):
    recipe = encoder_recipe(tmp_path / "r.yaml", "token-classification", files, epochs=2)
    (record,) = run_grid(recipe, tmp_path / "out", console=Console(quiet=True))
    items = np.load(tmp_path / "out" / "row-0-seed-1" / "items.npy")
    assert items[:, 2].tolist() == [2, 1, 2] * 2, "EU and German; Peter Blackburn; New York and Boston"
    correct, found, true = items.sum(0)
    assert 0 < correct <= found, "the words tell everything: two epochs find some"
    metrics = record["metrics"]
    assert metrics["test_precision"] == correct / found
    assert metrics["test_recall"] == correct / true
    assert metrics["test_f1"] == pytest.approx(2 * correct / (found + true))
    headings, (cells,) = table_cells(make_report([tmp_path / "out"], say=lambda text: None))
    assert headings[2:7] == ["F1 %", "vs row 0", "precision %", "recall %", "dev F1 %"]
    assert float(cells[2]) == pytest.approx(100 * metrics["test_f1"], abs=0.051)


def test_labels_are_at_the_first_token_of_each_word(files):
    splits = load_data(Data(**files))
    tokenizer = train_tokenizer(splits["train"]["text"], 60, "wordpiece")
    row = encode(splits["dev"], tokenizer)[1]
    names = splits["dev"].features["tags"].feature.names
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert len(tokens) > 4
    assert row["labels"][:2] == [-100, names.index("B-PER")]
    assert sum(label != -100 for label in row["labels"]) == 2
    tokenizer.model_max_length = 3
    assert encode(splits["dev"], tokenizer)[1]["labels"] == [*row["labels"][:2], -100]
