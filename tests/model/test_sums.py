"""Sums over tokens: against means of products in fp64 of all tokens at once."""

import pytest
import torch
from torch import Tensor

from hf_freeze.model import sums as module
from hf_freeze.model.sums import Sums


def drawn(tokens: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Correlated columns with means."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    return (x + 0.5 * x.roll(1, 1) + torch.randn(columns, generator=generator)).to(dtype)


def summed(x: Tensor, y: Tensor | None = None, weights: Tensor | None = None, size: int = 100) -> Sums:
    """In batches."""
    sums, parts = Sums(), [None if each is None else each.split(size) for each in (x, y, weights)]
    for number, batch in enumerate(parts[0] or ()):
        sums.add(batch, *(None if each is None else each[number] for each in parts[1:]))
    return sums


def assert_near(value: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (value.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-6), (torch.float16, 1e-6), (torch.float32, 1e-12)]
)
def test_the_means_are_those_of_products_in_fp64(dtype, tolerance):
    """Products of numbers of 16 bits are exact in fp32."""
    x, y = drawn(1000, 40, dtype), drawn(1000, 7, dtype, seed=1)
    moments = summed(x, y).moments("linear")
    assert moments is not None
    x, y = x.double(), y.double()
    assert (moments.count, moments.weight) == (1000, 1)
    assert_near(moments.gram, x.T @ x / 1000, tolerance)
    assert_near(moments.mean, x.mean(0), tolerance)
    assert_near(moments.cross, y.T @ x / 1000, tolerance)
    assert_near(moments.output_mean, y.mean(0), tolerance)
    assert_near(moments.output_square, y.square().mean(0), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1024, 1025, 2500])
def test_a_wide_gram_is_summed_in_blocks_of_rows_and_is_symmetric(columns, dtype):
    x = drawn(300, columns, dtype)
    moments = summed(x).moments("linear")
    assert moments is not None
    assert_near(moments.gram, moments.gram.T.double(), 1e-7)
    assert_near(moments.gram, x.double().T @ x.double() / 300, 1e-6)


def test_the_size_of_blocks_does_not_matter(monkeypatch):
    x, weights = drawn(200, 50, torch.float32), drawn(200, 1, torch.float32).abs()
    whole = summed(x, weights=weights).moments("linear")
    monkeypatch.setattr(module, "_ROWS", 16)
    blocks = summed(x, weights=weights).moments("linear")
    torch.testing.assert_close(blocks.gram, whole.gram, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-6), (torch.float32, 1e-6)])
def test_a_weight_counts_a_token_so_often(dtype, tolerance):
    x, y = drawn(300, 20, dtype), drawn(300, 5, dtype, seed=1)
    weights = torch.rand(300, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    moments = summed(x, y, weights).moments("linear")
    x, y, total = x.double(), y.double(), float(weights.double().sum())
    assert moments.count == 300
    assert moments.weight == pytest.approx(total / 300)
    assert_near(moments.gram, (weights * x).T @ x / total, tolerance)
    assert_near(moments.mean, (weights * x).sum(0) / total, tolerance)
    assert_near(moments.cross, (weights * y).T @ x / total, tolerance)
    assert_near(moments.output_mean, (weights * y).sum(0) / total, tolerance)
    assert_near(moments.output_square, (weights * y.square()).sum(0) / total, tolerance)


def test_linears_that_read_the_same_states_share_a_gram():
    x, outputs = drawn(200, 30, torch.float32), [drawn(200, 4, torch.float32, seed=seed) for seed in (1, 2)]
    first = Sums()
    both = [first, Sums(reads_as=first)]
    for number in range(2):  # batches
        for sums, y in zip(both, outputs, strict=True):
            sums.add(x.split(100)[number], y.split(100)[number])
    moments = [sums.moments("linear") for sums in both]
    assert moments[0].gram is moments[1].gram
    for one, y in zip(moments, outputs, strict=True):
        alone = summed(x, y).moments("linear")
        for name in ("gram", "mean", "cross", "output_mean", "output_square"):
            torch.testing.assert_close(getattr(one, name), getattr(alone, name))


def test_outputs_of_some_batches_alone_are_no_pairs():
    sums, x, y = Sums(), drawn(50, 8, torch.float32), drawn(50, 3, torch.float32)
    for each in (y, None, y):
        sums.add(x, each)
    moments = sums.moments("linear")
    assert (moments.count, moments.cross, moments.output_mean) == (150, None, None)
    assert Sums().moments("linear") is None


def test_inputs_that_are_not_finite_name_the_linear():
    x = drawn(50, 8, torch.float32)
    x[3, 2] = float("inf")
    with pytest.raises(
        ValueError, match=r"^calibration: the inputs or outputs of 'layers\.3\.fc2' cannot be used: gram has"
    ):
        summed(x).moments("layers.3.fc2")
