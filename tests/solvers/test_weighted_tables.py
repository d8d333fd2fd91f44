"""Tables of low rank: against decompositions of repeated rows, and on raw logits."""

import pytest
import torch

from hf_freeze.solvers.tables import weighted_table


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_counts_are_repeated_rows():
    """Without smoothing, against the singular value decomposition of a table in which each row occurs as often as its token."""
    table, counts = normal(9, 5), torch.tensor([4, 1, 0, 2, 7, 1, 1, 3, 2])
    repeated = table.repeat_interleave(counts, 0)
    result = weighted_table(table, counts, smoothing=0)
    u, s, vt = torch.linalg.svd(repeated, full_matrices=False)
    for rank in range(1, 6):
        rows, projection = result.factors(rank)
        assert rows.shape == (9, rank)
        expected = (u[:, :rank] * s[:rank]) @ vt[:rank]
        torch.testing.assert_close((rows @ projection).repeat_interleave(counts, 0), expected)
        least = float(s[rank:].square().sum() / counts.double().mean())
        assert float(result.losses[rank]) == pytest.approx(least, abs=1e-8)
        torch.testing.assert_close(projection @ projection.T, torch.eye(rank, dtype=torch.float64))


def test_equal_counts_and_strong_smoothing_are_the_plain_decomposition():
    table = normal(12, 5)
    u, s, vt = torch.linalg.svd(table, full_matrices=False)
    expected = (u[:, :3] * s[:3]) @ vt[:3]
    for counts, smoothing in ((torch.ones(12), 0.0), (torch.zeros(12), 1.0), (torch.rand(12), 1e9)):
        rows, projection = weighted_table(table, counts, smoothing=smoothing).factors(3)
        torch.testing.assert_close(rows @ projection, expected, rtol=1e-6, atol=1e-6)


def test_a_tied_table_counts_errors_of_lookup_and_logits():
    """The stated loss is the weighted error of rows and of raw logits, and no small change of the factors lowers it."""
    table, counts, states = normal(9, 5), torch.rand(9, dtype=torch.float64), normal(50, 5) @ normal(5, 5)
    gram = states.T @ states / 50
    result = weighted_table(table, counts, output_gram=gram, ridge=1e-12)
    weights = counts + counts.mean()
    weights = weights / weights.mean()

    def error(rows, projection):
        difference = table - rows @ projection
        logits = (states @ difference.T).square().mean(0) / gram.diagonal().mean()
        return float(weights @ (difference.square().sum(1) + logits))

    rows, projection = result.factors(2)
    least = error(rows, projection)
    assert float(result.losses[2]) == pytest.approx(least, rel=1e-6)
    for _ in range(20):
        assert error(rows + 1e-3 * normal(9, 2), projection + 1e-3 * normal(2, 5)) > least
    torch.testing.assert_close(torch.matmul(*result.factors(5)), table)


def test_rows_of_zeros_stay_and_the_dtype_too():
    table = torch.randn(9, 5).to(torch.bfloat16)
    table[3] = 0
    rows, _ = weighted_table(table, torch.ones(9), output_gram=torch.eye(5)).factors(2)
    assert rows.dtype == torch.bfloat16
    assert not rows[3].any()


def test_what_does_not_fit_is_an_error():
    table, ones = torch.ones(4, 3), torch.ones(4)
    for arguments, message in (
        ({"counts": torch.ones(5)}, r"counts has the shape \(5,\), but must have \(4,\)"),
        ({"counts": ones, "output_gram": torch.eye(4)}, r"output_gram has the shape \(4, 4\), but must have \(3, 3\)"),
        ({"counts": ones * float("nan")}, "counts has values that are not finite"),
        ({"counts": -ones}, "must not be negative"),
        ({"counts": 0 * ones, "smoothing": 0}, "no token of the table occurs"),
    ):
        with pytest.raises(ValueError, match=message):
            weighted_table(table, **arguments)
    with pytest.raises(ValueError, match=r"the table of shape \(4, 3\) has values that are not finite"):
        weighted_table(table / 0, ones)
    with pytest.raises(ValueError, match=r"rank=4: must be in 1\.\.3"):
        weighted_table(table, ones).factors(4)
