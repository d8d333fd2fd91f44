"""Finds the entities in tags, such as those of the CoNLL shared tasks."""

import re
from collections.abc import Iterable, Sequence

_TAG = re.compile(r"O|[BIES]-.+")


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
