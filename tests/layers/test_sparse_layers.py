"""Masks, sparse storage and variational dropout against dense weights, bytes counted by hand and numerical integration."""

import copy
import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
)
from transformers.pytorch_utils import Conv1D

from hf_freeze import make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers import MaskedConv1D, MaskedLinear, SparseLinear, VariationalConv1D, VariationalLinear
from hf_freeze.layers.bits import pack, packed_size, unpack
from hf_freeze.layers.masked import Masked, prune_smallest
from hf_freeze.layers.variational import Variational, negative_kl

both_kinds = pytest.mark.parametrize("dense", [nn.Linear, Conv1D], ids=["linear", "conv1d"])


def linear_of(dense, inputs, outputs):
    """With a bias that is not zero."""
    made = Conv1D(outputs, inputs) if dense is Conv1D else nn.Linear(inputs, outputs)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def masked_of(linear, kept=None):
    """With the linear's weights; `kept` in the shape of its weight."""
    made = Masked.from_linear(linear)
    made.load_state_dict(linear.state_dict() | {"mask": made.mask})
    if kept is not None:
        made.mask.copy_(pack(kept))
    return made.eval()


def variational_of(linear, log_sigma, threshold=3.0):
    made = Variational.from_linear(linear, threshold=threshold, log_sigma=-5.0)
    made.load_state_dict(linear.state_dict() | {"log_sigma": log_sigma})
    return made


def matrix(linear, tensor=None):
    """(O, I): the weight, or another tensor in its shape."""
    tensor = linear.weight if tensor is None else tensor
    return tensor.T if isinstance(linear, Conv1D) else tensor


# -- bits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [0, 1, 7, 8, 9, 64, 1001])
def test_bits(entries):
    for mask in (
        torch.rand(entries) < 0.5,
        torch.ones(entries, dtype=torch.bool),
        torch.zeros(entries, dtype=torch.bool),
    ):
        packed = pack(mask)
        assert packed.numpy().tobytes() == np.packbits(mask.numpy(), bitorder="little").tobytes()
        assert packed.shape == (packed_size(entries),) == (-(-entries // 8),)
        assert torch.equal(unpack(packed, entries), mask)
    square = torch.rand(5, 7) < 0.3
    assert torch.equal(unpack(pack(square), 35).view(5, 7), square)
    assert torch.equal(unpack(pack(square.T), 35).view(7, 5), square.T)


# -- masks -------------------------------------------------------------------------------------------------------------------


@both_kinds
def test_a_masked_linear_is_the_linear_with_zeros(dense):
    linear = linear_of(dense, 12, 7)
    kept = torch.rand(linear.weight.shape) < 0.4
    layer = masked_of(linear, kept)
    assert type(layer) is (MaskedConv1D if dense is Conv1D else MaskedLinear)
    assert layer.zeros() == int((~kept).sum())
    x = torch.randn(2, 5, 12)
    expected = functional.linear(x, matrix(linear, linear.weight * kept), linear.bias)
    for y in (layer(x), layer.requires_grad_(False)(x), layer.sparse()(x)):
        torch.testing.assert_close(y, expected)
    layer.requires_grad_()
    layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad != 0, kept)
    with torch.no_grad():
        layer.weight[~kept] = torch.inf  # whatever an optimiser does there
    torch.testing.assert_close(layer(x), expected)


def masks_of(modules):
    return torch.cat([m.kept_entries().flatten() for m in modules])


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("ties", [False, True])
@both_kinds
def test_pruning_masks_exactly_the_smallest(dense, ties, scope):
    modules = [masked_of(linear_of(dense, *size)) for size in ((10, 7), (9, 11), (4, 4))]
    with torch.no_grad():
        for scale, module in enumerate(modules, 1):
            module.weight.mul_(scale)
            if ties:
                module.weight.copy_(module.weight.round())
    before = [module.weight.clone() for module in modules]
    groups = [modules] if scope == "global" else [[module] for module in modules]
    kept = masks_of(modules)
    for sparsity in (0.0, 0.1, 0.5, 0.5, 0.3, 0.77, 0.999):
        prune_smallest(modules, sparsity, scope)
        following = masks_of(modules)
        assert not (following & ~kept).any()  # what is masked stays masked
        kept, reached = following, max(sparsity, 0.5) if sparsity == 0.3 else sparsity
        for group in groups:
            sizes = torch.cat([m.weight.abs().flatten() for m in group])
            left = masks_of(group)
            assert int((~left).sum()) == sum(m.zeros() for m in group) == round(reached * len(sizes))
            if left.any() and not left.all():
                assert sizes[~left].max() <= sizes[left].min()
    for module, weight in zip(modules, before, strict=True):
        assert torch.equal(module.weight, weight)


def test_weights_that_grow_back_do_not_return():
    module = masked_of(linear_of(nn.Linear, 8, 8))
    prune_smallest([module], 0.5, "layer")
    kept = module.kept_entries()
    with torch.no_grad():
        module.weight[~kept] = 100
    prune_smallest([module], 0.75, "layer")
    assert module.zeros() == 48
    assert not (module.kept_entries() & ~kept).any()


# -- sparse storage ----------------------------------------------------------------------------------------------------------


def sparse_of(linear, kept):
    layer = SparseLinear.of(masked_of(linear, kept), kept)
    stored = sum(t.numel() * t.element_size() for n, t in layer.state_dict().items() if n not in ("values", "bias"))
    return layer, stored


@pytest.mark.parametrize("nonzeros", [0, 1, 40, 400, 1599, 1600])
@both_kinds
def test_sparse_is_dense(dense, nonzeros):
    linear = linear_of(dense, 80, 20)
    kept = torch.zeros(1600, dtype=torch.bool)
    kept[torch.randperm(1600)[:nonzeros]] = True
    kept = kept.view(linear.weight.shape)
    layer, stored = sparse_of(linear, kept)
    as_columns, as_bits = 2 * nonzeros + 4 * 20, 1600 // 8
    assert stored == min(as_columns, as_bits)
    assert set(layer.state_dict()) == {"values", "bias"} | ({"columns", "counts"} if as_columns < as_bits else {"mask"})
    reference = copy.deepcopy(linear)
    with torch.no_grad():
        reference.weight[~kept] = 0
    assert torch.equal(layer.dense_weight(), matrix(reference))
    assert torch.equal(layer.weight, matrix(reference))
    assert torch.equal(layer.values, matrix(reference)[matrix(reference, kept)])  # row by row of (O, I)
    assert torch.equal(layer.positions(), matrix(reference, kept).flatten().nonzero()[:, 0])
    x = torch.randn(2, 3, 80)
    torch.testing.assert_close(layer(x), reference(x))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), reference(x))
        torch.testing.assert_close(layer(x[:0]), reference(x[:0]))
    layer(x).sin().sum().backward()
    reference(x).sin().sum().backward()
    expected = matrix(reference, reference.weight.grad)[matrix(reference, kept)]
    torch.testing.assert_close(layer.values.grad, expected)
    torch.testing.assert_close(layer.bias.grad, reference.bias.grad)
    fresh = SparseLinear(linear, nonzeros)  # of these shapes, before a checkpoint fills it
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.dense_weight(), layer.dense_weight())


