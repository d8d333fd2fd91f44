"""Linears of 16 bits that compute in fp32 while a model is looked at."""

from contextlib import nullcontext

import pytest
import torch
from support.conversions import converted, saved_source, tensors
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_freeze.methods import MagnitudePruning
from hf_freeze.model import paging, running
from hf_freeze.model.running import fast_linears


@pytest.fixture
def slow(monkeypatch):
    """A machine that multiplies matrices of 16 bits slowly."""
    monkeypatch.setattr(running, "_is_slow", lambda dtype: True)


class Seen(TorchFunctionMode):
    """Records the dtypes in which linears compute."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.linear:
            self.dtypes |= {each.dtype for each in args if each is not None}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_those_in_fp32_rounded_once(dtype, slow):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 5, 30), (7, 30), (7,)))
    with Seen() as seen, fast_linears(dtype):
        found = [
            functional.linear(x, weight),
            functional.linear(x, weight, bias),
            functional.linear(x, weight, bias=bias),
        ]
    assert seen.dtypes == {torch.float32}
    plain = x.float() @ weight.float().T
    for value, expected in zip(found, (plain, plain + bias.float(), plain + bias.float()), strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value, expected.to(dtype))


def test_where_it_is_not_slower_nothing_changes(monkeypatch, slow):
    assert isinstance(fast_linears(torch.float32), nullcontext)
    assert not isinstance(fast_linears(torch.bfloat16), nullcontext)
    monkeypatch.setattr(running, "_is_slow", lambda dtype: False)
    assert isinstance(fast_linears(torch.bfloat16), nullcontext)


def test_the_machine_is_measured_once():
    running._is_slow.cache_clear()
    assert running._is_slow(torch.bfloat16) in (True, False)
    running._is_slow(torch.bfloat16)
    assert running._is_slow.cache_info().hits == 1


def test_a_model_in_bf16_is_converted_to_the_same_up_to_rounding(tmp_path, monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)
    source = saved_source("llama", tmp_path / "source", torch.bfloat16)
    folders, asked = [], []
    for is_slow in (False, True):
        monkeypatch.setattr(running, "_is_slow", lambda dtype, is_slow=is_slow: (asked.append(dtype), is_slow)[1])
        folders.append(converted(source, tmp_path / str(is_slow), [MagnitudePruning(sparsity=0.5)]))
    assert set(asked) == {torch.bfloat16}
    plain, fast = map(tensors, folders)
    assert plain.keys() == fast.keys()
    for name, value in fast.items():
        assert value.dtype == plain[name].dtype
        assert (value.double() - plain[name].double()).norm() <= 1e-2 * plain[name].double().norm(), name
