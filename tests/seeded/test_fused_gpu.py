"""The kernels of GPUs make the bits of seeded/tensor.py: in Triton's interpreter on the CPU, in a process of their own, because
Triton decides when it is imported whether it interprets."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hf_freeze.layers.fused_weight import Fused
from hf_freeze.layers.seeded_weight import SeededWeight
from hf_freeze.seeded import fused_gpu
from hf_freeze.seeded.tensor import SeededTensor
from hf_freeze.seeded.tiles import Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
PLAIN = ["glorot", "embedding", "int8", "embedding_int8", "sign", "embedding_sign"]
SHAPES = [(5, 3), (45, 36), (33, 201)]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", PLAIN)
def test_rows_are_the_same_bits(scheme, shape, dtype):
    tensor = SeededTensor(3, "w", shape, scheme, gain=1.5)
    whole = tensor.generate().to(dtype)
    ids = torch.tensor([[shape[0] - 1, 0], [0, shape[0] // 2], [1, 1]])
    assert torch.equal(fused_gpu.rows(Tiles(tensor).plain, ids, dtype), whole[ids])


@interpreted
@pytest.mark.parametrize("scheme", ["embedding", "embedding_int8", "embedding_sign"])
def test_large_numbers(scheme):
    tensor = SeededTensor(9, "huge", (2**31, 12), scheme)
    ids = torch.tensor([2**31 - 1, 1431655765, 1431655766, 7])  # 2^32 calls end in the second
    expected = torch.cat([tensor.generate_rows(row, row + 1) for row in ids.tolist()])
    assert torch.equal(fused_gpu.rows(Tiles(tensor).plain, ids, torch.float32), expected)


@interpreted
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["glorot", "int8", "sign"])
def test_a_product_with_the_identity_is_the_weight_bit_for_bit(scheme, shape, axis):
    tensor = SeededTensor(3, "w", shape, scheme)
    whole = tensor.generate()
    expected = whole if axis else whole.T
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one = torch.eye(shape[1 - axis], dtype=dtype)
        assert torch.equal(fused_gpu.multiply(Tiles(tensor).plain, one, axis, None), expected.to(dtype)), dtype


@interpreted
@pytest.mark.parametrize("tokens", [1, 16, 70])
@pytest.mark.parametrize("scheme", ["glorot", "int8", "sign"])
def test_products_and_biases(scheme, tokens):
    tensor = SeededTensor(3, "w", (45, 33), scheme)
    whole, generator = tensor.generate(), torch.Generator().manual_seed(0)
    for axis in (0, 1):
        x = torch.randn(tokens, whole.shape[1 - axis], generator=generator)
        bias = torch.randn(whole.shape[axis], generator=generator)
        expected = x @ (whole if axis else whole.T) + bias
        torch.testing.assert_close(
            fused_gpu.multiply(Tiles(tensor).plain, x, axis, bias), expected, rtol=1e-5, atol=1e-5
        )
        half = fused_gpu.multiply(Tiles(tensor).plain, x.bfloat16(), axis, bias.bfloat16())
        torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.02)


def by_integers(scheme, shape, x):
    """Products by the kernels of fused_integers.py; in fp64, that of the weight in memory, rounded, and that of the exact one."""
    tensor = SeededTensor(3, "w", shape, scheme)
    exact = tensor.generate()
    y = fused_gpu.multiply(Tiles(tensor).plain, x, 0, None)
    return y.double(), x.double() @ exact.to(x.dtype).double().T, x.double() @ exact.double().T


def assert_rounded(y, expected, dtype):
    """Each output is the nearest of the dtype to `expected`, but for errors of fp32."""
    half = torch.finfo(dtype).eps / 2
    assert ((y - expected).abs() <= 1.01 * half * expected.abs() + 1e-6 * expected.norm(dim=1, keepdim=True)).all()


@interpreted
@pytest.mark.parametrize(
    ("tokens", "shape", "dtype"),
    [(20, (5, 2100), torch.bfloat16), (20, (70, 1100), torch.float16), (200, (5, 300), torch.bfloat16)],
)
def test_signs_in_several_pieces_are_the_resident_product(tokens, shape, dtype):
    """2,100 inputs are three blocks in two pieces; 70 outputs are two tiles, and so are 200 tokens."""
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    y, resident, _ = by_integers("sign", shape, x)
    assert_rounded(y, resident, dtype)


@interpreted
@pytest.mark.parametrize(("tokens", "shape"), [(3, (5, 2100)), (20, (70, 400)), (200, (5, 300))])
def test_values_of_8_bits_are_nearer_than_in_memory(tokens, shape):
    """2,100 inputs are 17 blocks in 16 pieces, of which 7 are empty."""
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    y, resident, exact = by_integers("int8", shape, x)
    assert_rounded(y, exact, torch.bfloat16)
    assert (y - exact).norm() < 0.9 * (resident.bfloat16().double() - exact).norm()


@interpreted
@pytest.mark.parametrize("scheme", ["int8", "sign"])
def test_inputs_of_very_different_sizes(scheme):
    """Each token has a power of two of its own."""
    sizes = torch.tensor([1e-30, 1.0, 1e30, 0.0, 2.0**125])
    x = (torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).clamp(-4, 4) * sizes[:, None]).bfloat16()
    y, resident, exact = by_integers(scheme, (45, 33), x)
    assert_rounded(y, exact if scheme == "int8" else resident, torch.bfloat16)
    assert not y[3].any()


@interpreted
@pytest.mark.parametrize("scheme", ["int8", "sign"])
def test_what_is_not_finite_stays_in_its_token(scheme):
    x = torch.ones(4, 33).bfloat16()
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y, _, _ = by_integers(scheme, (45, 33), x)
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()
    assert torch.equal(y[0], y[3])
    assert y[0].isfinite().all()


@interpreted
def test_neither_the_default_dtype_nor_strides_nor_the_current_gpu_matter(monkeypatch):
    guarded, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: guarded.append(x.shape) or device_of(x))
    for scheme in ("int8", "sign"):
        matrix = Tiles(SeededTensor(3, "w", (45, 200), scheme)).plain
        x, bias = torch.randn(200, 3).bfloat16().T, torch.randn(90).bfloat16()[::2]
        expected = fused_gpu.multiply(matrix, x.clone(memory_format=torch.contiguous_format), 0, bias.clone())
        monkeypatch.setattr(torch.version, "hip", "7.0")  # by the other kernel
        torch.testing.assert_close(fused_gpu.multiply(matrix, x, 0, bias), expected, rtol=0.02, atol=0.02)
        monkeypatch.setattr(torch.version, "hip", None)
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.equal(fused_gpu.multiply(matrix, x, 0, bias), expected)
        finally:
            torch.set_default_dtype(torch.float32)
        assert fused_gpu.multiply(matrix, x[:0], 0, bias).shape == (0, 45)
    assert guarded == 2 * [*3 * [(3, 200)], (0, 200)]


@interpreted
def test_forward_and_gradient_of_a_layer(monkeypatch):
    """The engine takes the way of a GPU."""
    monkeypatch.setattr("hf_freeze.layers.fused_weight.on_cpu", lambda weight: False)
    tensor = SeededTensor(3, "w", (45, 33), "int8")
    whole, weight = tensor.generate(), SeededWeight(tensor, torch.float32, "cpu", Fused())
    x = torch.randn(2, 3, 33, requires_grad=True)
    y = torch.nn.functional.linear(x, weight)
    y.sin().sum().backward()
    actual, x.grad = x.grad, None
    expected = torch.nn.functional.linear(x, whole)
    expected.sin().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, x.grad, rtol=1e-5, atol=1e-5)
    ids = torch.tensor([3, 44])
    assert torch.equal(torch.nn.functional.embedding(ids, weight), whole[ids])


@pytest.mark.skipif(INTERPRETED, reason="every device is interpreted")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "there are no kernels for the device 'mps', only for 'cuda' and 'cpu'"),
        ("cuda", "Triton is not installed"),
    ],
)
def test_without_kernels_the_reason_is_one_line(device, message, monkeypatch):
    monkeypatch.setattr(fused_gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fused_gpu.UnavailableError, match=message):
        fused_gpu.check(device)
