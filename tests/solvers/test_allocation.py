"""What goes where, against all ways to share the removals out."""

import itertools
import random

import pytest

from hf_freeze.solvers.allocation import allocate


def least(costs, removals, most, step):
    """The least sum of costs of any counts, multiples of `step`."""
    ways = itertools.product(*(range(0, limit + 1, step) for limit in most))
    return min(
        sum(part[count] for part, count in zip(costs, counts, strict=True))
        for counts in ways
        if sum(counts) == -(-removals // step) * step
    )


def convex(draw, units):
    return [0.0, *itertools.accumulate(sorted(draw.random() for _ in range(units)))]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_the_sum_of_convex_costs_is_the_least(seed, step):
    draw = random.Random(seed)
    most = [6, 4, 8]
    costs = [convex(draw, units + 1) for units in most]  # one more than may go
    for removals in range(sum(most) + 1):
        removed = allocate(costs, removals, most=most, step=step)
        assert sum(removed) == -(-removals // step) * step
        assert all(count % step == 0 and count <= limit for count, limit in zip(removed, most, strict=True))
        found = sum(part[count] for part, count in zip(costs, removed, strict=True))
        assert found == pytest.approx(least(costs, removals, most, step))


def test_what_gets_cheap_only_after_a_dear_unit_goes_at_once():
    """A second unit that costs nothing makes the first one half as dear."""
    assert allocate([[0, 3, 3], [0, 2, 4]], 2, most=[2, 2]) == [2, 0]


def test_more_than_may_go():
    with pytest.raises(ValueError, match="cannot remove 4 units: at most 3 may go"):
        allocate([[0, 1, 2], [0, 1]], 4, most=[2, 1])
