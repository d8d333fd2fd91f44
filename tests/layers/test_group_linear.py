"""Group linear transforms against dense block-diagonal matrices, and how groups are shuffled and mixed, by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_freeze.layers import GroupLinear
from hf_freeze.layers.group_linear import mix, shuffle

SIZES = [(12, 8, 1), (12, 8, 2), (12, 8, 4), (6, 9, 3), (4, 4, 4)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), SIZES)
def test_forward_and_gradients_are_those_of_a_block_diagonal_matrix(inputs, outputs, groups, bias):
    layer = GroupLinear(inputs, outputs, groups, bias).double()
    if bias:
        torch.nn.init.normal_(layer.bias)
    assert layer.weight.shape == (groups, inputs // groups, outputs // groups)
    dense = torch.block_diag(*layer.weight.detach()).requires_grad_()
    for shape in ((7, inputs), (2, 3, inputs), (inputs,)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        expected = x @ dense + (layer.bias if bias else 0)
        torch.testing.assert_close(layer(x), expected)
        scale = torch.randn_like(expected)
        of_x, of_dense = torch.autograd.grad((expected * scale).sum(), [x, dense])
        found_x, found = torch.autograd.grad((layer(x) * scale).sum(), [x, layer.weight])
        torch.testing.assert_close(found_x, of_x)
        blocks = of_dense.unflatten(0, (groups, -1)).unflatten(2, (groups, -1))
        torch.testing.assert_close(found, torch.stack([blocks[g, :, g] for g in range(groups)]))


@pytest.mark.parametrize(("inputs", "outputs", "groups"), SIZES)
def test_it_costs_one_part_in_groups(inputs, outputs, groups):
    layer = GroupLinear(inputs, outputs, groups)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(5, inputs))
    assert counter.get_total_flops() == 2 * 5 * inputs * outputs // groups
    assert sum(p.numel() for p in layer.parameters()) == inputs * outputs // groups + outputs


def test_blocks_are_drawn_each_after_glorot():
    layer = GroupLinear(400, 800, 4)
    bound = (6 / (100 + 200)) ** 0.5
    assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert not layer.bias.any()


def test_sizes_that_groups_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"GroupLinear\(inputs=10, groups=4\): inputs must be a multiple of groups"):
        GroupLinear(10, 8, 4)
    with pytest.raises(ValueError, match=r"GroupLinear\(outputs=6, groups=4\): outputs must be a multiple of groups"):
        GroupLinear(8, 6, 4)


def test_shuffling_takes_from_each_group_in_turn():
    x = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])
    assert shuffle(x, 2).tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    assert shuffle(x, 3).tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]
    for groups in (1, 6):
        assert torch.equal(shuffle(x, groups), x)
    assert torch.equal(shuffle(shuffle(x, 2), 3), x)


def test_mixing_gives_each_group_a_piece_of_both():
    x, y = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[10, 11]])
    assert mix(x, y, 1).tolist() == [[0, 1, 2, 3, 10, 11]]
    assert mix(x, y, 2).tolist() == [[0, 1, 10, 2, 3, 11]]
    assert mix(x[0], y[0], 2).tolist() == [0, 1, 10, 2, 3, 11]
