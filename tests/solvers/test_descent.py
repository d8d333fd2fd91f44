"""L-BFGS on errors: it finds what lstsq finds, and never makes an error larger."""

import pytest
import torch
from torch import nn

from hf_freeze.solvers.descent import Coordinates, descend


def test_a_linear_problem_is_solved_as_by_lstsq():
    torch.manual_seed(0)
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(3, 6, dtype=torch.float64))
    memory = weight.data
    before, after = descend([weight], lambda: ((x[i] @ weight.T - y[i]).square().sum() for i in range(50)), steps=60)
    wanted = torch.linalg.lstsq(x, y).solution.T
    torch.testing.assert_close(weight.data, wanted, rtol=0, atol=1e-6)
    assert before == pytest.approx(float(y.square().sum()))
    assert after == pytest.approx(float((x @ wanted.T - y).square().sum()))
    assert not memory.any()
    assert weight.grad is None


def test_without_a_lower_error_the_parameters_are_as_before():
    weight = nn.Parameter(torch.ones(2))
    descend([weight], lambda: [weight.square().sum() * float("nan")])
    assert torch.equal(weight.data, torch.ones(2))
    descend([weight], lambda: [weight.square().sum()], [Coordinates.of(torch.full((2, 2), float("nan")))])
    assert torch.equal(weight.data, torch.ones(2))


def test_a_problem_of_unlike_directions_is_solved_in_few_steps():
    """A matrix whose inputs, and whose outputs' errors, differ in size by ten."""
    torch.manual_seed(0)
    sizes = [torch.logspace(0, 1, count, dtype=torch.float64) for count in (12, 8)]
    x, mixed = torch.randn(400, 12, dtype=torch.float64) * sizes[0], torch.randn(8, 8, dtype=torch.float64) * sizes[1]
    y = x @ torch.randn(12, 8, dtype=torch.float64) @ mixed.T

    def left(coordinates):
        weight = nn.Parameter(torch.zeros(8, 12, dtype=torch.float64))
        before, after = descend([weight], lambda: [(x @ weight.T @ mixed.T - y).square().sum()], coordinates)
        return after / before

    assert 10 * left([Coordinates.of(mixed.T @ mixed, x.T @ x)]) < left(None)
