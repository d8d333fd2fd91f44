"""Low rank, tensor train and Tucker against formulas written out here, singular values and published parameter counts."""

import copy
import json
import math
import pickle
import string
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.parametrize import by_turns
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel
from transformers.pytorch_utils import Conv1D

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import LowRankLinear, TensorTrainLinear, TuckerLinear, factorized
from hf_freeze.layers.shapes import balanced_modes, mode_count, modes_of
from hf_freeze.layers.tensor_train import ContractionPlan, best_plan, full_ranks, tt_svd
from hf_freeze.layers.tucker import TuckerPlan, best_tucker_plan, tucker
from hf_freeze.methods.registry import method_from_dict

N512, M2048 = (2, 4, 8, 4, 2), (4, 4, 8, 4, 4)  # the factors of Khakhulin et al.
CLASSES = (LowRankLinear, TensorTrainLinear, TuckerLinear)
SETTINGS = [  # class, what it takes besides the linear; small enough for loops and finite differences
    (LowRankLinear, (24, 16), (3,)),
    (LowRankLinear, (5, 7), (5,)),
    (TensorTrainLinear, (24, 16), ((2, 3, 4), (4, 2, 2), (1, 3, 2, 1))),
    (TensorTrainLinear, (12, 35), ((1, 6, 2), (5, 1, 7), (1, 2, 3, 1))),
    (TensorTrainLinear, (16, 16), ((4, 4), (2, 8), (1, 1, 1))),
    (TuckerLinear, (24, 16), ((2, 3, 4), (4, 4), (2, 1, 3, 2, 4))),
    (TuckerLinear, (6, 35), ((6,), (5, 7), (4, 3, 2))),
    (TuckerLinear, (16, 6), ((4, 4), (3, 2), (1, 1, 1, 1))),
]
LARGE = [
    (LowRankLinear, (512, 2048), (8,)),
    (TensorTrainLinear, (512, 2048), (N512, M2048, (1, 2, 4, 4, 2, 1))),
    (TensorTrainLinear, (2048, 512), (M2048, N512, (1, 4, 4, 4, 4, 1))),
    (TuckerLinear, (512, 2048), (N512, M2048, (2,) * 10)),
]


def named(settings):
    return [pytest.param(*s, id=f"{s[0].__name__}-{s[1][0]}x{s[1][1]}-{s[2][-1]}".replace(" ", "")) for s in settings]


every_setting = pytest.mark.parametrize(("cls", "size", "arguments"), named(SETTINGS))
large_and_small = pytest.mark.parametrize(("cls", "size", "arguments"), named(SETTINGS + LARGE))
every_class = pytest.mark.parametrize(("cls", "size", "arguments"), named([SETTINGS[i] for i in (0, 2, 5)]))


def make(cls, size, arguments, *, dense=nn.Linear, bias=True, **options):
    """Fresh, in eval mode, with outputs of about 1 and a bias that is not zero."""
    inputs, outputs = size
    linear = Conv1D(outputs, inputs) if dense is Conv1D else nn.Linear(inputs, outputs, bias=bias)
    layer = cls(linear, *arguments, std=(2 / sum(size)) ** 0.5, **options).eval()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer


def densify(layer):
    """(O, I) by one einsum, the formula as it stands."""
    if isinstance(layer, LowRankLinear):
        return torch.einsum("or,ri->oi", layer.up, layer.down)
    letters = iter(string.ascii_letters)
    if isinstance(layer, TuckerLinear):
        modes = (*layer.in_modes, *layer.out_modes)
        ranks, axes = ([next(letters) for _ in modes] for _ in range(2))
        terms = ["".join(ranks)] + [axis + rank for axis, rank in zip(axes, ranks, strict=True)]
        operands = [layer.core.reshape(layer.ranks), *layer.factors]
        tensor = torch.einsum(f"{','.join(terms)}->{''.join(axes)}", *operands)
    else:
        d = len(layer.in_modes)
        bonds, ins, outs = ([next(letters) for _ in range(n)] for n in (d + 1, d, d))
        terms = [bonds[k] + ins[k] + outs[k] + bonds[k + 1] for k in range(d)]
        tensor = torch.einsum(f"{','.join(terms)}->{''.join(ins + outs)}", *layer.cores)
    return tensor.reshape(layer.in_features, layer.out_features).T


