"""Readers for text, parallel text and labelled examples from files, plain or compressed, and from data sets of the Hub.

What is read is copied once into an Arrow file of the cache and memory-mapped from there; it is never in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError

from hf_freeze.data.cache import cached_rows, stamp
from hf_freeze.data.files import found
from hf_freeze.data.lines import documents, filled_lines, full_lines
from hf_freeze.data.tables import (
    CLASS,
    NUMBER,
    OPTIONAL,
    TABLES,
    TEXT,
    Check,
    Column,
    check_columns,
    columns_of,
    iterate_columns,
    kind_of,
)

UNITS: dict[str, Callable[[str | Path], Iterator[str]]] = {
    "lines": full_lines,
    "filled lines": filled_lines,
    "documents": documents,
}


def read_text(paths: Sequence[str | Path], *, unit: str = "lines", column: str = "text") -> datasets.Dataset:
    """Column `text` from files, folders of them and patterns such as `reviews/*.csv`, memory-mapped.

    Of CSV (`.csv`), TSV (`.tsv`), JSON (`.jsonl`, `.ndjson`, `.json`), Parquet (`.parquet`) and Arrow (`.arrow`) files the column
    `column` is read, without surrounding white space and empty texts; any other file is plain text, a text for each of its
    `lines`, of its `filled lines` (empty ones are left out) or `documents`. All but Parquet may be compressed: gzip, bzip2, xz,
    zstd, lz4.

    Raises the errors of `read_lines` and of `read_table`.
    """

    schema = pa.schema([("text", pa.string())])

    def tables(path: Path) -> Iterator[pa.Table]:
        if kind_of(path) == "lines":
            yield from _tables(schema, ((text,) for text in UNITS[unit](path)))
        else:
            for table in iterate_columns(path, {column: OPTIONAL}):
                yield pa.table({"text": _stripped(table[column].to_pylist())}, schema)

    return _cached(paths, schema, [unit, column], tables)


def read_pairs(paths: Sequence[str | Path], *, source: str = "source", target: str = "target") -> datasets.Dataset:
    """Columns `source` and `target`, memory-mapped: from two line-aligned files of plain text, or from any number of tables (as
    for `read_text`) with the columns that `source` and `target` name.

    Raises ValueError for other files, and the errors of `read_text`.
    """
    paths = found(paths)
    kinds = {kind_of(path) for path in paths}
    if kinds == {"lines"} and len(paths) == 2:
        return read_parallel(*paths)
    if "lines" in kinds:
        named = ", ".join(map(str, paths))
        raise ValueError(f"parallel text is two files of lines, or files that end in {TABLES}, not {named}")
    return read_table(paths, {source: TEXT, target: TEXT}).rename_columns({source: "source", target: "target"})


def read_parallel(source: str | Path, target: str | Path) -> datasets.Dataset:
    """Columns `source` and `target` from two line-aligned files, memory-mapped.

    Raises the errors of `read_lines`, and ValueError with both counts if the files differ in length.
    """

    def pairs() -> Iterator[tuple[str, str]]:
        for pair in zip_longest(full_lines(source), full_lines(target)):
            if None in pair:
                counts = [sum(1 for _ in full_lines(path)) for path in (source, target)]
                raise ValueError(
                    f"parallel files differ in length: {source} has {counts[0]} lines, {target} has {counts[1]}"
                )
            yield pair

    schema = pa.schema([("source", pa.string()), ("target", pa.string())])
    return cached_rows([stamp(source), stamp(target)], schema, lambda: _tables(schema, pairs()))


def read_table(
    paths: Sequence[str | Path],
    columns: Mapping[str, Column],
    header: Sequence[str] | None = None,
    check: Check | None = None,
) -> datasets.Dataset:
    """Some columns of tables, memory-mapped. `header`: the names of the columns of CSV and TSV files without a row of names.

    Raises ValueError for a file that is no table; a missing column, with the choices; a value that its column does not take or,
    in a CSV file, an empty text, with row or line, and so for what `check` refuses; and files without rows.
    """
    paths = found(paths)
    for path in paths:
        if kind_of(path) == "lines" and header is None:
            raise ValueError(f"{path}: a file with columns ends in {TABLES}")
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    readers = [[name, column.read.__name__, column.may_be_empty] for name, column in columns.items()]
    key = [readers, header, getattr(check, "__qualname__", None)]
    return _cached(paths, schema, key, lambda path: iterate_columns(path, columns, header=header, check=check))


def read_labelled(
    paths: Sequence[str | Path],
    text: Sequence[str] = ("sentence",),
    label: str = "label",
    *,
    numbers: bool = False,
    header: Sequence[str] | None = None,
) -> datasets.Dataset:
    """Labelled examples from CSV, TSV, JSON, Parquet and Arrow files, memory-mapped.

    Columns: those named in `text` (two form a pair), and `label` as text: words, integers from 0 (also written 1.0), true or
    false; with `numbers`, any numbers. Raises the errors of `read_table`.
    """
    return read_table(paths, {**dict.fromkeys(text, TEXT), label: NUMBER if numbers else CLASS}, header)


def _cached(
    paths: Iterable[str | Path], schema: pa.Schema, key: Any, tables: Callable[[Path], Iterator[pa.Table]]
) -> datasets.Dataset:
    """What `tables` makes of each file."""
    paths = found(paths)
    stamps = [[*stamp(path), kind_of(path)] for path in paths]  # a kind may once have been read as lines
    data = cached_rows([stamps, key], schema, lambda: (table for path in paths for table in tables(path)))
    return _not_empty(data, ", ".join(map(str, paths)))


def _not_empty(data: datasets.Dataset, where: str) -> datasets.Dataset:
    if not len(data):
        raise ValueError(f"{where}: no text")
    return data


def _tables(schema: pa.Schema, rows: Iterator[tuple[str, ...]]) -> Iterator[pa.Table]:
    while some := list(islice(rows, 10_000)):
        yield pa.table([pa.array(values) for values in zip(*some, strict=True)], schema)


def _stripped(texts: Iterable[str | None]) -> list[str]:
    return [text for text in (text.strip() for text in texts if text) if text]


def load_hub_text(repo_id: str, split: str, column: str = "text", name: str | None = None) -> datasets.Dataset:
    """Column `text` from a data set of the Hub (or a local directory or file that `datasets` supports), without empty texts,
    memory-mapped.

    Raises ValueError for an unknown column, with the choices, and for data that cannot be read.
    """
    if files := _own_files(repo_id, split, name, [column]):
        return read_text(files, column=column)
    data = _chosen(_load(repo_id, split, name), f"{repo_id} ({split})", [column])
    data = data.map(_filled_texts, input_columns=column, batched=True, remove_columns=data.column_names)
    return _not_empty(data, f"{repo_id} ({split})")


def _filled_texts(texts: list[str | None]) -> dict[str, list[str]]:
    return {"text": _stripped(texts)}


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