@pytest.mark.parametrize(("inputs", "width"), [(32768, 2), (32769, 4)])
def test_the_last_column_fits(inputs, width):
    linear = nn.Linear(inputs, 3)
    kept = torch.zeros(3, inputs, dtype=torch.bool)
    kept[0, 0] = kept[0, -1] = kept[2, -1] = kept[2, 5] = True
    layer, stored = sparse_of(linear, kept)
    assert stored == 4 * width + 3 * 4  # bytes of a column number, and of a row's count
    columns, counts = (layer.get_buffer(name).numpy().tobytes() for name in ("columns", "counts"))
    assert np.frombuffer(columns, f"<i{width}").tolist() == [0, inputs - 1, 5, inputs - 1]
    assert np.frombuffer(counts, "<i4").tolist() == [2, 0, 2]
    assert torch.equal(layer.dense_weight() != 0, kept)
    assert torch.equal(layer.dense_weight()[kept], linear.weight[kept])


@pytest.mark.parametrize("nonzeros", [-1, 65])
def test_a_number_of_nonzeros_that_does_not_fit(nonzeros):
    with pytest.raises(ValueError, match=rf"nonzeros={nonzeros}: must be in 0..64 for 16 inputs, 4 outputs"):
        SparseLinear(nn.Linear(16, 4), nonzeros)


def test_sparse_on_meta():
    with torch.device("meta"):
        layer = SparseLinear(nn.Linear(64, 64), 100)
        assert layer(torch.randn(3, 64)).shape == (3, 64)


