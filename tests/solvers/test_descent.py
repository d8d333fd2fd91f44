"""L-BFGS on errors: it finds what lstsq finds, and never makes an error larger."""

import pytest
import torch
from torch import nn

from hf_freeze.solvers.descent import descend


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
