"""Maps of attention against closed forms, similarities of embeddings against known tables, and their pictures."""

import itertools

import numpy as np
import pytest
import torch
from support.models import native
from test_head_importance import CASES, MARIAN

from hf_freeze import analysis, make_variant
from hf_freeze.lab.report.plots.maps import (
    attention_figure,
    correlations_figure,
    embeddings_figure,
    sentence_figure,
)
from hf_freeze.methods import DeFINE, FactorizedEmbedding, HeadPruning

GPT2 = next(case for case in CASES if case.id.startswith("gpt2"))


def uniform(case):
    """A model without queries: each attends to all that it sees, equally."""
    model = native(case)
    for attention in case.architecture.attentions(model.config).values():
        linear = model.base_model.get_submodule(attention.q)
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.zero_()
    return model


def expected_self(lengths, reach, causal):
    """Query t of T tokens gives 1/T to each key, or 1/(t + 1) to each key up to its own."""
    shares = np.zeros(2 * reach + 1)
    for tokens in lengths:
        for query in range(tokens):
            for key in range(query + 1 if causal else tokens):
                if abs(key - query) <= reach:
                    shares[reach + key - query] += 1 / (query + 1 if causal else tokens)
    return shares / sum(lengths)


def test_uniform_attention_by_position():
    batch = MARIAN.batch()
    source = batch["attention_mask"].sum(1).tolist()
    target = (batch["labels"] != -100).sum(1).tolist()
    assert len(set(source)) > 1, "no padding"
    model = uniform(MARIAN).train()
    before = model.config._attn_implementation
    parts = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(2)]
    found = analysis.attention_by_position(model, parts, reach=2)
    assert model.training
    assert model.config._attn_implementation == before
    assert list(found) == list(MARIAN.architecture.attentions(model.config))
    for name, shares in found.items():
        heads = torch.ones(len(shares), 1)
        if not name.endswith(".cross"):
            wanted = expected_self(target if "decoder" in name else source, 2, causal="decoder" in name)
            torch.testing.assert_close(shares, heads * torch.tensor(wanted).float(), rtol=1e-5, atol=1e-6)
            continue
        pairs = zip(source, target, strict=True)
        counts = [sum(0 <= t + o < s for t in range(q)) / s for s, q in pairs for o in range(-2, 3)]
        wanted = np.reshape(counts, (2, 5)).sum(0) / sum(target)
        torch.testing.assert_close(shares, heads * torch.tensor(wanted).float(), rtol=1e-5, atol=1e-6)


def test_all_positions_together_are_all_of_the_attention():
    batch = GPT2.batch()
    length = batch["input_ids"].shape[1]
    for shares in analysis.attention_by_position(native(GPT2), [batch], reach=length).values():
        torch.testing.assert_close(shares.sum(1), torch.ones(len(shares)), rtol=1e-5, atol=1e-5)
        assert not shares[:, length + 1 :].any(), "it looks ahead"


def test_one_text_without_its_padding():
    batch = MARIAN.batch()
    lengths = batch["attention_mask"].sum(1).tolist()
    item = int(np.argmin(lengths))
    queries = int((batch["labels"][item] != -100).sum())
    found = analysis.attention_weights(uniform(MARIAN), batch, item=item)
    assert found["encoder.0.self"].shape[1:] == (lengths[item], lengths[item])
    assert found["decoder.1.cross"].shape[1:] == (queries, lengths[item])
    torch.testing.assert_close(found["decoder.1.cross"], torch.full_like(found["decoder.1.cross"], 1 / lengths[item]))
    with pytest.raises(ValueError, match=r"attention_weights\(item=7\): must be in 0..1, the texts of the batch"):
        analysis.attention_weights(native(MARIAN), batch, item=7)


def test_attentions_without_heads_have_no_map():
    pruned = make_variant(native(MARIAN), [HeadPruning(heads={"encoder.0.self": [0, 1]})])
    assert "encoder.0.self" not in analysis.attention_by_position(pruned, [MARIAN.batch()])
    names = list(MARIAN.architecture.attentions(pruned.config))
    none = make_variant(native(MARIAN), [HeadPruning(heads={name: [0, 1] for name in names})])
    with pytest.raises(ValueError, match="has no attention weights to map"):
        analysis.attention_by_position(none, [MARIAN.batch()])
    with pytest.raises(ValueError, match=r"attention_by_position\(reach=0\): must be an integer of at least 1"):
        analysis.attention_by_position(pruned, [MARIAN.batch()], reach=0)


def test_similarities_of_known_embeddings():
    model = native(GPT2)
    with torch.no_grad():
        table = model.transformer.wte.weight
        table[5] = 3 * table[4]
        table[6] = -table[4]
        table[7], table[8] = torch.eye(table.shape[1])[:2]
    found = analysis.embedding_similarity(model, [4, 5, 6, 7, 8])
    assert found.diagonal() == pytest.approx(torch.ones(5))
    assert (float(found[0, 1]), float(found[0, 2]), float(found[3, 4])) == pytest.approx((1, -1, 0), abs=1e-6)
    full = make_variant(model, [FactorizedEmbedding(rank=table.shape[1])])
    torch.testing.assert_close(analysis.embedding_similarity(full, [4, 5, 6, 7, 8]), found, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"tokens must be ids in 0\.\.\d+, at least one"):
        analysis.embedding_similarity(model, [4, 100000])
    with pytest.raises(ValueError, match=r"embedding_similarity\(table='x'\): choose from \['wte'\]"):
        analysis.embedding_similarity(model, [4], table="x")


