"""Reads columns of files whose columns are separated by tabs, such as those of GLUE."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import datasets

from hf_freeze.data.files import read_bytes


def read_tsv(path: str | Path, columns: Sequence[str], header: Sequence[str] | None = None) -> datasets.Dataset:
    """The `columns`, as text, of a file with tabs between its columns, plain or compressed. Quotation marks are text.

    `header`: the names of the columns, where the first line does not hold them. A line that is too short for `columns` is
    left out, with one warning for the file: the published train.tsv of QQP has a few. Surrounding white space is removed.

    Raises FileNotFoundError; ValueError for a missing column, with the choices, a file without a whole line, bytes that are
    not UTF-8, and a damaged compressed file.
    """
    try:
        lines = read_bytes(path).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    rows = [line.rstrip("\r").split("\t") for line in lines if line.strip()]
    if header is None:
        header, rows = (rows or [[]])[0], rows[1:]
    names = [name.strip() for name in header]
    for name in columns:
        if name not in names:
            raise ValueError(f"{path} has no column {name!r}; choose from {names}")
    places = [names.index(name) for name in columns]
    whole = [row for row in rows if len(row) > max(places)]
    if not whole:
        raise ValueError(f"{path}: no line has the columns {list(columns)}")
    if short := len(rows) - len(whole):
        warnings.warn(f"{path}: {short} of {len(rows)} lines are too short and left out", stacklevel=2)
    return datasets.Dataset.from_dict(
        {name: [row[place].strip() for row in whole] for name, place in zip(columns, places, strict=True)}
    )
