"""Tensor trains with quantised cores, against the dense weight of dequantised cores and the definition of straight-through."""

import pytest
import torch
from torch import nn

from hf_freeze.layers import TensorTrainLinear
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized_cores import FakeQuantizedTensorTrainLinear, IntegerTensorTrainLinear, balanced
from hf_freeze.layers.tensor_train import merge

GRIDS = [
    Grid(weights="int8"),
    Grid(weights="int4"),
    Grid(weights="int4", granularity="group-64", weight_ranges="learnt"),
]


def train(execution="auto"):
    torch.manual_seed(0)
    layer = TensorTrainLinear(nn.Linear(24, 60), (2, 3, 4), (4, 3, 5), (1, 5, 6, 1), std=0.2, execution=execution)
    with torch.no_grad():
        layer.bias.normal_()
    return layer


def fake(grid, linear):
    layer = FakeQuantizedTensorTrainLinear(linear, grid)
    layer.set_cores(linear.cores)
    with torch.no_grad():
        layer.bias.copy_(linear.bias)
    layer.start()
    return layer


def test_balanced_cores_give_the_same_weight():
    layer = train()
    with torch.no_grad():
        layer.core_0[..., 1] *= 100
        layer.core_1[..., 2] = 0
    cores = balanced(layer.cores)
    torch.testing.assert_close(merge(cores)[0, :, :, 0].T, layer.dense_weight())
    norms = cores[0].flatten(0, 2).norm(dim=0)
    torch.testing.assert_close(norms, norms.mean().expand(5))


@pytest.mark.parametrize("grid", GRIDS[:2])
def test_rounded_cores_are_off_by_half_a_step(grid):
    linear = train()
    layer = IntegerTensorTrainLinear(linear, grid)
    layer.set_cores(linear.cores)
    for core, stored, used in zip(balanced(linear.cores), layer.stored, layer.used_cores(), strict=True):
        steps = stored.steps()
        torch.testing.assert_close(steps, core.detach().flatten(1).abs().amax(1, keepdim=True) / grid.levels)
        assert ((used - core).flatten(1).abs() <= 0.5001 * steps).all()


@pytest.mark.parametrize("execution", ["dense", "factors"])
@pytest.mark.parametrize("grid", GRIDS)
def test_fixed_layers_compute_what_training_does_in_eval_mode(grid, execution):
    layer = fake(grid, train(execution)).eval()
    fixed = layer.fixed().eval()
    x = torch.randn(7, 24)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(fixed(x), expected)
        weight = merge(
            [core.dense_weight().view(old.shape) for core, old in zip(fixed.stored, layer.cores, strict=True)]
        )
        torch.testing.assert_close(expected, x @ weight[0, :, :, 0] + layer.bias)
        assert torch.equal(fixed.dense_weight(), layer.dense_weight())
        for tensor in (fixed.core_1.scales, *layer.core_1):  # caches notice changes
            tensor.zero_()
        torch.testing.assert_close(fixed(x), layer.bias.expand(7, -1))
        assert torch.equal(layer(x), fixed(x))


@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_go_straight_through(grid):
    """Those of the rounded cores, where they lie inside the range."""
    layer = fake(grid, train())
    if grid.weight_ranges == "learnt":
        with torch.no_grad():
            for own in layer.roundings():
                own.log_steps -= 0.3  # so that some values lie outside
    x = torch.randn(7, 24)
    layer(x).square().sum().backward()
    rounded = [core.detach().requires_grad_() for core in layer.used_cores()]
    (x @ merge(rounded)[0, :, :, 0] + layer.bias.detach()).square().sum().backward()
    for own, core, value in zip(layer.roundings(), layer.cores, rounded, strict=True):
        matrix = core.detach().flatten(1)
        limits = grid.spread(own.steps(matrix), matrix.shape[1]) * grid.levels
        inside = (matrix.abs() < limits).view_as(core) if grid.weight_ranges == "learnt" else 1
        torch.testing.assert_close(core.grad, value.grad * inside, rtol=1e-4, atol=1e-4)
        if grid.weight_ranges == "learnt":
            assert own.log_steps.grad.abs().min() > 0
        else:
            assert core.grad.abs().min() > 0


def test_full_precision_before_rounding_begins():
    linear = train()
    layer = fake(GRIDS[1], linear)
    x = torch.randn(7, 24)
    for rounding in layer.roundings():
        rounding.active = False
    with torch.no_grad():
        torch.testing.assert_close(layer(x), linear(x))
        rounded = x @ layer.dense_weight().T + layer.bias  # as finalize() and merge() give it, at any time
        assert (rounded - layer(x)).abs().max() > 0.01
        for rounding in layer.roundings():
            rounding.active = True
        torch.testing.assert_close(layer(x), rounded)
