"""Embeddings of low rank: against dense tables, against ALBERT, what is stored and counted, and what is refused."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from support.embeddings import (
    BACKBONES,
    TWO_TABLES,
    UNTIED,
    E,
    H,
    V,
    backbone,
    batch_of,
    bert,
    every_backbone,
    factorized,
    logits,
    no_dropout,
    on_meta,
)
from support.generation import generation_problems
from support.models import outputs, reload_problems, trainability
from support.training import training_step
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    BertForMaskedLM,
    LlamaConfig,
    MarianConfig,
    MarianMTModel,
)

from hf_freeze import count_parameters, make_variant, methods, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.factorized_embedding import nearest_factors

# -- against the dense table -------------------------------------------------------------------------------------------------


@every_backbone
def test_full_rank_is_exact(name):
    native = backbone(name)
    variant = factorized(native, H)
    torch.testing.assert_close(logits(variant, batch_of(name)), logits(native, batch_of(name)), rtol=1e-4, atol=1e-5)


@every_backbone
def test_the_error_of_a_lower_rank_is_what_the_singular_values_leave(name):
    native = backbone(name)
    variant = factorized(native)
    for own in BACKBONES[name][2]:
        dense = native.get_submodule(own).weight.detach().double()
        error = (variant.get_submodule(own).dense_weight().double() - dense).norm()
        left = torch.linalg.svdvals(dense)[E:].norm()
        torch.testing.assert_close(error, left, rtol=1e-5, atol=0)
        assert left > 0.1


def by_hand(native, variant, name):
    """The native model whose tables are products, as differentiable functions of the variant's factors."""
    weights = dict(native.named_parameters())
    for own in BACKBONES[name][2]:
        module = variant.get_submodule(own)
        weights[f"{own}.weight"] = module.weight @ module.projection
    return weights


@every_backbone
def test_forward_and_gradients_are_those_of_the_dense_product(name):
    native, batch = backbone(name, **no_dropout(name)), batch_of(name)
    variant = factorized(native).train()
    factors = [p for own in BACKBONES[name][2] for p in variant.get_submodule(own).parameters(recurse=False)]
    assert len(factors) == 2 * len(BACKBONES[name][2])
    expected = torch.func.functional_call(native.train(), by_hand(native, variant, name), (), batch)
    wanted = torch.autograd.grad(expected.loss, [*factors, native.get_parameter(norm_of(native))])
    actual = variant(**batch)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(actual.loss, [*factors, variant.get_parameter(norm_of(native))])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert all(gradient.abs().max() > 1e-4 for gradient in found)
    variant.eval()
    torch.testing.assert_close(logits(variant, batch), expected.logits, rtol=1e-5, atol=1e-5)


def norm_of(model):
    return next(name for name, p in model.named_parameters() if (p.ndim == 1 and "norm" in name) or "ln_1" in name)


def test_a_padding_row_stays_what_it_is():
    table = nn.Embedding(V, H, padding_idx=3)
    layer = LowRankEmbedding(table, E)
    with torch.no_grad():
        layer.weight.normal_()
        layer.projection.normal_()
    ids = torch.tensor([[3, 5], [7, 3]])
    out = layer(ids)
    torch.testing.assert_close(out, layer.dense_weight()[ids])
    out.square().sum().backward()
    assert not layer.weight.grad[3].any()
    assert layer.weight.grad[5].abs().min() > 0
    # From a table whose padding row is zero: it is zero, and stays so where the output is not tied.
    native = backbone("llama-untied", hidden_act="relu")
    variant = factorized(native)
    assert not variant.model.embed_tokens.weight[0].any()
    training_step(variant, batch_of("llama"))
    assert not variant.model.embed_tokens.weight[0].any()
    assert not variant.model.embed_tokens(torch.tensor([0])).any()


def test_marian_scales_what_is_projected():
    native = backbone("marian")
    variant = factorized(native, H)
    taken = []
    for model in (native, variant):
        layer = model.model.encoder.layers[0]
        layer.register_forward_pre_hook(lambda _, arguments: taken.append(arguments[0]))
        logits(model, batch_of("marian"))
    torch.testing.assert_close(*taken, rtol=1e-5, atol=1e-5)
    ids = batch_of("marian")["input_ids"]
    positions = native.model.encoder.embed_positions(ids.shape)
    torch.testing.assert_close(taken[1], variant.model.shared(ids) * H**0.5 + positions)


def test_lookups_keep_the_precision_of_the_table_under_autocast():
    layer = LowRankEmbedding(nn.Embedding(V, H), E)
    nn.init.normal_(layer.weight)
    ids = torch.arange(V)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, layer(ids), rtol=0.02, atol=0.02)
    assert not torch.equal(found, layer(ids)), "the product was not under autocast"


