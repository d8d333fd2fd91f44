"""Tensor trains and Tucker decompositions with quantised factors, against the dense weight of dequantised factors and the
definition of straight-through; and pruned weights on a grid."""

import pytest
import torch
from torch import nn

from hf_freeze.layers import TensorTrainLinear, TuckerLinear
from hf_freeze.layers.fake_quantized import FakeQuantizedTensorTrainLinear, FakeQuantizedTuckerLinear
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized_factors import (
    QuantizedSparseLinear,
    QuantizedTensorTrainLinear,
    QuantizedTuckerLinear,
)
from hf_freeze.layers.sparse import SparseLinear

GRIDS = [
    Grid(weights="int8"),
    Grid(weights="int4"),
    Grid(weights="int4", granularity="group-64", weight_ranges="learnt"),
]
SHAPES = {"tensor train": ((2, 3, 4), (4, 3, 5), (1, 5, 6, 1)), "Tucker": ((4, 6), (6, 10), (3, 5, 4, 7))}
LAYERS = {
    "tensor train": (TensorTrainLinear, QuantizedTensorTrainLinear, FakeQuantizedTensorTrainLinear),
    "Tucker": (TuckerLinear, QuantizedTuckerLinear, FakeQuantizedTuckerLinear),
}
every_kind = pytest.mark.parametrize("kind", LAYERS)


def plain(kind, execution="auto"):
    torch.manual_seed(0)
    layer = LAYERS[kind][0](nn.Linear(24, 60), *SHAPES[kind], std=0.2, execution=execution)
    with torch.no_grad():
        layer.bias.normal_()
    return layer


def fake(grid, kind, execution="auto"):
    linear = plain(kind, execution)
    layer = LAYERS[kind][2](linear, grid)
    layer.set_parts(linear.balanced())
    with torch.no_grad():
        layer.bias.copy_(linear.bias)
    layer.start()
    return layer


@every_kind
def test_balanced_factors_give_the_same_weight(kind):
    layer = plain(kind)
    first = 1 if kind == "Tucker" else 0  # the core of Tucker is no factor of a mode
    with torch.no_grad():
        layer.parts()[first][..., 1] *= 100
        layer.parts()[first + 1][..., 2] = 0
    parts = layer.balanced()
    torch.testing.assert_close(layer.product(parts), layer.dense_weight(), rtol=1e-4, atol=1e-4)
    norms = parts[first].flatten(0, -2).norm(dim=0)
    torch.testing.assert_close(norms, norms.mean().expand(len(norms)))


@every_kind
@pytest.mark.parametrize("grid", GRIDS[:2])
def test_rounded_factors_are_off_by_half_a_step(grid, kind):
    linear = plain(kind)
    layer = LAYERS[kind][1](linear, grid)
    layer.set_parts(linear.balanced())
    for part, holder, used in zip(linear.balanced(), layer.holders(), layer.used_parts(), strict=True):
        steps = holder.steps()
        torch.testing.assert_close(steps, part.detach().flatten(1).abs().amax(1, keepdim=True) / grid.levels)
        assert ((used - part).flatten(1).abs() <= 0.5001 * steps).all()


@every_kind
@pytest.mark.parametrize("execution", ["dense", "factors"])
@pytest.mark.parametrize("grid", GRIDS)
def test_fixed_layers_compute_what_training_does_in_eval_mode(grid, execution, kind):
    layer = fake(grid, kind, execution).eval()
    fixed = layer.fixed().eval()
    x = torch.randn(7, 24)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(fixed(x), expected)
        used = [h.dense_weight().view(part.shape) for h, part in zip(fixed.holders(), layer.parts(), strict=True)]
        torch.testing.assert_close(expected, x @ layer.product(used).T + layer.bias)
        assert torch.equal(fixed.dense_weight(), layer.dense_weight())
        fixed.holders()[1].scales.zero_()  # caches notice changes
        layer.parts()[1].zero_()
        torch.testing.assert_close(fixed(x), layer.bias.expand(7, -1))
        assert torch.equal(layer(x), fixed(x))


@every_kind
@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_go_straight_through(grid, kind):
    """Those of the rounded factors, where they lie inside the range."""
    layer = fake(grid, kind)
    if grid.weight_ranges == "learnt":
        with torch.no_grad():
            for own in layer.roundings():
                own.log_steps -= 0.3  # so that some values lie outside
    x = torch.randn(7, 24)
    layer(x).square().sum().backward()
    rounded = [part.detach().requires_grad_() for part in layer.used_parts()]
    (x @ layer.product(rounded).T + layer.bias.detach()).square().sum().backward()
    for own, part, value in zip(layer.roundings(), layer.parts(), rounded, strict=True):
        matrix = part.detach().flatten(1)
        limits = grid.spread(own.steps(matrix), matrix.shape[1]) * grid.levels
        inside = (matrix.abs() < limits).view_as(part) if grid.weight_ranges == "learnt" else 1
        torch.testing.assert_close(part.grad, value.grad * inside, rtol=1e-4, atol=1e-4)
        if grid.weight_ranges == "learnt":
            assert own.log_steps.grad.abs().min() > 0
        else:
            assert part.grad.abs().min() > 0


@every_kind
def test_full_precision_before_rounding_begins(kind):
    linear, layer = plain(kind), fake(GRIDS[1], kind)
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


# -- non-zero weights --------------------------------------------------------------------------------------------------------


def test_no_weight_is_taken_that_has_no_zeros():
    """PEFT would lose most of an adapter without a word."""
    sparse = SparseLinear.of(linear := nn.Linear(20, 6), torch.rand(6, 20) < 0.3)
    layer = QuantizedSparseLinear(sparse, Grid(weights="int8"))
    layer.get_buffer("mask").copy_(sparse.get_buffer("mask"))
    with pytest.raises(ValueError, match=r"\AQuantizedSparseLinear computes its weight from other parameters.+\Z"):
        layer.weight.data = linear.weight
