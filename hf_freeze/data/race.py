"""Reads questions with several answers to choose from, in the format of RACE."""

import json
from collections.abc import Sequence
from pathlib import Path

import datasets

from hf_freeze.data.files import fault, read_bytes

LETTERS = "ABCDEFGH"


def read_race(folders: Sequence[str | Path]) -> datasets.Dataset:
    """Columns `article`, `question`, `options`, a list of text, and `answer`, a letter from A. From folders of files (*.txt),
    each a JSON object with an article, its `questions`, and their `options` and `answers` (Lai et al., 2017).

    Raises FileNotFoundError for a folder without such files, and ValueError for a file of another format.
    """
    rows = {"article": [], "question": [], "options": [], "answer": []}
    for folder in map(Path, folders):
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