def backbone(model_type):
    """64 inputs are wide enough for column numbers to be smaller than bits."""
    torch.manual_seed(3)
    tiny = ARCHITECTURES[model_type].tiny
    if model_type == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**tiny | {"n_embd": 64, "n_inner": 128})).eval()
    wide = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    return MarianMTModel(MarianConfig(**tiny | wide)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("model_type", ["marian", "gpt2"])
def test_sparse_models_come_back_bit_by_bit(model_type, sparsity, dtype, tmp_path):
    auto = AutoModelForSeq2SeqLM if model_type == "marian" else AutoModelForCausalLM
    native = backbone(model_type).to(dtype)
    variant = make_variant(native, [methods.MagnitudePruning(sparsity=sparsity)])
    expected = {name: matrix(m, m.masked_weight()) for name, m in variant.named_modules() if isinstance(m, Masked)}
    variant.finalize()
    variant.save_pretrained(tmp_path)
    loaded, info = auto.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, weight in expected.items():
        module = loaded.get_submodule(name)
        assert type(module) is SparseLinear
        assert module.values.dtype == dtype
        assert torch.equal(module.dense_weight(), weight)
    state = loaded.state_dict()
    for name, tensor in variant.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name])
    # By hand: each linear stores its non-zeros, and bits or (2 bytes a non-zero, 4 a row), whichever is smaller.
    saved = stored_bytes(native) - stored_bytes(variant)
    by_hand = 0
    for weight in expected.values():
        entries, nonzeros = weight.numel(), int((weight != 0).sum())
        by_hand += (entries - nonzeros) * dtype.itemsize - min(entries // 8, 2 * nonzeros + 4 * weight.shape[0])
    assert saved == by_hand
    forms = {frozenset(m._buffers) for m in loaded.modules() if isinstance(m, SparseLinear)}
    assert forms == {frozenset({"columns", "counts"}) if sparsity == 0.99 else frozenset({"mask"})}
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    assert (tmp_path / "model.safetensors").stat().st_size - header == stored_bytes(variant)


@pytest.mark.parametrize("kind", ["masked", "sparse", "variational"])
@both_kinds
def test_what_inference_keeps_goes_with_a_change(kind, dense):
    linear = linear_of(dense, 12, 7)
    layer = masked_of(linear, torch.rand(linear.weight.shape) < 0.4)
    if kind == "sparse":
        layer = layer.sparse()
    elif kind == "variational":
        layer = variational_of(linear, torch.randn(linear.weight.shape)).eval()
    x, names = torch.randn(3, 12), set(layer.state_dict())
    value = layer.values if kind == "sparse" else layer.weight

    def check():
        with torch.no_grad():
            torch.testing.assert_close(layer(x), functional.linear(x, layer.dense_weight(), layer.bias))
        assert layer._cache

    with torch.inference_mode():
        layer(x)
    check()
    with torch.no_grad():
        value.mul_(2)
    check()
    layer(x).sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.1).step()
    check()
    if kind == "masked":
        layer.mask.copy_(pack(torch.rand(linear.weight.shape) < 0.4))
        check()
    if kind == "variational":
        with torch.no_grad():
            layer.log_sigma.add_(0.5)
        check()
    for assign in (False, True):
        layer.load_state_dict(
            {n: 1.5 * t if t.is_floating_point() else t for n, t in layer.state_dict().items()}, assign=assign
        )
        check()
    assert copy.deepcopy(layer)._cache is None
    assert set(layer.state_dict()) == names
    layer.train().eval()
    assert layer._cache is None


# -- variational dropout -----------------------------------------------------------------------------------------------------


def exact_negative_kl(log_alpha):
    """½ log α - E log|1 + √α ε| + E log|ε|, which is 0 for α → ∞: the divergence of N(θ, αθ²) to the log-uniform prior."""
    root = np.exp(log_alpha / 2)
    singular = -1 / root
    cuts = sorted({-12.0, 12.0, *(c for c in (singular, singular - 0.1, singular + 0.1, -1.0, 1.0) if abs(c) < 12)})

    total = sum(
        quad(lambda e: np.log(abs(1 + root * e)) * np.exp(-e * e / 2) / np.sqrt(2 * np.pi), a, b, limit=200)[0]
        for a, b in itertools.pairwise(cuts)
    )
    mean_of_log = -(np.euler_gamma + np.log(2)) / 2
    return log_alpha / 2 - total + mean_of_log


