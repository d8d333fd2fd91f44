"""Parametrize a test by cases."""

from collections.abc import Iterable
from typing import Any

import pytest

from support.cases import Case


def over(cases: Iterable[Case]) -> Any:
    """`@pytest.mark.parametrize` over the cases, of which there must be some."""
    cases = list(cases)
    assert cases, "no case: this test would pass without testing anything"
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])
