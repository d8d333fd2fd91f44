"""Cut-offs of adaptive embeddings: against every choice there is, against what a model has, at full size, and what is refused."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from transformers import MarianConfig

from hf_freeze import make_variant, methods
from hf_freeze.analysis import choose_cutoffs, count_tokens
from hf_freeze.architectures.base import canonical_parameters
from hf_freeze.lab import data

ZIPF = 1_000 / np.arange(1, 31)


def cost_and_width(counts, cutoffs, width, factor, hidden):
    """By hand: parameters of tables and projections, and the mean logarithm of the width of a token of the text."""
    parameters = wide = 0
    for band, (start, end) in enumerate(itertools.pairwise([0, *cutoffs, len(counts)])):
        of_band = int(width / factor**band)
        parameters += (end - start) * of_band + of_band * hidden
        wide += sum(counts[start:end]) * math.log(of_band)
    return parameters, wide / sum(counts)


def best_by_trying(counts, limit, width, factor, hidden, bands):
    """(expected logarithm, fewest parameters) over all cut-offs of 2 to `bands` bands within the limit."""
    choices = [c for n in range(1, bands) for c in itertools.combinations(range(1, len(counts)), n)]
    found = [cost_and_width(counts, cutoffs, width, factor, hidden) for cutoffs in choices]
    widest = max(wide for cost, wide in found if cost <= limit)
    return widest, min(cost for cost, wide in found if cost <= limit and wide > widest - 1e-9)


def rough(seed):
    """Counts in falling order but for noise, some of them zero."""
    noise = np.random.default_rng(seed).uniform(0.5, 1.5, len(ZIPF))
    return np.floor(ZIPF * noise * (noise > 0.7)).astype(int)


@pytest.mark.parametrize("counts", [ZIPF, rough(1), rough(2), np.ones(30)], ids=["zipf", "rough", "rougher", "flat"])
@pytest.mark.parametrize(("width", "factor", "hidden"), [(16, 4, 16), (8, 2, 16), (27, 3, 40)])
@pytest.mark.parametrize("bands", [2, 3, 4])
def test_nothing_that_could_be_chosen_is_better(counts, width, factor, hidden, bands):
    if width // factor ** (bands - 1) == 0:
        pytest.skip("a band of no width")
    tried = set()
    for share in (0.95, 0.999) if hidden == width else (0.55, 0.8, 0.999):
        limit = int(share * len(counts) * hidden)
        # Projections weigh more than so short a table: there may be no choice.
        least = cost_and_width(counts, [1], width, factor, hidden)[0]
        if limit < least:
            limit = least + int(share * 100)
        cutoffs = choose_cutoffs(counts, limit, width=width, hidden_size=hidden, factor=factor, bands=bands)
        cost, wide = cost_and_width(counts, cutoffs, width, factor, hidden)
        assert cost <= limit
        assert (wide, cost) == pytest.approx(best_by_trying(counts, limit, width, factor, hidden, bands))
        tried.add(tuple(cutoffs))
    assert len(tried) > 1, "one answer for every budget: nothing was chosen"


def test_the_budget_is_that_of_the_model():
    counts = 1e6 / np.arange(1, 2_001)
    cutoffs = choose_cutoffs(counts, 0.4, width=64, hidden_size=96, bands=3)
    config = MarianConfig(vocab_size=2_000, decoder_vocab_size=2_000, d_model=96, encoder_attention_heads=2,
                          decoder_attention_heads=2, pad_token_id=0)  # fmt: skip
    with torch.device("meta"):
        model = make_variant(config, [methods.AdaptiveEmbedding(cutoffs=cutoffs, width=64)], task="seq2seq-lm")
    size = sum(p.numel() for name, p in canonical_parameters(model) if name.startswith("model.shared."))
    assert size == cost_and_width(counts, cutoffs, 64, 4, 96)[0]
    assert 0.395 < size / (2_000 * 96) <= 0.4
    assert cutoffs == choose_cutoffs(counts, int(0.4 * 2_000 * 96), width=64, hidden_size=96)


@pytest.mark.parametrize("bands", [3, 4])
def test_a_large_vocabulary_takes_seconds(bands):
    counts = 1e9 / np.arange(1, 250_001) ** 1.1
    begin = time.perf_counter()
    cutoffs = choose_cutoffs(counts, 0.3, width=512, bands=bands)
    assert time.perf_counter() - begin < (3 if bands == 3 else 20)
    cost, wide = cost_and_width(counts, cutoffs, 512, 4, 512)
    assert cost <= 0.3 * 250_000 * 512
    fewer = cost_and_width(counts, choose_cutoffs(counts, 0.3, width=512, bands=bands - 1), 512, 4, 512)[1]
    assert wide > fewer if bands == 3 else wide >= fewer


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_trained_tokenizers_are_ordered_well_enough(kind):
    texts = data.builtin_corpus(train=2_000, dev=1, test=1)["train"]["source"]
    tokenizer = data.train_tokenizer(texts, vocab_size=800, kind=kind)
    counts = count_tokens(tokenizer, texts)
    assert len(counts) == len(tokenizer)
    expected = np.zeros(len(tokenizer), dtype=int)
    for text in texts:
        np.add.at(expected, tokenizer(text, add_special_tokens=False)["input_ids"], 1)
    assert np.array_equal(counts, expected)
    for budget in (0.4, 0.5, 0.8):
        cutoffs = choose_cutoffs(counts, budget, width=96)
        assert 0 < cutoffs[0] <= cutoffs[-1] < len(tokenizer)
    with pytest.raises(ValueError, match="the ids are not ordered by frequency"):
        choose_cutoffs(np.sort(counts), 0.5, width=96)


def test_unordered_ids_are_refused_by_what_sorting_would_gain():
    counts = np.array([1, 1, 1, 1, 1, 1, 1, 1, 46, 46])
    message = (
        r"the first 2 cover 2% of all occurrences, and the most frequent 2 cover 92%, so 90% would be gained by sorting"
    )
    budget = cost_and_width(counts, [2], 4, 4, 4)[0]
    with pytest.raises(ValueError, match=message):
        choose_cutoffs(counts, budget, width=4, bands=2)
    assert choose_cutoffs(counts[::-1], budget, width=4, bands=2) == [2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budget": 0}, r"budget=0\): must be a number of parameters, an integer of at least 1, or a share"),
        ({"budget": 1.0}, r"budget=1\.0\): must be"),
        ({"budget": True}, r"budget=True\): must be"),
        ({"budget": 100}, r"budget=100\): that is 100 parameters, and with width=16.* at least 384 are needed"),
        ({"width": 0}, r"width=0\): must be an integer of at least 1"),
        ({"factor": 1}, r"factor=1\): must be an integer of at least 2"),
        ({"hidden_size": 8}, r"hidden_size=8\): must be an integer of at least width=16"),
        ({"bands": 1}, r"bands=1\): must be an integer of at least 2"),
        ({"bands": 4}, r"bands=4\): must be in 2\.\.3 for 30 ids, width=16 and factor=4"),
        ({"token_counts": [3, 2], "bands": 3}, r"bands=3\): must be in 2\.\.2 for 2 ids"),
        ({"token_counts": []}, r"token_counts must hold a number .*; got float64 of shape \(0,\)"),
        ({"token_counts": [0, 0]}, "and not only zeros"),
        ({"token_counts": [1, -1]}, "of at least 0 for each"),
        ({"token_counts": ["a", "b"]}, "must hold a number"),
        ({"token_counts": [1.0, float("nan")]}, "must hold a number"),
    ],
)
def test_settings_that_are_refused(changed, message):
    settings = {"token_counts": ZIPF, "budget": 400, "width": 16} | changed
    counts, budget = settings.pop("token_counts"), settings.pop("budget")
    with pytest.raises(ValueError, match=message):
        choose_cutoffs(counts, budget, **settings)


def test_the_least_budget_is_enough():
    least = cost_and_width(ZIPF, [1, 2], 16, 4, 16)[0]
    assert choose_cutoffs(ZIPF, least, width=16) == [1, 2]
    with pytest.raises(ValueError, match="at least"):
        choose_cutoffs(ZIPF, least - 1, width=16)
