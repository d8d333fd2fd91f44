"""Reads columns of tables, some rows at a time: files that end in .csv, .tsv, .jsonl, .json, .parquet or .arrow.

CSV, Parquet and Arrow are read by `datasets`. It makes text of JSON of mixed types, and does not tell the short lines of the TSV
files of GLUE from lines with empty cells; so these two are read here.
"""

import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from hf_freeze.data.csv_files import csv_tables, head_of, place_in_csv
from hf_freeze.data.files import by_datasets, endings, read_bytes, read_pieces
from hf_freeze.data.lines import decoded_blocks, line_blocks

_ROWS = 10_000  # of Parquet and Arrow files, read at a time
_KINDS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".arrow": "arrow"}
_KINDS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json")
_STRINGS = (pa.string(), pa.large_string(), pa.string_view())
Rows = Iterator[tuple[Sequence[int], Any]]  # numbers of rows, as `place` counts them, and their values by column
_BOM = b"\xef\xbb\xbf"
TABLES = ".csv, .tsv, .jsonl, .json, .parquet or .arrow"


@dataclass(frozen=True)
class Column:
    """How the values of a column are read. `read` raises ValueError that says what a value must be."""

    type: pa.DataType
    read: Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    return value


def _filled(value: Any) -> str:
    if not _text(value).strip():
        raise ValueError("is empty")
    return value


def _class(value: Any) -> str:
    if isinstance(value, str):
        return _filled(value).strip()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and 0 <= value < math.inf and value == int(value):
        return str(int(value))
    raise ValueError(f"must be a word, an integer from 0, or true or false, not {value!r}")


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"must be a number, such as 2.5, not {value!r}")
    return number


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ValueError(f"must be a list of texts, not {value!r}")
    return value


def _words(value: Any) -> list[str]:
    """In CSV and TSV, words with spaces between them."""
    return _filled(value).split() if isinstance(value, str) else _texts(value)


TEXT = Column(pa.string(), _text)
FILLED = Column(pa.string(), _filled)
CLASS = Column(pa.string(), _class)
NUMBER = Column(pa.float64(), _number)
TEXTS = Column(pa.list_(pa.string()), _texts)
WORDS = Column(pa.list_(pa.string()), _words)
OPTIONAL = Column(pa.string(), _text)  # also empty


def kind_of(path: str | Path) -> str:
    """`csv`, `tsv`, `json`, `parquet`, `arrow` or, for any other file, `lines`, by the ending of the name without that of a
    compression."""
    return _KINDS.get((endings(path) or [""])[-1].lower(), "lines")


def columns_of(path: str | Path) -> list[str]:
    """The names of the columns of a table; of JSON, those of the first object."""
    kind = kind_of(path)
    if kind == "csv":
        return head_of(path).names
    if kind == "tsv":
        return next(decoded_blocks(path))[1].split("\n")[0].rstrip("\r").split("\t")
    if kind == "json":
        first = next(_examples(path))[1]
        return list(first[0]) if first else []
    with by_datasets(path, kind) as data:
        return list(data.features)


def check_columns(where: object, columns: Iterable[str], present: Sequence[str], hint: str = "") -> None:
    """Raise ValueError for a column that is not there, with the choices and the nearest name."""
    for name in columns:
        if name not in present:
            raise ValueError(
                f"{where} has no column {name!r}; choose from {list(present)}{hint}{_meant(name, present)}"
            )


def _meant(name: str, present: Iterable[str]) -> str:
    by_lower = {other.lower(): other for other in present}
    near = get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def iterate_columns(
    path: str | Path, columns: Mapping[str, Column], *, header: Sequence[str] | None = None, empty: bool = False
) -> Iterator[pa.Table]:
    """Tables of these columns. `header`: the names of the columns of a CSV or TSV file whose first row does not hold them.
    `empty`: whether texts in a CSV file may be empty. Rows of it that are empty in all columns are left out.

    Raises ValueError for a missing column, with the choices; a value that its column does not take, with row or line; and a
    damaged file.
    """
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    if kind_of(path) == "csv" and not empty:
        columns = {name: FILLED if column is TEXT else column for name, column in columns.items()}
    for numbers, rows in _rows(path, columns, header):
        yield pa.table([_values(path, numbers, name, rows[name], columns[name]) for name in columns], schema)


def place(path: str | Path, number: int) -> str:
    """Where a row is: a line of JSON lines; else a row as a spreadsheet counts it, so that the names of the columns of a CSV or
    TSV file are row 1. Where cells of CSV hold line breaks, the line where the row begins is added."""
    if kind_of(path) == "csv":
        return place_in_csv(path, number)
    return f"{path}, {'line' if kind_of(path) == 'json' and not _is_list(path) else 'row'} {number}"


def place_of(
    paths: Iterable[str | Path], columns: Mapping[str, Column], row: Sequence[Any], header: Sequence[str] | None = None
) -> str:
    """Where these columns have the values of `row` for the first time."""
    for path in paths:
        for numbers, rows in _rows(path, columns, header):
            values = [map(column.read, _list(rows[name])) for name, column in columns.items()]
            for number, *others in zip(numbers, *values, strict=True):
                if others == list(row):
                    return place(path, number)
    return ", ".join(map(str, paths))


