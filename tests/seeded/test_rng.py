"""Seeded tensors against a Philox written here in plain Python integers, and against published vectors."""

import dataclasses
import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_freeze.seeded import tensor as rng
from hf_freeze.seeded.tensor import SeededTensor, digest, philox, uniform

# kat_vectors of Random123: philox4x32, 10 rounds; counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
KINDS = {
    "int": lambda word: word,
    "numpy": lambda word: np.array([word, word], dtype=np.uint64),
    "torch": lambda word: torch.tensor([word, word], dtype=torch.int64),
}


def words(text):
    return tuple(int(word, 16) for word in text.split())


def reference_philox(counter, key):
    """The algorithm of the paper, one block, plain integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def reference_values(seed, name, bound, indices):
    """Elements `indices` of the flat tensor, each on its own, rounded to fp32 once."""
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    k0, k1, c2, c3 = np.frombuffer(key, dtype="<u4").tolist()
    values = []
    for index in indices:
        block, word = divmod(index, 4)
        top = reference_philox((block % 2**32, block // 2**32, c2, c3), (k0, k1))[word] >> 8
        values.append(np.float32((top + 0.5 - 2**23) * (float(np.float32(bound)) / 2**23)))
    return torch.tensor(values)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_cpu(monkeypatch):
    """Makes `uniform` take the path of a GPU, on int64 tensors, though they lie on the CPU."""

    class Elsewhere(torch.Tensor):
        device = SimpleNamespace(type="elsewhere")

    empty = torch.empty
    monkeypatch.setattr(rng.torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).as_subclass(Elsewhere))

    def plain(*args, **kwargs):
        result = uniform(*args, **kwargs)
        assert isinstance(result, Elsewhere), "the path of the CPU was taken"
        return result.as_subclass(torch.Tensor)

    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter, key, expected, kind):
    result = philox(tuple(map(KINDS[kind], words(counter))), words(key))
    for word, want in zip(result, words(expected), strict=True):
        assert (word == KINDS[kind](want)).all() if kind != "int" else word == want


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arrays_and_shared_words_agree_with_single_blocks(kind):
    # 0x80000000 and more: products that wrap in int64.
    counters = [0, 1, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    array = np.array(counters, dtype=np.uint64)
    array = torch.from_numpy(array.astype(np.int64)) if kind == "torch" else array
    result = philox((array, 0xFFFFFFFE, 0xCAFEBABE, 0x12345678), (0xFEDCBA98, 0x89ABCDEF))
    expected = [reference_philox((c, 0xFFFFFFFE, 0xCAFEBABE, 0x12345678), (0xFEDCBA98, 0x89ABCDEF)) for c in counters]
    assert np.array_equal(np.stack([np.asarray(word) for word in result], axis=1).astype(np.uint64), expected)


@pytest.mark.parametrize("shape", [(7, 5), (1,), (6,), (3, 1), (2, 3, 5), (4, 8)])
def test_values_are_the_definition(shape):
    value = uniform(2**63 - 1, "encoder.layers.0.fc1.weight", shape, 0.3)
    assert value.shape == shape
    assert value.dtype == torch.float32
    expected = reference_values(2**63 - 1, "encoder.layers.0.fc1.weight", 0.3, range(math.prod(shape)))
    assert torch.equal(value.flatten(), expected)


@pytest.mark.parametrize("bound", [1.0, 0.1, math.sqrt(6 / 1536), 3e-5, 1e4])
def test_cpu_and_gpu_paths_are_bit_equal(no_cpu, monkeypatch, bound):
    monkeypatch.setattr(rng, "_GPU_BLOCKS", 100)  # several chunks
    elsewhere = no_cpu(5, "shared.weight", (101, 37), bound)
    monkeypatch.undo()
    on_cpu = uniform(5, "shared.weight", (101, 37), bound)
    assert type(on_cpu) is torch.Tensor
    assert torch.equal(on_cpu, elsewhere)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", ["glorot", "embedding", "diagonal", "zero_diagonal"])
def test_a_gpu_makes_the_same_bits(scheme):
    tensor = SeededTensor(5, "shared.weight", (513, 1027), scheme)
    on_gpu = tensor.generate("cuda")
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_gpu.cpu(), tensor.generate())
    assert digest(on_gpu) == digest(tensor.generate())


@pytest.mark.parametrize("width", [1, 3, 4, 7, 130])
def test_a_range_of_rows_is_a_slice(width):
    whole = uniform(3, "t", (29, width), 1.0)
    for rows in [(0, 29), (0, 1), (1, 2), (3, 17), (28, 29), (5, 5), (29, 29)]:
        assert torch.equal(uniform(3, "t", (29, width), 1.0, rows=rows), whole[slice(*rows)]), rows
    one_dimensional = uniform(3, "t", (29 * width,), 1.0)
    assert torch.equal(one_dimensional, whole.flatten())
    assert torch.equal(uniform(3, "t", (29 * width,), 1.0, rows=(2, 27)), one_dimensional[2:27])
    # The rows before it are the same in a longer tensor: a table may grow.
    assert torch.equal(uniform(3, "t", (60, width), 1.0)[:29], whole)


def test_chunks_and_threads_do_not_show(threads, monkeypatch):
    shape = (3 * rng._CPU_BLOCKS + 1, 5)  # 3.75 chunks
    threads(1)
    alone = uniform(1, "t", shape, 0.5)
    threads(2)
    assert torch.equal(uniform(1, "t", shape, 0.5), alone)
    rows = (4 * rng._CPU_BLOCKS // 5 - 2, 4 * rng._CPU_BLOCKS // 5 + 2)  # across the end of the first chunk
    assert torch.equal(uniform(1, "t", shape, 0.5, rows=rows), alone[slice(*rows)])
    edge = range(4 * rng._CPU_BLOCKS - 3, 4 * rng._CPU_BLOCKS + 3)
    assert torch.equal(alone.flatten()[edge.start : edge.stop], reference_values(1, "t", 0.5, edge))
    monkeypatch.setattr(rng, "_CPU_BLOCKS", 1000)
    assert torch.equal(uniform(1, "t", shape, 0.5), alone)


@pytest.mark.parametrize(
    "rows",
    [(2**32 - 3, 2**32 + 3), (2**32 - 4, 2**32), (2**32, 2**32 + 2), (2**34 - 1, 2**34 + 2)],
    ids=["straddles", "below", "above", "far above"],
)
def test_a_tensor_of_more_than_2_to_the_32_blocks(rows, no_cpu):
    shape = (2**34 + 2, 4)  # a row is a block; only `rows` of it are made
    indices = range(4 * rows[0], 4 * rows[1])
    expected = reference_values(9, "huge", 1.0, indices).view(-1, 4)
    assert torch.equal(no_cpu(9, "huge", shape, 1.0, rows=rows), expected)


@pytest.mark.parametrize("rows", [(2**32 - 3, 2**32 + 3), (2**32, 2**32 + 2)], ids=["straddles", "above"])
def test_a_tensor_of_more_than_2_to_the_32_blocks_on_the_cpu(rows):
    expected = reference_values(9, "huge", 1.0, range(4 * rows[0], 4 * rows[1])).view(-1, 4)
    assert torch.equal(uniform(9, "huge", (2**33, 4), 1.0, rows=rows), expected)


def test_the_distribution_is_uniform():
    n, bound = 400_000, 0.25
    values = uniform(17, "t", (n // 8, 8), bound).double() / bound
    assert values.abs().max() < 1
    assert values.abs().max() > 1 - 1e-4
    assert (values != 0).all()
    # Five standard errors: of the mean, of the variance (kurtosis 9/5) and of neighbours' products.
    assert abs(values.mean()) < 5 * math.sqrt(1 / 3 / n)
    assert abs(values.var() - 1 / 3) < 5 * math.sqrt((1 / 5 - 1 / 9) / n)
    for lag in (1, 2, 4, 8):
        flat = values.flatten()
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 5 / 3 / math.sqrt(n), lag
    assert (values.mean(0).abs() < 5 * math.sqrt(8 / 3 / n)).all()  # each word of a block
    # Kolmogorov-Smirnov at a level of 1e-4.
    ordered = values.flatten().sort().values
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (ordered / 2 + 0.5 - steps).abs().max() * math.sqrt(n) < 2.225


def test_seeds_and_names_are_independent():
    base = uniform(1, "a", (300, 300), 1.0).flatten()
    others = {
        "seed": uniform(2, "a", (300, 300), 1.0),
        "name": uniform(1, "b", (300, 300), 1.0),
        "digits move from seed to name": uniform(11, "", (300, 300), 1.0),
    }
    assert not torch.equal(uniform(1, "1", (9, 9), 1.0), uniform(11, "", (9, 9), 1.0))
    for what, other in others.items():
        assert (other.flatten() == base).float().mean() < 1e-3, what
        assert abs((other.flatten() * base).mean()) < 5 / 3 / 300, what
    assert torch.equal(uniform(1, "a", (300, 300), 1.0).flatten(), base)


def test_the_global_random_state_is_neither_read_nor_changed():
    torch.manual_seed(1)
    first = SeededTensor(0, "t", (5, 5), "glorot").generate()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(SeededTensor(0, "t", (5, 5), "glorot").generate(), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32), (1, 6)])
def test_schemes(shape):
    rows, columns = shape
    made = {
        scheme: SeededTensor(3, "w", shape, scheme).generate()
        for scheme in ("glorot", "embedding", "diagonal", "zero_diagonal", "zeros", "ones")
    }
    for value in made.values():
        assert value.shape == shape
        assert value.dtype == torch.float32
    for scheme, bound in {"glorot": math.sqrt(6 / (rows + columns)), "embedding": math.sqrt(3 / columns)}.items():
        expected = reference_values(3, "w", bound, range(rows * columns)).view(shape)
        assert torch.equal(made[scheme], expected), scheme
        assert made[scheme].abs().max() < bound
        if rows * columns > 100:
            assert made[scheme].abs().max() > 0.97 * bound, scheme
    identity = torch.tensor([[float(i == j) for j in range(columns)] for i in range(rows)])
    assert torch.equal(made["diagonal"], identity)
    assert torch.equal(made["zero_diagonal"], torch.where(identity.bool(), 0, made["glorot"]))
    assert (made["zero_diagonal"] == 0).sum() == min(shape)
    assert not made["zeros"].any()
    assert torch.equal(made["ones"], torch.ones(shape))


def test_parts_lie_side_by_side():
    """A fused matrix of queries, keys and values is drawn as three matrices of their own size."""
    fused = {
        scheme: SeededTensor(1, "x", (40, 120), scheme, (40, 40, 40)).generate()
        for scheme in ("glorot", "diagonal", "zero_diagonal")
    }
    assert torch.equal(fused["diagonal"], torch.cat(3 * [torch.eye(40)], dim=1))
    bound = math.sqrt(6 / 80)
    assert 0.99 * bound < fused["glorot"].abs().max() < bound
    assert not torch.equal(fused["glorot"][:, :40], fused["glorot"][:, 40:80])
    assert torch.equal(fused["zero_diagonal"], fused["glorot"] * (1 - fused["diagonal"]))


def test_parts_of_other_sizes_have_their_own_bounds():
    """Queries of more heads than keys and values, as rows of an nn.Linear."""
    sizes = (60, 20, 20)
    random = SeededTensor(1, "x", (100, 40), "glorot", sizes, dimension=0).generate()
    for part, size in zip(random.split(sizes), sizes, strict=True):
        bound = math.sqrt(6 / (40 + size))
        assert 0.98 * bound < part.abs().max() < bound
    diagonal = SeededTensor(1, "x", (100, 40), "diagonal", sizes, dimension=0).generate()
    assert torch.equal(diagonal, torch.cat([torch.eye(size, 40) for size in sizes]))


def test_mixed_parts_are_the_same_matrices_in_other_rows():
    """Two groups of three query heads, a key and a value each, of 4 numbers."""
    settings = {"parts": (24, 8, 8), "dimension": 0}
    side_by_side = SeededTensor(1, "x", (40, 16), "glorot", **settings).generate()
    mixed = SeededTensor(1, "x", (40, 16), "glorot", **settings, interleaved=(12, 4, 4)).generate()
    queries, keys, values = side_by_side.split(settings["parts"])
    expected = torch.cat([queries[:12], keys[:4], values[:4], queries[12:], keys[4:], values[4:]])
    assert torch.equal(mixed, expected)


def test_experts_have_a_matrix_each():
    random, zeros, ones = (
        SeededTensor(1, "x", (3, 20, 30), scheme).generate() for scheme in ("glorot", "zero_diagonal", "diagonal")
    )
    bound = math.sqrt(6 / 50)
    assert all(0.95 * bound < expert.abs().max() < bound for expert in random)
    assert torch.equal(zeros, random * (1 - torch.eye(20, 30)))
    assert torch.equal(ones, torch.eye(20, 30).expand(3, -1, -1))


def test_rows_of_a_table_have_unit_norm_on_average():
    table = SeededTensor(3, "shared.weight", (2000, 64), "embedding").generate()
    assert table.pow(2).sum(1).mean().item() == pytest.approx(1, abs=0.01)


def test_a_bias_is_one_dimensional_zeros():
    assert torch.equal(SeededTensor(3, "b", (7,), "zeros").generate(), torch.zeros(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_once_to_the_nearest(dtype):
    exact = SeededTensor(3, "w", (64, 64), "glorot").generate()
    cast = exact.to(dtype)
    bits = cast.view(torch.int16)
    neighbours = torch.stack([(bits + step).view(dtype).double() for step in (-1, 0, 1)])
    distance = (neighbours - exact.double()).abs()
    assert (distance[1] <= distance.min(0).values).all()
    assert digest(cast) != digest(exact)


def test_digest_is_sha256_of_the_fp32_bytes():
    tensor = torch.tensor([[1.0, -2.5], [0.0, 3e-9]])
    want = hashlib.sha256(np.array([[1.0, -2.5], [0.0, 3e-9]], dtype="<f4").tobytes()).hexdigest()[:32]
    assert digest(tensor) == want
    assert digest(tensor.T.contiguous().T) == want, "memory order must not show"
    assert digest(torch.nn.Parameter(tensor)) == want
    assert digest(torch.tensor([1.5], dtype=torch.bfloat16)) == digest(torch.tensor([1.5]))


def test_digest_changes_with_any_bit():
    bits = torch.tensor([1.0, -2.5, 0.0]).view(torch.int32)
    found = {digest(bits.view(torch.float32))}
    for element in range(3):
        for bit in range(32):
            changed = bits.clone()
            changed[element] ^= (1 << bit) if bit < 31 else -(1 << 31)
            found.add(digest(changed.view(torch.float32)))
    assert len(found) == 1 + 3 * 32


@pytest.mark.parametrize("rows", [(-1, 2), (0, 6), (3, 2), (6, 6)])
def test_rows_outside_the_tensor_are_refused(rows):
    with pytest.raises(ValueError, match=r"rows \(.*\) of 'w' are outside 0..5"):
        uniform(0, "w", (5, 3), 1.0, rows=rows)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match=r"unknown scheme 'gaussian' of 'w'; choose from glorot, diagonal"):
        SeededTensor(0, "w", (5, 3), "gaussian").generate()


def test_a_definition_is_a_value():
    one = SeededTensor(0, "w", (5, 3), "glorot")
    assert one == SeededTensor(0, "w", (5, 3), "glorot") != dataclasses.replace(one, seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seed = 2
