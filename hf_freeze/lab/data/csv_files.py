"""Reads CSV files as spreadsheets write them: any delimiter, quotation marks, line breaks within cells, a byte-order mark."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pandas.errors import ParserError

from hf_freeze.data.lines import decoded_lines
from hf_freeze.lab.data.by_datasets import by_datasets

_DELIMITERS = ",;\t|"
_ROWS = 10_000  # read at a time


class Head(NamedTuple):
    """How a file begins. `first`: the cells of the row below the names."""

    delimiter: str
    names: list[str]
    first: list[str]


def head_of(path: str | Path) -> Head:
    """The delimiter is the one that cuts the first row into several cells, and most of the next ones into as many.

    Raises the errors of `decoded_lines`.
    """
    lines = list(islice(decoded_lines(path), 200))
    rows = {mark: list(_reader(lines, mark)) for mark in _DELIMITERS}

    def fit(mark: str) -> tuple[bool, float, int]:
        names, *others = rows[mark]
        others = [row for row in others[:-1] if row] or [names]  # the last one may be cut off
        return len(names) > 1, sum(len(row) == len(names) for row in others) / len(others), len(names)

    delimiter = max(_DELIMITERS, key=fit)
    names, *others = rows[delimiter]
    return Head(delimiter, [name.strip() for name in names], others[0] if others else [])


def csv_tables(
    path: str | Path, columns: Sequence[str], header: Sequence[str] | None
) -> Iterator[tuple[Callable[[int], str], pa.Table]]:
    """The columns, which are there, as text without surrounding white space, and where their rows are. Rows without anything in
    any column are left out. `header`: the names, where the first row does not hold them."""
    compute: Any = pc  # its functions are made when it is imported
    head = head_of(path)
    names = list(header or head.names)
    for name in columns:
        if names.count(name) > 1:
            raise ValueError(f"{path} has {names.count(name)} columns {name!r}; give them different names")
    # Delimiters at the ends of all rows make further cells, which are empty.
    width = max(len(names), len(head.names if header else head.first))
    numbered = [str(i) for i in range(width)]
    row = 1 if header else 2
    try:
        with by_datasets(
            path,
            "csv",
            sep=head.delimiter,
            names=numbered,
            header=None if header else 0,
            features=datasets.Features(dict.fromkeys(numbered, datasets.Value("string"))),
            index_col=False,
            na_filter=False,  # "NA" and "null" are text
            skip_blank_lines=False,  # a spreadsheet counts them
            encoding="utf-8-sig",
        ) as data:
            for table in data.with_format("arrow").iter(_ROWS):
                cells = [compute.utf8_trim_whitespace(column) for column in table.columns]
                is_filled = [compute.not_equal(column, "") for column in cells]
                if any(compute.any(column).as_py() for column in is_filled[len(names) :]):
                    raise ParserError
                filled = reduce(compute.or_, is_filled)
                found = pa.table([cells[names.index(name)] for name in columns], list(columns))
                yield partial(_place, path, head, (row + np.flatnonzero(filled)).tolist()), found.filter(filled)
                row += len(table)
    except (ParserError, UnicodeDecodeError) as error:
        raise _wrong_row(path, head, len(names), width) from error


def _place(path: str | Path, head: Head, numbers: Sequence[int], index: int) -> str:
    """The row as a spreadsheet counts it, and the line where it begins, if that has another number."""
    return next(where for number, where, _ in _rows(path, head) if number == numbers[index])


def _rows(path: str | Path, head: Head) -> Iterator[tuple[int, str, list[str]]]:
    """(number, place, cells) of every row: slower than `datasets`, but with lines."""
    reader, line = _reader(decoded_lines(path), head.delimiter), 1
    for number, cells in enumerate(reader, 1):
        yield number, f"{path}, row {number}" + (f" (line {line})" if line != number else ""), cells
        line = reader.line_num + 1


def _reader(lines: Iterable[str], delimiter: str) -> Any:
    csv.field_size_limit(1 << 30)  # a quotation mark that is not closed makes one cell of the rest
    return csv.reader(chain.from_iterable(io.StringIO(line, newline="") for line in lines), delimiter=delimiter)


def _wrong_row(path: str | Path, head: Head, names: int, width: int) -> ValueError:
    """For the first row with too many cells, else the last row, which an open quotation mark makes of all the rest."""
    where = str(path)
    for _, where, cells in _rows(path, head):
        if any(cells[names:]) or len(cells) > width:
            columns = f"{names} column{'s' * (names > 1)}"
            quoted = f"put a cell that holds {head.delimiter!r} in quotation marks"
            return ValueError(f"{where}: {len(cells)} cells for {columns}; {quoted}")
    return ValueError(f"{where}: a quotation mark is opened and never closed")
