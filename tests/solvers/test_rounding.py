"""GPTQ: against a slow optimal brain surgeon that removes one column after another, and against plain rounding."""

from dataclasses import replace

import pytest
import torch
from support.moments import Seen, seen

from hf_freeze.layers.grids import Grid, rounded
from hf_freeze.solvers.moments import problem
from hf_freeze.solvers.rounding import Rounded, Symmetric, gptq

LARGEST = (1.0,)  # steps by the largest value alone


def errors(case: Seen, weight: torch.Tensor) -> torch.Tensor:
    """(O,): the error of each row."""
    solved = problem(case.weight, case.bias, case.moments)
    difference = solved.target - weight.double()
    return (difference @ solved.gram * difference).sum(1)


def textbook(case: Seen, levels: int, size: int) -> torch.Tensor:
    """Optimal brain surgeon, row by row: round a column, change the columns that are left by the least squares of the inverse of
    what is left of the Gram. The same order of columns and steps."""
    solved = problem(case.weight, case.bias, case.moments)
    diagonal, inputs = solved.gram.diagonal(), case.weight.shape[1]
    groups = [list(range(start, min(start + size, inputs))) for start in range(0, inputs, size)]
    groups = [sorted(group, key=lambda j: -float(diagonal[j])) for group in groups]
    groups.sort(key=lambda group: -float(diagonal[group].mean()))
    result = solved.target.clone()
    for row in result:
        left = [j for group in groups for j in group]
        for group in groups:
            step = float((row[group].abs().max() / levels).float())
            for j in group:
                inverse = torch.linalg.inv(solved.gram[left][:, left])
                value = (row[j] / step).round().clamp(-levels, levels) * step
                change = (row[j] - value) / inverse[0, 0] * inverse[0]
                row[left] -= change
                row[j] = value
                left.remove(j)
    return result


@pytest.mark.parametrize("settings", [{}, {"bias": True, "pairs": True}])
@pytest.mark.parametrize(("levels", "group"), [(127, None), (7, None), (7, 4), (7, 3)])
def test_it_is_the_textbook_surgeon(settings, levels, group):
    case = seen(4, 10, **settings)
    result = gptq(case.weight, case.bias, case.moments, Symmetric(levels, LARGEST), group=group, sweeps=0)
    expected = textbook(case, levels, group or 10)
    plain = rounded_plainly(case, levels, group or 10)
    keeps = errors(case, plain) < errors(case, expected)
    torch.testing.assert_close(result.weight(), torch.where(keeps[:, None], plain, expected).float())


def rounded_plainly(case: Seen, levels: int, size: int) -> torch.Tensor:
    target = problem(case.weight, case.bias, case.moments).target
    parts = []
    for block in target.split(size, 1):
        steps = (block.abs().amax(1, keepdim=True) / levels).float().double()
        parts.append((block / steps).round().clamp(-levels, levels) * steps)
    return torch.cat(parts, 1)


def test_blocks_of_columns_are_columns_one_at_a_time(monkeypatch):
    case = seen(3, 40, bias=True)
    whole = gptq(case.weight, case.bias, case.moments, Symmetric(7), group=16)
    monkeypatch.setattr("hf_freeze.solvers.rounding._BLOCK", 3)
    blocks = gptq(case.weight, case.bias, case.moments, Symmetric(7), group=16)
    assert torch.equal(whole.numbers, blocks.numbers)
    torch.testing.assert_close(whole.steps, blocks.steps)


def column_by_column(case: Seen, levels: int, size: int) -> torch.Tensor:
    """GPTQ without blocks: (O, I) numbers. The inverse of what is left of the Gram is updated for each column."""
    solved = problem(case.weight, case.bias, case.moments)
    w, inverse, diagonal = solved.target.clone(), torch.linalg.inv(solved.gram), solved.gram.diagonal()
    groups = [list(range(start, min(start + size, w.shape[1]))) for start in range(0, w.shape[1], size)]
    groups = [sorted(group, key=lambda j: -float(diagonal[j])) for group in groups]
    numbers = torch.empty_like(w)
    for group in sorted(groups, key=lambda group: -float(diagonal[group].mean())):
        step = (w[:, group].abs().amax(1) / levels).float().double()
        for j in group:
            numbers[:, j] = (w[:, j] / step).round().clamp(-levels, levels)
            error = (w[:, j] - numbers[:, j] * step) / inverse[j, j]
            w -= error.outer(inverse[j])
            inverse -= inverse[:, j].outer(inverse[j]) / inverse[j, j]
            inverse[j, j] = 1  # which no column reads any more
    return numbers


