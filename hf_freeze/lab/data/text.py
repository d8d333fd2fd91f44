"""Readers for text and parallel text from files, plain or compressed.

What is read is copied once into an Arrow file of the cache and memory-mapped from there; it is never in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path

import datasets
import pyarrow as pa

from hf_freeze.data.files import kind_of, matching_files
from hf_freeze.data.lines import UNITS, full_lines
from hf_freeze.lab.data.cache import cached_rows, stamp
from hf_freeze.lab.data.tables import OPTIONAL, TABLES, TEXT, cached_files, iterate_columns, read_table


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
                yield pa.table(filled(table[column].to_pylist()), schema)

    return cached_files(paths, schema, [unit, column], tables)


def read_pairs(paths: Sequence[str | Path], *, source: str = "source", target: str = "target") -> datasets.Dataset:
    """Columns `source` and `target`, memory-mapped: from two line-aligned files of plain text, or from any number of tables (as
    for `read_text`) with the columns that `source` and `target` name.

    Raises ValueError for other files, and the errors of `read_text`.
    """
    paths = matching_files(paths)
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
                counts = [f"{path} has {sum(1 for _ in full_lines(path))} lines" for path in (source, target)]
                raise ValueError(f"parallel files differ in length: {', '.join(counts)}")
            yield pair

    schema = pa.schema([("source", pa.string()), ("target", pa.string())])
    return cached_rows([stamp(source), stamp(target)], schema, lambda: _tables(schema, pairs()))


def _tables(schema: pa.Schema, rows: Iterator[tuple[str, ...]]) -> Iterator[pa.Table]:
    while some := list(islice(rows, 10_000)):
        yield pa.table([pa.array(values) for values in zip(*some, strict=True)], schema)


def filled(texts: Iterable[str | None]) -> dict[str, list[str]]:
    """The column `text`, without surrounding white space and empty texts."""
    return {"text": [text for text in (text.strip() for text in texts if text) if text]}
