"""Reads questions on a text whose answers are parts of it, as those of SQuAD."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.files import endings, fault, found, read_bytes
from hf_freeze.data.tables import OPTIONAL, TEXT, columns_of, kind_of, place_of
from hf_freeze.data.text import load_hub_labelled, read_table

COLUMNS = ("id", "question", "context", "answers", "starts")


def read_squad(paths: Sequence[str | Path]) -> datasets.Dataset:
    """Columns `id`, `question`, `context`, and the lists `answers`, text, and `starts`, the characters of `context` where they
    begin; both are empty where the text holds no answer (SQuAD 2.0). From JSON files in the format of SQuAD 1.1 or 2.0, plain
    or compressed, or from tables (`read_table`, JSON lines) with the columns `question`, `context` and `answer`, whose first
    occurrence in the context counts; an empty answer is none.

    Raises FileNotFoundError; ValueError for what is not JSON or not of this format, and for an answer that does not stand where
    it is said to.
    """
    rows: list[dict[str, Any]] = []
    for path in found(paths):
        if kind_of(path) != "lines" and endings(path)[-1] != ".json":
            rows += _of_table(path)
            continue
        try:
            for article in json.loads(read_bytes(path))["data"]:
                for paragraph in article["paragraphs"]:
                    for question in paragraph["qas"]:
                        given = [] if question.get("is_impossible") else question["answers"]
                        rows.append(
                            {
                                "id": question["id"],
                                "question": question["question"].strip(),
                                "context": paragraph["context"],
                                "answers": [answer["text"] for answer in given],
                                "starts": [answer["answer_start"] for answer in given],
                            }
                        )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a file of SQuAD's format: {fault(error)}") from error
    return _checked(rows, ", ".join(map(str, paths)))


def _of_table(path: Path) -> Iterator[dict[str, Any]]:
    columns = {"question": TEXT, "context": TEXT, "answer": OPTIONAL}
    ids = {"id": TEXT} if "id" in columns_of(path) else {}
    rows: Any = read_table([path], columns | ids)
    for number, row in enumerate(rows, 1):
        question, context, answer = (row[name] for name in columns)
        if answer not in context:
            where = place_of([path], columns, [question, context, answer])
            raise ValueError(f"{where}: answer {answer!r} is not in the context")
        given = {"answers": [answer], "starts": [context.index(answer)]} if answer else {"answers": [], "starts": []}
        yield (
            {"id": str(number), "question": question.strip(), "context": context}
            | {name: row[name] for name in ids}
            | given
        )


def load_hub_questions(repo_id: str, split: str, name: str | None = None) -> datasets.Dataset:
    """As `read_squad`, from a data set of the Hub (or a local directory that `datasets` supports) with SQuAD's columns `id`,
    `question`, `context` and `answers`. Raises ValueError for other columns, and as `read_squad`."""
    loaded: Any = load_hub_labelled(repo_id, split, ["id", "question", "context"], "answers", name)
    rows = [
        {
            "id": row["id"],
            "question": row["question"].strip(),
            "context": row["context"],
            "answers": list(row["answers"]["text"]),
            "starts": list(row["answers"]["answer_start"]),
        }
        for row in loaded
    ]
    return _checked(rows, f"{repo_id} ({split})")


def _checked(rows: list[dict[str, Any]], where: str) -> datasets.Dataset:
    if not rows:
        raise ValueError(f"{where}: no questions")
    for row in rows:
        for answer, start in zip(row["answers"], row["starts"], strict=True):
            if row["context"][start : start + len(answer)] != answer:
                raise ValueError(f"{where}: question {row['id']!r}: {answer!r} does not begin at character {start}")
    features = datasets.Features(
        dict.fromkeys(COLUMNS[:3], datasets.Value("string"))
        | {"answers": datasets.Sequence(datasets.Value("string")), "starts": datasets.List(datasets.Value("int64"))}
    )
    return datasets.Dataset.from_list(rows, features)