@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize("settings", [{}, {"bias": True, "pairs": True}])
def test_parts_of_blocks_are_the_columns_one_at_a_time(group, settings):
    """More columns than a block has; a block of whole parts, and one that ends in half a part."""
    case = seen(12, 300, **settings)
    result = gptq(case.weight, case.bias, case.moments, Symmetric(7, LARGEST), group=group, sweeps=0)
    expected = column_by_column(case, 7, group or 300)
    differ = (result.numbers != expected).sum(1)
    # A number halfway between two may be rounded the other way, and then those after it in its row too.
    assert int((differ > 0).sum()) <= 1


@pytest.mark.parametrize("group", [None, 8])
def test_sweeps_lower_the_error_further(group):
    case = seen(32, 32)

    def total(sweeps):
        weight = gptq(case.weight, None, case.moments, Symmetric(7), group=group, sweeps=sweeps).weight()
        return float(errors(case, weight).sum())

    plain = float(errors(case, rounded_plainly(case, 7, group or 32)).sum())
    assert total(3) < total(1) < total(0) < plain / 2


def test_no_row_is_worse_than_plain_rounding_with_the_steps_of_the_grid():
    for seed in range(5):
        case = seen(40, 6, seed=seed)
        plain = errors(case, rounded_plainly(case, 7, 6).float())
        weight = gptq(case.weight, None, case.moments, Symmetric(7, LARGEST), sweeps=0).weight()
        assert (errors(case, weight) <= plain * (1 + 1e-5)).all()


def test_white_inputs_leave_plain_rounding():
    """Where no column can make up for another."""
    case = seen(5, 9)
    moments = replace(case.moments, gram=torch.eye(9, dtype=torch.float64))
    result = gptq(case.weight, None, moments, Symmetric(7, LARGEST), sweeps=0)
    torch.testing.assert_close(result.weight(), rounded_plainly(case, 7, 9).float())


@pytest.mark.parametrize(("weights", "granularity"), [("int8", "channel"), ("int4", "group-64")])
def test_its_numbers_are_stored_by_the_layers(weights, granularity):
    """The weight lies on the project's grid: its own numbers for these steps are the same."""
    case = seen(4, 70, bias=True)
    grid = Grid(weights=weights, granularity=granularity)
    result = gptq(
        case.weight, case.bias, case.moments, Symmetric(grid.levels), group=64 if grid.groups(70) > 1 else None
    )
    assert result.steps.shape == (4, grid.groups(70))
    numbers = rounded(result.weight(), grid.spread(result.steps, 70), grid.levels, clips=False)
    assert torch.equal(numbers, result.numbers.float())
    assert numbers.abs().max() <= grid.levels


def test_the_bias_keeps_the_mean_of_the_outputs():
    case = seen(4, 10, bias=True)
    result = gptq(case.weight, case.bias, case.moments, Symmetric(1))
    y = case.x @ result.weight().double().T + result.bias
    torch.testing.assert_close(y.mean(0), case.y.mean(0), rtol=1e-5, atol=1e-5)


def test_another_grid_can_be_given():
    """Powers of two and zero, with one step for all."""

    class Powers:
        def steps(self, block, costs):
            return torch.ones(len(block), dtype=block.dtype)

        def numbers(self, values, steps):
            return values.sign() * 2 ** values.abs().clamp_min(2**-8).log2().round()

    case = seen(4, 10)
    weight = gptq(case.weight, None, case.moments, Powers(), sweeps=0).weight()
    assert torch.equal(weight.abs().log2(), weight.abs().log2().round())


def test_zeros_and_few_tokens():
    case = seen(4, 10)
    weight = case.weight.clone()
    weight[1] = 0
    x = case.x[:3]
    x[:, 2] = 0
    moments = replace(case.moments, gram=x.T @ x / 3, mean=x.mean(0), count=3)
    with pytest.warns(UserWarning, match="3 tokens"):
        result = gptq(weight, None, moments, Symmetric(7))
    assert isinstance(result, Rounded)
    assert result.weight().isfinite().all()
    assert not result.weight()[1].any()
    with pytest.raises(ValueError, match="group=0: must be at least 1"):
        gptq(weight, None, case.moments, Symmetric(7), group=0)
