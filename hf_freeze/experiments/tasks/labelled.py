"""Sentences and pairs of them with a label: from JSONL files, files with tabs such as those of GLUE, or the Hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

from hf_freeze import data as hf_data
from hf_freeze.data import Progress
from hf_freeze.data.files import COMPRESSED
from hf_freeze.experiments.tasks.data_forms import data_form


def labelled_reader(settings: dict[str, Any], *, numbers: bool = False) -> Callable[[Any], datasets.Dataset]:
    """What reads a split, given its files or its name on the Hub: columns `sentence` and, of pairs, `second`, and `label`.
    `numbers`: labels are numbers, else classes."""
    columns, label = settings.get("columns", ["sentence"]), settings.get("label", "label")
    root = Path(settings.get("root", "."))

    def read_file(file: str) -> datasets.Dataset:
        endings = [ending for ending in Path(file).suffixes if ending not in COMPRESSED]
        if "header" in settings or endings[-1:] == [".tsv"]:
            return hf_data.read_tsv(root / file, [*columns, label], settings.get("header"))
        return hf_data.read_jsonl(root / file, columns, label, numbers=numbers)

    def read(named: Any) -> datasets.Dataset:
        if data_form(settings) == "hub":
            split = hf_data.load_hub_labelled(settings["hub"], named, columns, label, settings.get("name"))
        else:
            split = datasets.concatenate_datasets([read_file(file) for file in named])
        return split.rename_columns({**dict(zip(columns, ("sentence", "second"), strict=False)), label: "label"})

    return read


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
