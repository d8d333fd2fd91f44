"""Embeddings of low rank in BERT: the structure of ALBERT, from trained tables and from fresh ones."""

import pytest
import torch
from support.embeddings import UNTIED, E, H, bert, factorized, on_meta
from support.models import outputs
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertModel,
    BertConfig,
    BertForMaskedLM,
    BertModel,
)

from hf_freeze import count_parameters, make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.factorized_embedding import centred_axes


def fill_from_albert(variant, albert):
    """ALBERT uses one layer's parameters for every layer; BERT gets a copy of them in each."""
    base, source = variant.base_model, albert.base_model
    pairs = {
        "embeddings.word_embeddings": "embeddings.word_embeddings",
        "embeddings.position_embeddings": "embeddings.position_embeddings",
        "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
        "embeddings.LayerNorm": "embeddings.LayerNorm",
        "embeddings.dropout.projection": "encoder.embedding_hidden_mapping_in",
    }
    for number in range(variant.config.num_hidden_layers):
        layer, shared = f"encoder.layer.{number}", "encoder.albert_layer_groups.0.albert_layers.0"
        pairs |= {f"{layer}.attention.self.{part}": f"{shared}.attention.{part}" for part in ("query", "key", "value")}
        pairs |= {
            f"{layer}.attention.output.dense": f"{shared}.attention.dense",
            f"{layer}.attention.output.LayerNorm": f"{shared}.attention.LayerNorm",
            f"{layer}.intermediate.dense": f"{shared}.ffn",
            f"{layer}.output.dense": f"{shared}.ffn_output",
            f"{layer}.output.LayerNorm": f"{shared}.full_layer_layer_norm",
        }
    if isinstance(albert, AlbertModel):
        pairs["pooler.dense"] = "pooler"
    for mine, theirs in pairs.items():
        base.get_submodule(mine).load_state_dict(source.get_submodule(theirs).state_dict())
    if not isinstance(albert, AlbertModel):
        head, other = variant.cls.predictions, albert.predictions
        head.transform.dense.load_state_dict(other.dense.state_dict())
        head.transform.LayerNorm.load_state_dict(other.LayerNorm.state_dict())
        head.bias.data.copy_(other.bias)
    return variant.eval()


