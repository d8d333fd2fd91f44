"""Readers for text, parallel text and labelled examples: files, plain or gzipped, or data sets of the Hub."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzipped (by content, not by name), without surrounding white space.

    Raises FileNotFoundError; ValueError with file and line for an empty line, a NUL byte (binary data) or bytes that are not
    UTF-8; ValueError for a damaged gzip file or an empty one.
    """
    lines = []
    for number, text in _numbered_lines(path):
        if not text:
            raise ValueError(f"{path}, line {number}: empty line")
        lines.append(text)
    return lines


def read_documents(path: str | Path) -> list[str]:
    """The documents of a text file, which empty lines separate; their own lines are kept apart by newlines.

    Raises what `read_lines` raises, but for empty lines; ValueError for a file that holds nothing else.
    """
    documents: list[list[str]] = [[]]
    for _, text in _numbered_lines(path):
        if text:
            documents[-1].append(text)
        elif documents[-1]:
            documents.append([])
    found = ["\n".join(lines) for lines in documents if lines]
    if not found:
        raise ValueError(f"{path}: nothing but empty lines")
    return found


def _numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    raw = Path(path).read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path}: damaged gzip file: {error}") from error
    if not raw:
        raise ValueError(f"{path}: the file is empty")
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        if b"\x00" in line:
            raise ValueError(f"{path}, line {number}: binary data (a NUL byte), not text")
        try:
            yield number, line.decode("utf-8").removeprefix("\ufeff").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error


def read_jsonl(path: str | Path, text: Sequence[str] = ("sentence",), label: str = "label") -> datasets.Dataset:
    """Examples for classification from a file of one JSON object a line, plain or gzipped.

    Columns: those named in `text` (strings; two of them make a pair) and `label` (integers from 0, or strings). Other fields
    are left out. Raises what `read_lines` raises; ValueError with file and line, and the choices, for anything else.
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
                raise ValueError(f"{where}: {name} is {value!r}, but {values[0]!r} in line 1: of one type, please")
            values.append(value)
    return datasets.Dataset.from_dict(columns)


def read_parallel(source: str | Path, target: str | Path) -> datasets.Dataset:
    """Columns `source` and `target` from two files whose lines correspond.

    Raises what `read_lines` raises, and ValueError where the files differ in length (both counts named).
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"parallel files differ in length: {source} has {len(sources)} lines, {target} has {len(targets)}"
        )
    return datasets.Dataset.from_dict({"source": sources, "target": targets})


def load_hub_text(repo_id: str, split: str, column: str = "text", name: str | None = None) -> datasets.Dataset:
    """Column `text` from a data set of the Hub (or a local directory or file that `datasets` knows); empty texts are left out.

    Raises ValueError for a column that is not there, with the choices.
    """
    data: Any = datasets.load_dataset(repo_id, name, split=split)
    _check_columns(data, [column], repo_id, split)
    texts = [text.strip() for text in data[column]]
    return datasets.Dataset.from_dict({"text": [text for text in texts if text]})


def load_hub_labelled(
    repo_id: str, split: str, text: Sequence[str] = ("sentence",), label: str = "label", name: str | None = None
) -> datasets.Dataset:
    """The columns named in `text` and `label`, as of `read_jsonl`, from a data set of the Hub (or a local directory or file that
    `datasets` knows).

    Raises ValueError for a column that is not there, with the choices.
    """
    data: Any = datasets.load_dataset(repo_id, name, split=split)
    _check_columns(data, (*text, label), repo_id, split)
    return data.select_columns([*text, label])


def load_hub_parallel(repo_id: str, split: str, source: str, target: str, name: str | None = None) -> datasets.Dataset:
    """Columns `source` and `target` from a data set of the Hub (or a local directory or file that `datasets` knows).

    `source` and `target` name columns, or languages inside a `translation` column.
    Raises ValueError for a column that is not there, with the choices.
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
