"""Readers for text, parallel text and labelled examples from files, plain or gzipped, and from data sets of the Hub."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.files import read_bytes


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzipped (detected by content), without surrounding white space.

    Raises FileNotFoundError; ValueError with file and line for an empty line, a NUL byte (binary data) or bytes that are not
    UTF-8; ValueError for an empty file or a damaged gzip file.
    """
    lines = []
    for number, text in _numbered_lines(path):
        if not text:
            raise ValueError(f"{path}, line {number}: empty line")
        lines.append(text)
    return lines


def read_documents(path: str | Path) -> list[str]:
    """The documents of a text file, separated by empty lines; the lines of a document are joined by newlines.

    Raises the errors of `read_lines` except for empty lines, and ValueError if all lines are empty.
    """
    documents: list[list[str]] = [[]]
    for _, text in _numbered_lines(path):
        if text:
            documents[-1].append(text)
        elif documents[-1]:
            documents.append([])
    texts = ["\n".join(lines) for lines in documents if lines]
    if not texts:
        raise ValueError(f"{path}: all lines are empty")
    return texts


def _numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    data = read_bytes(path)
    if not data:
        raise ValueError(f"{path}: the file is empty")
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), 1):
        if b"\x00" in line:
            raise ValueError(f"{path}, line {number}: binary data (a NUL byte), not text")
        try:
            yield number, line.decode("utf-8").removeprefix("\ufeff").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error


def read_jsonl(path: str | Path, text: Sequence[str] = ("sentence",), label: str = "label") -> datasets.Dataset:
    """Classification examples from a file with one JSON object per line, plain or gzipped.

    Columns: those named in `text` (strings; two columns form a pair) and `label` (integers from 0, or strings). Other fields are
    ignored. Raises the errors of `read_lines`, and ValueError with file and line for a missing field or a wrong value.
    """
    columns: dict[str, list[Any]] = {name: [] for name in (*text, label)}
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(example, dict):
            raise ValueError(f"{where}: an example is a JSON object, not {line[:40]!r}")
        for name, values in columns.items():
            if name not in example:
                raise ValueError(f"{where}: no field {name!r}; choose from {sorted(example)}")
            value = example[name]
            if name != label and not isinstance(value, str):
                raise ValueError(f"{where}: {name} must be text, not {value!r}")
            if name == label and not (isinstance(value, str) or (type(value) is int and value >= 0)):
                raise ValueError(f"{where}: {name} must be an integer from 0 or a string, not {value!r}")
            if values and type(value) is not type(values[0]):
                raise ValueError(f"{where}: {name} is {value!r}, but {values[0]!r} in line 1: use one type")
            values.append(value)
    return datasets.Dataset.from_dict(columns)


def read_parallel(source: str | Path, target: str | Path) -> datasets.Dataset:
    """Columns `source` and `target` from two line-aligned files.

    Raises the errors of `read_lines`, and ValueError with both counts if the files differ in length.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"parallel files differ in length: {source} has {len(sources)} lines, {target} has {len(targets)}"
        )
    return datasets.Dataset.from_dict({"source": sources, "target": targets})


def load_hub_text(repo_id: str, split: str, column: str = "text", name: str | None = None) -> datasets.Dataset:
    """Column `text` from a data set of the Hub (or a local directory or file that `datasets` supports), without empty texts.

    Raises ValueError for an unknown column, with the choices.
    """
    data: Any = datasets.load_dataset(repo_id, name, split=split)
    _check_columns(data, [column], repo_id, split)
    texts = [text.strip() for text in data[column]]
    return datasets.Dataset.from_dict({"text": [text for text in texts if text]})


def load_hub_labelled(
    repo_id: str, split: str, text: Sequence[str] = ("sentence",), label: str = "label", name: str | None = None
) -> datasets.Dataset:
    """The columns named in `text` and `label`, as in `read_jsonl`, from a data set of the Hub (or a local directory or file that
    `datasets` supports).

    Raises ValueError for an unknown column, with the choices.
    """
    data: Any = datasets.load_dataset(repo_id, name, split=split)
    _check_columns(data, (*text, label), repo_id, split)
    return data.select_columns([*text, label])


def load_hub_parallel(repo_id: str, split: str, source: str, target: str, name: str | None = None) -> datasets.Dataset:
    """Columns `source` and `target` from a data set of the Hub (or a local directory or file that `datasets` supports).

    `source` and `target` name columns, or languages inside a `translation` column.
    Raises ValueError for an unknown column, with the choices.
    """
    data: Any = datasets.load_dataset(repo_id, name, split=split)
    if "translation" in data.column_names and source not in data.column_names:
        data = data.flatten()
        data = data.rename_columns({c: c.removeprefix("translation.") for c in data.column_names if "." in c})
    _check_columns(data, (source, target), repo_id, split)
    return data.select_columns([source, target]).rename_columns({source: "source", target: "target"})


def _check_columns(data: Any, columns: Iterable[str], repo_id: str, split: str) -> None:
    for column in columns:
        if column not in data.column_names:
            raise ValueError(f"{repo_id} ({split}) has no column {column!r}; choose from {data.column_names}")
