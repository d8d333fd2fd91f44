"""Sentences and pairs of them with a label: from tables, such as CSV files or those of GLUE, or the Hub."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import datasets
from transformers import DataCollatorWithPadding

from hf_freeze.data.files import matching_files
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.data.tables import CLASS, iterate_columns
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.base import Task
from hf_freeze.lab.tasks.splits import paths_of, reader


def labelled_reader(data: Data, *, numbers: bool = False) -> Callable[[Any], datasets.Dataset]:
    """What reads a split, given its files or its name on the Hub: columns `sentence` and, of pairs, `second`, and `label`.
    `numbers`: labels are numbers, else classes."""
    columns, label = data.columns, data.label or "label"
    files = partial(hf_data.read_labelled, text=columns, label=label, numbers=numbers, header=data.header)
    read = reader(data, files, partial(hf_data.load_hub_labelled, text=columns, label=label))
    names = {**dict(zip(columns, ("sentence", "second"), strict=False)), label: "label"}
    return lambda named: read(named).rename_columns(names)


def refuse_label(data: Data, split: str, label: str, message: str) -> NoReturn:
    """Raise ValueError with this message and, where the data are files, the place of the first such label in the split."""
    column = data.label or "label"

    def check(row: dict[str, Any]) -> None:
        if row[column] == label:
            raise ValueError(message)

    if data.form == "files":
        named = getattr(data, split) or data.train  # what is drawn comes from train
        for path in matching_files(paths_of(data, list(named))):
            for _ in iterate_columns(path, {column: CLASS}, header=data.header, check=check):
                pass
    raise ValueError(message)


def columns_of(split: datasets.Dataset) -> list[str]:
    """The columns of texts: one, or two of pairs."""
    return [column for column in ("sentence", "second") if column in split.column_names]


def encode(
    split: datasets.Dataset, tokenizer: Any, run: Run | None = None, progress: Progress | None = None
) -> datasets.Dataset:
    """The tokenizer's columns, and `labels`. A pair is one sequence of two segments."""
    columns = columns_of(split)

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer(*(batch[column] for column in columns), truncation=True), "labels": batch["label"]}

    return split.map(ids, batched=True, remove_columns=split.column_names, keep_in_memory=True)


def task_of_labelled(**fields: Any) -> Task:
    """A task of these texts; `fields`: what is its own."""
    return Task(
        head="sequence-classification",
        tokenizer="wordpiece",
        texts=lambda split: hf_data.Texts(split, columns_of(split)),
        encode=encode,
        collator=lambda tokenizer, model: DataCollatorWithPadding(tokenizer),
        **fields,
    )
