"""Recurrent units: against loops over their formulas in numpy, in parts with a state, gradients, padding and autocast."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from hf_freeze.layers.recurrent import LSTM, SSRU, AverageAttention, StateLayer, linear_recurrence

HIDDEN = 6
UNITS = {
    "ssru": lambda: SSRU(HIDDEN),
    "aan": lambda: AverageAttention(HIDDEN),
    "aan, FFN": lambda: AverageAttention(HIDDEN, 5),
    "mean": lambda: AverageAttention(HIDDEN, gate=False),
    "lstm": lambda: LSTM(HIDDEN),
}
every_unit = pytest.mark.parametrize("name", UNITS)


def unit_of(name):
    torch.manual_seed(3)
    unit = UNITS[name]().double()
    for parameter in unit.parameters():
        nn.init.normal_(parameter, std=1.5)
    return unit


def some(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def start(unit, rows):
    return torch.zeros(rows, unit.state_size, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_loop(unit, x):
    """The outputs (T, H) for one sentence x (T, H), by the formulas of the papers, token by token."""
    p = {name: value.detach().numpy() for name, value in unit.named_parameters()}
    x = x.numpy()
    outputs, state, output = [], np.zeros(HIDDEN), np.zeros(HIDDEN)
    for number, token in enumerate(x, 1):
        if isinstance(unit, SSRU):
            forget = sigmoid(p["forget.weight"] @ token + p["forget.bias"])
            state = forget * state + (1 - forget) * (p["input.weight"] @ token)
            output = np.maximum(state, 0)
        elif isinstance(unit, LSTM):
            i, f, g, o = np.split(p["input.weight"] @ token + p["input.bias"] + p["recurrent.weight"] @ output, 4)
            state = sigmoid(f) * state + sigmoid(i) * np.tanh(g)
            output = sigmoid(o) * np.tanh(state)
        else:
            output = x[:number].sum(0) / number
            if "fc1.weight" in p:
                inner = np.maximum(p["fc1.weight"] @ output + p["fc1.bias"], 0)
                output = p["fc2.weight"] @ inner + p["fc2.bias"]
            if "gate.weight" in p:
                i, f = np.split(sigmoid(p["gate.weight"] @ np.concatenate([token, output]) + p["gate.bias"]), 2)
                output = i * token + f * output
        outputs.append(output)
    return torch.from_numpy(np.stack(outputs))


@every_unit
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@torch.no_grad()
def test_all_tokens_at_once_are_the_loop_of_the_paper(name, tokens):
    unit, x = unit_of(name), some(3, tokens, HIDDEN)
    found, _ = unit(x, None, start(unit, 3))
    torch.testing.assert_close(found, torch.stack([by_loop(unit, row) for row in x]), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_the_lstm_is_that_of_torch():
    unit, x = unit_of("lstm"), some(3, 9, HIDDEN)
    expected = nn.LSTM(HIDDEN, HIDDEN, batch_first=True).double()
    for name, value in (
        ("weight_ih_l0", unit.input.weight),
        ("weight_hh_l0", unit.recurrent.weight),
        ("bias_ih_l0", unit.input.bias),
    ):
        getattr(expected, name).copy_(value)
    expected.bias_hh_l0.zero_()
    outputs, (output, cell) = expected(x)
    found, state = unit(x, None, start(unit, 3))
    torch.testing.assert_close(found, outputs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, torch.cat([output[0], cell[0]], dim=-1), rtol=1e-10, atol=1e-10)


@every_unit
def test_values_and_gradients_are_those_of_single_steps(name):
    unit, x = unit_of(name), some(2, 13, HIDDEN).requires_grad_()
    weights = some(2, 13, HIDDEN, seed=1)

    def gradients(outputs):
        return torch.autograd.grad((outputs * weights).sum(), [x, *unit.parameters()])

    whole, _ = unit(x, None, start(unit, 2))
    steps, state = [], start(unit, 2)
    for token in x.split(1, dim=1):
        output, state = unit(token, None, state)
        steps.append(output)
    single = torch.cat(steps, dim=1)
    torch.testing.assert_close(whole, single, rtol=1e-6, atol=1e-9)
    for found, expected in zip(gradients(whole), gradients(single), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_the_recurrence_is_that_of_finite_differences():
    values = [torch.sigmoid(some(2, 5, 3)), some(2, 5, 3, seed=1), some(2, 3, seed=2)]
    assert torch.autograd.gradcheck(linear_recurrence, [value.requires_grad_() for value in values])


def test_a_recurrence_that_forgets_all_stays_finite():
    """A quotient of cumulative products would be 0 / 0, and so would its gradient."""
    factors = torch.zeros(1, 300, 2, requires_grad=True)
    states = linear_recurrence(factors, torch.ones(1, 300, 2), torch.ones(1, 2))
    states.sum().backward()
    assert torch.equal(states, torch.ones(1, 300, 2))
    assert torch.equal(factors.grad, torch.ones(1, 300, 2))


@every_unit
@torch.no_grad()
def test_padding_at_either_end_and_between_changes_no_token(name):
    unit, x = unit_of(name), some(3, 9, HIDDEN)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4] = mask[1, 6:] = mask[2, 3:5] = False
    found, states = unit(x, mask, start(unit, 3))
    for row, real in enumerate(mask):
        expected, state = unit(x[row : row + 1, real], None, start(unit, 1))
        torch.testing.assert_close(found[row, real], expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(states[row], state[0], rtol=1e-10, atol=1e-10)


@every_unit
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output(name):
    unit, x = unit_of(name), some(1, 8, HIDDEN)
    other = x.clone()
    other[:, 5] += 1
    outputs, changed = (unit(each, None, start(unit, 1))[0] for each in (x, other))
    assert torch.equal(changed[:, :5], outputs[:, :5])
    assert (changed[:, 5:] != outputs[:, 5:]).any(-1).all()


@every_unit
@torch.no_grad()
def test_the_state_is_in_fp32_where_the_weights_are_in_bf16(name):
    """In bf16, a sum of ones would stay at 256, and small changes of a state would be lost."""
    unit = unit_of(name).to(torch.bfloat16)
    found, state = unit(torch.ones(1, 1000, HIDDEN, dtype=torch.bfloat16), None, torch.zeros(1, unit.state_size))
    assert (found.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = unit.double()(torch.ones(1, 1000, HIDDEN).double(), None, start(unit, 1))
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


def test_a_cache_reorders_repeats_and_selects_states_and_cannot_be_cropped():
    cache, states = DynamicCache(), torch.arange(6.0).reshape(2, 3)
    layer = StateLayer.of(cache, 1)
    layer.put(states, 4)
    assert cache.layers[1] is layer is StateLayer.of(cache, 1)
    assert cache.get_mask_sizes(2, 1) == (6, 0)
    assert cache.get_seq_length(1) == 4
    layer.put(states, 1)
    assert layer.get_seq_length() == 5
    assert layer.keys.untyped_storage().nbytes() == 0
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.values.flatten(1), states.flip(0))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([3]))
    assert torch.equal(layer.values.flatten(1), states[:1])
    assert layer.get_seq_length() == 5
    assert not layer.is_croppable
    layer.crop(0)
    with pytest.raises(ValueError, match="the state of a recurrent unit cannot forget 2 tokens: choose another search"):
        layer.crop(-2)
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.values is None
