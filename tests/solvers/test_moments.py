"""The problem that statistics pose: against least squares on the raw activations."""

import warnings
from dataclasses import replace

import pytest
import torch
from support.moments import seen

from hf_freeze.solvers.moments import (
    Moments,
    add_ridge,
    behind,
    best_dense,
    best_scale,
    cholesky,
    loss,
    problem,
    projected,
    together,
    without_outputs,
)

both_biases = pytest.mark.parametrize("bias", [False, True])
EXACT = {"rtol": 1e-8, "atol": 1e-8}


@both_biases
def test_the_best_dense_weight_is_least_squares_on_raw_activations(bias):
    case = seen(bias=bias, pairs=True)
    weight, new_bias = best_dense(case.weight, case.bias, case.moments)
    expected, expected_bias = case.lstsq()
    torch.testing.assert_close(weight, expected, **EXACT)
    torch.testing.assert_close(new_bias, expected_bias, **EXACT)


@pytest.mark.parametrize("bias", [False, True])
def test_behind_a_matrix_are_the_moments_of_its_outputs(bias):
    case, down = seen(bias=bias, pairs=True), torch.randn(3, 8, dtype=torch.float64)
    z, moments = case.x @ down.T, projected(case.moments, down, case.weight, case.bias)
    torch.testing.assert_close(moments.gram, z.T @ z / len(z))
    torch.testing.assert_close(moments.mean, z.mean(0))
    torch.testing.assert_close(moments.cross, case.y.T @ z / len(z))
    alone = projected(without_outputs(case.moments), down, case.weight, case.bias)
    y = case.x @ case.weight.T + (0 if case.bias is None else case.bias)
    torch.testing.assert_close(alone.cross, y.T @ z / len(z))
    torch.testing.assert_close(alone.output_mean, y.mean(0))


@both_biases
def test_what_a_linear_gave_follows_from_what_it_read(bias):
    case = seen(bias=bias, pairs=True)
    x, old, count = case.x, case.x + torch.randn_like(case.x), len(case.x)
    y = old @ case.weight.T + (0 if case.bias is None else case.bias)
    read = Moments(x.T @ x / count, x.mean(0), count, old.T @ x / count, old.mean(0), None, old.square().mean(0))
    expected = Moments(read.gram, read.mean, count, y.T @ x / count, y.mean(0), None, y.square().mean(0))
    moments = behind(case.weight, case.bias, read, old.T @ old / count)
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(moments, name), value)


@both_biases
def test_of_several_places_are_the_moments_of_all_tokens(bias):
    """Places may have seen different numbers of tokens."""
    cases = [seen(bias=bias, pairs=True, seed=seed) for seed in (0, 1)]
    x, y = cases[1].x[:60], cases[1].y[:60]
    part = Moments(x.T @ x / 60, x.mean(0), 60, y.T @ x / 60, y.mean(0), None, y.square().mean(0))
    moments = together([cases[0].moments, part])
    x, y = torch.cat([cases[0].x, x]), torch.cat([cases[0].y, y])
    expected = Moments(x.T @ x / len(x), x.mean(0), len(x), y.T @ x / len(x), y.mean(0), None, y.square().mean(0))
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(moments, name), value)


@both_biases
def test_the_best_scale_is_least_squares_channel_by_channel(bias):
    case = seen(outputs=3, inputs=3, bias=bias, pairs=True)
    scale, shift = best_scale(case.moments, shifts=bias, ridge=0.0)
    for number in range(3):
        x, y = case.x[:, number : number + 1], case.y[:, number : number + 1]
        rows = torch.cat([x, torch.ones_like(x)], 1) if bias else x
        expected = torch.linalg.lstsq(rows, y).solution.flatten()
        torch.testing.assert_close(scale[number], expected[0], **EXACT)
        if bias:
            torch.testing.assert_close(shift[number], expected[1], **EXACT)
    drawn, _ = best_scale(case.moments, shifts=bias, ridge=1e9)
    torch.testing.assert_close(drawn, torch.ones_like(drawn), rtol=1e-6, atol=1e-6)


def test_a_strong_ridge_draws_to_the_weight_as_it_was():
    case = seen(bias=True, pairs=True)
    weight, _ = best_dense(case.weight, case.bias, case.moments, ridge=1e9)
    torch.testing.assert_close(weight, case.weight, rtol=1e-6, atol=1e-6)


