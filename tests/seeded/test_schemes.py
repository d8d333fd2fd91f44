"""Normal, orthogonal, sparse and block-diagonal matrices of a seed against their closed forms, and digests that must stay."""

import math
import statistics

import numpy as np
import pytest
import torch

from hf_freeze.seeded import schemes
from hf_freeze.seeded.tensor import SeededTensor, digest, philox, stream, uniform

FEW_BITS = ["int8", "sign", "embedding_int8", "embedding_sign"]
ELEMENTWISE = ["normal", "sparse", "embedding_normal", "embedding_sparse"]


def generated(scheme, shape, seed=3, **fields):
    return SeededTensor(seed, "w", shape, scheme, **fields).generate().double()


def draw(part, shape):
    return uniform(3, f"w/{part}", shape, 2.0**23)


def test_quantiles_are_those_of_the_normal_distribution():
    ends = np.array([2**23 - 0.5, 0.5 - 2**23, 0.5, -0.5, 0.425 * 2**24, 0.425 * 2**24 + 1])
    shares = np.concatenate([draw("", (2000,)).numpy().astype(np.float64), ends]) * 2.0**-24
    expected = [statistics.NormalDist().inv_cdf(0.5 + share) for share in shares]
    assert np.abs(schemes._quantiles(shares) - expected).max() < 1e-13


@pytest.mark.parametrize(("scheme", "std"), [("normal", math.sqrt(2 / 700)), ("embedding_normal", math.sqrt(1 / 200))])
def test_normal(scheme, std):
    values = generated(scheme, (500, 200)).flatten() / std
    n = len(values)
    # Five standard errors of the first four moments of N(0, 1).
    for power, (moment, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs((values**power).mean() - moment) < 5 * math.sqrt(variance / n), power
    assert 4 < values.abs().max() < 5.5
    # Kolmogorov-Smirnov at a level of 1e-4.
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (torch.special.ndtr(values.sort().values) - steps).abs().max() * math.sqrt(n) < 2.225


@pytest.mark.parametrize("density", [1, 1 / 3, 0.02])
@pytest.mark.parametrize(("scheme", "variance"), [("sparse", 2 / 700), ("embedding_sparse", 1 / 200)])
def test_sparse(scheme, variance, density):
    values = generated(scheme, (500, 200), density=density).flatten()
    n, size = len(values), math.sqrt(variance / density)
    assert set(values.abs().unique().tolist()) == {0, np.float32(size).item()} - ({0} if density == 1 else set())
    assert abs((values != 0).double().mean() - density) < 5 * math.sqrt(density * (1 - density) / n) + 1e-12
    assert abs(values.mean()) < 5 * math.sqrt(variance / n)


@pytest.mark.parametrize(("scheme", "variance"), [("int8", 2 / 700), ("embedding_int8", 1 / 200)])
def test_int8_values_are_odd_numbers_times_one_number(scheme, variance):
    values = generated(scheme, (500, 200))
    scale = np.float32(math.sqrt(variance / 21845)).astype(np.float64)
    odd = (values / scale).round()
    assert torch.equal(odd.float() * np.float32(scale), values.float())
    numbers, counts = odd.unique(return_counts=True)
    assert numbers.tolist() == list(range(-255, 256, 2))
    # chi-squared of 255 degrees of freedom, five standard deviations; the mean and the variance, five standard errors.
    expected = odd.numel() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)
    assert abs(odd.mean()) < 5 * math.sqrt(21845 / odd.numel())
    assert abs(values.var() / variance - 1) < 5 * math.sqrt(0.8 / odd.numel())


@pytest.mark.parametrize(("scheme", "variance"), [("sign", 2 / 700), ("embedding_sign", 1 / 200)])
def test_signs_are_fair_coins(scheme, variance):
    values = generated(scheme, (500, 200))
    size = np.float32(math.sqrt(variance)).item()
    assert set(values.unique().tolist()) == {-size, size}
    signs = values.sign().flatten()
    for lag in (1, 8, 31, 32, 64, 128, 200):
        assert abs((signs[lag:] * signs[:-lag]).mean()) < 5 / math.sqrt(len(signs)), lag
    assert (values.sign().mean(0).abs() < 5 / math.sqrt(500)).all()


@pytest.mark.parametrize("scheme", FEW_BITS)
def test_values_of_few_bits_are_the_definition(scheme):
    """Each entry on its own: call c // n of row r, whose first two counter words are (c // n, r)."""
    shape, tensor = (5, 300), SeededTensor(7, "x", (5, 300), scheme, gain=0.5)
    key0, key1, counter2, counter3 = stream(7, "x")
    values, size = tensor.generate(), np.float32(tensor.scales()[0])
    for row, column in [(0, 0), (1, 15), (2, 16), (3, 127), (4, 128), (4, 299)]:
        per_call = 16 if "int8" in scheme else 128
        words = philox((column // per_call, row, counter2, counter3), (key0, key1))
        bits = sum(word << (32 * number) for number, word in enumerate(words))
        place = column % per_call
        if "int8" in scheme:
            octet = bits >> (8 * place) & 255
            expected = 2 * (octet - 256 * (octet > 127)) + 1
        else:
            expected = 1 - 2 * (bits >> place & 1)
        assert values[row, column].item() == np.float32(expected) * size, (row, column)
    # Wider and longer matrices begin with the same integers.
    wider = SeededTensor(7, "x", (8, 500), scheme, gain=0.5)
    whole = (wider.generate() / wider.scales()[0]).round()
    assert torch.equal(whole[:5, :300], (values / size).round().view(shape))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (7, 3), (3, 7), (64, 64), (96, 40), (40, 96)])
