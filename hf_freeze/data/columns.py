"""Reads columns of text from JSONL and Parquet files, some rows at a time."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from hf_freeze.data.files import COMPRESSED
from hf_freeze.data.lines import line_blocks

_ROWS = 10_000  # of a Parquet file, read at a time
_JSONL = (".jsonl", ".ndjson", ".json")


def kind_of(path: str | Path) -> str:
    """`parquet`, `jsonl` or `lines`, by the ending of the name without that of a compression."""
    endings = [ending for ending in Path(path).suffixes if ending not in COMPRESSED]
    ending = endings[-1] if endings else ""
    return "parquet" if ending == ".parquet" else "jsonl" if ending in _JSONL else "lines"


def has_columns(path: str | Path, columns: Sequence[str]) -> bool:
    """Whether the file is JSONL or Parquet with these columns; of JSONL, the first line decides."""
    if kind_of(path) == "parquet":
        return set(columns) <= set(_parquet(path).schema_arrow.names)
    if kind_of(path) == "lines":
        return False
    _, block = next(line_blocks(path))
    try:
        first = json.loads(block.split(b"\n", 1)[0])
    except ValueError:
        return False
    return isinstance(first, dict) and set(columns) <= set(first)


def iterate_columns(path: str | Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Tables of these columns, of type string, from a JSONL or Parquet file.

    Raises ValueError for a missing column, with the choices; a value that is not text, with line or row; and a damaged file.
    """
    return (_parquet_tables if kind_of(path) == "parquet" else _jsonl_tables)(path, columns)


def _parquet(path: str | Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: damaged Parquet file: {' '.join(str(error).split())}") from error


def _parquet_tables(path: str | Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    file, schema, row = _parquet(path), _schema(columns), 0
    for name in columns:
        if name not in file.schema_arrow.names:
            raise ValueError(f"{path} has no column {name!r}; choose from {file.schema_arrow.names}")
        if (kind := file.schema_arrow.field(name).type) not in (pa.string(), pa.large_string(), pa.string_view()):
            raise ValueError(f"{path}: column {name!r} holds {kind}, not text")
    try:
        for batch in file.iter_batches(_ROWS, columns=list(columns)):
            table = pa.table(batch).select(list(columns)).cast(schema)
            for name in columns:
                if table[name].null_count:
                    index = table[name].is_null().to_pylist().index(True)
                    raise ValueError(f"{path}, row {row + index + 1}: {name} must be text, not None")
            row += len(table)
            yield table
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: damaged Parquet file: {' '.join(str(error).split())}") from error


def _jsonl_tables(path: str | Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Not by the reader of `datasets`: at a line that does not fit the first ones it reads the whole file into memory, or turns
    the column into JSON."""
    schema = _schema(columns)
    for first, block in line_blocks(path):
        if first == 1:
            block = block.removeprefix(b"\xef\xbb\xbf")
        yield _fast_table(block, schema) or pa.Table.from_pylist(_examples(path, first, block, columns), schema)


def _fast_table(block: bytes, schema: pa.Schema) -> pa.Table | None:
    """The lines parsed by Arrow; None where one of them is not as it should be."""
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    whole = pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        block.decode("utf-8")  # Arrow does not look
        table = pyarrow.json.read_json(io.BytesIO(block), whole, options)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    is_whole = len(table) == block.count(b"\n") + 1 and not any(column.null_count for column in table.columns)
    return table if is_whole and table.schema == schema else None


def _examples(path: str | Path, first: int, block: bytes, columns: Sequence[str]) -> list[dict[str, str]]:
    """The lines parsed one by one, to say which one is wrong."""
    examples = []
    for number, line in enumerate(block.split(b"\n"), first):
        example = parse_example(f"{path}, line {number}", line, columns)
        for name in columns:
            if not isinstance(example[name], str):
                raise ValueError(f"{path}, line {number}: {name} must be text, not {example[name]!r}")
        examples.append({name: example[name] for name in columns})
    return examples


def parse_example(where: str, line: str | bytes, columns: Sequence[str]) -> dict[str, Any]:
    """The JSON object in a line, which has these fields."""
    if not line.strip():
        raise ValueError(f"{where}: empty line")
    try:
        example = json.loads(line)
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(example, dict):
        start = line if isinstance(line, str) else line.decode("utf-8")
        raise ValueError(f"{where}: an example is a JSON object, not {start[:40]!r}")
    for name in columns:
        if name not in example:
            raise ValueError(f"{where}: no field {name!r}; choose from {sorted(example)}")
    return example


def _schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in columns])
