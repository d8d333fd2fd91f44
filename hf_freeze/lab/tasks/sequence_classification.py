"""Classification of sentences or pairs of them, scored by accuracy, or of two classes by F1 or Matthews correlation."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_freeze.lab import data as hf_data
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import SPLITS, Data
from hf_freeze.lab.tasks.base import Outcome, label_fields, scored
from hf_freeze.lab.tasks.labelled import encode, labelled_reader, refuse_label, task_of_labelled
from hf_freeze.lab.tasks.splits import first, read_all, take
from hf_freeze.lab.training import ClassificationTrainer


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test, and `mismatched` where the recipe names one, a second test split. Columns: `sentence` and, of
    pairs, `second`, and `label`, whose classes (a `datasets.ClassLabel`) are the labels of the training split in order. The
    built-in sentences are the target side of the built-in translations, and their classes the tense of the first clause.

    Labels are words; whole numbers, in order, where all are; or true and false, however they are written, where all are.

    Raises ValueError for a label that the training data has not, with file and row.
    """
    if data.builtin is not None:
        files = {str(name): split for name, split in hf_data.builtin_tenses(**data.builtin.given()).items()}
    else:
        files = read_all(data, labelled_reader(data), (*SPLITS, "mismatched"))
    return _taken(_classes(files, data), data)


def _taken(files: dict[str, datasets.Dataset], data: Data) -> dict[str, datasets.Dataset]:
    splits = take({name: split for name, split in files.items() if name != "mismatched"}, data)
    if "mismatched" in files:
        splits["mismatched"] = first(files["mismatched"], data.limit)
    return splits


def _classes(files: dict[str, datasets.Dataset], data: Data) -> dict[str, datasets.Dataset]:
    """With the numbers of classes as labels. They are put into whole files: of a part of one, `datasets` would copy the text."""
    used = {name: {str(label) for label in split["label"]} for name, split in _taken(files, data).items()}
    if "None" in used["train"] and None in set(files["train"]["label"]):
        raise ValueError("the train split has examples without a label")
    trained = set(used["train"])
    if not set().union(*used.values()) <= trained:
        # A class may be so rare that the part of the training data that is left to train on has none of it.
        trained |= {str(label) for label in files["train"]["label"]}
    spelled = _spelling(trained)
    labels = {spelled(label) for label in trained}
    names = sorted(labels, key=int if all(map(_WHOLE.fullmatch, labels)) else None)
    for name, found in used.items():
        if unknown := sorted(label for label in found if spelled(label) not in labels):
            message = f"the {name} split has label {unknown[0]!r}; the training split has {names}"
            refuse_label(data, name, unknown[0], message)
    number = {name: i for i, name in enumerate(names)}
    numbered = {}
    for name, split in files.items():
        numbers = [number.get(spelled(str(label)), -1) for label in split["label"]]  # -1: of a row that is not used
        numbered[name] = split.remove_columns("label").add_column("label", numbers)
        numbered[name].info.features["label"] = datasets.ClassLabel(names=names)
    return numbered


_WHOLE = re.compile(r"(0|-?[1-9]\d*)(\.0+)?")


def _spelling(labels: set[str]) -> Callable[[str], str]:
    """How labels of this kind are written in one way: files have TRUE, True and true, 1 and 1.0."""
    if {label.lower() for label in labels} <= {"true", "false"}:
        return str.lower
    if all(map(_WHOLE.fullmatch, labels)):
        return lambda label: label.split(".")[0] if _WHOLE.fullmatch(label) else label
    return str


def _test(run: Run, folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    names, metric = split.features["label"].names, run.metric or "accuracy"
    if metric != "accuracy" and len(names) != 2:
        raise ValueError(f"metric={metric!r} is of two classes, but the training split has {names}; use 'accuracy'")
    items, metrics = scored(trainer, encoded)
    added = items[:, [2, 1]] if metric == "accuracy" else items[:, 3:7]
    if run.data.mismatched and run.scored_on == "test":
        _, others = scored(trainer, encode(load_data(run.data)["mismatched"], tokenizer))
        metrics |= {name.replace("test_", "mismatched_"): value for name, value in others.items()}
    return Outcome(metrics=metrics, items=np.column_stack([added, encoded["labels"]]).astype(np.int64))


TASK = task_of_labelled(
    load=load_data,
    test=_test,
    trainer=ClassificationTrainer,
    config=lambda split: label_fields(split.features["label"].names),
)