def parse_example(where: str, line: str | bytes, columns: Iterable[str]) -> dict[str, Any]:
    """The JSON object in a line, which has these fields."""
    if not line.strip():
        raise ValueError(f"{where}: empty line")
    try:
        example = json.loads(line)
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{where}: not JSON ({error})") from error
    return _checked(where, example, columns)


def _checked(where: str, example: Any, columns: Iterable[str]) -> dict[str, Any]:
    if not isinstance(example, dict):
        raise ValueError(f"{where}: an example is a JSON object, not {json.dumps(example, ensure_ascii=False)[:40]!r}")
    for name in columns:
        if name not in example:
            raise ValueError(f"{where}: no field {name!r}; choose from {sorted(example)}{_meant(name, example)}")
    return example


def _rows(path: str | Path, columns: Mapping[str, Column], header: Sequence[str] | None) -> Rows:
    kind = kind_of(path)
    if kind == "csv":
        check_columns(path, columns, header or head_of(path).names)
        yield from csv_tables(path, list(columns), header)
    elif kind == "tsv" or header:
        yield from _tsv_rows(path, list(columns), header)
    elif kind == "json":
        yield from _json_rows(path, columns)
    else:
        check_columns(path, columns, columns_of(path))
        options = {"columns": list(columns), "batch_size": _ROWS} if kind == "parquet" else {}
        with by_datasets(path, kind, **options) as data:
            row = 1
            for table in data.with_format("arrow").iter(_ROWS):
                yield range(row, row + len(table)), table
                row += len(table)


def _values(path: str | Path, numbers: Sequence[int], name: str, values: Any, column: Column) -> Any:
    if column is TEXT and isinstance(values, pa.ChunkedArray):
        if values.type not in _STRINGS:
            raise ValueError(f"{path}: column {name!r} holds {values.type}, not text")
        if not values.null_count:
            return values.cast(column.type)
    read = []
    for number, value in zip(numbers, _list(values), strict=True):
        try:
            read.append(column.read(value))
        except ValueError as error:
            raise ValueError(f"{place(path, number)}: {name} {error}") from None
    return pa.array(read, column.type)


def _list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else values.to_pylist()


def _tsv_rows(path: str | Path, columns: list[str], header: Sequence[str] | None) -> Rows:
    """As text without surrounding white space. Quotation marks are text. A line that is too short for `columns` is left out, with
    one warning for the file: the published train.tsv of QQP has a few."""
    names, whole, short = header, 0, 0
    for first, text in decoded_blocks(path):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), first) if line.strip()]
        if names is None and lines:
            names = [name.strip() for name in lines.pop(0)[1].split("\t")]
        if names is None:
            continue
        check_columns(path, columns, names)
        places = [names.index(name) for name in columns]
        cells = [(number, line.rstrip("\r").split("\t")) for number, line in lines]
        found = [(number, row) for number, row in cells if len(row) > max(places)]
        whole, short = whole + len(found), short + len(cells) - len(found)
        rows = {name: [row[place].strip() for _, row in found] for name, place in zip(columns, places, strict=True)}
        yield [number for number, _ in found], rows
    if not whole:
        raise ValueError(f"{path}: no line has the columns {columns}")
    if short:
        warnings.warn(f"{path}: {short} of {whole + short} lines are too short and left out", stacklevel=2)


def _json_rows(path: str | Path, columns: Mapping[str, Column]) -> Rows:
    """The lines parsed by Arrow, where all columns are text and no line is wrong; else one by one."""
    schema = pa.schema([(name, pa.string()) for name in columns]) if set(columns.values()) == {TEXT} else None
    for first, examples in _examples(path, columns, schema):
        numbers = range(first, first + len(examples))
        is_table = isinstance(examples, pa.Table)
        yield numbers, examples if is_table else {name: [example[name] for example in examples] for name in columns}


def _is_list(path: str | Path) -> bool:
    return next(read_pieces(path), b"").removeprefix(_BOM).lstrip()[:1] == b"["


def _examples(path: str | Path, columns: Iterable[str] = (), schema: pa.Schema | None = None) -> Iterator[Any]:
    """The number of the first one, and a list of some, or a table where Arrow can make one of this schema."""
    if _is_list(path):
        try:
            listed = json.loads(read_bytes(path).removeprefix(_BOM))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        yield 1, [_checked(f"{path}, row {row}", example, columns) for row, example in enumerate(listed, 1)]
        return
    for first, block in line_blocks(path):
        block = block.removeprefix(_BOM) if first == 1 else block
        table = _fast_table(block, schema) if schema is not None else None
        if table is None:
            lines = enumerate(block.split(b"\n"), first)
            table = [parse_example(f"{path}, line {number}", line, columns) for number, line in lines]
        yield first, table


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