def entry(layer, i, j):
    """One entry of Wᵀ by loops, in numpy."""
    if isinstance(layer, LowRankLinear):
        return sum((layer.up[j, r] * layer.down[r, i]).item() for r in range(layer.rank))
    at, to = np.unravel_index(i, layer.in_modes), np.unravel_index(j, layer.out_modes)
    if isinstance(layer, TensorTrainLinear):
        row = np.ones((1, 1))
        for core, n, m in zip(layer.cores, at, to, strict=True):
            row = row @ core[:, n, m].detach().numpy()
        return row.item()
    core, total = layer.core.detach().reshape(layer.ranks), 0.0
    for index in np.ndindex(*layer.ranks):
        total += float(core[index]) * math.prod(
            f[mode, r].item() for f, mode, r in zip(layer.factors, (*at, *to), index, strict=True)
        )
    return total


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
            y = layer.multiply(x, (plan, *layer._matrices(plan)))
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


# -- filling -----------------------------------------------------------------------------------------------------------------


def discarded_by_tt(matrix, in_modes, out_modes, ranks):
    """Σ of the squares of the singular values that a sequence of truncated SVDs leaves out, in numpy."""
    d = len(in_modes)
    axes = [axis for k in range(d) for axis in (k, d + k)]
    rest = matrix.reshape(*in_modes, *out_modes).transpose(axes)
    lost = 0.0
    for k in range(d - 1):
        u, s, _ = np.linalg.svd(rest.reshape(ranks[k] * in_modes[k] * out_modes[k], -1), full_matrices=False)
        lost += float((s[ranks[k + 1] :] ** 2).sum())
        rest = u[:, : ranks[k + 1]].T @ rest.reshape(ranks[k] * in_modes[k] * out_modes[k], -1)
    return lost


def from_cores(cores, size):
    layer = SimpleNamespace(in_modes=[c.shape[1] for c in cores], cores=cores)
    layer.in_features, layer.out_features = size
    return densify(layer).T


@pytest.mark.parametrize(
    ("in_modes", "out_modes"),
    [((2, 3, 4), (4, 2, 2)), ((4, 6), (5, 7)), ((1, 6, 2, 2), (5, 1, 7, 2)), ((2,) * 5, (2,) * 5)],
)
def test_tt_svd(in_modes, out_modes):
    size = (math.prod(in_modes), math.prod(out_modes))
    matrix = torch.randn(*size, dtype=torch.double)
    full = full_ranks(in_modes, out_modes)
    for exact in (tt_svd(matrix, in_modes, out_modes), tt_svd(matrix, in_modes, out_modes, full)):
        torch.testing.assert_close(from_cores(exact, size), matrix, rtol=0, atol=1e-10)
    for rank in (1, 2, 3, 5):
        ranks = [min(rank, each) for each in full]
        cores = tt_svd(matrix, in_modes, out_modes, ranks)
        assert [c.shape[0] for c in cores] == ranks[:-1]
        error = (from_cores(cores, size) - matrix).square().sum().item()
        assert error == pytest.approx(discarded_by_tt(matrix.numpy(), in_modes, out_modes, ranks), rel=1e-9, abs=1e-18)
        layer = make(TensorTrainLinear, size, (in_modes, out_modes, ranks)).double()
        layer.fill(matrix.T)
        assert (densify(layer) - matrix.T).square().sum().item() == pytest.approx(error, rel=1e-9, abs=1e-18)
    for loss in (0.001, 0.05, 0.3, 0.9):
        cores = tt_svd(matrix, in_modes, out_modes, loss=loss)
        error = (from_cores(cores, size) - matrix).square().sum() / matrix.square().sum()
        assert error <= loss
        parameters = sum(c.numel() for c in cores)
        assert loss < 0.3 or parameters < sum(c.numel() for c in exact)