@pytest.mark.parametrize("gradient", [True, False])
def test_the_output_makes_no_dense_matrix(gradient):
    layer, x = LowRankOutput(nn.Linear(H, 6_000, bias=False), E, 0.02), torch.randn(3, H)
    torch.testing.assert_close(layer(x), x @ layer.dense_weight().T, rtol=1e-4, atol=1e-6)
    with torch.set_grad_enabled(gradient), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 3 * E * (H + 6_000)


@pytest.mark.parametrize("shapes", [[(40, 16)], [(40, 16), (40, 16)], [(7, 16)], [(20, 16), (20, 16)]])
def test_the_nearest_factors_share_a_table(shapes):
    weights = [torch.randn(shape) for shape in shapes]
    beside = torch.cat(weights, dim=1).double()
    table, projections = nearest_factors(weights, E)
    assert table.shape == (shapes[0][0], E)
    assert [projection.shape for projection in projections] == [(E, 16)] * len(weights)
    error = (table @ torch.cat(projections, dim=1) - beside).norm()
    torch.testing.assert_close(error, torch.linalg.svdvals(beside)[E:].norm(), rtol=1e-8, atol=1e-10)


# -- source and target -------------------------------------------------------------------------------------------------------


def test_two_tables_may_become_one_with_two_projections(tmp_path):
    native, batch = backbone("marian-two-tables"), batch_of("marian")
    variant = factorized(native, share=True)
    source, target, output = variant.model.encoder.embed_tokens, variant.model.decoder.embed_tokens, variant.lm_head
    assert source.weight is target.weight is output.weight
    assert target.projection is output.projection is not source.projection
    dense = torch.cat([native.model.encoder.embed_tokens.weight, native.model.decoder.embed_tokens.weight], dim=1)
    found = torch.cat([source.dense_weight(), target.dense_weight()], dim=1)
    left = torch.linalg.svdvals(dense.detach())[E:].norm()
    torch.testing.assert_close((found - dense).norm(), left, rtol=1e-4, atol=0)
    assert generation_problems(variant, batch) == []
    expected = outputs(variant, batch)["logits"]
    merged = variant.merge()
    assert type(merged) is MarianMTModel
    torch.testing.assert_close(outputs(merged, batch)["logits"], expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(merged.model.encoder.embed_tokens.weight, merged.model.decoder.embed_tokens.weight)
    apart = factorized(native)
    assert apart.model.encoder.embed_tokens.weight is not apart.model.decoder.embed_tokens.weight
    assert count_parameters(apart).total - count_parameters(variant).total == V * E
    # A step changes all of the factors, and the ties hold.
    before = [p.clone() for p in (source.weight, source.projection, target.projection)]
    training_step(variant, batch)
    after = (source.weight, source.projection, target.projection)
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    variant.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert base.encoder.embed_tokens.weight is base.decoder.embed_tokens.weight
    assert torch.equal(base.decoder.embed_tokens.projection, target.projection)


def test_sharing_holds_where_the_config_ties_nothing(tmp_path):
    variant = factorized(backbone("marian-two-tables-untied"), share=True)
    assert variant.model.encoder.embed_tokens.weight is variant.model.decoder.embed_tokens.weight
    assert variant.lm_head.weight is not variant.model.decoder.embed_tokens.weight
    variant.save_pretrained(tmp_path)
    again = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert again.model.encoder.embed_tokens.weight is again.model.decoder.embed_tokens.weight
    assert torch.equal(logits(again, batch_of("marian")), logits(variant, batch_of("marian")))


@pytest.mark.parametrize("name", ["marian-two-tables", "marian-two-tables-untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "int8"},
        {"weights": "int4", "granularity": "group-64"},
        {"weights": "int8", "train": True, "weight_ranges": "learnt"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_table_with_two_projections_is_quantised_once(name, settings, tmp_path):
    batch, quantize = batch_of("marian"), methods.Quantize(components=["embeddings"], **settings)
    shared, apart = (
        make_variant(factorized(backbone(name), share=share), [quantize]).eval() for share in (True, False)
    )
    if quantize.train:
        assert shared.model.encoder.embed_tokens.weight is shared.model.decoder.embed_tokens.weight
        training_step(shared, batch)
        for variant in (shared, apart):
            variant.finalize()
    source, target = shared.model.encoder.embed_tokens, shared.model.decoder.embed_tokens
    assert source.packed.data_ptr() == target.packed.data_ptr()
    assert source.projection is not target.projection
    assert stored_bytes(apart) - stored_bytes(shared) == source.packed.nbytes + source.scales.nbytes
    shared.save_pretrained(tmp_path)
    again = AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path)
    assert torch.equal(logits(again, batch), logits(shared, batch))
    assert again.model.encoder.embed_tokens.packed.data_ptr() == again.model.decoder.embed_tokens.packed.data_ptr()
    torch.testing.assert_close(logits(again.merge(), batch), logits(shared, batch), rtol=1e-5, atol=1e-5)
    # All the same, it is near the table that was rounded.
    if not quantize.train:
        plain = logits(factorized(backbone(name), share=True), batch)
        assert 0 < (logits(shared, batch) - plain).norm() / plain.norm() < (0.02 if "scheme" in settings else 0.3)


# -- saving and loading ------------------------------------------------------------------------------------------------------


@every_backbone
def test_each_factor_is_stored_once(name, tmp_path):
    variant = factorized(backbone(name))
    variant.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    expected = {f"{own}.{factor}" for own in BACKBONES[name][2] for factor in ("weight", "projection")}
    tables = {key for key in written if "layers." not in key and ".h." not in key and written[key].ndim == 2}
    assert tables - {"final_logits_bias", "transformer.wpe.weight"} == expected
    assert sum(tensor.numel() * 4 for tensor in written.values()) == stored_bytes(variant)


def test_variants_beyond_the_contract_reload_bit_equal(tmp_path):
    """Two tables, one shared by two projections, outputs of their own, random factors: bit-equal, after a step too."""
    random = methods.Freeze(embeddings="random", seed=3)
    cells = {
        **{name: factorized(backbone(name)) for name in BACKBONES},
        "shared": factorized(backbone("marian-two-tables"), share=True),
        "shared-random": factorized(backbone("marian-two-tables"), E, random, share=True),
        "llama-untied-random": factorized(backbone("llama-untied"), E, random),
        "bert-random": factorized(bert(BertForMaskedLM), E, random),
        "bert-untied": factorized(bert(BertForMaskedLM, **UNTIED)),
    }
    for name, model in cells.items():
        task = model.architecture.tasks[0]
        batch = model.architecture.tiny_inputs(task)
        for step in range(2):
            folder = tmp_path / f"{name}-{step}"
            model.save_pretrained(folder)
            torch.manual_seed(987)
            reloaded, info = AUTO_CLASSES[task].from_pretrained(folder, output_loading_info=True)
            assert reload_problems(reloaded, info, outputs(model, batch), trainability(model), batch) == [], folder.name
            training_step(model, batch)


@every_backbone
def test_what_is_opened_trains_and_generates(name, tmp_path):
    variant = factorized(backbone(name))
    variant.save_pretrained(tmp_path)
    again = AUTO_CLASSES[variant.architecture.tasks[0]].from_pretrained(tmp_path)
    before = {n: p.detach().clone() for n, p in again.named_parameters()}
    training_step(again, batch_of(name))
    for own in BACKBONES[name][2]:
        for factor in (f"{own}.weight", f"{own}.projection"):
            assert not torch.equal(again.get_parameter(factor), before[factor]), factor
    assert generation_problems(again, batch_of(name)) == []


# -- freezing ----------------------------------------------------------------------------------------------------------------


def test_factors_are_embeddings():
    variant = factorized(backbone("marian"), E, methods.Freeze(embeddings="frozen"))
    assert not variant.model.shared.projection.requires_grad
    assert not variant.lm_head.weight.requires_grad
    counts = count_parameters(variant).by_component["embeddings"]
    assert (counts.total, counts.trainable) == (V * E + E * H, 0)
    untied = factorized(backbone("llama-untied"), E, methods.Freeze(embeddings="frozen"))
    assert not untied.model.embed_tokens.projection.requires_grad
    assert untied.lm_head.projection.requires_grad
    assert count_parameters(untied).by_component["head"].total == V * E + E * H


def test_random_factors_have_the_variance_of_a_random_table(tmp_path):
    config = MarianConfig(
        **ARCHITECTURES["marian"].tiny | {"vocab_size": 3000, "decoder_vocab_size": 3000, "d_model": 64}
    )
    random = methods.Freeze(embeddings="random", seed=3)
    variant = make_variant(config, [methods.FactorizedEmbedding(rank=24), random], task="seq2seq-lm")
    assert set(variant.seeded_tensors) == {"model.shared.weight", "model.shared.projection"}
    assert variant.model.shared.dense_weight().std().item() == pytest.approx(64**-0.5, rel=0.05)
    variant.save_pretrained(tmp_path)
    assert not [
        name for name in load_file(tmp_path / "model.safetensors") if "embed_tokens" in name or "shared" in name
    ]


# -- fresh weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, False, True])
@pytest.mark.parametrize(("init", "std"), [("backbone", 0.02), ("marian", 128**-0.5)])
def test_a_fresh_product_has_the_variance_of_the_dense_table(init, std, share):
    fields = {"vocab_size": 2000, "decoder_vocab_size": 2000, "d_model": 128, "init_std": 0.02}
    config = MarianConfig(**ARCHITECTURES["marian"].tiny | fields | (TWO_TABLES if share is not None else {}))
    method = methods.FactorizedEmbedding(rank=48, share=bool(share))
    variant = make_variant(config, [method], task="seq2seq-lm", init=init, seed=5)
    dense = make_variant(config, [], task="seq2seq-lm", init=init, seed=5)
    for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        found = variant.get_submodule(name).dense_weight().std().item()
        assert found == pytest.approx(dense.get_submodule(name).weight.std().item(), rel=0.05)
        assert found == pytest.approx(std, rel=0.05)
        # A step of Adam then moves a logit as far as in the dense table.
        assert variant.get_submodule(name).projection.std().item() == pytest.approx(128**0.5 / 48, rel=0.05)
    if init == "backbone":
        assert not variant.model.encoder.embed_tokens.weight[0].any()


def test_a_fresh_output_of_its_own_has_the_variance_of_the_dense_one():
    config = LlamaConfig(**ARCHITECTURES["llama"].tiny | UNTIED | {"vocab_size": 2000, "hidden_size": 128})
    variant = make_variant(config, [methods.FactorizedEmbedding(rank=48)], task="causal-lm")
    for module in (variant.model.embed_tokens, variant.lm_head):
        assert module.dense_weight().std().item() == pytest.approx(config.initializer_range, rel=0.05)
        assert module.projection.std().item() == pytest.approx(128**0.5 / 48, rel=0.05)


# -- parameters --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "share"), [(128, False), (256, False), (256, True)])
def test_the_tables_of_a_large_translator_by_hand(rank, share):
    d, v = 1024, 40_000
    config = MarianConfig(
        d_model=d, vocab_size=v, decoder_vocab_size=v, encoder_layers=1, decoder_layers=1, pad_token_id=0, **TWO_TABLES
    )
    dense = on_meta(config, "seq2seq-lm")
    counts = on_meta(config, "seq2seq-lm", methods.FactorizedEmbedding(rank=rank, share=share))
    assert dense.by_component["embeddings"].total == 2 * v * d
    assert counts.by_component["embeddings"].total == (2 - share) * v * rank + 2 * rank * d
    assert dense.total - counts.total == 2 * v * d - (2 - share) * v * rank - 2 * rank * d


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("marian", {"rank": 0}, r"FactorizedEmbedding\(rank=0\): must be an integer of at least 1"),
        ("marian", {"rank": 2.0}, r"rank=2\.0\): must be an integer"),
        ("marian", {"rank": True}, r"rank=True\): must be an integer"),
        ("marian", {"rank": 4, "share": 1}, r"FactorizedEmbedding\(share=1\): must be True or False"),
        ("marian", {"rank": 17}, r"FactorizedEmbedding\(rank=17\): must be in 1\.\.16, the hidden size of this marian"),
        ("llama", {"rank": 17}, r"rank=17\): must be in 1\.\.16, the hidden size of this llama"),
        ("marian", {"rank": 4, "share": True}, r"share=True\): this marian has one table, 'model\.shared', for source"),
        ("gpt2", {"rank": 4, "share": True}, r"share=True\): gpt2 has one table; leave share out"),
        ("llama-untied", {"rank": 4, "share": True}, r"share=True\): llama has one table; leave share out"),
    ],
)
def test_settings_that_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_variant(backbone(name), [methods.FactorizedEmbedding(**settings)])


def test_tables_of_unlike_sizes_are_not_shared():
    native = backbone("marian-two-tables", decoder_vocab_size=50)
    message = r"the tables have \{'model\.encoder\.embed_tokens': 40, 'model\.decoder.*': 50\} rows, which must be equal; leave"
    with pytest.raises(ValueError, match=message):
        factorized(native, share=True)
    assert factorized(native).lm_head.weight.shape == (50, E)


@pytest.mark.parametrize(
    ("native", "message"),
    [
        (backbone("gpt2"), r"rank=4\): 'transformer\.wte' has the rank 3 already; give one in 1\.\.3"),
        (
            bert(BertForMaskedLM),
            "lower rank already, and a norm over it; give the first FactorizedEmbedding the rank that",
        ),
    ],
    ids=["gpt2", "bert"],
)
def test_a_factorised_table_that_cannot_have_another_rank(native, message):
    once = factorized(native, 3)
    applied = [methods.FactorizedEmbedding(rank=3), methods.FactorizedEmbedding(rank=4)]
    for target, added in ((once, applied[1:]), (copy.deepcopy(native), applied)):
        with pytest.raises(ValueError, match=message):
            make_variant(target, added)
