"""Readers for parallel text: two files of one sentence a line, plain or gzipped, or a data set of the Hub."""

import gzip
from pathlib import Path
from typing import Any

import datasets


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzipped (by content, not by name), without surrounding white space.

    Raises FileNotFoundError; ValueError with file and line for an empty line, a NUL byte (binary data) or bytes that are not
    UTF-8; ValueError for a damaged gzip file or an empty one.
    """
    raw = Path(path).read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path}: damaged gzip file: {error}") from error
    if not raw:
        raise ValueError(f"{path}: the file is empty")
    lines = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n"), 1):
        if b"\x00" in line:
            raise ValueError(f"{path}, line {number}: binary data (a NUL byte), not text")
        try:
            text = line.decode("utf-8").removeprefix("\ufeff").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if not text:
            raise ValueError(f"{path}, line {number}: empty line")
        lines.append(text)
    return lines


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


def load_hub_parallel(repo_id: str, split: str, source: str, target: str, name: str | None = None) -> datasets.Dataset:
    """Columns `source` and `target` from a data set of the Hub (or a local directory or file that `datasets` knows).

    `source` and `target` name columns, or languages inside a `translation` column.
    Raises ValueError for a column that is not there, with the choices.
    """
    data: Any = datasets.load_dataset(repo_id, name, split=split)
    if "translation" in data.column_names and source not in data.column_names:
        data = data.flatten()
        data = data.rename_columns({c: c.removeprefix("translation.") for c in data.column_names if "." in c})
    for column in (source, target):
        if column not in data.column_names:
            raise ValueError(f"{repo_id} ({split}) has no column {column!r}; choose from {data.column_names}")
    return data.select_columns([source, target]).rename_columns({source: "source", target: "target"})
