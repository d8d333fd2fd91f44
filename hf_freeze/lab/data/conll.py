"""Reads words with tags from files of columns, as those of the CoNLL shared tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.entities import check_tags
from hf_freeze.data.files import kind_of, matching_files
from hf_freeze.data.lines import documents
from hf_freeze.lab.data.tables import WORDS, read_table


def read_conll(paths: Sequence[str | Path], tokens: str = "tokens", tags: str = "ner_tags") -> datasets.Dataset:
    """Columns `tokens` and `tags`, lists of text, a row for each sentence. A line is a word: its columns are separated by white
    space, the first is the word and the last its tag. Empty lines end sentences; lines of -DOCSTART- are left out.

    Of tables (`read_table`), the columns that `tokens` and `tags` name: lists or, in CSV and TSV files, with spaces between.

    Raises the errors of `read_documents`, and ValueError for a line of one column, other numbers of tags than of words, or a
    tag that `check_tags` refuses.
    """
    paths = matching_files(paths)
    if all(kind_of(path) != "lines" for path in paths):

        def check(row: dict[str, Any]) -> None:
            if len(row[tokens]) != len(row[tags]):
                raise ValueError(f"{len(row[tokens])} words, but {len(row[tags])} tags")
            check_tags(row[tags])

        data = read_table(paths, {tokens: WORDS, tags: WORDS}, check=check)
        return data.rename_columns({tokens: "tokens", tags: "tags"})
    rows: list[dict[str, list[str]]] = []
    for path in paths:
        for sentence in documents(path):
            words = [line.split() for line in sentence.split("\n") if not line.startswith("-DOCSTART-")]
            if short := next((word for word in words if len(word) < 2), None):
                raise ValueError(f"{path}: {short[0]!r} has no tag; a line is a word and, in its last column, a tag")
            if words:
                rows.append({"tokens": [word[0] for word in words], "tags": [word[-1] for word in words]})
        check_tags((tag for row in rows for tag in row["tags"]), f"{path}: ")
    return datasets.Dataset.from_list(rows)
