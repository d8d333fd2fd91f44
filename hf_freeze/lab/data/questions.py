"""Reads questions on a text: their answers are parts of it, as in SQuAD, or one of several to choose from, as in RACE."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.files import endings, fault, kind_of, matching_files, read_bytes
from hf_freeze.lab.data.hub import load_hub_labelled
from hf_freeze.lab.data.tables import CLASS, OPTIONAL, TEXT, TEXTS, columns_of, read_table

LETTERS = "ABCDEFGH"
_FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in ("id", "question", "context")}
    | {"answers": [datasets.Value("string")], "starts": [datasets.Value("int64")]}
)


def read_squad(paths: Sequence[str | Path]) -> datasets.Dataset:
    """Columns `id`, `question`, `context`, and the lists `answers`, text, and `starts`, the characters of `context` where they
    begin; both are empty where the text holds no answer (SQuAD 2.0). From JSON files in the format of SQuAD 1.1 or 2.0, plain
    or compressed, or from tables (`read_table`, JSON lines) with the columns `question`, `context` and `answer`, whose first
    occurrence in the context counts; an empty answer is none.

    Raises FileNotFoundError; ValueError for what is not JSON or not of this format, and for an answer that does not stand where
    it is said to.
    """
    rows: list[dict[str, Any]] = []
    for path in matching_files(paths):
        if kind_of(path) != "lines" and endings(path)[-1] != ".json":
            rows += _of_table(path)
            continue
        try:
            for article in json.loads(read_bytes(path))["data"]:
                for paragraph in article["paragraphs"]:
                    for asked in paragraph["qas"]:
                        given = [] if asked.get("is_impossible") else asked["answers"]
                        answers = {name: [answer[name] for answer in given] for name in ("text", "answer_start")}
                        rows.append(_row(asked["id"], asked["question"], paragraph["context"], answers))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a file of SQuAD's format: {fault(error)}") from error
    return _checked(rows, ", ".join(map(str, paths)))


def _row(id: str, question: str, context: str, answers: dict[str, Any]) -> dict[str, Any]:
    """`answers` as in SQuAD on the Hub."""
    values = (id, question.strip(), context, answers["text"], answers["answer_start"])
    return dict(zip(_FEATURES, values, strict=True))


def _of_table(path: Path) -> Iterator[dict[str, Any]]:
    ids = {"id": TEXT} if "id" in columns_of(path) else {}
    columns = {"question": TEXT, "context": TEXT, "answer": OPTIONAL} | ids
    rows: Any = read_table([path], columns, check=_check_answer)
    for number, row in enumerate(rows, 1):
        texts = [row["answer"]] if row["answer"] else []
        answers = {"text": texts, "answer_start": [row["context"].index(text) for text in texts]}
        yield _row(row.get("id", str(number)), row["question"], row["context"], answers)


def _check_answer(row: dict[str, Any]) -> None:
    if row["answer"] not in row["context"]:
        raise ValueError(f"answer {row['answer']!r} is not in the context")


def load_hub_questions(repo_id: str, split: str, name: str | None = None) -> datasets.Dataset:
    """As `read_squad`, from a data set of the Hub (or a local directory that `datasets` supports) with SQuAD's columns `id`,
    `question`, `context` and `answers`. Raises ValueError for other columns, and as `read_squad`."""
    loaded: Any = load_hub_labelled(repo_id, split, ["id", "question", "context"], "answers", name)
    return _checked([_row(**row) for row in loaded], f"{repo_id} ({split})")


def _checked(rows: list[dict[str, Any]], where: str) -> datasets.Dataset:
    if not rows:
        raise ValueError(f"{where}: no questions")
    for row in rows:
        for answer, start in zip(row["answers"], row["starts"], strict=True):
            if row["context"][start : start + len(answer)] != answer:
                raise ValueError(f"{where}: question {row['id']!r}: {answer!r} does not begin at character {start}")
    return datasets.Dataset.from_list(rows, _FEATURES)


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
            for path in matching_files([folder]):
                rows += _choices(path)
            continue
        if not (paths := sorted(folder.glob("*.txt"))):
            raise FileNotFoundError(f"{folder} holds no files *.txt of RACE")
        for path in paths:
            try:
                text = json.loads(read_bytes(path))
                article = str(text["article"])
                for question, options, answer in zip(text["questions"], text["options"], text["answers"], strict=True):
                    rows.append({"article": article, "question": question, "options": options, "answer": answer})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a file of RACE's format: {fault(error)}") from error
    return datasets.Dataset.from_list(rows)


def _choices(path: Path) -> Iterator[dict[str, Any]]:
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
