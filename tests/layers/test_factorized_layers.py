"""What linears of low rank, tensor trains and Tucker decompositions compute, against formulas, and what inference keeps."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.factors import (
    LARGE,
    M2048,
    N512,
    SETTINGS,
    Largest,
    densify,
    entry,
    every_class,
    every_setting,
    large_and_small,
    make,
    named,
)
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_freeze.layers import TensorTrainLinear, TuckerLinear, factorized
from hf_freeze.layers.tensor_train import ContractionPlan, best_plan
from hf_freeze.layers.tucker import TuckerPlan, best_tucker_plan


@every_setting
def test_the_independent_dense_weight_is_the_formula(cls, size, arguments):
    layer = make(cls, size, arguments)
    weight = densify(layer).detach()
    for i, j in [(0, 0), (size[0] - 1, size[1] - 1), *zip((3, 1, 4), (2, 5, 0), strict=True)]:
        assert weight[j, i].item() == pytest.approx(entry(layer, i, j), abs=1e-5)
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=1e-5)


# -- the forward -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", factorized.EXECUTIONS)
@pytest.mark.parametrize("dense", [nn.Linear, Conv1D, None], ids=["linear", "conv1d", "no bias"])
@large_and_small
def test_inference_equals_the_dense_weight(cls, size, arguments, dense, execution):
    layer = make(cls, size, arguments, dense=dense or nn.Linear, bias=dense is not None, execution=execution)
    weight = densify(layer).detach()
    assert (layer.bias is None) == (dense is None)
    shapes = [(1,), (3,), (64,), (65,), (200,), (2, 5), (0,), (3, 0), ()]  # 64 are a chunk
    for tokens in shapes:
        x = torch.randn(*tokens, size[0])
        with torch.no_grad():
            y = layer(x)
        assert y.shape == (*tokens, size[1])
        torch.testing.assert_close(y, functional.linear(x, weight, layer.bias), rtol=1e-5, atol=1e-5)
    x = torch.randn(size[0], 70).T  # not contiguous
    with torch.no_grad():
        torch.testing.assert_close(layer(x), functional.linear(x, weight, layer.bias), rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["dense", "factors"])
def training_path(request, monkeypatch):
    """Both ways to train, whatever the estimate says."""
    monkeypatch.setattr(factorized, "_GAIN", 0 if request.param == "dense" else math.inf)
    return request.param


@large_and_small
def test_training_equals_the_dense_weight(cls, size, arguments, training_path):
    layer = make(cls, size, arguments).train()
    for tokens in ((1,), (65,), (2, 3), (0,)):
        x = torch.randn(*tokens, size[0])
        y = layer(x)
        assert layer.path(math.prod(tokens), "cpu", training=True) == training_path
        assert layer._cache is None
        torch.testing.assert_close(y, functional.linear(x, densify(layer), layer.bias), rtol=1e-5, atol=1e-5)


@every_setting
def test_gradients_are_finite_differences(cls, size, arguments, training_path):
    layer = make(cls, size, arguments).double()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    values = [p.detach().clone().requires_grad_() for p in parameters]  # no nn.Parameter
    x = torch.randn(3, size[0], dtype=torch.double, requires_grad=True)

    def forward(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(forward, (x, *values), fast_mode=True)
    y = functional.linear(x, densify(layer), layer.bias)
    expected = torch.autograd.grad(y.sin().sum(), (x, *parameters))
    for y, weights in ((layer(x), parameters), (forward(x, *values), values)):
        for one, other in zip(torch.autograd.grad(y.sin().sum(), (x, *weights)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("execution", factorized.EXECUTIONS)
@every_class
def test_frozen_factors_pass_the_gradient_on(cls, size, arguments, execution):
    layer = make(cls, size, arguments, execution=execution).double().requires_grad_(False)
    layer.bias.requires_grad_()
    for tokens in (2, 65):
        x = torch.randn(tokens, size[0], dtype=torch.double, requires_grad=True)
        assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)
        bias, found = torch.autograd.grad(layer(x).sum(), (layer.bias, x))
        torch.testing.assert_close(found, densify(layer).sum(0).expand_as(x))
        torch.testing.assert_close(bias, torch.full_like(bias, tokens))
        assert layer._cache


@pytest.mark.parametrize(
    ("cls", "size", "arguments"), named([s for s in SETTINGS + LARGE if s[0] is TensorTrainLinear])
)
def test_every_order_of_contraction_gives_the_same(cls, size, arguments):
    layer = make(cls, size, arguments)
    d, count = len(layer.in_modes), 0
    x = torch.randn(3, size[0])
    expected = x @ densify(layer).T
    for bits in range(1 << (d - 1)):
        cuts = tuple(k for k in range(1, d) if bits >> (k - 1) & 1)
        for from_left in (False, True):
            plan = ContractionPlan(*arguments, cuts, from_left)
            matrices = plan.matrices(layer.cores)
            torch.testing.assert_close(plan.multiply(x, matrices), expected, rtol=1e-5, atol=1e-5)
            # `steps` names the shapes of the products, which are counted below.
            assert [tuple(m.shape) for m in matrices] == [(rows, inner) for _, rows, inner, _ in plan.steps()]
            count += 1
    assert count == 2**d


def test_multiply_adds_of_the_unmerged_chain_are_the_published_ones():
    for rank, published in ((2, 77_824), (4, 286_720), (8, 1_097_728)):
        for from_left in (False, True):
            plan = ContractionPlan(N512, M2048, (1, *[rank] * 4, 1), (1, 2, 3, 4), from_left)
            assert sum(math.prod(step) for step in plan.steps()) == published


def test_the_search_for_an_order_is_short_however_many_cores_there_are():
    plan = best_plan((2,) * 16, (2,) * 16, (1, *[2] * 15, 1), 5, "cpu", True)
    assert 2 <= len(plan.spans) <= 3


def test_every_way_to_take_the_factors_of_tucker_computes_the_same():
    in_modes, out_modes, ranks = (4, 3, 2), (2, 5, 3), (3, 2, 2, 2, 4, 3)
    layer = make(TuckerLinear, (24, 30), (in_modes, out_modes, ranks), bias=False)
    x = torch.randn(5, 24)
    expected = functional.linear(x, layer.dense_weight())
    orders = [(cuts, left) for cuts in ((), (1,), (2,), (1, 2)) for left in (False, True)]
    ins = [None, *(ContractionPlan(in_modes, ranks[:3], (1,) * 4, *order) for order in orders)]
    outs = [None, *(ContractionPlan(ranks[3:], out_modes, (1,) * 4, *order) for order in orders)]
    for left in ins:
        for right in outs:
            plan = TuckerPlan(left, right, 0.0)
            y = layer.multiply(x, (plan, layer.matrices(plan)))
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    # Two large outer factors are not made where small ones will do; for few tokens fewer operations are better.
    large = ((4,) * 5, (4,) * 3 + (8,) * 2, (3,) * 10)
    many, one = (best_tucker_plan(*large, tokens, "cpu", False) for tokens in (2048, 1))
    assert len(many.inputs.spans) > 1
    assert len(many.outputs.spans) > 1
    assert None in (one.inputs, one.outputs)


@pytest.mark.parametrize("execution", factorized.EXECUTIONS)
@large_and_small
def test_a_token_changes_its_own_output_alone(cls, size, arguments, execution, training_path):
    layer = make(cls, size, arguments, execution=execution)
    x = torch.randn(3, 7, size[0])
    for training in (False, True):
        with torch.set_grad_enabled(training):
            before = layer(x)
            for sentence, position in ((0, 0), (1, 3), (2, 6)):
                changed = x.clone()
                changed[sentence, position] += 1
                differs = (layer(changed) != before).any(-1)
                assert differs.nonzero().tolist() == [[sentence, position]]


@every_class
def test_chunks_are_those_of_one_product(cls, size, arguments, monkeypatch):
    layer = make(cls, size, arguments, execution="factors")
    x, seen, multiply = torch.randn(130, size[0]), [], layer.multiply

    def spy(rows, ready):
        seen.append(rows.shape[0])
        return multiply(rows, ready)

    monkeypatch.setattr(layer, "multiply", spy)
    with torch.no_grad():
        chunked = layer(x)
    whole = layer.requires_grad_(False)(x)
    assert seen == [64, 64, 2, 130]
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


# -- what inference keeps ----------------------------------------------------------------------------------------------------


def changed_in_place(layer):
    with torch.no_grad():
        next(p for n, p in layer.named_parameters() if n != "bias").mul_(1.5)
    return layer


def stepped(layer):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.randn(3, layer.in_features)).square().sum().backward()
    optimizer.step()
    return layer


def loaded(layer, **how):
    layer.load_state_dict({name: torch.randn_like(value) * 0.3 for name, value in layer.state_dict().items()}, **how)
    return layer


CHANGES = {
    "in place": changed_in_place,
    "optimizer": stepped,
    "load_state_dict": loaded,
    "assign": lambda layer: loaded(layer, assign=True),
    "dtype": lambda layer: layer.double(),
    "train": lambda layer: layer.train(),
    "eval": lambda layer: layer.eval(),
    "deepcopy": lambda layer: changed_in_place(copy.deepcopy(layer)),
    "pickle": lambda layer: changed_in_place(pickle.loads(pickle.dumps(layer))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("execution", ["dense", "factors"])
@every_class
@torch.no_grad()
def test_what_is_kept_goes_with_the_first_change(cls, size, arguments, execution, change, monkeypatch):
    layer = make(cls, size, arguments, execution=execution)
    x, keys, made = torch.randn(3, size[0]), set(layer.state_dict()), []
    monkeypatch.setattr(cls, "dense_weight", lambda self: (made.append(1), densify(self))[1])
    first = layer(x)
    assert torch.equal(layer(x), first)
    assert len(made) == (execution == "dense")  # once for both
    assert layer._cache
    assert set(layer.state_dict()) == keys
    before = dict(layer.__dict__)
    with torch.enable_grad():
        other = CHANGES[change](layer)
    if change in ("dtype", "train", "eval", "deepcopy", "pickle"):
        assert other._cache is None
        assert other is layer or layer._cache is before["_cache"]  # a copy leaves the original as it is
    made.clear()
    x = x.to(next(other.parameters()).dtype)
    torch.testing.assert_close(other(x), functional.linear(x, densify(other), other.bias), rtol=1e-5, atol=1e-5)
    assert len(made) == (execution == "dense")


@pytest.mark.parametrize("execution", ["dense", "factors"])
@every_class
def test_inference_mode_first_and_training_afterwards(cls, size, arguments, execution):
    layer = make(cls, size, arguments, execution=execution)
    x = torch.randn(3, size[0])
    with torch.inference_mode():
        first = layer(x)
    layer.requires_grad_(False)
    x.requires_grad_()
    y = layer(x)  # by what inference mode has kept
    torch.testing.assert_close(y, first.clone())
    y.sum().backward()
    assert x.grad.abs().sum() > 0
    layer.requires_grad_()
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(copy.deepcopy(layer)(x), first)


@pytest.mark.parametrize("tokens", [3, 65])
@pytest.mark.parametrize("execution", ["dense", "factors"])
@large_and_small
@torch.no_grad()
def test_autocast(cls, size, arguments, execution, tokens):
    layer = make(cls, size, arguments, execution=execution)
    linear = nn.Linear(*size)
    linear.weight.copy_(layer.dense_weight().bfloat16())
    linear.bias.copy_(layer.bias)
    x = torch.randn(tokens, size[0])
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = layer(x), linear(x)
    assert actual.dtype == expected.dtype == torch.bfloat16
    if execution == "dense":
        assert torch.equal(actual, expected)
    # The factors are rounded, and what lies between them.
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.05, atol=0.1)
    torch.testing.assert_close(layer(x), functional.linear(x, densify(layer), layer.bias), rtol=1e-5, atol=1e-5)


def makes_weight(layer, tokens):
    x = torch.randn(tokens, layer.in_features)
    with Largest() as spy, torch.no_grad():
        layer(x)
    found = tuple(sorted((layer.in_features, layer.out_features))) in spy.shapes
    if tokens == 1:  # with more, the tokens themselves may be as large
        assert found == (spy.seen >= layer.in_features * layer.out_features)
    return found


@pytest.mark.parametrize(("cls", "size", "arguments"), named(LARGE))
def test_factors_never_make_the_weight(cls, size, arguments, monkeypatch):
    for tokens in (1, 64, 200):
        assert not makes_weight(make(cls, size, arguments, execution="factors"), tokens)
        assert makes_weight(make(cls, size, arguments, execution="dense"), tokens)
    # "auto" where dense is faster, but the weight is too large.
    monkeypatch.setattr(factorized, "_GAIN", 0)
    assert makes_weight(make(cls, size, arguments), 1)
    monkeypatch.setattr(factorized, "_LARGEST_DENSE", math.prod(size))
    assert makes_weight(make(cls, size, arguments), 1)
    monkeypatch.setattr(factorized, "_LARGEST_DENSE", math.prod(size) - 1)
    assert not makes_weight(make(cls, size, arguments), 1)


@pytest.mark.parametrize(("cls", "size", "arguments"), named(LARGE))
@pytest.mark.parametrize("execution", factorized.EXECUTIONS)
def test_output_bits_do_not_depend_on_free_memory(cls, size, arguments, execution, monkeypatch):
    """Nor on what was computed before: a layer that has kept its dense weight computes the same bits as one that has not."""
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(factorized, "_GAIN", 0)  # "auto" is for the dense weight
    layer = make(cls, size, arguments, execution=execution).eval()
    inputs = [torch.randn(tokens, size[0]) for tokens in (1, 7, 200)]

    def outputs(available, order):
        layer.train().eval()  # forgets what it has kept
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
        with torch.no_grad():
            found = {number: layer(inputs[number]) for number in order}
        return [found[number] for number in sorted(found)]

    expected = outputs(1 << 40, (0, 1, 2))
    for available, order in ((0, (0, 1, 2)), (1 << 40, (2, 1, 0)), (0, (1, 2, 0))):
        assert all(map(torch.equal, outputs(available, order), expected))


def test_factors_hold_what_one_number_of_tokens_needs():
    layer = make(TuckerLinear, (64, 128), ((4, 4, 4), (4, 4, 8), (3,) * 6), execution="factors")
    keys = set()
    with torch.no_grad():
        for tokens in (1, 8, 300, 1):
            layer(torch.randn(tokens, 64))
            assert len(layer._cache) == 1
            keys |= set(layer._cache)
            ((_, value),) = layer._cache.values()
            again = layer(torch.randn(tokens, 64))
            assert again.shape == (tokens, 128)
            assert next(iter(layer._cache.values()))[1] is value
    assert len(keys) > 1  # or it showed nothing
