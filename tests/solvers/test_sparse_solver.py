"""Zeros: SparseGPT against a slow optimal brain surgeon, refits against least squares on raw activations."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.moments import Seen, seen
from support.sparsegpt import sparsegpt

from hf_freeze.solvers.moments import problem
from hf_freeze.solvers.sparse import gradual, losses, refit_mask, wanda

EXACT = {"rtol": 1e-7, "atol": 1e-7}
SOLVERS = pytest.mark.parametrize("solver", [sparsegpt, gradual])
SETTINGS = pytest.mark.parametrize("settings", [{}, {"bias": True, "pairs": True}])


def error(case: Seen, weight: torch.Tensor) -> float:
    solved = problem(case.weight, case.bias, case.moments)
    difference = solved.target - weight
    return float((difference @ solved.gram * difference).sum())


def textbook(case: Seen, share: float, block: int) -> torch.Tensor:
    """Optimal brain surgeon row by row: at each column, in order, set the chosen entries to zero and change the later entries of
    their rows by the inverse of the later part of the Gram."""
    solved = problem(case.weight, case.bias, case.moments, 1e-2)
    w, inputs = solved.target.clone(), case.weight.shape[1]
    inverses = [torch.linalg.inv(solved.gram[j:, j:]) for j in range(inputs)]
    for start in range(0, inputs, block):
        columns = range(start, min(start + block, inputs))
        costs = {(i, j): float(w[i, j] ** 2 / inverses[j][0, 0]) for i in range(len(w)) for j in columns}
        gone = set(sorted(costs, key=costs.__getitem__)[: len(costs) - round(share * len(costs))])
        for j in columns:
            for i in range(len(w)):
                if (i, j) in gone:
                    w[i, j:] -= w[i, j] / inverses[j][0, 0] * inverses[j][0]
                    w[i, j] = 0
    return w


@SETTINGS
@pytest.mark.parametrize("block", [3, 128])
def test_sparsegpt_is_the_textbook_surgeon(settings, block):
    case = seen(6, 10, **settings)
    weight, bias = sparsegpt(case.weight, case.bias, case.moments, 0.4, block=block)
    torch.testing.assert_close(weight, textbook(case, 0.4, block), **EXACT)
    if bias is not None:
        torch.testing.assert_close((case.x @ weight.T + bias).mean(0), case.y.mean(0))


def test_wanda_keeps_the_largest_products_of_each_row():
    case = seen(6, 10)
    mask = wanda(case.weight, case.moments, 0.3)
    scores = case.weight.abs() * case.x.square().sum(0).sqrt()  # from raw activations
    for row, kept in zip(scores, mask, strict=True):
        assert set(row.topk(3).indices.tolist()) == set(kept.nonzero().flatten().tolist())


@SETTINGS
def test_a_refit_is_least_squares_on_raw_activations_row_by_row(settings):
    case = seen(6, 10, **settings)
    mask = torch.rand(6, 10) < 0.5
    mask[2], mask[3] = False, True
    weight, bias = refit_mask(case.weight, case.bias, case.moments, mask)
    for i, kept in enumerate(mask):
        columns = kept.nonzero().flatten().tolist()
        expected = torch.zeros(10, dtype=torch.float64)
        if columns:
            expected[columns] = case.lstsq(columns)[0][i]
        torch.testing.assert_close(weight[i], expected, **EXACT)
    if bias is not None:
        torch.testing.assert_close((case.x @ weight.T + bias).mean(0), case.y.mean(0))


def test_a_refit_that_is_cut_short_is_never_worse_than_its_start():
    case = seen(6, 30)
    start, _ = sparsegpt(case.weight, None, case.moments, 0.4)
    errors = [error(case, start)]
    for steps in (0, 1, 2, 5, 60):
        errors.append(error(case, refit_mask(case.weight, None, case.moments, start != 0, start, steps=steps)[0]))
    assert errors[0] == pytest.approx(errors[1])
    assert all(later < earlier for earlier, later in itertools.pairwise(errors[1:]))


@SOLVERS
def test_a_share_of_the_entries_stays(solver):
    case = seen(6, 10, bias=True)
    for share in (0.0, 0.35, 1.0):
        weight, _ = solver(case.weight, case.bias, case.moments, share)
        assert int((weight != 0).sum()) == round(share * 60)
    torch.testing.assert_close(weight, case.weight, rtol=1e-5, atol=1e-5)  # where all stay


def test_errors_fall_from_magnitude_over_sparsegpt_to_gradual():
    """Sums over cases; a single one may differ."""
    sums = torch.zeros(3)
    for seed in range(8):
        case = seen(16, 24, seed=seed)
        magnitude = case.weight * (case.weight.abs() >= case.weight.abs().flatten().topk(192).values[-1])
        others = [solver(case.weight, None, case.moments, 0.5)[0] for solver in (sparsegpt, gradual)]
        sums += torch.tensor([error(case, weight) for weight in (magnitude, *others)])
    assert sums[0] > 1.2 * sums[1]
    assert sums[1] > 1.3 * sums[2]


def test_losses_are_about_those_of_gradual_pruning():
    case, shares = seen(16, 24, bias=True, pairs=True, curvature=True), [0.8, 0.65, 0.5, 0.4, 0.3, 0.2]
    solved = problem(case.weight, case.bias, case.moments)
    found, exact = losses(case.weight, case.bias, case.moments, shares), []
    for share in shares:
        difference = solved.target - gradual(case.weight, case.bias, case.moments, share)[0]
        exact.append(float((solved.curvature @ difference @ solved.gram * difference).sum()))
    assert found == sorted(found)
    assert all(0.8 * one < other < 3 * one for one, other in zip(exact, found, strict=True))
    assert found[-1] == pytest.approx(exact[-1], rel=0.25)


def test_rows_lose_more_where_outputs_matter_less():
    case = seen(4, 12)
    matter = torch.diag(torch.tensor([100.0, 1, 1, 0.01], dtype=torch.float64))
    weight, _ = gradual(case.weight, None, replace(case.moments, curvature=matter), 0.5)
    left = (weight != 0).sum(1)
    assert int(left.sum()) == 24
    assert left[0] > left[1:3].max() >= left[1:3].min() > left[3]


@SOLVERS
def test_inputs_that_are_always_zero_and_few_tokens(solver):
    case = seen(4, 10)
    x = case.x[:3].clone()
    x[:, 2] = 0
    moments = replace(case.moments, gram=x.T @ x / 3, mean=x.mean(0), count=3)
    with pytest.warns(UserWarning, match="3 tokens"):
        weight, _ = solver(case.weight.float(), None, moments, 0.5)
    assert weight.dtype == torch.float32
    assert weight.isfinite().all()


def test_shares_and_masks_that_do_not_fit_are_errors():
    case = seen()
    for call in (
        lambda: wanda(case.weight, case.moments, 1.5),
        lambda: gradual(case.weight, None, case.moments, 1.5),
    ):
        with pytest.raises(ValueError, match=r"share=1\.5: must be in 0\.\.1"):
            call()
    with pytest.raises(ValueError, match=r"mask has the shape \(2, 2\), but the weight has \(5, 8\)"):
        refit_mask(case.weight, None, case.moments, torch.ones(2, 2, dtype=torch.bool))
