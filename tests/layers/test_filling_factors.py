"""The values of factors: decompositions against singular values, fresh variances, and published parameter counts."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.factors import CLASSES, M2048, N512, densify, every_setting, make
from support.parametrize import by_turns
from torch import nn
from transformers import AutoConfig, MarianConfig

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import LowRankLinear, TensorTrainLinear, TuckerLinear
from hf_freeze.layers.tensor_train import full_ranks, tt_svd
from hf_freeze.layers.tucker import tucker

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
