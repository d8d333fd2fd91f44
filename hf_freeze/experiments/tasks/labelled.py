"""Sentences and pairs of them with a label: from tables, such as CSV files or those of GLUE, or the Hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

from hf_freeze import data as hf_data
from hf_freeze.data import Progress
from hf_freeze.data.files import found
from hf_freeze.data.tables import CLASS, place_of
from hf_freeze.experiments.tasks.data_forms import data_form


def labelled_reader(settings: dict[str, Any], *, numbers: bool = False) -> Callable[[Any], datasets.Dataset]:
    """What reads a split, given its files or its name on the Hub: columns `sentence` and, of pairs, `second`, and `label`.
    `numbers`: labels are numbers, else classes."""
    columns, label = settings.get("columns", ["sentence"]), settings.get("label", "label")

    def read(named: Any) -> datasets.Dataset:
        if data_form(settings) == "hub":
            split = hf_data.load_hub_labelled(settings["hub"], named, columns, label, settings.get("name"))
        else:
            files = _files(settings, named)
            split = hf_data.read_labelled(files, columns, label, numbers=numbers, header=settings.get("header"))
        return split.rename_columns({**dict(zip(columns, ("sentence", "second"), strict=False)), label: "label"})

    return read


def place_of_label(settings: dict[str, Any], split: str, label: str) -> str:
    """Where a label of a split is for the first time, as the beginning of a message; nothing for data that are no files."""
    if data_form(settings) != "files":
        return ""
    files = found(_files(settings, settings.get(split, settings["train"])))  # what is drawn comes from train
    column = {settings.get("label", "label"): CLASS}
    return f"{place_of(files, column, [label], settings.get('header'))}: "


def _files(settings: dict[str, Any], named: list[str]) -> list[Path]:
    return [Path(settings.get("root", ".")) / file for file in named]


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
