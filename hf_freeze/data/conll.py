"""Reads words with tags from files of columns, as those of the CoNLL shared tasks, and finds the entities in tags."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.data.files import found
from hf_freeze.data.lines import documents
from hf_freeze.data.tables import WORDS, kind_of, read_table

_TAG = re.compile(r"O|[BIES]-.+")


def read_conll(paths: Sequence[str | Path], tokens: str = "tokens", tags: str = "ner_tags") -> datasets.Dataset:
    """Columns `tokens` and `tags`, lists of text, a row for each sentence. A line is a word: its columns are separated by white
    space, the first is the word and the last its tag. Empty lines end sentences; lines of -DOCSTART- are left out.

    Of tables (`read_table`), the columns that `tokens` and `tags` name: lists or, in CSV and TSV files, with spaces between.

    Raises the errors of `read_documents`, and ValueError for a line of one column, other numbers of tags than of words, or a
    tag that `check_tags` refuses.
    """
    paths = found(paths)
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


def check_tags(tags: Iterable[str], where: str = "") -> None:
    """Raise ValueError for a tag that is not O, or B-, I-, E- or S- and a type."""
    for tag in dict.fromkeys(tags):
        if not _TAG.fullmatch(tag):
            raise ValueError(f"{where}tag {tag!r} is none of O, B-TYPE, I-TYPE, E-TYPE, S-TYPE")


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first, last) of each entity, by the rules of conlleval: B and S begin one, E and S end one, and so does another
    type; an I or E that continues nothing begins one (Tjong Kim Sang and De Meulder, 2003)."""
    found, first, open_kind = set(), 0, None
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if open_kind is not None and (prefix in "OBS" or kind != open_kind):
            found.add((open_kind, first, place - 1))
            open_kind = None
        if open_kind is None and prefix != "O":
            first, open_kind = place, kind
        if prefix in "ES":
            found.add((kind, first, place))
            open_kind = None
    return found
