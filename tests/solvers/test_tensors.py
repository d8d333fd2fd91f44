"""Alternating least squares: against closed forms, and from the starts of the layers."""

import math
from dataclasses import replace

import pytest
import torch
from support.moments import Seen, seen

from hf_freeze.layers.tensor_train import merge, tt_svd
from hf_freeze.layers.tucker import kronecker, tucker
from hf_freeze.solvers.low_rank import low_rank
from hf_freeze.solvers.moments import problem
from hf_freeze.solvers.tensors import alternate

SETTINGS = pytest.mark.parametrize("settings", [{}, {"bias": True, "pairs": True}])
IN_MODES, OUT_MODES = (2, 3, 2), (3, 2, 2)


def train_weight(cores):
    return merge(cores)[0, :, :, 0].T


def tucker_weight(parts):
    core, *factors = parts
    return kronecker(factors[3:]) @ core.T @ kronecker(factors[:3]).T


def train_start(weight):
    return tt_svd(weight.T, IN_MODES, OUT_MODES, [1, 3, 2, 1])


def tucker_start(weight):
    ranks = [2, 2, 1, 2, 2, 2]
    core, factors = tucker(weight.T.reshape(*IN_MODES, *OUT_MODES), ranks)
    return [core.reshape(math.prod(ranks[:3]), -1), *factors]


FORMATS = pytest.mark.parametrize(("start", "build"), [(train_start, train_weight), (tucker_start, tucker_weight)])


def error(case: Seen, weight: torch.Tensor) -> float:
    solved = problem(case.weight, case.bias, case.moments)
    difference = solved.target - weight
    return float((difference @ solved.gram * difference).sum())


@FORMATS
@SETTINGS
def test_every_sweep_lowers_the_error_and_the_bias_keeps_the_mean(settings, start, build):
    case = seen(12, 12, **settings)
    first = start(case.weight)
    errors = [error(case, build(first))]
    for sweeps in (0, 1, 2, 6):
        parts, bias = alternate(case.weight, case.bias, case.moments, first, build, sweeps=sweeps)
        assert [part.shape for part in parts] == [part.shape for part in first]
        errors.append(error(case, build(parts)))
        if bias is not None:
            y = case.x @ build(parts).T + bias
            torch.testing.assert_close(y.mean(0), case.y.mean(0))
    assert errors[0] == pytest.approx(errors[1])
    assert errors[1] > errors[2] > errors[3] > errors[4]


@FORMATS
def test_a_weight_that_has_this_form_stays(start, build):
    case = seen(12, 12)
    first = start(case.weight)
    parts, _ = alternate(build(first), None, case.moments, first, build)
    torch.testing.assert_close(build(parts), build(first))


@SETTINGS
def test_two_factors_reach_the_known_optimum(settings):
    """Alternating least squares on up · down, against the closed form of whitened low rank."""
    case = seen(5, 6, **settings)
    first = [torch.randn(2, 6, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)]
    parts, _ = alternate(case.weight, case.bias, case.moments, first, lambda parts: parts[1] @ parts[0], sweeps=60)
    least = float(low_rank(case.weight, case.bias, case.moments).losses[2])
    assert error(case, parts[1] @ parts[0]) == pytest.approx(least, rel=1e-6)


def test_one_part_is_least_squares_on_raw_activations():
    """With all cores but one fixed, against torch.linalg.lstsq on the features that this core multiplies."""
    case = seen(12, 12)
    first = train_start(case.weight)

    def build(parts):
        return train_weight([first[0], parts[0], first[2]])

    (core,), _ = alternate(case.weight, None, case.moments, [first[1]], build, sweeps=1, steps=300, ridge=1e-12)
    units = torch.eye(first[1].numel(), dtype=torch.float64).view(-1, *first[1].shape)
    features = torch.stack([(case.x @ build([unit]).T).flatten() for unit in units], 1)
    expected = torch.linalg.lstsq(features, case.y.flatten()[:, None], driver="gelsd").solution
    torch.testing.assert_close(core.flatten(), expected[:, 0], rtol=1e-6, atol=1e-6)


def test_inputs_that_are_always_zero_and_few_tokens():
    case = seen(12, 12)
    x = case.x[:3].clone()
    x[:, 2] = 0
    moments = replace(case.moments, gram=x.T @ x / 3, mean=x.mean(0), count=3)
    with pytest.warns(UserWarning, match="3 tokens"):
        parts, _ = alternate(case.weight.float(), None, moments, train_start(case.weight), train_weight)
    assert all(part.isfinite().all() and part.dtype == torch.float32 for part in parts)
