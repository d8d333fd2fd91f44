"""Which ordered pairs of methods are refused: those of refused.txt, on the architectures that it names, and no others."""

import pytest
from refused import kept, pairs, places, reason, title
from support.cases import ALL, ARCHITECTURES, EXAMPLES, name_of

KEPT = kept()


def cells(first):
    """(pair, architecture) for each method after `first`; the architectures by turns, all if they are wanted."""
    for number, pair in enumerate(pair for pair in pairs() if pair[0] == first):
        fitting = places(pair)
        turn = number + EXAMPLES.index(first)
        for architecture in (
            fitting if ALL else fitting[turn % len(fitting) : turn % len(fitting) + 1] if fitting else []
        ):
            yield pair, architecture


def change(pair, architecture):
    """What is otherwise than refused.txt says, in one line; None if nothing is."""
    where, listed = f"{title(pair)} on {architecture.model_type}", KEPT.get(title(pair), [])
    found = reason(pair, architecture)
    if found is not None and architecture.model_type not in listed:
        return f"{where} is refused, but not in refused.txt: {found}"
    if found is None and architecture.model_type in listed:
        return f"{where} is no longer refused, but in refused.txt"
    return None


@pytest.mark.parametrize("first", EXAMPLES, ids=map(name_of, EXAMPLES))
def test_the_pairs_that_are_refused_are_those_of_the_file(first):
    changes = [change(*cell) for cell in cells(first)]
    assert changes, "no architecture takes any pair"
    assert [line for line in changes if line is not None] == []


def test_the_file_names_pairs_that_exist():
    titles = {title(pair): pair for pair in pairs()}
    assert KEPT.keys() <= titles.keys()
    for name, architectures in KEPT.items():
        assert set(architectures) <= {place.model_type for place in places(titles[name])} & ARCHITECTURES.keys()
