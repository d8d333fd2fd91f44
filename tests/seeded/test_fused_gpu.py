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
