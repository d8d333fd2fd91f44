"""Symmetric grids of integers: against numpy, the gradients in closed form, and exact integer products."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers import grids
from hf_freeze.layers.grids import Grid, pack, rounded, scaled_gradient, unpack
from hf_freeze.layers.quantized import QuantizedLinear

every_width = pytest.mark.parametrize("weights", grids.WIDTHS)
every_granularity = pytest.mark.parametrize("granularity", grids.GRANULARITIES)


def reference(weight: np.ndarray, weights: str, granularity: str) -> np.ndarray:
    """Each value is the nearest multiple of the largest of its row, or of its 64 neighbours, divided by 127 or 7."""
    levels, width = {"int8": 127, "int4": 7}[weights], 64 if granularity == "group-64" else weight.shape[1]
    result = np.zeros_like(weight, dtype=np.float64)
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], width):
            part = weight[row, start : start + width].astype(np.float64)
            step = np.abs(part).max() / levels
            result[row, start : start + width] = np.round(part / step) * step if step else 0
    return result


@every_width
@every_granularity
@pytest.mark.parametrize("shape", [(6, 64), (3, 5), (5, 129), (2, 200)])
def test_the_stored_weight_is_that_of_numpy(shape, weights, granularity):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight[1] = 0  # a channel without a range
    layer = QuantizedLinear(nn.Linear(*reversed(shape)), Grid(weights=weights, granularity=granularity))
    layer.fill(weight)
    expected = reference(weight.numpy(), weights, granularity)
    np.testing.assert_allclose(layer.dense_weight().numpy(), expected, rtol=1e-5, atol=1e-7)
    assert not layer.dense_weight()[1].any()
    groups = 1 if granularity == "channel" else -(-shape[1] // 64)
    per_row = shape[1] if weights == "int8" else -(-shape[1] // 2)
    assert (layer.packed.nbytes, layer.scales.nbytes) == (shape[0] * per_row, 4 * shape[0] * groups)
    again = QuantizedLinear(nn.Linear(*reversed(shape)), layer.grid)
    again.fill(layer.dense_weight())  # what is on the grid stays there
    assert torch.equal(again.integers(), layer.integers())


@every_width
@pytest.mark.parametrize("columns", [1, 6, 7])
def test_packing_loses_nothing(columns, weights):
    levels = grids.WIDTHS[weights]
    numbers = torch.randint(-levels, levels + 1, (9, columns), dtype=torch.int8)
    packed = pack(numbers, weights)
    assert packed.nbytes == 9 * (columns if weights == "int8" else -(-columns // 2))
    assert torch.equal(unpack(packed, columns), numbers)


# -- gradients ---------------------------------------------------------------------------------------------------------------


@every_width
@every_granularity
def test_the_gradient_goes_straight_through(weights, granularity):
    """With the largest value as range, nothing is outside: the gradient to w is that to the rounded w, exactly."""
    grid = Grid(weights=weights, granularity=granularity)
    weight, out = torch.randn(5, 100, requires_grad=True), torch.randn(5, 100)
    steps = grid.steps(weight)
    ((grid.numbers(weight, steps) * grid.spread(steps, 100)) * out).sum().backward()
    torch.testing.assert_close(weight.grad, out)


@pytest.mark.parametrize("levels", [7, 127])
def test_the_gradient_to_a_step_is_equation_3_of_lsq(levels):
    """Esser et al. (2020): dv̂/ds is -v/s + round(v/s) inside (-Q, Q), and -Q or Q outside; dv̂/dv is 1 inside and 0 outside."""
    step = torch.tensor(0.05, requires_grad=True)
    values = torch.linspace(-1.5 * levels * 0.05, 1.5 * levels * 0.05, 41, requires_grad=True)
    out = torch.randn(41)
    ((rounded(values, step, levels, clips=True) * step) * out).sum().backward()
    ratio = values.detach().numpy().astype(np.float64) / 0.05
    inside = np.abs(ratio) < levels
    to_step = np.where(inside, np.round(ratio) - ratio, levels * np.sign(ratio))
    assert float(step.grad) == pytest.approx(float((to_step * out.numpy()).sum()), rel=1e-4, abs=1e-3)
    torch.testing.assert_close(values.grad, torch.where(torch.from_numpy(inside), out, 0))


def test_the_gradient_to_a_step_is_scaled_by_the_number_of_values():
    step = torch.tensor(2.0, requires_grad=True)
    (scaled_gradient(step, 50, 8) * 3).backward()
    assert float(step.grad) == pytest.approx(3 / (50 * 8) ** 0.5)
    assert torch.equal(scaled_gradient(step, 50, 8), step)


def test_first_steps_are_those_of_lsq_where_nothing_lies_beyond():
    grid = Grid(weights="int4", weight_ranges="learnt")
    weight = torch.randn(4, 1000)
    expected = 2 * weight.abs().mean(1) / 7**0.5
    torch.testing.assert_close(grid.first_steps(weight)[:, 0], torch.minimum(expected, weight.abs().amax(1) / 7))
    shorter = Grid(weights="int4", granularity="group-64").first_steps(torch.ones(1, 70))
    torch.testing.assert_close(shorter, torch.full((1, 2), 1 / 7))  # the last group has six values, and no others


# -- products ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 5, 3), (17, 1040, 8), (2, 3000, 4), (0, 4, 2), (3, 1, 4)])
def test_integer_products_are_exact(shape):
    tokens, inputs, outputs = shape
    x = torch.randint(-127, 128, (tokens, inputs), dtype=torch.int8)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    x[:, ::2], weight[:, ::2] = 127, -127  # sums beyond what fp32 holds
    expected = x.long() @ weight.long().T
    assert torch.equal(grids.integer_product(x, weight).long(), expected)
    assert torch.equal(grids.blockwise_product(x, weight).long(), expected)


@every_width
@every_granularity
@pytest.mark.parametrize("inputs", [50, 1040, 3000])
@pytest.mark.parametrize("kind", ["token", "static"])
def test_the_integer_product_is_the_fake_one(kind, inputs, weights, granularity):
    """To the last bit with one step for each output and up to 1,040 inputs; otherwise to the rounding of fp32 sums, which is at
    most 2^-24 of the sum of absolute products for each addition."""
    torch.manual_seed(1)
    grid = Grid(weights=weights, granularity=granularity, activations="int8")
    weight, x, bias = torch.randn(6, inputs), torch.randn(3, 4, inputs), torch.randn(6)
    x_steps = grids.token_steps(x) if kind == "token" else torch.tensor(0.02)  # which cuts values off
    steps = grid.steps(weight)
    numbers = grid.numbers(weight, steps)
    found = grids.product_on_grid(x, x_steps, numbers.to(torch.int8), steps, bias)
    q = rounded(x, x_steps, 127, clips=True)
    if granularity == "channel" and inputs <= 1040:
        fake = functional.linear(q, numbers) * (x_steps * steps[:, 0]) + bias
        assert torch.equal(found, fake)
    dense = numbers.double() * grid.spread(steps, inputs).double()
    exact = functional.linear(q.double() * x_steps.double(), dense, bias.double())
    size = functional.linear(q.abs().double() * x_steps.double(), dense.abs(), bias.abs().double())
    assert ((found - exact).abs() <= (inputs + 4) * 2.0**-24 * size).all()


def test_a_product_of_integers_is_one_graph_of_torch_compile():
    x, weight = (torch.randint(-127, 128, (20, 70), dtype=torch.int8) for _ in range(2))
    compiled = torch.compile(grids.integer_product, fullgraph=True, backend="aot_eager")
    grids._are_integers_exact.cache_clear()
    assert torch.equal(compiled(x, weight), x.int() @ weight.int().T)


def test_where_the_library_is_not_exact_fp32_takes_its_place(monkeypatch):
    x, weight = (torch.randint(-127, 128, (5, 70), dtype=torch.int8) for _ in range(2))
    expected = grids.integer_product(x, weight)

    def saturating(a, b):
        return (a.int() @ b.int()).clamp(-(2**15), 2**15)

    grids._are_integers_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert torch.equal(grids.integer_product(x, weight), expected)
    assert not grids._are_integers_exact()
    grids._are_integers_exact.cache_clear()
    monkeypatch.delattr(torch, "_int_mm")
    assert torch.equal(grids.integer_product(x, weight), expected)
    assert not grids._are_integers_exact()
    grids._are_integers_exact.cache_clear()