def test_orthogonal(shape):
    q = generated("orthogonal", shape)
    gram = q.T @ q if shape[0] >= shape[1] else q @ q.T
    torch.testing.assert_close(gram, torch.eye(min(shape)).double(), rtol=0, atol=2e-7)


def test_entries_of_an_orthogonal_matrix_are_spread():
    n = 128
    values = generated("orthogonal", (n, n)) * math.sqrt(n)
    assert abs(values.mean()) < 5 / n
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96) / n
    other = generated("orthogonal", (n, n), seed=4) * math.sqrt(n)
    assert abs((values * other).mean()) < 5 / n


def test_rows_of_an_orthogonal_table():
    table = generated("embedding_orthogonal", (50, 16))
    for block in table.split(16):
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)).double(), rtol=0, atol=2e-7)
    assert table[:16].sub(table[16:32]).abs().max() > 0.1
    # A table that grows keeps its rows.
    assert torch.equal(generated("embedding_orthogonal", (70, 16))[:50], table)


@pytest.mark.parametrize("shape", [(24, 60), (60, 24)])
def test_block_diagonal(shape):
    rows, columns = shape
    values = generated("blocks", shape, blocks=4)
    inside = torch.block_diag(*[torch.ones(rows // 4, columns // 4)] * 4).bool()
    assert (values[inside] != 0).all()
    assert not values[~inside].any()
    bound = math.sqrt(6 / (rows / 4 + columns / 4))
    assert 0.97 * bound < values.abs().max() < bound
    with pytest.raises(
        ValueError, match=r"'w' \(24 x 60\) cannot be divided into 5 diagonal blocks: their number must divide"
    ):
        generated("blocks", (24, 60), blocks=5)


@pytest.mark.parametrize(
    "scheme", ["glorot", "embedding", "orthogonal", "embedding_orthogonal", "blocks", *ELEMENTWISE, *FEW_BITS]
)
def test_gain_multiplies(scheme):
    fields = {"blocks": 2} if scheme == "blocks" else {"density": 0.5}
    plain, scaled = (generated(scheme, (12, 8), gain=gain, **fields) for gain in (1.0, 2.0))
    assert torch.equal(scaled, 2 * plain)
    assert plain.any()


@pytest.mark.parametrize("scheme", ["orthogonal", "blocks", "normal", "sparse"])
def test_matrices_of_a_tensor_have_streams_of_their_own(scheme):
    fields = {"density": 0.5, "blocks": 2}
    experts = generated(scheme, (3, 8, 8), **fields)
    fused = generated(scheme, (8, 24), parts=(8, 8, 8), **fields).split(8, dim=1)
    rows = generated(scheme, (24, 8), parts=(8, 8, 8), dimension=0, **fields).split(8)
    for matrices in (experts, fused, rows):
        assert not torch.equal(matrices[0], matrices[1])
        if scheme == "orthogonal":
            for matrix in matrices:
                torch.testing.assert_close(matrix @ matrix.T, torch.eye(8).double(), rtol=0, atol=2e-7)
    assert all(map(torch.equal, experts, fused))


def test_a_slice_is_a_slice_of_the_whole():
    whole = generated("orthogonal", (12, 8))
    kept = ((0, (1, 5, 7)), (1, (0, 2)))
    assert torch.equal(generated("orthogonal", (12, 8), kept=kept), whole[[1, 5, 7]][:, [0, 2]])
    part = SeededTensor(3, "w", (12, 8), "orthogonal").generate_rows(2, 9)
    assert torch.equal(part.double(), whole[2:9])


# Of (48, 36), seed 3, by the first version that had the scheme. Checkpoints hold such digests: they must never change.
DIGESTS = {
    "glorot": "31830608d84dd36245095aba630577ce",
    "normal": "d2d646ae4f782795c46f6f83f84058bb",
    "sparse": "75c6b78fb4b1678267f1e3d07fd8dddf",
    "orthogonal": "688f2d85ae563a262cbe94611aa0c9e2",
    "blocks": "464dd542077024fb3f124866fdd1403f",
    "embedding_normal": "f67b772244538f31fa51e834a80ec703",
    "embedding_sparse": "1205492c09ec6f0399be737a168119e6",
    "embedding_orthogonal": "ccf615e9343db3955a0da4f6fa6fbb72",
    "int8": "dc97a0ee5ce1baf206bcfef54514951c",
    "sign": "834b925a3f0665097cd363d790b93007",
    "embedding_int8": "e005e5c74eb9b294c10ed67562a5e3f1",
    "embedding_sign": "35243bb6cfdc34d47bc43ae11ec9ad94",
}


@pytest.mark.parametrize("scheme", DIGESTS)
def test_digests_of_published_checkpoints(scheme):
    fields = {"sparse": {"density": 1 / 3}, "embedding_sparse": {"density": 1 / 3}, "blocks": {"blocks": 4}}
    value = SeededTensor(3, "w", (48, 36), scheme, gain=1.5, **fields.get(scheme, {})).generate()
    assert digest(value) == DIGESTS[scheme]