def test_correlations_of_layers_and_groups_are_those_of_their_numbers():
    model = make_variant(native(GPT2), [DeFINE(depth=2, width=8, groups=2, map_dim=4)]).train()
    unit, tokens = model.transformer.wte, [3, 1, 4, 15, 9, 26]
    with torch.no_grad():
        unit.weight[:, 2] = 0.5  # the same for all tokens
        x = unit.weight[tokens]
        groups = [layer.linear for layer in unit.layers]
        first = torch.cat([x[:, :2] @ groups[0].weight[0], x[:, 2:] @ groups[0].weight[1]], 1) + groups[0].bias
        first = torch.nn.functional.gelu(unit.layers[0].norm(first))
        second = torch.cat([x, first], 1) @ groups[1].weight[0] + groups[1].bias
        second = torch.nn.functional.gelu(unit.layers[1].norm(second))
        numbers = torch.cat([x, first, second, model.eval().transformer.wte(torch.tensor(tokens))], 1).double().numpy()
    found = analysis.embedding_correlations(model, tokens)
    assert found.groups == {"table": [4], "layer 1": [3, 3], "layer 2": [8], "embedding": [unit.reduce.out_features]}
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(np.corrcoef(numbers.T))
    expected[2, 2] = 1
    np.testing.assert_allclose(found.values, expected, atol=1e-4)
    assert not found.values[2, 3:].any()

    ends = np.cumsum([0, 4, 3, 3, 8, unit.reduce.out_features])
    names, means = found.means(of_groups=True)
    assert names == ["table", "layer 1, group 1", "layer 1, group 2", "layer 2", "embedding"]
    for a, b in itertools.product(range(5), repeat=2):
        block = np.abs(expected[ends[a] : ends[a + 1], ends[b] : ends[b + 1]])
        block = block[~np.eye(len(block), dtype=bool)] if a == b else block
        assert float(means[a, b]) == pytest.approx(block.mean(), abs=1e-4)
    names, layers = found.means()
    assert names == ["table", "layer 1", "layer 2", "embedding"]
    assert float(layers[0, 1]) == pytest.approx(np.abs(expected[:4, 4:10]).mean(), abs=1e-4)
    assert float(layers[1, 1]) == pytest.approx((np.abs(expected[4:10, 4:10]).sum() - 6) / 30, abs=1e-4)

    left, right, *_ = correlations_figure(found).axes
    assert np.array(left.images[0].get_array()) == pytest.approx(found.values.numpy())
    assert [label.get_text() for label in left.get_yticklabels()] == names
    assert np.array(right.images[0].get_array()) == pytest.approx(means.numpy())


@pytest.mark.parametrize(
    ("tokens", "method", "message"),
    [
        ([3], DeFINE.example, r"embedding_correlations: correlations need at least 2 tokens, not 1"),
        (
            [3, 4],
            FactorizedEmbedding(rank=4),
            r"the table is a LowRankEmbedding; its layers are known for methods.DeFINE",
        ),
        ([3, 10**6], DeFINE.example, r"embedding_correlations: tokens must be ids in 0\.\.\d+"),
    ],
)
def test_correlations_that_are_refused(tokens, method, message):
    with pytest.raises(ValueError, match=message):
        analysis.embedding_correlations(make_variant(native(GPT2), [method]), tokens)


def test_a_random_table_is_unrelated():
    similarity = analysis.random_similarity(300, 64)
    others = similarity[~torch.eye(300, dtype=torch.bool)]
    assert float(others.mean()) == pytest.approx(0, abs=0.003)
    assert float(others.std()) == pytest.approx(64**-0.5, rel=0.03)


def test_similar_tokens_become_neighbours():
    group = torch.arange(12) % 3
    vectors = torch.eye(3)[group] + 0.05 * torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    order = analysis.clustered(vectors @ vectors.T)
    assert sorted(order) == list(range(12))
    assert sum(group[a] != group[b] for a, b in itertools.pairwise(order)) == 2
    assert analysis.clustered(torch.eye(2)) == [0, 1]


def test_the_most_frequent_tokens():
    assert analysis.most_frequent(np.array([9, 3, 0, 5, 5]), 3, leave_out=[0]) == [3, 4, 1]
    assert analysis.most_frequent(np.array([9, 3, 0, 5, 5]), 9) == [0, 3, 4, 1]


def test_the_pictures_show_the_numbers():
    weights = analysis.attention_by_position(native(MARIAN), [MARIAN.batch()], reach=3)
    figure = attention_figure({"one": weights, "two": weights})
    titles = [axes.get_title() for axes in figure.axes[:6]]
    assert titles[0] == "one\nencoder, self-attention"
    assert titles[2:] == [kind for kind in ("decoder, self-attention", "decoder, cross-attention") for _ in range(2)]
    shown = figure.axes[1].images[0].get_array()
    assert np.array(shown) == pytest.approx(torch.cat([weights[f"encoder.{layer}.self"] for layer in range(2)]).numpy())

    found = analysis.attention_weights(native(GPT2), GPT2.batch())
    tokens = list("abcdefghij")[: next(iter(found.values())).shape[1]]
    grid = sentence_figure(found, tokens)
    heads = [values[head] for values in found.values() for head in range(len(values))]
    assert [np.array(axes.images[0].get_array()) for axes in grid.axes] == [
        pytest.approx(head.numpy()) for head in heads
    ]
    assert [label.get_text() for label in grid.axes[0].get_yticklabels()] == tokens
    with pytest.raises(ValueError, match=r"sentence_figure: 'decoder.0.self' has \d queries and \d keys, not 1 and 1"):
        sentence_figure(found, ["a"])

    plots = embeddings_figure({"trained": (torch.eye(3), ["x", "y", "z"]), "random table": (torch.eye(3), [])}).axes
    assert [label.get_text() for label in plots[0].get_xticklabels()] == ["x", "y", "z"]
    assert plots[1].get_title() == "random table\nmean +0.00, standard deviation 0.00"
