"""Reads columns of tables, some rows at a time: files that end in .csv, .tsv, .jsonl, .json, .parquet or .arrow.

CSV, Parquet and Arrow are read by `datasets`. It makes text of JSON of mixed types, and does not tell the short lines of the TSV
files of GLUE from lines with empty cells; so these two are read here.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa

from hf_freeze.data.files import kind_of, matching_files
from hf_freeze.data.lines import decoded_lines
from hf_freeze.lab.data.by_datasets import by_datasets
from hf_freeze.lab.data.cache import cached_rows, stamp
from hf_freeze.lab.data.csv_files import csv_tables, head_of

_ROWS = 10_000  # read at a time
_STRINGS = (pa.string(), pa.large_string(), pa.string_view())
Rows = Iterator[tuple[Callable[[int], str], Any]]  # where the rows are, by their index, and some rows
TABLES = ".csv, .tsv, .jsonl, .json, .parquet or .arrow"
Check = Callable[[dict[str, Any]], object]
"""A function that raises ValueError for a row that is wrong."""


class Column(NamedTuple):
    """How the values of a column are read. `read` raises ValueError that says what a value must be."""

    type: pa.DataType
    read: Callable[[Any], Any]
    may_be_empty: bool = False  # in CSV; elsewhere every text may


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
OPTIONAL = Column(pa.string(), _text, may_be_empty=True)
CLASS = Column(pa.string(), _class)
NUMBER = Column(pa.float64(), _number)
TEXTS = Column(pa.list_(pa.string()), _texts)
WORDS = Column(pa.list_(pa.string()), _words)


def columns_of(path: str | Path) -> list[str]:
    """The names of the columns of a table; of JSON, those of the first object."""
    kind = kind_of(path)
    if kind == "csv":
        return head_of(path).names
    if kind == "tsv":
        first = next((line for line in decoded_lines(path) if line.strip()), "")
        return [name.strip() for name in first.split("\t")]
    if kind == "json":
        return list(next(_examples(path), ("", [{}]))[1][0])
    with by_datasets(path, kind) as data:
        return list(data.features)


def check_columns(
    where: object, columns: Iterable[str], present: Iterable[str], hint: str = "", missing: str = " has no column"
) -> None:
    """Raise ValueError for a column that is not there, with the choices and the nearest name."""
    for name in columns:
        if name not in present:
            by_lower = {other.lower(): other for other in present}
            near = get_close_matches(name.lower(), by_lower, 1)
            meant = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
            raise ValueError(f"{where}{missing} {name!r}; choose from {list(present)}{hint}{meant}")


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
    if header is None and (others := [path for path in matching_files(paths) if kind_of(path) == "lines"]):
        raise ValueError(f"{others[0]}: a file with columns ends in {TABLES}")
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    readers = [[name, column.read.__name__, column.may_be_empty] for name, column in columns.items()]
    key = [readers, header, getattr(check, "__qualname__", None)]
    return cached_files(paths, schema, key, lambda path: iterate_columns(path, columns, header=header, check=check))


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


def cached_files(
    paths: Iterable[str | Path], schema: pa.Schema, key: Any, tables: Callable[[Path], Iterator[pa.Table]]
) -> datasets.Dataset:
    """What `tables` makes of each file, memory-mapped; ValueError if that is nothing. `key`: what else it depends on."""
    paths = matching_files(paths)
    stamps = [[*stamp(path), kind_of(path)] for path in paths]  # a kind may once have been read as lines
    data = cached_rows([stamps, key], schema, lambda: (table for path in paths for table in tables(path)))
    if not len(data):
        raise ValueError(f"{', '.join(map(str, paths))}: no text")
    return data


def iterate_columns(
    path: str | Path, columns: Mapping[str, Column], *, header: Sequence[str] | None = None, check: Check | None = None
) -> Iterator[pa.Table]:
    """Tables of these columns. `header`: the names of the columns of a CSV or TSV file whose first row does not hold them.
    Rows of a CSV file that are empty in all columns are left out.

    Raises ValueError for a missing column, with the choices; and, with the place of the row, for a value that its column does not
    take and for what `check` refuses: the line of JSON lines; else the row as a spreadsheet counts it, so that the names of the
    columns of a CSV or TSV file are row 1. Where cells of CSV hold line breaks, the line where the row begins is added.
    """
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    if kind_of(path) == "csv":
        columns = {name: TEXT._replace(read=_filled) if column == TEXT else column for name, column in columns.items()}
    for where, rows in _rows(path, columns, header):
        table = pa.table([_values(path, where, name, rows[name], column) for name, column in columns.items()], schema)
        if check is not None:
            _each(where, check, table.to_pylist())
        yield table


def _each(where: Callable[[int], str], read: Callable[[Any], Any], values: Iterable[Any], name: str = "") -> list[Any]:
    results = []
    for index, value in enumerate(values):
        try:
            results.append(read(value))
        except ValueError as error:
            raise ValueError(f"{where(index)}: {name}{error}") from None
    return results


def _values(path: str | Path, where: Callable[[int], str], name: str, values: Any, column: Column) -> Any:
    if isinstance(values, pa.ChunkedArray):
        if column.read is _text:
            if values.type not in _STRINGS:
                raise ValueError(f"{path}: column {name!r} holds {values.type}, not text")
            if not values.null_count:
                return values.cast(column.type)
        values = values.to_pylist()
    return pa.array(_each(where, column.read, values, f"{name} "), column.type)


def _rows(path: str | Path, columns: Mapping[str, Column], header: Sequence[str] | None) -> Rows:
    """Where some rows are, and their values by column."""
    kind = kind_of(path)
    if kind != "json":  # there it is checked for each object
        check_columns(path, columns, header or columns_of(path))
    if kind == "csv":
        yield from csv_tables(path, list(columns), header)
    elif kind in ("parquet", "arrow"):
        options = {"columns": list(columns), "batch_size": _ROWS} if kind == "parquet" else {}
        with by_datasets(path, kind, **options) as data:
            first = 1
            for table in data.with_format("arrow").iter(_ROWS):
                yield _counted(f"{path}, row", first), table
                first += len(table)
    elif kind == "json":
        for where, examples in _examples(path, columns):
            yield where, {name: [example[name] for example in examples] for name in columns}
    else:
        rows = _tsv_rows(path, list(columns), header)
        while some := list(islice(rows, _ROWS)):
            places, values = zip(*some, strict=True)
            yield places.__getitem__, dict(zip(columns, zip(*values, strict=True), strict=True))


def _counted(what: str, first: int) -> Callable[[int], str]:
    return lambda index: f"{what} {first + index}"


def _tsv_rows(
    path: str | Path, columns: list[str], header: Sequence[str] | None
) -> Iterator[tuple[str, Sequence[str]]]:
    """As text without surrounding white space. Quotation marks are text. A line that is too short for `columns` is left out, with
    one warning for the file: the published train.tsv of QQP has a few."""
    names = header or columns_of(path)
    places, whole, short = [names.index(name) for name in columns], 0, 0
    rows = ((number, line) for number, line in enumerate(decoded_lines(path), 1) if line.strip())
    for number, line in islice(rows, 0 if header else 1, None):
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) > max(places):
            whole += 1
            yield f"{path}, row {number}", [cells[place] for place in places]
        else:
            short += 1
    if not whole:
        raise ValueError(f"{path}: no line has the columns {columns}")
    if short:
        warnings.warn(f"{path}: {short} of {whole + short} lines are too short and left out", stacklevel=2)


def _examples(path: str | Path, columns: Iterable[str] = ()) -> Rows:
    """Where some examples are, and they themselves, with these fields: JSON lines, or one list."""

    def read(row: Any) -> dict[str, Any]:
        example = row if unit == "row" else _parsed(row)
        if not isinstance(example, dict):
            raise ValueError(f"an example is a JSON object, not {json.dumps(example, ensure_ascii=False)[:40]!r}")
        check_columns("", columns, example, missing="no field")
        return example

    lines, unit, first = decoded_lines(path), "line", 1
    rows = chain([begin := next(lines)], lines)
    if begin.lstrip().startswith("["):
        unit, rows = "row", iter(_each(lambda _: str(path), _parsed, ["".join(rows)])[0])
    while some := list(islice(rows, _ROWS)):
        where = _counted(f"{path}, {unit}", first)
        yield where, _each(where, read, some)
        first += len(some)


def _parsed(text: str) -> Any:
    if not text.strip():
        raise ValueError("empty line")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from error
