"""Classification of sentences or pairs of them, scored by accuracy."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import DataCollatorWithPadding

from hf_freeze import data as hf_data
from hf_freeze.data import Progress
from hf_freeze.experiments.tasks.base import Outcome, Task, scored
from hf_freeze.experiments.tasks.data_forms import data_form
from hf_freeze.experiments.tasks.splits import read_splits, take
from hf_freeze.training import ClassificationTrainer


def load_data(settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the columns `sentence` and, of pairs, `second`, and `label`, whose classes (a
    `datasets.ClassLabel`) are the labels of the training split in order. The built-in sentences are the target side of the
    built-in translations, and their classes the tense of the first clause.

    Raises ValueError for a label that the training split has not.
    """
    form, columns, label = data_form(settings), settings.get("columns", ["sentence"]), settings.get("label", "label")
    if form == "builtin":
        return _classes(take({str(n): s for n, s in hf_data.builtin_tenses(**settings["builtin"]).items()}, settings))
    root = Path(settings.get("root", "."))

    def read(named: Any) -> datasets.Dataset:
        if form == "hub":
            split = hf_data.load_hub_labelled(settings["hub"], named, columns, label, settings.get("name"))
        else:
            split = datasets.concatenate_datasets([hf_data.read_jsonl(root / file, columns, label) for file in named])
        return split.rename_columns({**dict(zip(columns, ("sentence", "second"), strict=False)), label: "label"})

    return _classes(read_splits(settings, read))


def _classes(splits: dict[str, datasets.Dataset]) -> dict[str, datasets.Dataset]:
    labels = sorted(set(splits["train"]["label"]))
    for name, split in splits.items():
        if unknown := set(split["label"]) - set(labels):
            raise ValueError(f"the {name} split has label {min(unknown)!r}; the training split has {labels}")
    number = {label: i for i, label in enumerate(labels)}
    classes = datasets.ClassLabel(names=[str(label) for label in labels])
    return {
        name: split.remove_columns("label")
        .add_column("label", [number[label] for label in split["label"]])
        .cast_column("label", classes)
        for name, split in splits.items()
    }


def _labels(split: datasets.Dataset) -> dict[str, Any]:
    names = split.features["label"].names
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def columns_of(split: datasets.Dataset) -> list[str]:
    """The columns of texts: one, or two of pairs."""
    return [column for column in ("sentence", "second") if column in split.column_names]


def encode(
    split: datasets.Dataset, tokenizer: Any, run: dict[str, Any] | None = None, progress: Progress | None = None
) -> datasets.Dataset:
    """The tokenizer's columns, and `labels`. A pair is one sequence of two segments."""
    columns = columns_of(split)

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer(*(batch[column] for column in columns), truncation=True), "labels": batch["label"]}

    return split.map(ids, batched=True, remove_columns=split.column_names, keep_in_memory=True)


def _test(run: dict[str, Any], folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    items, metrics = scored(trainer, encoded)
    classes = np.asarray(encoded["labels"])
    return Outcome(metrics=metrics, items=np.stack([items[:, 2], items[:, 1], classes], axis=1).astype(np.int64))


TASK = Task(
    head="sequence-classification",
    tokenizer="wordpiece",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, columns_of(split)),
    encode=encode,
    test=_test,
    trainer=ClassificationTrainer,
    collator=lambda tokenizer, model: DataCollatorWithPadding(tokenizer),
    config=_labels,
)
