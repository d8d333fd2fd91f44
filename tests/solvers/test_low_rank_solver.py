"""Whitened low rank: against the singular value decomposition in the whitened space, and on raw activations."""

import pytest
import torch
from support.moments import Seen, seen

from hf_freeze.solvers.low_rank import low_rank
from hf_freeze.solvers.moments import problem

SHAPES = pytest.mark.parametrize(("outputs", "inputs"), [(5, 8), (9, 6), (7, 7)])
SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"bias": True}, {"curvature": True}, {"bias": True, "pairs": True, "curvature": True}]
)


def whitened(case: Seen) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mᵀ T L, and M and L, by Cholesky."""
    solved = problem(case.weight, case.bias, case.moments)
    factor = torch.linalg.cholesky(solved.gram)
    m = torch.eye(len(case.weight), dtype=torch.float64)
    if solved.curvature is not None:
        m = torch.linalg.cholesky(solved.curvature)
    return m.T @ solved.target @ factor, m, factor


@SHAPES
@SETTINGS
def test_every_rank_is_the_known_optimum(settings, outputs, inputs):
    case = seen(outputs, inputs, **settings)
    product, m, factor = whitened(case)
    u, values, vt = torch.linalg.svd(product, full_matrices=False)
    result = low_rank(case.weight, case.bias, case.moments)
    total = float(values.square().sum())
    for rank in range(1, len(values) + 1):
        least = float(values[rank:].square().sum())
        up, down, _ = result.factors(rank)
        assert up.shape == (outputs, rank)
        assert down.shape == (rank, inputs)
        assert float(result.losses[rank]) == pytest.approx(least, abs=1e-8 * total)
        # The factors lose that much, and they are those of the decomposition.
        lost = float((product - m.T @ up @ down @ factor).square().sum())
        assert lost == pytest.approx(least, abs=1e-8 * total)
        best = torch.linalg.solve(m.T, (u[:, :rank] * values[:rank]) @ vt[:rank]) @ torch.linalg.inv(factor)
        torch.testing.assert_close(up @ down, best, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1))
    assert float(result.losses[0]) == pytest.approx(total)


def test_outputs_of_rank_r_lose_least_on_raw_activations():
    """Reduced-rank regression: the centred outputs of the best weight are the leading principal components of the outputs."""
    case = seen(4, 9, bias=True)
    up, down, bias = low_rank(case.weight, case.bias, case.moments, ridge=1e-12).factors(2)
    lost = (case.y - case.x @ (up @ down).T - bias).square().sum()
    values = torch.linalg.svdvals(case.y - case.y.mean(0))
    assert float(lost) == pytest.approx(float(values[2:].square().sum()), rel=1e-7)


def test_it_keeps_what_inputs_use_where_the_plain_decomposition_does_not():
    case = seen(6, 6)
    result = low_rank(case.weight, None, case.moments)
    u, s, vt = torch.linalg.svd(case.weight)
    for rank in range(1, 6):
        difference = case.weight - (u[:, :rank] * s[:rank]) @ vt[:rank]
        gram = problem(case.weight, None, case.moments).gram
        assert result.losses[rank] < (difference @ gram * difference).sum()


def test_a_rotation_of_outputs_rotates_the_factors():
    case = seen(5, 8)
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    first, second = (low_rank(w, None, case.moments) for w in (case.weight, rotation @ case.weight))
    torch.testing.assert_close(first.losses, second.losses)
    (up, down, _), (up2, down2, _) = first.factors(3), second.factors(3)
    torch.testing.assert_close(rotation @ up @ down, up2 @ down2)


def test_zeros_and_few_tokens_give_finite_factors():
    case = seen(5, 8)
    case.moments.gram[2] = case.moments.gram[:, 2] = 0
    for weight in (case.weight, torch.zeros(5, 8), torch.zeros(9, 8)):
        up, down, _ = low_rank(weight, None, case.moments).factors(4)
        assert up.isfinite().all()
        assert down.isfinite().all()
        assert up.dtype == weight.dtype


def test_a_rank_that_no_weight_has_is_an_error():
    case = seen(5, 8)
    for rank in (0, 6):
        with pytest.raises(ValueError, match=rf"rank={rank}: must be in 1\.\.5"):
            low_rank(case.weight, None, case.moments).factors(rank)
