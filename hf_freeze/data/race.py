"""Reads questions with several answers to choose from, in the format of RACE."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.files import fault, found, read_bytes
from hf_freeze.data.tables import CLASS, TEXT, TEXTS, columns_of, kind_of, place_of
from hf_freeze.data.text import read_table

LETTERS = "ABCDEFGH"


def read_race(folders: Sequence[str | Path]) -> datasets.Dataset:
    """Columns `article`, `question`, `options`, a list of text, and `answer`, a letter from A. From folders of files (*.txt),
    each a JSON object with an article, its `questions`, and their `options` and `answers` (Lai et al., 2017); or from tables
    (`read_table`) with these columns, where the options may be columns of their own, named A, B and so on.

    Raises FileNotFoundError for a folder without such files; ValueError for a file of another format, and for an answer of a
    table that is none of its options, with the row.
    """
    rows = {"article": [], "question": [], "options": [], "answer": []}
    for folder in map(Path, folders):
        if kind_of(folder) != "lines":
            for row in (row for path in found([folder]) for row in _of_table(path)):
                for name, value in row.items():
                    rows[name].append(value)
            continue
        if not (paths := sorted(folder.glob("*.txt"))):
            raise FileNotFoundError(f"{folder} holds no files *.txt of RACE")
        for path in paths:
            try:
                text = json.loads(read_bytes(path))
                questions = list(zip(text["questions"], text["options"], text["answers"], strict=True))
                rows["article"] += [str(text["article"])] * len(questions)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a file of RACE's format: {fault(error)}") from error
            for question, options, answer in questions:
                rows["question"].append(question)
                rows["options"].append(options)
                rows["answer"].append(answer)
    return datasets.Dataset.from_dict(rows)


def _of_table(path: Path) -> Iterator[dict[str, Any]]:
    options = (
        ["options"] if "options" in (present := columns_of(path)) else [name for name in LETTERS if name in present]
    )
    columns = dict.fromkeys(("article", "question", *(options or ["options"])), TEXT) | {"answer": CLASS}
    if "options" in columns:
        columns["options"] = TEXTS
    rows: Any = read_table([path], columns)
    for row in rows:
        listed, answer = row["options"] if "options" in columns else [row[name] for name in options], row["answer"]
        if answer not in LETTERS[: len(listed)]:
            where = place_of([path], {"answer": CLASS}, [answer])
            raise ValueError(f"{where}: answer {answer!r}; choose from {LETTERS[: len(listed)]!r}")
        yield {"article": row["article"], "question": row["question"], "options": listed, "answer": answer}