def test_low_rank_is_the_nearest_of_its_rank():
    weight = torch.randn(9, 14, dtype=torch.double)
    singular = np.linalg.svd(weight.numpy(), compute_uv=False)
    for rank in (1, 4, 9):
        layer = make(LowRankLinear, (14, 9), (rank,)).double()
        layer.fill(weight)
        error = (densify(layer) - weight).square().sum().item()
        assert error == pytest.approx((singular[rank:] ** 2).sum(), rel=1e-9, abs=1e-20)
        torch.testing.assert_close(layer.up.T @ layer.up, layer.down @ layer.down.T)  # both are U √S, √S Vᵀ
        torch.testing.assert_close(
            torch.diagonal(layer.up.T @ layer.up).sort(descending=True)[0].detach().numpy(), singular[:rank].copy()
        )


def tucker_error(tensor, core, factors):
    made = core
    for mode, factor in enumerate(factors):
        assert torch.allclose(factor.T @ factor, torch.eye(factor.shape[1], dtype=factor.dtype), atol=1e-10)
        made = torch.einsum("ra,a...->r...", factor, made.movedim(mode, 0)).movedim(0, mode)
    return (made - tensor).square().sum().item()


@pytest.mark.parametrize(("modes", "ranks"), [((4, 5, 6), (2, 3, 2)), ((3, 2, 4, 5), (1, 2, 2, 4)), ((8, 7), (3, 3))])
def test_tucker_decomposition(modes, ranks):
    tensor = torch.randn(*modes, dtype=torch.double)
    discarded = []
    for mode, rank in enumerate(ranks):
        singular = np.linalg.svd(np.moveaxis(tensor.numpy(), mode, 0).reshape(modes[mode], -1), compute_uv=False)
        discarded.append((singular[rank:] ** 2).sum())
    hosvd = tucker_error(tensor, *tucker(tensor, ranks, sweeps=0))
    errors = [tucker_error(tensor, *tucker(tensor, ranks, sweeps=sweeps)) for sweeps in (1, 3, 10)]
    assert max(discarded) - 1e-9 <= errors[-1] <= errors[1] + 1e-9 <= errors[0] + 2e-9 <= hosvd + 3e-9
    assert hosvd <= sum(discarded) + 1e-9
    if len(modes) == 2:  # Eckart and Young
        assert errors[-1] == pytest.approx(discarded[0], rel=1e-9)
    assert tucker_error(tensor, *tucker(tensor, modes)) < 1e-20
    assert tucker_error(tensor, *tucker(tensor)) < 1e-20
    for loss in (0.01, 0.1, 0.5):
        assert tucker_error(tensor, *tucker(tensor, loss=loss)) <= loss * tensor.square().sum()


def test_tucker_fill_holds_inputs_before_outputs():
    weight = torch.randn(16, 24, dtype=torch.double)
    layer = make(TuckerLinear, (24, 16), ((2, 3, 4), (4, 4), (2, 3, 4, 4, 4))).double()
    layer.fill(weight)
    torch.testing.assert_close(densify(layer), weight, rtol=0, atol=1e-10)
    part = make(TuckerLinear, (24, 16), ((2, 3, 4), (4, 4), (2, 2, 3, 4, 3))).double()
    part.fill(weight)
    core, factors = tucker(weight.T.reshape(2, 3, 4, 4, 4), (2, 2, 3, 4, 3))
    error = (densify(part) - weight).square().sum().item()
    assert error == pytest.approx(tucker_error(weight.T.reshape(2, 3, 4, 4, 4), core, factors), rel=1e-9)


# -- fresh weights -----------------------------------------------------------------------------------------------------------


def assert_mean(values, expected, within=5.0, resolution=0.15):
    """The mean of independent values is `expected`, within so many standard errors, and these are small enough to tell."""
    values = np.asarray(values, dtype=np.float64) / expected
    error = values.std(ddof=1) / len(values) ** 0.5
    assert error < resolution
    assert abs(values.mean() - 1) < within * error


@every_setting
def test_fresh_weights_have_the_variance_asked_for(cls, size, arguments):
    layer = make(cls, size, arguments)
    squares = []
    for _ in range(600):
        layer.initialize_parameters()
        squares.append(densify(layer).detach().square().mean().item())
    assert_mean(squares, 2 / sum(size))
    assert not layer.bias.any()


