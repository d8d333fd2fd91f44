"""Parametrize a test by cases, or by few members of a product."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from support.cases import ALL, Case


def over(cases: Iterable[Case]) -> Any:
    """`@pytest.mark.parametrize` over the cases, of which there must be some."""
    cases = list(cases)
    assert cases, "no case: this test would pass without testing anything"
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def by_turns(*marks: Any) -> Any:
    """In place of several `pytest.mark.parametrize` of one argument, whose product has more members than kinds: every value of
    each, combined in turn. `HF_FREEZE_TESTS=all` runs the product."""
    arguments = [mark.args[0] for mark in marks]
    values = [list(mark.args[1]) for mark in marks]
    ids = [_ids(mark.kwargs.get("ids", str), each) for mark, each in zip(marks, values, strict=True)]
    sizes = list(map(len, values))
    turns = ([number % size for size in sizes] for number in range(max(sizes)))
    chosen = list(itertools.product(*map(range, sizes))) if ALL else list(turns)
    return pytest.mark.parametrize(
        arguments,
        [[each[number] for each, number in zip(values, numbers, strict=True)] for numbers in chosen],
        ids=["-".join(each[number] for each, number in zip(ids, numbers, strict=True)) for numbers in chosen],
    )


def _ids(ids: Any, values: list[Any]) -> list[str]:
    return [ids(value) for value in values] if callable(ids) else list(ids)
