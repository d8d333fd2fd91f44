"""Reads questions with several answers to choose from, in the format of RACE."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.files import fault, found, read_bytes
from hf_freeze.data.tables import CLASS, TEXT, TEXTS, columns_of, kind_of
from hf_freeze.data.text import read_table

LETTERS = "ABCDEFGH"


def read_race(folders: Sequence[str | Path]) -> datasets.Dataset:
    """Columns `article`, `question`, `options`, a list of text, and `answer`, a letter from A. From folders of files (*.txt),
    each a JSON object with an article, its `questions`, and their `options` and `answers` (Lai et al., 2017); or from tables
    (`read_table`) with these columns, where the options may be columns of their own, named A, B and so on.

    Raises FileNotFoundError for a folder without such files; ValueError for a file of another format, and for an answer of a
    table that is none of its options, with the row.
    """
    rows: list[dict[str, Any]] = []
    for folder in map(Path, folders):
        if kind_of(folder) != "lines":
            for path in found([folder]):
                rows += _of_table(path)
            continue
        if not (paths := sorted(folder.glob("*.txt"))):
            raise FileNotFoundError(f"{folder} holds no files *.txt of RACE")
        for path in paths:
            try:
                text = json.loads(read_bytes(path))
                asked = zip(text["questions"], text["options"], text["answers"], strict=True)
                article = {"article": str(text["article"])}
                rows += [article | dict(zip(("question", "options", "answer"), one, strict=True)) for one in asked]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a file of RACE's format: {fault(error)}") from error
    return datasets.Dataset.from_list(rows)


def _of_table(path: Path) -> Iterator[dict[str, Any]]:
    present = columns_of(path)
    letters = [] if "options" in present else [name for name in LETTERS if name in present]
    columns = dict.fromkeys(("article", "question", *letters), TEXT) | {"answer": CLASS}
    columns |= {} if letters else {"options": TEXTS}

    def check(row: dict[str, Any]) -> None:
        choices = LETTERS[: len(letters or row["options"])]
        if row["answer"] not in choices:
            raise ValueError(f"answer {row['answer']!r}; choose from {choices!r}")

    rows: Any = read_table([path], columns, check=check)
    for row in rows:
        yield {"options": [row.pop(name) for name in letters]} | row