def kinds(model, architecture):
    """Linear, by its name below the layer -> the mean square of the weight in each layer."""
    found = {}
    for component in ("ffn", "attention"):
        for stack, layer, name in architecture.linears(model.config, component):
            module = model.base_model.get_submodule(name)
            weight = densify(module) if isinstance(module, CLASSES) else module.weight
            kind = name.removeprefix(architecture.stacks[stack].layers.format(layer))
            found.setdefault(kind, []).append(weight.detach().square().mean().item())
    return found


@by_turns(
    pytest.mark.parametrize("init", ["backbone", "marian"]),
    pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES),
)
def test_fresh_variants_have_the_variance_of_their_linears(architecture, init):
    stacks = architecture.stacks.values()
    deep = architecture.tiny | {stack.depth: 24 // len(stacks) for stack in stacks}
    config = AutoConfig.for_model(architecture.model_type, **deep)
    both = {"components": ["ffn", "attention"]}
    task = architecture.tasks[0]

    def build(*applied):
        return make_variant(config, list(applied), task=task, init=init, seed=5)

    dense = {kind: np.mean(squares) for kind, squares in kinds(build(), architecture).items()}
    for kind, squares in kinds(build(methods.LowRank(rank=8, **both)), architecture).items():
        assert_mean(squares, dense[kind])
    for method in (methods.TensorTrain(rank=4, **both), methods.Tucker(rank=3, **both)):
        model = build(method)
        modules = [module for module in model.modules() if isinstance(module, CLASSES)]
        assert len(modules) == sum(map(len, kinds(model, architecture).values()))
        wanted = [2 / (module.in_features + module.out_features) for module in modules]
        for module, variance in zip(modules, wanted, strict=True):
            assert module.std**2 == pytest.approx(variance)
        squares = [densify(module).detach().square().mean().item() for module in modules]
        assert_mean(np.divide(squares, wanted), 1, resolution=0.2)  # of all together: a product of many has a long tail


def test_low_rank_follows_the_depth_scaling_of_gpt2():
    config = AutoConfig.for_model("gpt2", **ARCHITECTURES["gpt2"].tiny | {"n_layer": 8})
    model = make_variant(config, [methods.LowRank(rank=4)], task="causal-lm")
    stds = {name: np.mean([h.mlp.get_submodule(name).std for h in model.transformer.h]) for name in ("c_fc", "c_proj")}
    assert stds["c_fc"] == pytest.approx(0.02, rel=0.05)
    assert stds["c_proj"] == pytest.approx(0.02 / 16**0.5, rel=0.05)


# -- parameter counts of Khakhulin et al. ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "size", "modes", "ranks", "count"),
    [
        (TensorTrainLinear, (512, 2048), (N512, M2048), (1, 2, 2, 2, 2, 1), 416),
        (TensorTrainLinear, (2048, 512), (M2048, N512), (1, 2, 2, 2, 2, 1), 416),
        (TensorTrainLinear, (512, 2048), (N512, M2048), (1, 4, 4, 4, 4, 1), 1600),
        (TensorTrainLinear, (512, 2048), (N512, M2048), (1, 2, 4, 4, 2, 1), 1312),
        # The same ranks for n m = (8, 16, 16, 16, 8).
        (TensorTrainLinear, (512, 512), ((2, 4, 4, 4, 4), (4, 4, 4, 4, 2)), (1, 2, 4, 4, 2, 1), 544),
        (TuckerLinear, (512, 2048), (N512, M2048), (2,) * 10, 1112),
        (TuckerLinear, (512, 512), (N512, N512), (2,) * 10, 1104),
    ],
)
def test_parameters_of_a_matrix(cls, size, modes, ranks, count):
    layer = make(cls, size, (*modes, ranks), bias=False)
    assert sum(p.numel() for p in layer.parameters()) == count


# The source's body is pre-norm, with a norm after each stack; Marian has none there. Its linears have no bias when compressed;
# ours keep theirs: 2048 + 512 an FFN, 4 x 512 an attention.
FULL, FINAL_NORMS, FFN_BIASES, ATTENTION_BIASES = 64_231_918, 2 * 1024, 2048 + 512, 18 * 4 * 512
SHAPE = {"shape": (N512, M2048), "rank": 2}


