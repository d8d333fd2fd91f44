"""The curves that what is scheduled follows."""

import itertools
import math

import pytest

from hf_freeze.methods._ramps import RAMPS, in_stages, ramp

each_shape = pytest.mark.parametrize("shape", RAMPS)


@each_shape
def test_a_ramp_rises_from_0_to_1_and_stays_outside(shape):
    values = [ramp(shape, step / 100) for step in range(101)]
    assert (values[0], values[-1]) == (0, 1)
    assert all(one < other for one, other in itertools.pairwise(values))
    assert (ramp(shape, -0.5), ramp(shape, 1.5)) == (0, 1)


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [
        ("linear", 0.25, 0.5),
        ("cosine", 0.5 - math.sqrt(0.125), 0.5),  # cos π/4 is the root of 1/2
        ("cubic", 37 / 64, 7 / 8),
    ],
)
def test_the_value_at_a_quarter_and_at_half(shape, quarter, half):
    assert ramp(shape, 0.25) == pytest.approx(quarter)
    assert ramp(shape, 0.5) == pytest.approx(half)


def test_only_the_cubic_one_is_steepest_at_first():
    for shape, parts in (("linear", 4), ("cosine", 2), ("cubic", 1)):
        gains = [ramp(shape, (step + 1) / 4) - ramp(shape, step / 4) for step in range(4)]
        assert sum(gain == pytest.approx(max(gains)) for gain in gains) == parts
        assert (gains[0] == pytest.approx(max(gains))) == (shape != "cosine")


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"unknown ramp 'square'; choose from \['linear', 'cosine', 'cubic'\]"):
        ramp("square", 0.5)


def test_stages_are_hundredths_rounded_upwards():
    assert [in_stages(k / 100) for k in range(101)] == [k / 100 for k in range(101)]
    assert [in_stages(k * 0.01) for k in range(101)] == [k / 100 for k in range(101)]  # some just above, by rounding
    assert [in_stages(k / 100 + 1e-6) for k in range(100)] == [k / 100 for k in range(1, 101)]
    assert [in_stages(k / 100 - 1e-6) for k in range(1, 101)] == [k / 100 for k in range(1, 101)]
    assert (in_stages(-0.5), in_stages(1.5)) == (0, 1)


@pytest.mark.parametrize(("steps", "stages"), [(7, 8), (100, 101), (5000, 101)])
def test_stages_rise_with_the_steps_and_end_with_the_last(steps, stages):
    values = [in_stages(step / steps) for step in range(steps + 1)]
    assert values == sorted(values)
    assert len(set(values)) == stages
    assert values.index(1) == math.floor(0.99 * steps) + 1
