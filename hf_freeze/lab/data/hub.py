"""Readers for data sets of the Hub, and for local directories and files that `datasets` reads as it reads those."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from hf_freeze.data.files import kind_of
from hf_freeze.lab.data.tables import check_columns, columns_of
from hf_freeze.lab.data.text import filled, read_pairs, read_text


def load_hub_text(repo_id: str, split: str, column: str = "text", name: str | None = None) -> datasets.Dataset:
    """Column `text` from a data set of the Hub (or a local directory or file that `datasets` supports), without empty texts,
    memory-mapped.

    Raises ValueError for an unknown column, with the choices, and for data that cannot be read.
    """
    if files := _own_files(repo_id, split, name, [column]):
        return read_text(files, column=column)
    data = _chosen(_load(repo_id, split, name), f"{repo_id} ({split})", [column])
    data = data.map(filled, input_columns=column, batched=True, remove_columns=data.column_names)
    if not len(data):
        raise ValueError(f"{repo_id} ({split}): no text")
    return data


def load_hub_labelled(
    repo_id: str, split: str, text: Sequence[str] = ("sentence",), label: str = "label", name: str | None = None
) -> datasets.Dataset:
    """The columns named in `text` and `label` from a data set of the Hub (or a local directory or file that
    `datasets` supports).

    Raises ValueError for an unknown column, with the choices.
    """
    return _chosen(_load(repo_id, split, name), f"{repo_id} ({split})", [*text, label], are_texts=False)


def load_hub_parallel(repo_id: str, split: str, source: str, target: str, name: str | None = None) -> datasets.Dataset:
    """Columns `source` and `target` from a data set of the Hub (or a local directory or file that `datasets` supports),
    memory-mapped.

    `source` and `target` name columns, or languages inside a `translation` column.
    Raises ValueError for an unknown column, with the choices, and for data that cannot be read.
    """
    if files := _own_files(repo_id, split, name, [source, target]):
        return read_pairs(files, source=source, target=target)
    data = _load(repo_id, split, name)
    if "translation" in data.column_names and source not in data.column_names:
        data = data.flatten()
        data = data.rename_columns({c: c.removeprefix("translation.") for c in data.column_names if "." in c})
    data = _chosen(data, f"{repo_id} ({split})", [source, target])
    return data.rename_columns({source: "source", target: "target"})


def _own_files(repo_id: str, split: str, name: str | None, columns: Sequence[str]) -> list[str]:
    """The files of a split in a local directory, where all are tables and the first has these columns: our readers say which line
    is wrong. Empty for any other data."""
    if not Path(repo_id).is_dir():
        return []
    data_files = datasets.load_dataset_builder(repo_id, name).config.data_files or {}
    files = [str(file) for file in data_files.get(split, ())]
    are_ours = all(Path(file).is_file() and kind_of(file) != "lines" for file in files)
    return files if files and are_ours and set(columns) <= set(columns_of(files[0])) else []


def _load(repo_id: str, split: str, name: str | None) -> Any:
    try:
        is_csv = hasattr(datasets.load_dataset_builder(repo_id, name).config, "keep_default_na")
        options: Any = {"keep_default_na": False} if is_csv else {}  # "NA" and "null" are text
        return datasets.load_dataset(repo_id, name, split=split, **options)
    except DatasetGenerationError as error:  # it says only that there was one
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(f"{cause}".split())
        raise ValueError(f"{repo_id} ({split}) cannot be read: {type(cause).__name__}: {reason}") from error


def _chosen(data: Any, where: str, columns: list[str], *, are_texts: bool = True) -> Any:
    check_columns(where, columns, data.column_names)
    for column in columns if are_texts else ():
        if getattr(data.features[column], "dtype", None) not in ("string", "large_string"):
            raise ValueError(f"{where}: column {column!r} holds {data.features[column]}, not text")
    return data.select_columns(columns)