def test_the_divergence_is_that_of_numerical_integration():
    grid = np.linspace(-8, 8, 65)
    exact = np.array([exact_negative_kl(each) for each in grid])
    found = negative_kl(torch.tensor(grid)).numpy()
    assert 0.005 < abs(found - exact).max() < 0.0095  # 0.00937, at -3.5: how good equation 14 is
    assert abs(exact_negative_kl(20.0)) < 1e-3
    assert abs(negative_kl(torch.tensor([20.0, 50.0]))).max() < 1e-6
    assert (np.diff(exact) > 0).all()


@both_kinds
def test_the_divergence_of_a_layer(dense):
    linear = linear_of(dense, 6, 5)
    with torch.no_grad():
        linear.weight[0, 0] = 0  # log α is clipped
    layer = variational_of(linear, torch.randn(linear.weight.shape) * 2)
    theta, log_sigma = linear.weight.detach().double(), layer.log_sigma.detach().double()
    log_alpha = (2 * log_sigma - 2 * (theta.abs() + 1e-16).log()).clamp(-10, 10)
    expected = -negative_kl(log_alpha).sum().item()
    assert layer.kl().item() == pytest.approx(expected, rel=1e-5)
    layer.kl_weight = 0.25
    assert layer.kl().item() == pytest.approx(expected / 4, rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.kl().item() == pytest.approx(expected / 4, rel=1e-5)
    layer.kl().backward()
    found = layer.log_sigma.grad.double()
    step = 1e-5

    def total(change):
        log_alpha = (2 * (log_sigma + change) - 2 * (theta.abs() + 1e-16).log()).clamp(-10, 10)
        return -0.25 * negative_kl(log_alpha)

    torch.testing.assert_close(found, (total(step) - total(-step)) / (2 * step), rtol=1e-3, atol=1e-4)


@both_kinds
def test_training_draws_outputs_of_the_right_mean_and_variance(dense):
    linear = linear_of(dense, 6, 4)
    layer = variational_of(linear, torch.randn(linear.weight.shape) - 1).train()
    assert type(layer) is (VariationalConv1D if dense is Conv1D else VariationalLinear)
    x, draws = torch.randn(2, 3, 6), 20_000
    theta, sigma = matrix(linear).double(), matrix(linear, layer.log_sigma).double().exp()
    mean = (x.double() @ theta.T + linear.bias).detach().flatten()
    variance = (x.double().square() @ sigma.square().T + 1e-8).detach().flatten()
    with torch.no_grad():
        drawn = layer(x.expand(draws, 2, 3, 6)).double().flatten(1)
    assert (drawn.mean(0) - mean).abs().lt(5 * (variance / draws).sqrt()).all()
    assert (drawn.var(0) - variance).abs().lt(5 * variance * (2 / draws) ** 0.5).all()
    correlation = torch.corrcoef(drawn.T) - torch.eye(len(mean), dtype=torch.double)
    assert correlation.abs().max() < 5.5 / draws**0.5  # every output of every token has its own noise


@both_kinds
def test_eval_mode_drops_what_is_noise(dense):
    linear = linear_of(dense, 9, 8)
    layer = variational_of(linear, torch.randn(linear.weight.shape), threshold=0.5).eval()
    alpha = (
        np.exp(layer.log_sigma.detach().numpy().astype(float)) ** 2 / linear.weight.detach().numpy().astype(float) ** 2
    )
    kept = torch.from_numpy(np.log(alpha) < 0.5)
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(layer.kept_entries(), kept)
    x = torch.randn(3, 9)
    expected = functional.linear(x, matrix(linear, linear.weight * kept), linear.bias)
    for made in (layer, layer.sparse()):
        torch.testing.assert_close(made(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(made(x), expected)
            torch.testing.assert_close(made(x), expected)
    assert layer.sparse().nonzeros == int(kept.sum())
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad != 0, kept)
    with torch.no_grad():  # the threshold itself is dropped
        layer.weight.fill_(1.0)
        layer.log_sigma.fill_(1.5)
        layer.threshold = 3.0
    assert not layer.kept_entries().any()


@both_kinds
def test_gradients_under_fixed_noise_are_finite_differences(dense):
    linear = linear_of(dense, 5, 4)
    layer = variational_of(linear, torch.randn(linear.weight.shape) * 0.3).double().train()
    names, values = zip(*layer.named_parameters(), strict=True)
    assert set(names) == {"weight", "bias", "log_sigma"}
    x = torch.randn(3, 5, dtype=torch.double, requires_grad=True)

    def forward(x, *values):
        torch.manual_seed(0)
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(forward, (x, *values))
    assert not torch.equal(layer(x), layer(x))