@pytest.mark.parametrize("shared", [False, True], ids=["own layers", "shared layers"])
@pytest.mark.parametrize(
    ("task", "albert_class"), [("feature-extraction", AlbertModel), ("masked-lm", AlbertForMaskedLM)]
)
def test_bert_gets_the_structure_of_albert(task, albert_class, shared):
    tiny = ARCHITECTURES["bert"].tiny
    albert = albert_class(AlbertConfig(**tiny | {"embedding_size": E, "hidden_act": "gelu"})).eval()
    with torch.no_grad():
        for parameter in albert.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    sharing = [methods.LayerSharing()] if shared else []
    variant = make_variant(BertConfig(**tiny), [*sharing, methods.FactorizedEmbedding(rank=E)], task=task)
    fill_from_albert(variant, albert)
    batch = ARCHITECTURES["bert"].tiny_inputs(task)
    found, expected = outputs(variant, batch), outputs(albert, batch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    layers = variant.config.num_hidden_layers
    one = sum(p.numel() for name, p in variant.base_model.named_parameters() if "layer.0." in name)
    assert count_parameters(variant).total == albert.num_parameters() + (0 if shared else (layers - 1) * one)


def test_a_fresh_mapping_is_drawn_as_in_albert():
    config = BertConfig(**ARCHITECTURES["bert"].tiny | {"hidden_size": 128, "num_attention_heads": 4})
    variant = make_variant(config, [methods.FactorizedEmbedding(rank=64)], task="masked-lm")
    projection = variant.bert.embeddings.dropout.projection
    assert projection.weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert not projection.bias.any()


def test_from_a_trained_bert_embeddings_are_exact_at_full_rank_only():
    native, batch = bert(BertModel), ARCHITECTURES["bert"].tiny_inputs("feature-extraction")
    expected = outputs(native, batch)["last_hidden_state"]
    torch.testing.assert_close(
        outputs(factorized(native, H), batch)["last_hidden_state"], expected, rtol=1e-4, atol=1e-5
    )
    errors = [(outputs(factorized(native, rank), batch)["last_hidden_state"] - expected).norm() for rank in (2, 8, 15)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0.01


def test_from_a_trained_bert_embeddings_are_exact_where_the_tables_have_that_rank():
    """The norm in E then divides by what the norm in H did, whatever its eps."""
    native, batch = bert(BertModel, layer_norm_eps=0.5), ARCHITECTURES["bert"].tiny_inputs("feature-extraction")
    axes = torch.randn(E - 1, H)
    axes -= axes.mean(dim=1, keepdim=True)
    with torch.no_grad():
        for module in (m for m in native.modules() if isinstance(m, nn.Embedding)):
            module.weight.copy_(torch.randn(len(module.weight), E - 1) @ axes + torch.randn(len(module.weight), 1))
    expected = outputs(native, batch)["last_hidden_state"]
    torch.testing.assert_close(outputs(factorized(native), batch)["last_hidden_state"], expected, rtol=1e-4, atol=1e-5)


def test_from_a_trained_bert_the_output_is_a_start():
    native, batch = bert(BertForMaskedLM), ARCHITECTURES["bert"].tiny_inputs("masked-lm")
    fresh = make_variant(native.config, [methods.FactorizedEmbedding(rank=8)], task="masked-lm", seed=1)
    expected = outputs(native, batch)["logits"].flatten()
    started, drawn = (
        torch.corrcoef(torch.stack([outputs(model, batch)["logits"].flatten(), expected]))[0, 1]
        for model in (factorized(native, 8), fresh)
    )
    assert started > 0.3 > drawn.abs()
    norm = factorized(native, 4).cls.predictions.transform.LayerNorm
    assert norm.weight.norm().item() == pytest.approx(H**0.5)  # a hidden state before the matrix is as long as it was


def test_an_untied_output_of_another_width_has_axes_of_its_own():
    """The nearest matrix of rank E - 1 to it, its rows without their means (Eckart and Young, 1936)."""
    native = bert(BertForMaskedLM, **UNTIED)
    narrow = make_variant(native, [methods.HiddenPruning(width=8)])
    variant = make_variant(narrow, [methods.FactorizedEmbedding(rank=4)])
    rows = narrow.cls.predictions.decoder.weight.detach().double()
    assert rows.shape[1] != narrow.config.hidden_size
    rows = rows - rows.mean(1, keepdim=True)
    expected = torch.linalg.svdvals(rows)[:3] * (4 / rows.shape[1]) ** 0.5
    found = torch.linalg.svdvals(variant.cls.predictions.decoder.weight.detach().double())
    torch.testing.assert_close(found, torch.cat([expected, expected.new_zeros(1)]), rtol=1e-4, atol=1e-6)


def test_centred_axes_keep_the_mean_at_zero():
    rows = torch.randn(30, H)
    axes = centred_axes(rows, E)
    assert axes.shape == (H, E)
    for vector in (rows.double() @ axes).unbind():
        assert vector.mean().abs() < 1e-12
    centred = rows.double() - rows.double().mean(dim=1, keepdim=True)
    error = (centred - centred @ axes @ axes.T).norm()
    torch.testing.assert_close(error, torch.linalg.svdvals(centred)[E - 1 :].norm())


def test_bert_does_not_merge():
    with pytest.raises(
        ValueError, match=r"\Amethod 'factorized_embedding' cannot be merged on bert: its norm over rank=5 .*\Z"
    ):
        factorized(bert(BertForMaskedLM)).merge()


# -- parameters --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "separate", "shared"),
    [(64, 87.06, 9.68), (128, 89.06, 11.68), (256, 93.06, 15.69), (None, 108.49, 31.11)],
)
def test_alberts_table(rank, separate, shared):
    """Lan et al., 2020, table 3: 12 layers of BERT, V = 30 000. "Not shared" is counted without the pooler, "shared" with it;
    ALBERT projects from E = H too, which the last row of the table leaves out."""
    applied = [] if rank is None else [methods.FactorizedEmbedding(rank=rank)]
    config = BertConfig(vocab_size=30_000)
    pooler = 768 * 768 + 768
    for sharing, millions, left_out in (([], separate, pooler), ([methods.LayerSharing()], shared, 0)):
        counts = on_meta(config, "feature-extraction", *sharing, *applied)
        assert counts.by_component["head"].total == pooler
        assert round((counts.total - left_out) / 1e6, 2) == millions


def test_bert_needs_a_norm_of_two():
    for rank in (1, 17):
        with pytest.raises(ValueError, match=rf"rank={rank}\): must be in 2\.\.16, the hidden size of this bert"):
            factorized(bert(BertModel), rank)
    with pytest.raises(ValueError, match=r"share=True\): bert has one table"):
        factorized(bert(BertModel), share=True)