def published_body(*applied):
    config = MarianConfig(
        vocab_size=18_777,
        decoder_vocab_size=10_222,
        d_model=512,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        encoder_layers=6,
        decoder_layers=6,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=1,
    )
    with torch.device("meta"):  # init="marian" trains the bias of the output, which the source counts
        return count_parameters(make_variant(config, list(applied), task="seq2seq-lm", init="marian")).total


def some(count):
    """`count` of the 12 layers, as many in the encoder as in the decoder."""
    return {stack: list(range(count // 2)) for stack in ("encoder", "decoder")}


@pytest.mark.parametrize(
    ("method", "total", "ratio", "biases"),
    [
        (methods.TensorTrain(**SHAPE), 39_045_358, 1.645, 12 * FFN_BIASES),
        (methods.TensorTrain(layers=some(10), **SHAPE), 43_243_118, 1.485, 10 * FFN_BIASES),
        (methods.TensorTrain(layers=some(6), **SHAPE), 51_638_638, 1.244, 6 * FFN_BIASES),
        (methods.TensorTrain(layers=some(2), **SHAPE), 60_034_158, 1.070, 2 * FFN_BIASES),
        (methods.Tucker(**SHAPE), 39_062_062, 1.644, 12 * FFN_BIASES),
        (
            methods.Tucker(components=["ffn", "attention"], **SHAPE),
            20_230_318,
            3.175,
            12 * FFN_BIASES + ATTENTION_BIASES,
        ),
    ],
    ids=["tt all", "tt 10", "tt 6", "tt 2", "tucker", "tucker with attention"],
)
def test_published_parameter_counts(method, total, ratio, biases):
    assert published_body() == FULL - FINAL_NORMS
    counted = published_body(method)
    assert counted == total - FINAL_NORMS + biases
    assert (published_body() + FINAL_NORMS) / (counted + FINAL_NORMS - biases) == pytest.approx(ratio, abs=0.001)


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


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made, and all shapes without their ones; those on meta left out."""

    def __init__(self):
        super().__init__()
        self.seen, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(tensor) and tensor.device.type != "meta":
                self.seen = max(self.seen, tensor.numel())
                self.shapes.add(tuple(sorted(n for n in tensor.shape if n > 1)))
        return out


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


# -- shapes ------------------------------------------------------------------------------------------------------------------


def test_balanced_factors():
    for number in (*range(2, 400), 512, 768, 1000, 1024, 2048, 3072, 4096, 11_008):
        for count in (2, 3, 4, 5):
            modes = balanced_modes(number, count)
            assert math.prod(modes) == number
            assert len(modes) == count
            assert modes == sorted(modes)
    assert balanced_modes(512, 5) == [2, 4, 4, 4, 4]
    assert balanced_modes(768, 4) == [4, 4, 6, 8]
    assert balanced_modes(2048, 4) == [4, 8, 8, 8]


@pytest.mark.parametrize(
    ("inputs", "outputs", "count"), [(512, 2048, 4), (16, 24, 2), (768, 3072, 5), (6, 4096, 2), (9, 9, 2)]
)
def test_factors_fit_both_dimensions(inputs, outputs, count):
    in_modes, out_modes = modes_of(inputs, outputs, None)
    assert (math.prod(in_modes), math.prod(out_modes)) == (inputs, outputs)
    assert len(in_modes) == len(out_modes) == mode_count(inputs, outputs) == count
    assert modes_of(outputs, inputs, None) == (out_modes, in_modes)
    assert min(*in_modes, *out_modes) > 1


@pytest.mark.parametrize(
    ("prime", "below", "above"), [(509, 504, 512), (17, 16, 18), (2, 4, 4), (3, 4, 4), (5, 4, 6), (97, 96, 98)]
)
def test_a_prime_is_refused(prime, below, above):
    message = f"^{prime} is prime: .* the nearest good sizes are {below} and {above}$"
    for inputs, outputs in ((prime, 64), (64, prime)):
        with pytest.raises(ValueError, match=message):
            modes_of(inputs, outputs, None)


def test_a_shape_serves_both_directions():
    shape = ((2, 8), (8, 4))
    assert modes_of(16, 32, shape) == ((2, 8), (8, 4))
    assert modes_of(32, 16, shape) == ((8, 4), (2, 8))
    assert modes_of(16, 16, shape) == ((2, 8), (2, 8))  # a square matrix: the list of its size, twice
    assert modes_of(16, 16, ((2, 8), (4, 4))) == ((2, 8), (4, 4))  # both fit: inputs, outputs
    for sizes, wrong in (((16, 33), "33 outputs"), ((15, 32), "15 inputs")):
        with pytest.raises(ValueError, match=rf"the products \[16, 32\], but the linear has {wrong}"):
            modes_of(*sizes, shape)


# -- bad input ---------------------------------------------------------------------------------------------------------------


def marian(**changes):
    torch.manual_seed(3)
    return MarianMTModel(MarianConfig(**ARCHITECTURES["marian"].tiny | changes)).eval()  # d_model 16, 24 neurons


FC1 = "encoder.layers.0.fc1"
BAD = {
    "rank 0": ({"method": "low_rank", "rank": 0}, r"LowRank\(rank=0\): must be an integer of at least 1"),
    "rank True": ({"method": "low_rank", "rank": True}, r"rank=True\): must be an integer"),
    "rank of text": ({"method": "low_rank", "rank": "4"}, r"rank='4'\): must be an integer"),
    "no rank": ({"method": "low_rank"}, r"low_rank.*rank"),
    "rank above full": ({"method": "low_rank", "rank": 17}, r"rank=17: must be in 1..16 for 16 inputs and 24 outputs"),
    "rank of a linear": (
        {"method": "low_rank", "rank": {FC1: 99}},
        rf"method 'low_rank', '{FC1}': rank=99: must be in 1..16",
    ),
    "no ranks": ({"method": "low_rank", "rank": {}}, r"LowRank\(rank={}\) names no linear"),
    "unknown linear": (
        {"method": "low_rank", "rank": {"encoder.layers.7.fc1": 2}},
        r"LowRank: no linear 'encoder.layers.7.fc1' in these components and layers; choose from \['encoder.layers.0.fc1'",
    ),
    "linear of another component": (
        {"method": "tucker", "ranks": {"encoder.layers.0.self_attn.q_proj": [2, 2, 2, 2]}},
        r"Tucker: no linear 'encoder.layers.0.self_attn.q_proj' in these components and layers",
    ),
    "linear of another layer": (
        {"method": "tensor_train", "ranks": {FC1: [1, 2, 1]}, "layers": {"decoder": [0]}},
        rf"TensorTrain: no linear '{FC1}' in these components and layers; choose from \['decoder.layers.0.fc1'",
    ),
    "tt rank 0": ({"method": "tensor_train", "rank": 0}, r"TensorTrain\(rank=0\): must be an integer of at least 1"),
    "tucker rank 0": ({"method": "tucker", "rank": 0}, r"Tucker\(rank=0\): must be an integer of at least 1"),
    "tt rank above full": (
        {"method": "tensor_train", "rank": 17},
        rf"method 'tensor_train', '{FC1}': rank=17: must be in 1..16, the largest full rank of \[1, 16, 1\]",
    ),
    "tucker rank above full": ({"method": "tucker", "rank": 7}, r"rank=7: must be in 1..6, the largest full rank of"),
    "tt ranks too many": (
        {"method": "tensor_train", "ranks": [1, 2, 2, 1]},
        r"ranks=\[1, 2, 2, 1\]: 2 cores need 3 ranks, the first and last 1",
    ),
    "tucker ranks too few": (
        {"method": "tucker", "ranks": [2, 2, 2]},
        r"ranks=\[2, 2, 2\]: the 4 modes \[4, 4, 4, 6\] need one rank each",
    ),
    "tt ranks above full": (
        {"method": "tensor_train", "ranks": [1, 17, 1]},
        r"ranks=\[1, 17, 1\]: rank 1 is 17, but must be in 1..16, its full rank",
    ),
    "tt ranks not from 1": (
        {"method": "tensor_train", "ranks": [2, 2, 1]},
        r"rank 0 is 2, but must be in 1..1, its full",
    ),
    "tt ranks that do not follow": (
        {"method": "tensor_train", "ranks": [1, 1, 13, 1, 1], "shape": [[2, 2, 2, 2], [2, 3, 2, 2]]},
        r"rank 2 is 13, but must be at most 6: the previous rank 1 times the modes 2 and 3",
    ),
    "tucker ranks above full": (
        {"method": "tucker", "ranks": [2, 5, 2, 2]},
        r"ranks=\[2, 5, 2, 2\]: rank 1 is 5, but must be in 1..4, its mode",
    ),
    "a rank of 0 in ranks": (
        {"method": "tucker", "ranks": [2, 0, 2, 2]},
        r"Tucker\(ranks\[1\]=0\): must be an integer",
    ),
    "ranks no list": ({"method": "tucker", "ranks": 3}, r"Tucker\(ranks=3\): must be a list of integers"),
    "ranks of a linear": (
        {"method": "tensor_train", "ranks": {FC1: [1, 2, 2, 1]}},
        rf"method 'tensor_train', '{FC1}': ranks=\[1, 2, 2, 1\]: 2 cores need 3 ranks",
    ),
    "ranks of no linear": ({"method": "tucker", "ranks": {}}, r"Tucker\(ranks={}\) names no linear"),
    "rank and ranks": (
        {"method": "tucker", "rank": 2, "ranks": [2, 2, 2, 2]},
        r"Tucker\(rank=2, ranks=\[.*\): give one",
    ),
    "neither": ({"method": "tensor_train"}, r"TensorTrain\(rank=None, ranks=None\): give one of them"),
    "wrong product": (
        {"method": "tensor_train", "rank": 2, "shape": [[4, 4], [5, 5]]},
        rf"'{FC1}': shape=\[\[4, 4\], \[5, 5\]\] has the products \[16, 25\], but the linear has 24 outputs",
    ),
    "shape of one": (
        {"method": "tucker", "rank": 2, "shape": [[4, 4]]},
        r"Tucker\(shape=\[\[4, 4\]\]\): must be two lists",
    ),
    "shape with 0": (
        {"method": "tucker", "rank": 2, "shape": [[4, 0], [4, 6]]},
        r"Tucker\(shape\[0\]\[1\]=0\): must be",
    ),
    "shape of unequal lengths": (
        {"method": "tensor_train", "rank": 2, "shape": [[4, 2, 2], [4, 6]]},
        r"a tensor train needs equally many modes of inputs and outputs, not \[4, 2, 2\] and \[4, 6\]",
    ),
    "endless shape": (
        {"method": "tensor_train", "rank": 2, "shape": [[1] * 40 + [16], [1] * 40 + [24]]},
        r"TensorTrain: shape has a list of 41 factors; the limit is 32",
    ),
    "component": (
        {"method": "low_rank", "rank": 2, "components": ["embeddings"]},
        r"LowRank\(components=\['embeddings'\]\): choose from \['ffn', 'attention'\]",
    ),
    "no component": (
        {"method": "low_rank", "rank": 2, "components": []},
        r"must be a list such as \['ffn', 'attention'\]",
    ),
    "execution": (
        {"method": "tucker", "rank": 2, "execution": "fast"},
        r"Tucker\(execution='fast'\): choose from \['auto', 'dense', 'factors'\]",
    ),
    "layer": ({"method": "tucker", "rank": 2, "layers": {"encoder": [2]}}, r"no layer 2 in stack 'encoder' of marian"),
    "stack": ({"method": "tucker", "rank": 2, "layers": {"middle": [0]}}, r"no stack 'middle' in marian; choose from"),
    "no layer": ({"method": "tucker", "rank": 2, "layers": {"encoder": []}}, r"Tucker\(layers=.*\) names no layer"),
    "unknown field": ({"method": "tucker", "size": 2}, r"unknown field 'size' of method 'tucker'; choose from"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_variant(marian(), [methods.LowRank(rank=2)]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bad", BAD)
def test_bad_settings_are_refused_in_one_line(bad, saved, tmp_path):
    data, message = BAD[bad]
    with pytest.raises(ValueError, match=message) as error:
        make_variant(marian(), [method_from_dict(data)])
    assert "\n" not in str(error.value)
    # The same from a config that was edited by hand, before the model is made: nothing but meta tensors.
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"methods": [data]}))
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with Largest() as spy, pytest.raises(ValueError, match=message) as error:
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    assert spy.seen <= 32 * 16  # the positions, which transformers computes


def test_a_damaged_config_of_a_large_model_allocates_nothing(saved, tmp_path):
    config = json.loads((saved / "config.json").read_text())
    config |= {"d_model": 4096, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192, "max_position_embeddings": 64}
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    for data in (
        {"method": "low_rank", "rank": 10**12},
        {"method": "tensor_train", "ranks": [1, 10**12, 1]},
        {"method": "tucker", "ranks": [10**12] * 12},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"methods": [data]}))
        with Largest() as spy, pytest.raises(ValueError, match=r"method .*rank.*"):
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert spy.seen <= 64 * 4096


def test_a_prime_width_is_refused():
    with pytest.raises(ValueError, match=rf"method 'tucker', '{FC1}': 23 is prime: .* are 21 and 24"):
        make_variant(marian(encoder_ffn_dim=23), [methods.Tucker(rank=2)])


FACTORIZED = [methods.LowRank(rank=2), methods.TensorTrain(rank=2), methods.Tucker(rank=2)]


CHANGED_TWICE = [  # all but LowRank twice: factors may get a smaller rank
    (first, second)
    for first in [*FACTORIZED, methods.MagnitudePruning(sparsity=0.5)]
    for second in FACTORIZED
    if not first.name == second.name == "low_rank"
]


@pytest.mark.parametrize(("first", "second"), CHANGED_TWICE, ids=lambda m: m.name)
def test_a_linear_is_changed_once(first, second):
    message = rf"^method '{second.name}': '{FC1}' is a \w+Linear already, which another method made; .*$"
    model = marian()
    variant = make_variant(model, [first])
    with pytest.raises(ValueError, match=message):
        make_variant(model, [first, second])
    with pytest.raises(ValueError, match=message):
        make_variant(variant, [second])
    with pytest.raises(ValueError, match=message):
        make_variant(model.config, [first, second], task="seq2seq-lm")
    if variant.finalizable:
        variant.finalize()
        with pytest.raises(ValueError, match="is a SparseLinear already"):
            make_variant(variant, [second])
    make_variant(model, [methods.LowRank(rank=2, components=["attention"]), second])  # apart from each other


@pytest.mark.parametrize("method", FACTORIZED, ids=lambda m: m.name)
def test_factors_cannot_be_made_from_a_seed(method):
    freeze = methods.Freeze(ffn="random")
    message = r"^Freeze\(ffn='random'\): '.*fc1' is a \w+Linear, and only the matrices of plain linears can be drawn from a seed"
    for order in ([method, freeze], [freeze, method]):
        with pytest.raises(ValueError, match=message) as error:
            make_variant(marian(), order)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=message):
            make_variant(make_variant(marian(), order[:1]), order[1:])
        with pytest.raises(ValueError, match=message):
            make_variant(marian().config, order, task="seq2seq-lm")
    apart = methods.Freeze(ffn="random", layers={"decoder": [0, 1]})
    encoder = method_from_dict({"method": method.name, "rank": 2, "layers": {"encoder": [0, 1]}})
    assert len(make_variant(marian(), [apart, encoder]).seeded_tensors) == 8


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (64, 96)])
def test_the_randomized_solver_is_close_to_the_nearest_of_its_rank(outputs, inputs):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs) @ torch.diag(torch.arange(1, inputs + 1) ** -1.0)
    state = torch.get_rng_state()
    linear = nn.Linear(inputs, outputs)
    errors = {}
    for solver in ("exact", "randomized"):
        torch.set_rng_state(state)
        low_rank = LowRankLinear(linear, 8, std=0.1, solver=solver)
        drawn = torch.get_rng_state()
        low_rank.fill(weight)
        assert torch.equal(torch.get_rng_state(), drawn)
        errors[solver] = float((low_rank.dense_weight() - weight).norm())
        again = LowRankLinear(linear, 8, std=0.1, solver=solver)
        again.fill(weight)
        assert torch.equal(again.dense_weight(), low_rank.dense_weight())
    least = float(torch.linalg.svdvals(weight)[8:].norm())
    assert errors["exact"] == pytest.approx(least, rel=1e-4)
    assert least * 0.9999 <= errors["randomized"] <= least * 1.01
