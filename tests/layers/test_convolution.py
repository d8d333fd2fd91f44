"""Convolutions over time against loops by their formulas, and what they, long-short attention and DExTra units compile to."""

import pytest
import torch
from support.formulas import by_formulas
from support.models import perturbed
from torch.nn import functional
from transformers import DynamicCache, MarianConfig, StaticCache
from transformers.models.marian.modeling_marian import MarianAttention

from hf_freeze.layers import convolution
from hf_freeze.layers.convolution import KINDS, KernelConvolution, convolve
from hf_freeze.layers.dextra import DExTraUnit, dextra_sizes
from hf_freeze.layers.long_short import LongShortAttention

every_kind = pytest.mark.parametrize("kind", KINDS)
where = pytest.mark.parametrize("causal", [True, False], ids=["causal", "centred"])
B, C = 2, 6


def convolved(x, kernels):
    """Number by number."""
    made = torch.zeros(x.shape[0], kernels.shape[1], x.shape[2], dtype=x.dtype)
    size = x.shape[2] // kernels.shape[2]
    for t in range(kernels.shape[1]):
        for c in range(x.shape[2]):
            for k in range(kernels.shape[3]):
                made[:, t, c] += kernels[:, t, c // size, k] * x[:, t + k, c]
    return made


def a_convolution(kind="dynamic", heads=2, taps=5, causal=True, dropout=0.0, channels=C):
    """In double precision, with weights that make kernels far from even."""
    made = KernelConvolution(channels, heads, taps, kind=kind, causal=causal, dropout=dropout, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made.eval()


def run(module, x, mask=None):
    return module(module.inputs(x, mask))


# -- the product with band matrices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("taps", [1, 2, 5, 9])
def test_convolve_is_a_sum_over_taps(heads, taps, monkeypatch):
    """Tokens below, equal to, above and not a multiple of the tile, and fewer than taps."""
    for tile, lengths in ((1, (1, 3)), (3, (1, 2, 3, 4, 6, 8)), (4, (3, 4, 5, 9)), (32, (31, 32, 33, 70))):
        monkeypatch.setattr(convolution, "_TILE", tile)
        for tokens in lengths if heads == 2 or tile < 32 else ():
            x = torch.randn(B, tokens + taps - 1, C, dtype=torch.float64)
            kernels = torch.randn(B, tokens, heads, taps, dtype=torch.float64)
            torch.testing.assert_close(convolve(x, kernels), convolved(x, kernels))


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_gradients_are_those_of_the_sum(tokens, monkeypatch):
    monkeypatch.setattr(convolution, "_TILE", 2)
    x = torch.randn(B, tokens + 2, 4, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(B, tokens, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(convolve, (x, kernels))
    scale = torch.randn(B, tokens, 4, dtype=torch.float64)
    found = torch.autograd.grad((convolve(x, kernels) * scale).sum(), (x, kernels))
    wanted = torch.autograd.grad((convolved(x, kernels) * scale).sum(), (x, kernels))
    torch.testing.assert_close(found, wanted)


# -- the module --------------------------------------------------------------------------------------------------------------


@every_kind
@where
@pytest.mark.parametrize(("heads", "taps"), [(1, 3), (2, 5), (3, 1), (6, 7)])
def test_forward_and_gradients_are_the_formulas(kind, causal, heads, taps):
    module = a_convolution(kind, heads, taps, causal)
    for tokens in (1, 4, 9):
        x = torch.randn(B, tokens, C, dtype=torch.float64)
        mask = torch.rand(B, tokens) < 0.7
        for given in (None, mask):
            expected, found = by_formulas(module, x, given), run(module, x, given)
            torch.testing.assert_close(found, expected)
        scale = torch.randn_like(expected)
        parameters = list(module.parameters())
        wanted = torch.autograd.grad((expected * scale).sum(), parameters)
        torch.testing.assert_close(torch.autograd.grad((found * scale).sum(), parameters), wanted)


@every_kind
def test_what_is_padding_is_zero_and_moves_nothing(kind):
    module = a_convolution(kind, causal=False)
    x, mask = torch.randn(B, 6, C, dtype=torch.float64), torch.ones(B, 6, dtype=torch.bool)
    mask[0, 4:], mask[1, :2] = False, False
    other = torch.where(mask[..., None], x, torch.randn_like(x))
    assert not module.inputs(x, mask)[~mask].any()
    assert torch.equal(run(module, x, mask), run(module, other, mask))
    assert not torch.equal(run(module, x), run(module, other))
    for row, tokens in enumerate(mask):
        alone = run(module, x[row : row + 1, tokens])
        torch.testing.assert_close(run(module, x, mask)[row, tokens], alone[0])


@every_kind
@pytest.mark.parametrize("taps", [1, 3, 7])
def test_it_goes_on_from_what_was_before(kind, taps):
    """From the inputs of the K - 1 tokens before, zero before the first, for every way to cut a sentence in two."""
    module = a_convolution(kind, taps=taps)
    inputs = module.inputs(torch.randn(B, 5, C, dtype=torch.float64), None)
    whole, padded = module(inputs), functional.pad(inputs, (0, 0, taps - 1, 0))
    for cut in range(5):
        torch.testing.assert_close(module(inputs[:, cut:], padded[:, cut : cut + taps - 1]), whole[:, cut:])


@every_kind
def test_training_leaves_out_taps(kind, monkeypatch):
    seen = []
    monkeypatch.setattr(convolution, "convolve", lambda x, kernels: seen.append(kernels) or convolve(x, kernels))
    module, x = a_convolution(kind, taps=7, dropout=0.25), torch.randn(4, 50, C, dtype=torch.float64)
    expected = run(module, x)
    torch.testing.assert_close(expected, by_formulas(module, x))
    run(module.train(), x)
    whole, dropped = seen
    torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole[..., 0]))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    assert not kept.all()
    if kind == "dynamic":  # static kernels are dropped once for all tokens
        assert kept.double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(run(module.eval(), x), expected)
    without = a_convolution(kind).train()
    assert torch.equal(run(without, x), run(without.eval(), x))


@pytest.mark.parametrize(("channels", "heads", "taps"), [(6, 2, 5), (100, 4, 31)])
def test_numbers_of_parameters(channels, heads, taps):
    def count(kind):
        made = KernelConvolution(channels, heads, taps, kind=kind, causal=True, dropout=0.0, device="meta")
        return sum(parameter.numel() for parameter in made.parameters())

    assert count("dynamic") == 3 * channels**2 + 3 * channels + channels * heads * taps
    assert count("lightweight") == 2 * channels**2 + 2 * channels + heads * taps


def test_static_kernels_are_drawn_after_glorot():
    kernel = KernelConvolution(64, 64, 127, kind="lightweight", causal=True, dropout=0.0).kernel
    bound = (6 / (64 + 127)) ** 0.5
    assert kernel.shape == (64, 127)
    assert kernel.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert kernel.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


# -- compiling ---------------------------------------------------------------------------------------------------------------


def compiled(module):
    """Fails where the graph would break."""
    torch._dynamo.reset()
    return torch.compile(module, backend="eager", fullgraph=True)


@pytest.mark.parametrize(("kind", "causal"), [("dynamic", True), ("lightweight", False)])
def test_a_convolution_is_one_graph(kind, causal):
    module = a_convolution(kind, causal=causal)
    whole = compiled(lambda x, mask: run(module, x, mask))
    for tokens in (40, 1):
        x, mask = torch.randn(B, tokens, C, dtype=torch.float64), torch.rand(B, tokens) < 0.7
        torch.testing.assert_close(whole(x, mask), run(module, x, mask))


def a_long_short(heads=2):
    attention = MarianAttention(C, heads, config=MarianConfig(attn_implementation="sdpa"), is_decoder=True, layer_idx=0)
    conv = KernelConvolution(C, 2, 5, kind="dynamic", causal=True, dropout=0.0)
    return perturbed(LongShortAttention(attention, conv, C // heads)).eval()


@torch.no_grad()
def test_long_short_attention_is_one_graph():
    """Without a cache, and step by step with each."""
    module = a_long_short()
    whole = compiled(module)
    for tokens in (7, 1):
        x = torch.randn(B, tokens, 2 * C)
        mask = torch.ones(B, 1, tokens, tokens, dtype=torch.bool).tril()
        torch.testing.assert_close(whole(x, attention_mask=mask)[0], module(x, attention_mask=mask)[0])
    config = MarianConfig(d_model=2 * C, decoder_layers=1, num_hidden_layers=1, decoder_attention_heads=2)
    x = torch.randn(B, 6, 2 * C)
    for made in (lambda: DynamicCache(config=config), lambda: StaticCache(config=config, max_cache_len=9)):
        caches = [made(), made()]
        length = 9 if isinstance(caches[0], StaticCache) else None
        for start, end in ((0, 4), (4, 5), (5, 6)):
            seen = torch.arange(length or end) <= torch.arange(start, end)[:, None]
            given = {"attention_mask": seen.expand(B, 1, -1, -1)}
            step = module if start == 0 else whole  # a static cache is made in its first, uncompiled step
            results = [
                each(x[:, start:end], past_key_values=cache, **given)[0]
                for each, cache in zip((module, step), caches, strict=True)
            ]
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("spec", ["released", "paper"])
def test_a_unit_is_one_graph(spec):
    sizes = dextra_sizes(16, 8, depth=4, multiplier=2.0, groups=4, spec=spec, projected=8)
    unit = perturbed(DExTraUnit(sizes, 0.0)).eval()
    whole = compiled(unit)
    for shape in ((B, 40, 16), (B, 1, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(whole(x), unit(x))