@both_biases
def test_without_pairs_the_best_dense_weight_is_the_weight(bias):
    case = seen(bias=bias)
    weight, new_bias = best_dense(
        case.weight.float(), case.bias if case.bias is None else case.bias.float(), case.moments
    )
    assert torch.equal(weight, case.weight.float())
    if bias:
        torch.testing.assert_close(new_bias, case.bias.float(), rtol=1e-6, atol=1e-6)


@both_biases
@pytest.mark.parametrize("pairs", [False, True])
def test_loss_is_the_mean_square_of_raw_outputs(bias, pairs):
    case, new = seen(bias=bias, pairs=pairs), seen(bias=bias, seed=1)
    y = case.x @ new.weight.T + (new.bias if bias else 0)
    expected = (case.y - y).square().sum() / case.y.square().sum()
    actual = loss(case.weight, new.weight, case.moments, case.bias, new.bias)
    assert actual == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize("name", ["gram", "mean", "cross", "output_mean", "curvature", "output_square"])
def test_statistics_that_are_not_finite_are_named(name):
    moments = seen(pairs=True, curvature=True).moments
    wrong = getattr(moments, name).clone()
    wrong.view(-1)[1] = float("nan")
    with pytest.raises(ValueError, match=f"{name} has 1 values that are not finite, of {wrong.numel()}"):
        replace(moments, **{name: wrong})


def test_statistics_of_other_shapes_are_errors():
    case = seen(bias=True, pairs=True)
    with pytest.raises(ValueError, match=r"gram has the shape \(3, 3\), but must have \(8, 8\)"):
        replace(case.moments, gram=torch.eye(3))
    with pytest.raises(ValueError, match="count=0"):
        replace(case.moments, count=0)
    with pytest.raises(ValueError, match="the weight has 7 inputs, but the moments have 8"):
        problem(case.weight[:, 1:], None, case.moments)
    with pytest.raises(ValueError, match="the weight has 4 outputs, but cross has 5"):
        problem(case.weight[1:], None, case.moments)
    with pytest.raises(ValueError, match="cross needs output_mean"):
        problem(case.weight, case.bias, replace(case.moments, output_mean=None))
    with pytest.raises(ValueError, match=r"the weight of shape \(5, 8\) has values that are not finite"):
        problem(case.weight * float("inf"), None, case.moments)


def test_few_tokens_warn_once_and_raise_the_ridge():
    case = seen()
    few = replace(case.moments, count=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        grams = [problem(case.weight, None, few).gram for _ in range(2)]
    (warning,) = caught
    assert "7 tokens for a linear of 8 inputs: give at least 8, better 80" in str(warning.message)
    expected = case.moments.gram.clone()
    add_ridge(expected, 1e-2)
    torch.testing.assert_close(grams[0], expected)


def test_inputs_that_are_always_zero_count_alike():
    moments = Moments(torch.zeros(3, 3), torch.zeros(3), 10)
    solved = problem(torch.ones(2, 3), torch.ones(2), moments)
    assert torch.equal(solved.gram, torch.eye(3, dtype=torch.float64))
    assert loss(torch.ones(2, 3), torch.zeros(2, 3), moments) == 0.0


def test_a_gram_that_rounding_left_indefinite_has_a_cholesky_factor():
    gram = torch.ones(3, 3) - 1e-6 * torch.eye(3)
    factor = cholesky(gram)
    torch.testing.assert_close(factor @ factor.T, gram, rtol=1e-4, atol=1e-4)


def test_the_problem_is_solved_in_fp64_up_to_4096_inputs_and_leaves_its_arguments():
    case = seen(bias=True, pairs=True, curvature=True)
    before = {name: getattr(case.moments, name).clone() for name in ("gram", "mean", "cross", "curvature")}
    assert problem(case.weight, case.bias, case.moments).target.dtype == torch.float64
    assert problem(case.weight.to(torch.bfloat16), case.bias, case.moments).target.dtype == torch.float32
    assert all(torch.equal(value, getattr(case.moments, name)) for name, value in before.items())
    wide = Moments(torch.eye(1), torch.zeros(1), 1)
    assert problem(torch.ones(1, 1), None, wide).result(torch.ones(1, 1, dtype=torch.float64))[0].dtype == torch.float32
