"""Elimination of columns: against least squares on raw activations for every subset."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.moments import Seen, seen

from hf_freeze.solvers.columns import eliminate, group_columns, refit
from hf_freeze.solvers.moments import problem

EXACT = {"rtol": 1e-8, "atol": 1e-8}


def error(case: Seen, kept: list[int]) -> float:
    """tr(A (T - W') H (T - W')ᵀ) of the least squares on the columns `kept`."""
    solved = problem(case.weight, case.bias, case.moments)
    new = torch.zeros_like(case.weight)
    new[:, kept] = case.lstsq(kept)[0]
    difference = solved.target - new
    inner = difference if solved.curvature is None else solved.curvature @ difference
    return float((inner @ solved.gram * difference).sum())


def slow_elimination(case: Seen, groups: list[list[int]]) -> tuple[list[int], list[float]]:
    """One removal at a time, by comparing all subsets that lack one more group."""
    left, free = list(range(len(groups))), set(range(case.weight.shape[1])) - set(itertools.chain(*groups))
    order, losses = [], [0.0]
    while left:
        errors = {g: error(case, sorted(free.union(*(groups[i] for i in left if i != g)))) for g in left}
        order.append(min(errors, key=errors.__getitem__))
        losses.append(errors[order[-1]])
        left.remove(order[-1])
    return order, losses


@pytest.mark.parametrize(
    "settings", [{}, {"bias": True}, {"pairs": True}, {"bias": True, "pairs": True, "curvature": True}]
)
@pytest.mark.parametrize("groups", [1, 4, [[0, 7], [1], [2, 5, 6]]], ids=str)
def test_elimination_removes_what_costs_least_and_its_curve_is_exact(settings, groups):
    case = seen(**settings)
    result = eliminate(case.weight, case.bias, case.moments, groups)
    order, losses = slow_elimination(case, group_columns(groups, 8))
    assert result.order.tolist() == order
    torch.testing.assert_close(result.losses, torch.tensor(losses, dtype=torch.float64), rtol=1e-7, atol=1e-9)
    assert result.kept(2) == sorted(order[-2:])


@pytest.mark.parametrize(
    "groups",
    [1, 2, [[at, *range(at + 1, at + 1 + at % 3)] for at in range(0, 248, 4)]],
    ids=["alone", "pairs", "uneven, and some stay"],
)
@pytest.mark.parametrize("settings", [{}, {"bias": True, "pairs": True, "curvature": True}], ids=["plain", "all"])
def test_blocks_of_removals_are_removals_one_at_a_time(groups, settings):
    """More columns than a block removes, so that what is left is copied to smaller matrices; against updates of the whole
    matrices."""
    case = seen(6, 250, **settings)
    solved, columns = problem(case.weight, case.bias, case.moments), group_columns(groups, 250)
    curvature = torch.eye(6, dtype=torch.float64) if solved.curvature is None else solved.curvature
    w, p = solved.target.clone(), torch.linalg.inv(solved.gram)
    order, losses = [], [0.0]
    while len(order) < len(columns):
        costs = {}
        for number, g in enumerate(columns):
            if number not in order:
                costs[number] = float((curvature @ w[:, g] @ torch.linalg.inv(p[g][:, g]) * w[:, g]).sum())
        order.append(min(costs, key=costs.__getitem__))
        losses.append(losses[-1] + costs[order[-1]])
        g = columns[order[-1]]
        factor = torch.linalg.solve(p[g][:, g], p[g])
        w, p = w - w[:, g] @ factor, p - p[:, g] @ factor
    result = eliminate(case.weight, case.bias, case.moments, groups)
    assert result.order.tolist() == order
    torch.testing.assert_close(result.losses, torch.tensor(losses, dtype=torch.float64), rtol=1e-6, atol=0)
    if groups == 1:  # with no input left, the error is that of no output at all
        nothing = (curvature @ solved.target @ solved.gram * solved.target).sum()
        assert float(result.losses[-1]) == pytest.approx(float(nothing))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_refit_is_least_squares_on_raw_activations(bias, pairs):
    case = seen(bias=bias, pairs=pairs)
    kept = [6, 0, 3]  # in the order that is asked for
    weight, new_bias = refit(case.weight, case.bias, case.moments, kept)
    expected, expected_bias = case.lstsq(kept)
    torch.testing.assert_close(weight, expected, **EXACT)
    torch.testing.assert_close(new_bias, expected_bias, **EXACT)


def test_no_small_change_of_a_refit_lowers_the_error():
    """Finite differences of the error on raw activations with a negligible ridge: the slope is zero."""
    case = seen(3, 6, bias=True, pairs=True)
    kept, step = [0, 2, 3], 1e-4
    weight, bias = refit(case.weight, case.bias, case.moments, kept, ridge=1e-12)
    x = torch.cat([case.x[:, kept], torch.ones(len(case.x), 1, dtype=torch.float64)], 1)
    solution = torch.cat([weight, bias[:, None]], 1)

    def mean_square(w):
        return float((x @ w.T - case.y).square().sum(1).mean())

    for i, j in itertools.product(range(3), range(4)):
        change = torch.zeros_like(solution)
        change[i, j] = step
        slope = (mean_square(solution + change) - mean_square(solution - change)) / (2 * step)
        assert abs(slope) < 1e-6 * mean_square(solution)


def test_a_permutation_of_columns_permutes_the_order():
    case = seen(bias=True)
    by = torch.randperm(8)
    moments = replace(case.moments, gram=case.moments.gram[by][:, by], mean=case.moments.mean[by])
    result, permuted = (
        eliminate(w, case.bias, m) for w, m in ((case.weight, case.moments), (case.weight[:, by], moments))
    )
    assert by[permuted.order].tolist() == result.order.tolist()


def test_a_rotation_of_outputs_changes_nothing():
    case = seen(bias=True)
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    result, rotated = (eliminate(w, case.bias, case.moments) for w in (case.weight, rotation @ case.weight))
    assert torch.equal(result.order, rotated.order)
    torch.testing.assert_close(result.losses, rotated.losses)


def test_inputs_that_add_nothing_go_first_at_no_cost():
    """A column of zeros, and one that is the sum of two others."""
    case = seen(5, 8)
    case.x[:, 2], case.x[:, 4] = 0, case.x[:, 0] + case.x[:, 1]
    moments = replace(case.moments, gram=case.x.T @ case.x / len(case.x), mean=case.x.mean(0))
    result = eliminate(case.weight, None, moments, ridge=1e-9)
    assert result.losses[2] < 1e-6 * result.losses[-1] < result.losses[3]
    weight, _ = refit(case.weight, None, moments, [0, 1, 3, 5, 6, 7], ridge=1e-9)
    expected = case.x @ case.weight.T
    torch.testing.assert_close(case.x[:, [0, 1, 3, 5, 6, 7]] @ weight.T, expected, rtol=1e-4, atol=1e-4)


def test_fewer_tokens_than_columns_still_give_finite_weights():
    case = seen(4, 10)
    x = case.x[:3]
    moments = replace(case.moments, gram=x.T @ x / 3, mean=x.mean(0), count=3)
    with pytest.warns(UserWarning, match="3 tokens"):
        kept = eliminate(case.weight, None, moments).kept(5)
    with pytest.warns(UserWarning, match="3 tokens"):
        assert refit(case.weight, None, moments, kept)[0].isfinite().all()


def test_groups_that_do_not_fit_are_errors():
    case = seen()
    with pytest.raises(ValueError, match="groups=3: must divide the number of inputs, 8"):
        eliminate(case.weight, None, case.moments, 3)
    with pytest.raises(ValueError, match="no column twice"):
        eliminate(case.weight, None, case.moments, [[0, 1], [1]])
    with pytest.raises(ValueError, match="groups have columns 0 to 8, but the weight has columns 0 to 7"):
        eliminate(case.weight, None, case.moments, [[0], [8]])
    with pytest.raises(ValueError, match="cannot keep 9 groups: there are 8"):
        eliminate(case.weight, None, case.moments).kept(9)
