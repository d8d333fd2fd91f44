"""The compiled generator of the CPU makes the bits of numpy, and its products are those of torch."""

import ctypes
import functools
import subprocess

import numpy as np
import pytest
import torch
from support.cases import ALL

from hf_freeze.layers import fused_weight
from hf_freeze.layers.fused_weight import Fused
from hf_freeze.layers.seeded_weight import SeededWeight
from hf_freeze.seeded import fused_cpu
from hf_freeze.seeded.tensor import SCHEMES, SeededTensor
from hf_freeze.seeded.tiles import Tiles

SHAPES = [(1, 1), (5, 3), (45, 33), (64, 1000)] + ([(40, 128), (3, 5000)] if ALL else [])
BY_ROWS = [scheme for scheme in SCHEMES if "orthogonal" not in scheme]
PLAIN = ["glorot", "embedding", "int8", "embedding_int8", "sign", "embedding_sign"]
# What the compiler is told, so that the code for other CPUs is tested too.
CPUS = [pytest.param(("-march=native",), id="native")]
if ALL:
    CPUS += [
        pytest.param(("-march=native", "-mno-avx512f"), id="AVX2"),
        pytest.param(("-O2", "-mno-avx2"), id="portable"),
    ]


@pytest.fixture(params=CPUS)
def compiled(request, tmp_path_factory, monkeypatch):
    try:
        fused_cpu.library()
    except fused_cpu.UnavailableError as error:
        pytest.skip(f"cannot be compiled here: {error}")
    if request.param != ("-march=native",):
        other = compiled_for(request.param, tmp_path_factory.getbasetemp())
        monkeypatch.setattr(fused_cpu, "library", lambda: other)


@functools.cache
def compiled_for(cpu, folder):
    path = folder / f"fused{'-'.join(cpu)}.so"
    flags = [flag for flag in fused_cpu._FLAGS if flag != "-march=native"]
    subprocess.run(["g++", *flags, *cpu, "-o", path, fused_cpu._SOURCE], check=True)
    return fused_cpu._declared(ctypes.CDLL(str(path)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", PLAIN)
def test_the_same_bits(compiled, scheme, shape):
    tensor = SeededTensor(3, "w", shape, scheme, gain=1.5)
    whole, source = tensor.generate(), Tiles(tensor)
    assert source.plain is not None
    rows, columns = shape
    for index in (np.arange(rows), np.array([rows - 1, 0, 0, rows // 2])):
        for start, stop in {(0, columns), (columns - 1, columns), (columns // 3, columns), (0, columns - columns // 2)}:
            out = torch.full((len(index), stop - start), torch.nan)
            fused_cpu.fill(source.plain, index, start, stop, out)
            assert torch.equal(out, whole[index][:, start:stop]), (index, start, stop)


@pytest.mark.parametrize("scheme", ["embedding", "embedding_int8"])
def test_calls_and_rows_with_large_numbers(compiled, scheme):
    tensor = SeededTensor(9, "huge", (2**31, 12), scheme)
    rows = np.array([2**31 - 1, 1431655765, 1431655766, 2**30, 7])  # 2^32 calls end in the second
    expected = torch.cat([tensor.generate_rows(row, row + 1) for row in rows.tolist()])
    out = torch.empty(len(rows), 12)
    fused_cpu.fill(Tiles(tensor).plain, rows, 0, 12, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["glorot", "int8", "sign"])
def test_products(compiled, scheme, shape, tokens):
    tensor = SeededTensor(3, "w", shape, scheme)
    whole, plain = tensor.generate(), Tiles(tensor).plain
    generator = torch.Generator().manual_seed(0)
    for axis in (0, 1):
        x = torch.randn(tokens, shape[1 - axis], generator=generator)
        bias = torch.randn(shape[axis], generator=generator)
        matrix = whole if axis else whole.T
        torch.testing.assert_close(fused_cpu.multiply(plain, x, axis, None), x @ matrix, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fused_cpu.multiply(plain, x, axis, bias), x @ matrix + bias, rtol=1e-5, atol=1e-5)


def test_threads_share_the_outputs(compiled, monkeypatch):
    plain = Tiles(SeededTensor(3, "w", (300, 500), "glorot")).plain
    monkeypatch.setattr(fused_cpu, "_FEW_PER_THREAD", 1)
    for axis in (0, 1):
        x = torch.randn(2, (500, 300)[axis])
        results = []
        for threads in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(fused_cpu.multiply(plain, x, axis, torch.ones((300, 500)[axis])))
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scheme", BY_ROWS)
def test_other_schemes_and_fused_matrices_are_made_by_its_tiles(compiled, scheme):
    table = scheme.startswith("embedding")
    fields = {"density": 0.4} if "sparse" in scheme else {"blocks": 3} if scheme == "blocks" else {}
    fields |= {} if table else {"parts": (24, 12, 12), "dimension": 0, "interleaved": (6, 3, 3)}
    tensor = SeededTensor(3, "w", (48, 36), scheme, kept=((1, tuple(range(2, 30))),), **fields)
    weight = SeededWeight(tensor, torch.float32, "cpu", Fused())
    whole = tensor.generate()
    assert torch.equal(weight.whole(), whole)
    x = torch.randn(20, 28)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight), x @ whole.T, rtol=1e-5, atol=1e-5)
    ids = torch.tensor([[3, 3, 47]])
    assert torch.equal(torch.nn.functional.embedding(ids, weight), whole[ids])


@pytest.fixture
def forgetful(monkeypatch, tmp_path):
    """Nothing is compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (fused_cpu.library, fused_weight.why_not):
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in (fused_cpu.library, fused_weight.why_not):
        cached.cache_clear()


def test_without_a_compiler_the_reason_is_one_line(forgetful, tmp_path):
    forgetful.setenv("CXX", "no-such-compiler")
    assert fused_weight.why_not("cpu") == "no C++ compiler no-such-compiler on the PATH; set CXX"
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    failing.chmod(0o755)
    forgetful.setenv("CXX", str(failing))
    fused_weight.why_not.cache_clear()
    assert fused_weight.why_not("cpu") == f"{failing} failed: x.cpp:1: error: no such thing"
    (tmp_path / "hf_freeze").rmdir()
    (tmp_path / "hf_freeze").write_text("a file")
    fused_weight.why_not.cache_clear()
    assert "its library cannot be written or loaded" in fused_weight.why_not("cpu")


def test_a_weight_without_the_library_is_streamed(forgetful):
    forgetful.setenv("CXX", "no-such-compiler")
    tensor = SeededTensor(3, "w", (48, 36), "glorot")
    weight, x = SeededWeight(tensor, torch.float32, "cpu", Fused()), torch.randn(2, 36)
    assert torch.equal(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, tensor.generate()))
