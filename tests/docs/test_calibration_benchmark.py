"""The benchmark of calibrated cuts measures what it says, and the methods written anew for it do what their papers say."""

import importlib
import itertools
import os
import re
import sys

import numpy as np
import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from support import ROOT
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MarianConfig, MarianMTModel

FOLDER = ROOT / "benchmarks" / "calibration"
BATCH = {
    "input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    before = dict(os.environ)  # a job goes offline when it is imported; a later test, with a Hub of its own, must not
    yield
    os.environ.clear()
    os.environ.update(before)
    for file in FOLDER.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def measures():
    return importlib.import_module("measures")


@pytest.fixture
def blocks():
    return importlib.import_module("blocks")


def bert():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return BertModel(BertConfig(**sizes, max_position_embeddings=10)).eval()


def llama():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()


def marian():
    torch.manual_seed(0)
    depth = {f"{stack}_{field}": 2 for stack in ("encoder", "decoder") for field in ("layers", "attention_heads")}
    width = {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "vocab_size": 20, "pad_token_id": 0}
    return MarianMTModel(MarianConfig(**depth, **width, decoder_start_token_id=0, max_position_embeddings=10)).eval()


def test_places_are_those_of_sorting(measures):
    draws = torch.Generator().manual_seed(0)
    documents = torch.nn.functional.normalize(torch.randn(40, 3, generator=draws), dim=-1)
    queries = torch.nn.functional.normalize(documents[:30] + torch.randn(30, 3, generator=draws), dim=-1)
    found = measures.places(queries, documents, chunk=7)
    for number, query in enumerate(queries):
        order = (documents @ query).argsort(descending=True).tolist()
        assert found[number] == order.index(number)
    assert 0 < (found < 1).float().mean() < 1


def test_equal_vectors_find_nothing(measures):
    assert (measures.places(torch.ones(9, 2), torch.ones(9, 2)) == 4).all()


def test_intervals_are_those_of_paired_differences(measures):
    draws = np.random.default_rng(0)
    whole = draws.random(1500) < 0.5
    changed = whole ^ (draws.random(1500) < 0.04)  # the same but for a few
    items = [np.stack([value, np.ones(1500)], 1).astype(float) for value in (whole, changed)]
    middle, low, high = measures.interval([items[0]], [items[1]], measures.mean_of_first)
    differences = changed.astype(float) - whole
    spread = 1.96 * differences.std() / 1500**0.5
    assert middle == pytest.approx(differences.mean())
    assert (low, high) == pytest.approx((middle - spread, middle + spread), abs=0.1 * spread)
    assert high - low < 0.5 * 2 * 1.96 * (2 * 0.25 / 1500) ** 0.5  # an unpaired one would be far wider
    assert measures.interval([items[0]], [items[0]], measures.mean_of_first) == [0, 0, 0]


def test_bleu_of_items_is_that_of_the_corpus(measures):
    texts = ["a man walks a dog in the park", "two dogs run on the green grass", "a woman reads a long book today"]
    references = ["a man walks his dog in the park", "two dogs run over the green grass", "one woman reads a long book"]
    items = [BLEU().corpus_score([text], [[reference]]) for text, reference in zip(texts, references, strict=True)]
    sums = np.array([[*item.counts, *item.totals, item.sys_len, item.ref_len] for item in items], dtype=float).sum(0)
    assert measures.bleu_of(sums) == pytest.approx(BLEU().corpus_score(texts, [references]).score)
    shorter = BLEU().corpus_score(["a man walks his dog"], [references[:1]])
    sums = np.array([*shorter.counts, *shorter.totals, shorter.sys_len, shorter.ref_len], dtype=float)
    assert measures.bleu_of(sums) == pytest.approx(shorter.score)


@pytest.mark.parametrize("make", [bert, llama, marian])
def test_blocks_name_linears_and_removed_units_compute_nothing(blocks, measures, make):
    model = make()
    chosen = blocks.blocks(model)
    for block in chosen:
        weight = blocks.weight(model, block.out)
        assert weight.shape[1] == block.units * block.size
        assert all(blocks.weight(model, name).shape[1] == weight.shape[0] for name in block.ins)
        model.get_submodule(block.residual)
    for cut in ({"heads": 0.5}, {"neurons": 0.5}, {"heads": 0.5, "neurons": 0.5}):
        model = make()
        for block in chosen:
            if ("heads" if block.attention else "neurons") in cut:
                blocks.remove_units(model, block, list(range(0, block.units, 2)))
        assert measures.share_kept(model, cut) == 0.5 == measures.limit_of(cut)
    model = make()
    removed = chosen[-1]
    blocks.remove_units(model, removed, [])
    (inputs,) = next(blocks.inputs_of(model, (removed.out,), [labelled(model)]))
    assert not inputs.any()


def labelled(model):
    return (
        {**BATCH, "labels": torch.tensor([[3, 4, 1], [5, 1, -100]])} if model.config.model_type == "marian" else BATCH
    )


def test_shares_of_zeros_layers_and_ranks_are_counted(blocks, measures):
    model = llama()
    assert measures.share_kept(model, {"zeros": 0.5}) == measures.share_kept(model, {"layers": 0.5}) == 1
    for block in blocks.ffns(model)[:1]:
        for name in block.linears:
            weight = blocks.weight(model, name)
            weight.copy_(torch.outer(weight[:, 0], weight[0]))
    assert measures.share_kept(model, {"rank": 0.5}) == pytest.approx((3 * 28 + 3 * 12 * 28) / (6 * 12 * 16))
    blocks.weight(model, blocks.ffns(model)[0].out).zero_()
    assert measures.share_kept(model, {"layers": 0.5}) == 0.5
    assert measures.share_kept(model, {"zeros": 0.5}) == pytest.approx(5 / 6)
    assert measures.limit_of({"zeros": 0.7}) == pytest.approx(0.3)


def test_statistics_leave_padding_out(blocks):
    model = marian()
    names = [block.out for block in blocks.ffns(model)]
    grams = blocks.grams(model, names, [labelled(model)])
    for name in names:
        (states,) = next(blocks.inputs_of(model, (name,), [labelled(model)]))
        assert len(states) == (5 if "decoder" in name else 6)
        torch.testing.assert_close(grams[name], states.double().T @ states.double())


@pytest.mark.parametrize("heads", [False, True])
def test_elimination_removes_the_cheapest_and_refits_the_rest(blocks, heads):
    ziplm = importlib.import_module("peer_ziplm")
    model = bert()
    block = (blocks.attentions(model) if heads else blocks.ffns(model))[0]
    weight = blocks.weight(model, block.out).double()
    states = (
        torch.randn(300, weight.shape[1], dtype=torch.float64) @ torch.randn(weight.shape[1], weight.shape[1]).double()
    )
    levels, errors = ziplm.eliminate(model, block, states.T @ states)
    outputs = states @ weight.T

    def refitted(units):
        columns = states[:, ziplm._columns(torch.tensor(units), block.size)]
        fit = torch.linalg.lstsq(columns, outputs).solution.T
        return fit, float((outputs - columns @ fit.T).norm() / outputs.norm())

    first = min(itertools.combinations(range(block.units), block.units - 1), key=lambda units: refitted(units)[1])
    count = max(count for count in levels if count < block.units)
    assert count == block.units - 1
    assert tuple(levels[count][0]) == first
    for count in (block.units - 1, block.units // 2):
        fit, error = refitted(levels[count][0])
        torch.testing.assert_close(levels[count][1].double(), fit, rtol=0.1, atol=0.02)  # but for the ridge
        assert errors[count] == pytest.approx(error, rel=0.1)


def test_allocation_is_the_best_of_all():
    ziplm = importlib.import_module("peer_ziplm")
    draws = np.random.default_rng(0)
    errors = [{n: (4 - n) * float(draws.random()) for n in range(5)} for _ in range(3)]
    costs = [{n: 7 * n for n in range(5)} for _ in range(3)]
    factors = draws.random(3)
    found = ziplm.allocate(errors, costs, factors, 45)

    def value(counts):
        return sum(f * e[n] ** 2 for f, e, n in zip(factors, errors, counts, strict=True))

    within = [counts for counts in itertools.product(range(5), repeat=3) if 7 * sum(counts) <= 45]
    assert value(found) == pytest.approx(min(map(value, within)))
    assert tuple(found) in within


def test_rearranged_masks_have_a_smaller_squared_sum_and_as_many_units():
    fisher = importlib.import_module("peer_fisher")
    draws = torch.Generator().manual_seed(0)
    gradients = torch.randn(50, 12, generator=draws, dtype=torch.float64)
    gradients[:, 6:] = 0.1 * torch.randn(50, 6, generator=draws).double() - gradients[:, :6]  # pairs that cancel
    mask = torch.arange(12) < 6  # one of each pair
    new = fisher.rearrange(gradients, mask)
    assert new.sum() == 6
    assert gradients[:, ~new].sum(1).norm() < 0.8 * gradients[:, ~mask].sum(1).norm()
    assert fisher.rearrange(gradients, torch.ones(12, dtype=torch.bool)).all()


@pytest.mark.parametrize("make", [bert, llama, marian])
def test_fitted_masks_are_one_where_nothing_goes_and_lessen_the_error_elsewhere(blocks, make):
    fisher = importlib.import_module("peer_fisher")
    model, batch = make(), None
    batch = labelled(model)
    chosen = blocks.ffns(model)
    before = {block.out: blocks.weight(model, block.out).clone() for block in chosen}
    masks = [torch.ones(block.units, dtype=torch.bool) for block in chosen]
    fisher.tune(model, chosen, masks, [batch])
    for block in chosen:
        torch.testing.assert_close(blocks.weight(model, block.out), before[block.out], rtol=0.01, atol=1e-4)
    for mask in masks:
        mask[::2] = False
    fisher.tune(model, chosen[:1], masks[:1], [batch])
    block = chosen[0]
    (states,) = next(blocks.inputs_of(make(), (block.out,), [batch]))

    def error(weight):
        return float((states @ (weight - before[block.out]).T).norm())

    plain = before[block.out] * masks[0]
    assert error(blocks.weight(model, block.out)) < error(plain)


@pytest.mark.parametrize("make", [bert, llama, marian])
def test_peers_of_this_folder_make_the_cut(blocks, measures, make):
    model = make()
    batch = labelled(model)
    if make is bert:
        batch = {**batch, "vectors": blocks.sentence_vectors(model, batch).detach()}
    for name in ("peer_ziplm", "peer_fisher", "peer_hf_freeze"):
        peer = importlib.import_module(name)
        method = next(iter(peer.METHODS))
        new = make()
        cut = {"neurons": 0.5}
        job = {"cut": cut, "method": method, "seed": 1}
        state, _ = peer.compress(new, [batch], job)
        padded = importlib.import_module("job").padded
        whole = make()
        whole.load_state_dict({key: padded(state[key], tensor) for key, tensor in whole.state_dict().items()})
        assert measures.share_kept(whole, cut) == pytest.approx(0.5, abs=0.05), name


def test_help_states_the_claim_and_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("run").main()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Claim: ", printed, re.MULTILINE)
    assert "python benchmarks/calibration/run.py" in printed


def test_tables_pair_rows_with_the_whole_model_and_say_what_cannot_be_done(monkeypatch, tmp_path):
    run = importlib.import_module("run")
    table = run.Table(tmp_path)
    base = {"model": "minilm", "split": "test", "seed": 1, "cut": "1/2 of the neurons"}
    hits = np.stack([np.arange(100) < 60, np.ones(100)], 1).astype(float)
    fewer = np.stack([np.arange(100) < 50, np.ones(100)], 1).astype(float)
    table.add({**base, "cut": "", "method": run.WHOLE}, {"recall@1": hits})
    done = {
        "scores": {"recall@1": 0.5},
        "kept": 0.6,
        "seconds": 3.0,
        "cpu_seconds": 2.0,
        "peak_bytes": 5e6,
        "loaded_bytes": 1e6,
    }
    table.add({**base, **done, "method": "one"}, {"recall@1": fewer})
    ours = np.stack([np.arange(100) < 55, np.ones(100)], 1).astype(float)
    table.add({**base, **done, "method": run.CALIBRATED}, {"recall@1": ours})
    table.add({**base, "method": "two", "cannot": "no BERT"}, {})
    table.add({**base, "method": "three", "error": "broke"}, {})
    assert table.has({**base, "method": "one"})
    assert table.has({**base, "method": "two"})
    assert not table.has({**base, "method": "three"})
    printed = run.Table(tmp_path).markdown("test")
    found = r"\| one \| 1 \| 0.500 \| -0.100 \(-0.1\d\d to -0.0\d\d\) \| 0.050 \(0.0\d\d to 0.\d+\) \| 0.600 \(above 0.5\) \|"
    assert re.search(rf"{found} 3.0 \| 2.0 \| 4 \|", printed)
    assert "| two | 0 | no BERT |" in printed
    assert "| three | 0 | broke |" in printed
