"""Embeddings by bands: against dense tables, from trained ones, what is stored, what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from support.embeddings import (
    BACKBONES,
    CUTOFFS,
    WIDTHS,
    H,
    V,
    adaptive,
    backbone,
    bands_of,
    bert,
    check_rows,
    edges,
    every_backbone,
    logits,
    no_dropout,
    trained,
    wide_batch,
    with_labels,
)
from support.generation import generation_problems
from support.models import outputs
from support.training import training_step
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, BertForMaskedLM

from hf_freeze import count_parameters, make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers import AdaptiveInputEmbedding

every_output = pytest.mark.parametrize("output", ["adaptive", "dense"])


# -- tables ------------------------------------------------------------------------------------------------------------------


def filled(padding=None):
    torch.manual_seed(0)
    layer = AdaptiveInputEmbedding(nn.Embedding(V, H, padding), CUTOFFS, WIDTHS)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def by_rows(layer, ids):
    """Each token by itself."""
    found = []
    for token in ids.flatten().tolist():
        band = next(b for b, (start, end) in zip(layer.bands, edges(), strict=True) if start <= token < end)
        found.append(band.weight[token - max(c for c in (0, *CUTOFFS) if c <= token)] @ band.projection)
    return torch.stack(found).view(*ids.shape, H)


@pytest.mark.parametrize("shape", [(50,), (3, 20), (1,)])
def test_look_ups_are_those_of_each_row(shape):
    layer, ids = filled(), torch.randint(V, shape)
    expected = by_rows(layer, ids)
    torch.testing.assert_close(layer(ids), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(functional.embedding(ids, layer.dense_weight()), expected, rtol=1e-5, atol=1e-6)
    parameters = list(layer.parameters())
    weights = torch.randn(*shape, H)
    wanted = torch.autograd.grad((by_rows(layer, ids) * weights).sum(), parameters, allow_unused=True)
    for found in (layer(ids), layer._summed(ids.flatten()).view(*shape, H)):  # as on a CPU, as elsewhere
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad((found * weights).sum(), parameters)
        for gradient, each in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if each is None else each)


@pytest.mark.parametrize("path", [AdaptiveInputEmbedding.forward, AdaptiveInputEmbedding._summed])
@pytest.mark.parametrize("padding", [3, 7, 39])
def test_a_padding_row_gets_no_gradient_in_any_band(padding, path):
    layer = filled(padding)
    assert layer.dense_padding_idx == padding
    path(layer, torch.arange(V)).square().sum().backward()
    moved = torch.cat([band.weight.grad.abs().sum(1) > 0 for band in layer.bands])
    assert moved.tolist() == [token != padding for token in range(V)]


@pytest.mark.parametrize("path", [AdaptiveInputEmbedding.forward, AdaptiveInputEmbedding._summed])
@pytest.mark.parametrize("token", [-1, V])
def test_what_is_no_token_is_an_error(token, path):
    with pytest.raises(IndexError):
        path(filled(), torch.tensor([token]))


def test_look_ups_keep_the_precision_of_the_table_under_autocast():
    layer, ids = filled(), torch.arange(V)
    with torch.autocast("cpu", torch.bfloat16):
        found = [layer(ids), layer._summed(ids)]
    for each in found:
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, layer(ids), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("init", ["backbone", "marian"])
@pytest.mark.parametrize("padding", [0, 1999])
def test_fresh_rows_have_the_variance_of_the_dense_table(init, padding):
    sizes = {"vocab_size": 2000, "decoder_vocab_size": 2000, "d_model": 256, "pad_token_id": padding}
    config = AutoConfig.for_model("marian", **ARCHITECTURES["marian"].tiny | sizes)
    dense = make_variant(config, [], task="seq2seq-lm", init=init)
    method = methods.AdaptiveEmbedding(cutoffs=[500, 1000])
    model = make_variant(config, [method], task="seq2seq-lm", init=init)
    rows = model.model.shared.dense_weight()
    for start, end in ((0, 500), (500, 1000), (1000, 2000)):
        assert rows[start:end].std().item() == pytest.approx(dense.model.shared.weight.std().item(), rel=0.1)
    assert not rows[padding].any() or init == "marian"
    assert model.lm_head.to_tails.weight.std() > 0


# -- the output: dense -------------------------------------------------------------------------------------------------------


def dense_weights(native, variant, name):
    """Those of the native model that the variant stands for, as differentiable functions of its own."""
    weights = {n: variant.get_parameter(n) for n, p in native.named_parameters() if n not in bands_of(variant, name)}
    for own in BACKBONES[name][2]:
        weights[f"{own}.weight"] = torch.cat([b.weight @ b.projection for b in variant.get_submodule(own).bands])
    return weights


@every_backbone
def test_a_dense_output_is_that_of_the_dense_matrix(name):
    native, batch = backbone(name, **no_dropout(name)), wide_batch(name)
    variant = trained(name, output="dense")
    expected = torch.func.functional_call(native.train(), dense_weights(native, variant, name), (), batch)
    factors = list(bands_of(variant, name).values())
    assert len(factors) == 6 * len(BACKBONES[name][2])
    wanted = torch.autograd.grad(expected.loss, factors)
    actual = variant(**batch)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(actual.loss, factors), wanted, rtol=1e-4, atol=1e-6)
    merged = variant.eval().merge()
    assert type(merged) is type(native)
    torch.testing.assert_close(logits(merged, batch), expected.logits, rtol=1e-5, atol=1e-5)


# -- from trained tables -----------------------------------------------------------------------------------------------------


@every_output
@every_backbone
def test_each_band_is_the_nearest_of_its_rank(name, output):
    native = backbone(name)
    variant = adaptive(native, output=output)
    for own in BACKBONES[name][2]:
        module, dense = variant.get_submodule(own), native.get_submodule(own).weight.detach().double()
        for band, (start, end) in zip(module.bands, edges(), strict=True):
            part = dense[start:end]
            error = (band.weight.double() @ band.projection.double() - part).norm()
            rank = band.weight.shape[1]
            torch.testing.assert_close(error, torch.linalg.svdvals(part)[rank:].norm(), rtol=1e-5, atol=1e-5)
    if output == "adaptive":
        dense = native.lm_head.weight.detach()
        means = torch.stack([dense[start:end].mean(0) for start, end in edges()[1:]])
        torch.testing.assert_close(variant.lm_head.to_tails.weight, means)


def test_bands_of_full_width_are_exact():
    native, batch = backbone("llama"), wide_batch("llama")
    variant = adaptive(native, factor=1, output="dense")
    torch.testing.assert_close(logits(variant, batch), logits(native, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["marian", "llama-untied", "bert"])
def test_a_dense_output_merges(name):
    variant, batch, *_ = with_labels(name, output="dense")
    expected = outputs(variant, batch)["logits"]
    merged = variant.merge()
    assert "hf_freeze" not in type(merged).__module__
    torch.testing.assert_close(outputs(merged, batch)["logits"], expected, rtol=1e-5, atol=1e-5)
    table = merged.get_input_embeddings()
    assert table.padding_idx == (None if name == "gpt2" else 0)


# -- what is stored ----------------------------------------------------------------------------------------------------------


@every_output
@every_backbone
def test_each_factor_is_stored_once(name, output, tmp_path):
    variant = adaptive(backbone(name), output=output)
    variant.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    expected = set(bands_of(variant, name)) | ({"lm_head.to_tails.weight"} if output == "adaptive" else set())
    tables = {key for key in written if "layers." not in key and ".h." not in key and written[key].ndim == 2}
    assert tables - {"final_logits_bias", "transformer.wpe.weight"} == expected
    assert sum(tensor.numel() * 4 for tensor in written.values()) == stored_bytes(variant)
    assert generation_problems(variant, wide_batch(name)) == []


def test_wikitext_103_by_hand():
    """METHODS of the released code: cut-offs of 20,000 and 60,000 of 267,744 ids, 128 wide, halved from band to band."""
    config = AutoConfig.for_model("gpt2", vocab_size=267_744, n_embd=128, n_head=2, n_layer=1)
    method = methods.AdaptiveEmbedding(cutoffs=[20_000, 60_000], width=128, factor=2, output="dense")
    with torch.device("meta"):
        model = make_variant(config, [method], task="causal-lm")
    size = sum(p.numel() for n, p in model.named_parameters() if n.startswith("transformer.wte."))
    assert size == 20_000 * 128 + 40_000 * 64 + 207_744 * 32 + 128 * (128 + 64 + 32)
    assert round(size / 1e6, 2) == 11.80
    assert count_parameters(model).by_component["embeddings"].total == size + config.n_positions * 128


def test_random_bands_are_made_again_from_the_seed(tmp_path):
    variant = adaptive(backbone("marian"), methods.Freeze(embeddings="random", seed=4))
    factors = bands_of(variant, "marian")
    assert set(variant.seeded_tensors) == set(factors)
    rows = variant.model.shared.dense_weight()
    assert rows.std().item() == pytest.approx(H**-0.5, rel=0.15)
    variant.save_pretrained(tmp_path)
    assert not set(load_file(tmp_path / "model.safetensors")) & set(factors)
    again = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert torch.equal(logits(again, wide_batch("marian")), logits(variant, wide_batch("marian")))
    again.resize_token_embeddings(50)
    check_rows(again.model.shared, dict(variant.model.shared.named_parameters()), rows)
    training_step(again, wide_batch("marian"))
    again.save_pretrained(tmp_path / "resized")
    twice = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path / "resized")
    assert torch.equal(logits(twice, wide_batch("marian")), logits(again, wide_batch("marian")))


def test_the_base_model_holds_the_same_bands(tmp_path):
    variant = adaptive(backbone("marian-two-tables"))
    variant.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base.decoder.embed_tokens.dense_weight(), variant.model.decoder.embed_tokens.dense_weight())
    assert base.decoder.embed_tokens.tails[0].weight is not base.encoder.embed_tokens.tails[0].weight


# -- with other methods ------------------------------------------------------------------------------------------------------


def test_after_trimming_the_bands_are_of_what_is_left():
    native = backbone("marian")
    kept = [*range(30), 35, 39]
    variant = make_variant(
        native,
        [methods.VocabularyTrimming(keep=kept), methods.AdaptiveEmbedding(cutoffs=CUTOFFS, factor=1, output="dense")],
    )
    torch.testing.assert_close(
        variant.model.shared.dense_weight(), native.model.shared.weight[kept], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(
        ValueError, match=r"cutoffs=\[7, 32\]\): the last must be below 32, the vocab_size of this marian"
    ):
        make_variant(variant.merge(), [methods.AdaptiveEmbedding(cutoffs=[7, 32])])


def test_what_adds_to_the_loss_adds_to_the_loss_by_labels():
    torch.manual_seed(0)
    variant = adaptive(backbone("marian"), methods.VariationalDropout(training_size=100))
    variant.advance(1, 2)
    batch = wide_batch("marian")
    result = variant.train()(**batch)
    assert result.logits is None
    alone = result.loss - result["auxiliary_loss"]
    assert result["auxiliary_loss"].item() != 0
    result.loss.backward()
    assert 0 < alone.item() < 20
    variant(**batch).loss.backward()  # the term was reached, or this is refused


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cutoffs": []}, r"cutoffs=\[\]\): must be a list of token ids such as \[20000, 60000\], at least one"),
        ({"cutoffs": 7}, r"cutoffs=7\): must be a list"),
        ({"cutoffs": [7.0]}, r"cutoffs=\[7\.0\]\): must be a list"),
        ({"cutoffs": [True]}, r"cutoffs=\[True\]\): must be a list"),
        ({"cutoffs": [20, 7]}, r"cutoffs=\[20, 7\]\): 7 comes after 20; they must ascend, from at least 1"),
        ({"cutoffs": [7, 7]}, r"7 comes after 7; they must ascend"),
        ({"cutoffs": [0]}, r"0 comes after 0; they must ascend, from at least 1"),
        ({"cutoffs": [7, 40]}, r"cutoffs=\[7, 40\]\): the last must be below 40, the vocab_size of this marian"),
        ({"factor": 0}, r"AdaptiveEmbedding\(factor=0\): must be an integer of at least 1"),
        ({"factor": 2.0}, r"factor=2\.0\): must be an integer"),
        ({"width": 0}, r"AdaptiveEmbedding\(width=0\): must be an integer of at least 1"),
        ({"width": 17}, r"width=17\): must be in 1\.\.16, the hidden size of this marian"),
        (
            {"factor": 5},
            r"factor=5, width=None\): the bands would have the widths \[16, 3, 0\], which must be at least 1: give",
        ),
        ({"output": "sparse"}, r"output='sparse'\): choose from \['adaptive', 'dense'\]"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        adaptive(backbone("marian"), **settings)


def test_the_smaller_of_two_vocabularies_limits():
    with pytest.raises(ValueError, match=r"the last must be below 18, the decoder_vocab_size of this marian"):
        adaptive(backbone("marian-two-tables", decoder_vocab_size=18))


@pytest.mark.parametrize("native", [backbone("gpt2"), bert(BertForMaskedLM)], ids=["gpt2", "bert"])
def test_a_table_is_divided_once(native):
    for first in (methods.AdaptiveEmbedding(cutoffs=CUTOFFS, factor=2), methods.FactorizedEmbedding(rank=4)):
        with pytest.raises(ValueError, match=r"\Amethod 'adaptive_embedding': .*another method.*\Z"):
            make_variant(native, [first, methods.AdaptiveEmbedding(cutoffs=[7], factor=2)])
