"""Reads CSV files as spreadsheets write them: any delimiter, quotation marks, line breaks within cells, a byte-order mark."""

import codecs
import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pandas.errors import ParserError

from hf_freeze.data.files import by_datasets, read_pieces, unpacked
from hf_freeze.data.lines import iterate_lines

_DELIMITERS = ",;\t|"
_ROWS = 10_000  # read at a time
_UTF8 = "utf-8-sig"  # with or without a byte-order mark


@dataclass(frozen=True)
class Head:
    """How a file begins. `first`: the cells of the row below the names."""

    delimiter: str
    names: list[str]
    first: list[str]


def head_of(path: str | Path) -> Head:
    """The delimiter is the one that cuts the first row into several cells, and most of the next ones into as many.

    Raises ValueError for an empty file, and for one that is not UTF-8.
    """
    piece = next(read_pieces(path), b"")
    if not piece:
        raise ValueError(f"{path}: the file is empty")
    try:
        text = codecs.getincrementaldecoder(_UTF8)().decode(piece)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    if "\x00" in text:
        raise _not_utf8(path)
    rows = {mark: list(islice(_reader(io.StringIO(text, newline=""), mark), 50)) for mark in _DELIMITERS}

    def fit(mark: str) -> tuple[bool, float, int]:
        names, *others = rows[mark]
        others = [row for row in others[:-1] if row] or [names]  # the last one may be cut off
        return len(names) > 1, sum(len(row) == len(names) for row in others) / len(others), len(names)

    delimiter = max(_DELIMITERS, key=fit)
    names, *others = rows[delimiter]
    return Head(delimiter=delimiter, names=[name.strip() for name in names], first=others[0] if others else [])


def csv_tables(
    path: str | Path, columns: Sequence[str], header: Sequence[str] | None
) -> Iterator[tuple[Sequence[int], pa.Table]]:
    """The columns, which are there, as text without surrounding white space, with the numbers of their rows in a spreadsheet.
    Rows without anything in any column are left out. `header`: the names, where the first row does not hold them."""
    compute: Any = pc  # its functions are made when it is imported
    head = head_of(path)
    names = list(header or head.names)
    first = [*head.names] if header else head.first
    for name in columns:
        if names.count(name) > 1:
            raise ValueError(f"{path} has {names.count(name)} columns {name!r}; give them different names")
    width = max(len(names), len(first))  # delimiters at the ends of all rows make further cells, which are empty
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
            encoding=_UTF8,
        ) as data:
            for table in data.with_format("arrow").iter(_ROWS):
                cells = [compute.utf8_trim_whitespace(column) for column in table.columns]
                if any(compute.any(compute.not_equal(column, "")).as_py() for column in cells[len(names) :]):
                    raise _wrong_row(path, head, len(names), width)
                filled = reduce(compute.or_, (compute.not_equal(column, "") for column in cells))
                found = pa.table([cells[names.index(name)] for name in columns], list(columns))
                yield (row + np.flatnonzero(filled)).tolist(), found.filter(filled)
                row += len(table)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    except ParserError as error:
        raise _wrong_row(path, head, len(names), width) from error


def place_in_csv(path: str | Path, row: int) -> str:
    """The row as a spreadsheet counts it, and the line where it begins, if that has another number."""
    rows = _rows(path, head_of(path).delimiter)
    return next((_place(path, row, line) for number, line, _ in rows if number == row), f"{path}, row {row}")


def _place(path: str | Path, row: int, line: int) -> str:
    return f"{path}, row {row}" + (f" (line {line})" if line != row else "")


def _rows(path: str | Path, delimiter: str) -> Iterator[tuple[int, int, list[str]]]:
    """(number, first line, cells) of every row: slower than `datasets`, but with lines."""
    with unpacked(path) as plain, open(plain, encoding=_UTF8, newline="") as file:
        reader, line = _reader(file, delimiter), 1
        for number, cells in enumerate(reader, 1):
            yield number, line, cells
            line = reader.line_num + 1


def _reader(lines: Iterable[str], delimiter: str) -> Any:
    csv.field_size_limit(1 << 30)  # a quotation mark that is not closed makes one cell of the rest
    return csv.reader(lines, delimiter=delimiter)


def _wrong_row(path: str | Path, head: Head, names: int, width: int) -> ValueError:
    """For the first row with too many cells, else the last row, which an open quotation mark makes of all the rest."""
    row, line = 1, 1
    for row, line, cells in _rows(path, head.delimiter):
        if any(cells[names:]) or len(cells) > width:
            quoted = f"put a cell that holds {head.delimiter!r} in quotation marks"
            return ValueError(
                f"{_place(path, row, line)}: {len(cells)} cells for {names} column{'s' * (names > 1)}; {quoted}"
            )
    return ValueError(f"{_place(path, row, line)}: a quotation mark is opened and never closed")


def _not_utf8(path: str | Path) -> ValueError:
    try:
        for _ in iterate_lines(path):
            pass
    except ValueError as error:
        return ValueError(f"{error}; save the file as UTF-8 (in a spreadsheet: CSV UTF-8)")
    return ValueError(f"{path}: not UTF-8")
