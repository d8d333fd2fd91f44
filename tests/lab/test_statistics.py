"""Statistics over test items, against sacrebleu's own corpus scores and significance test, and on synthetic rows."""

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from hf_freeze.analysis.significance import compare, holm
from hf_freeze.lab.data import builtin_corpus
from hf_freeze.lab.tasks.items import bleu, bleu_items, log_perplexity

TRANSLATIONS = ["the cat sat on the mat today .", "a dog runs", "x", "", "two men are here, are they?"]
REFERENCES = ["the cat sat on a mat .", "a dog runs fast in the park", "hello there", "nothing", "two men are here."]


def test_items_add_up_to_the_corpus():
    items = bleu_items(TRANSLATIONS, REFERENCES)
    for chosen in (range(5), [0, 0, 3, 4], [1]):
        corpus = BLEU().corpus_score([TRANSLATIONS[i] for i in chosen], [[REFERENCES[i] for i in chosen]])
        found = items[list(chosen)].sum(0)
        assert found.tolist() == [*corpus.counts, *corpus.totals, corpus.sys_len, corpus.ref_len]
    assert items.dtype == np.int64


def test_items_need_a_reference_each():
    with pytest.raises(ValueError, match="shorter"):
        bleu_items(TRANSLATIONS, REFERENCES[:-1])


def test_bleu_is_sacrebleus():
    items = bleu_items(TRANSLATIONS, REFERENCES)
    # Each sentence alone and all subsets: no match at all, orders without a match, no 4-gram, an empty translation.
    chosen = [[i for i in range(5) if mask >> i & 1] for mask in range(1, 32)]
    expected = [
        BLEU().corpus_score([TRANSLATIONS[i] for i in few], [[REFERENCES[i] for i in few]]).score for few in chosen
    ]
    found = bleu(np.stack([items[few].sum(0) for few in chosen]))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found == 0).any()
    assert (found > 10).any()


def test_log_perplexity():
    sums = np.array([[20.0, 10.0], [3.0, 2.0]])
    np.testing.assert_allclose(log_perplexity(sums), [2.0, 1.5])


def test_differences_are_plain_numbers():
    draw = np.random.default_rng(0)
    (one,) = compare({name: [draw.integers(2, size=(30, 1))] for name in "ab"}, lambda total: total[..., 0])
    assert type(one.p_corrected) is float
    assert type(one.significant) is bool


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.fixture(scope="module")
def texts():
    """300 references and a function that makes translations of them with a share of the words wrong."""
    references = list(builtin_corpus(train=1, dev=1, test=300)["test"]["target"])

    def translations(share, seed):
        rng = np.random.default_rng(seed)
        return [" ".join("oops" if rng.random() < share else word for word in line.split()) for line in references]

    return references, translations


@pytest.mark.parametrize("shares", [(0.2, 0.2), (0.2, 0.23), (0.2, 0.24), (0.2, 0.3)])
def test_one_seed_agrees_with_sacrebleus_paired_bootstrap(texts, shares):
    references, make = texts
    systems = [make(share, seed) for seed, share in enumerate(shares)]
    named = [("a", systems[0]), ("b", systems[1])]
    test = PairedTest(named, {"BLEU": BLEU(references=[references])}, None, "bs", n_samples=2000)
    theirs = test()[1]["BLEU"]
    rows = {name: [bleu_items(system, references)] for name, system in named}
    (ours,) = compare(rows, bleu)
    assert ours.difference == pytest.approx(theirs[1].score - theirs[0].score)
    # Sacrebleu asks how often a resample is off by more than the difference, in its direction: one-sided.
    assert ours.p == pytest.approx(2 * theirs[1].p_value, rel=0.25, abs=0.015)
    # Theirs are the intervals of the systems. That of the difference is the one of a system against a perfect twin of the
    # other, and lies between their difference (twins) and their sum (unrelated).
    assert ours.low < ours.difference < ours.high
    half = (ours.high - ours.low) / 2
    assert abs(theirs[0].ci - theirs[1].ci) < half < (theirs[0].ci + theirs[1].ci) * 1.1
    perfect = bleu_items(references, references)
    (alone,) = compare({"perfect": [perfect], "b": rows["b"]}, bleu)
    assert (alone.high - alone.low) / 2 == pytest.approx(theirs[1].ci, rel=0.1), "the spread of row b alone"
    assert ours.p_corrected == ours.p
    assert not ours.seeds


def test_the_order_of_the_sentences_does_not_matter_and_a_system_equals_itself(texts):
    references, make = texts
    items = bleu_items(make(0.2, 0), references)
    (same,) = compare({"a": [items], "b": [items]}, bleu)
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
    (shuffled,) = compare({"a": [items], "b": [np.random.default_rng(0).permutation(items)]}, bleu)
    assert shuffled.difference == 0
    assert shuffled.p > 0.5
    assert not shuffled.significant


def synthetic(rng, *, seeds, spread, shift=0.0, items=150):
    """Items of a language model: blocks of 10 tokens with a nll a token of about 3, one array a seed."""
    nll = 3 + shift + spread * rng.normal(size=(seeds, 1)) + 0.5 * rng.normal(size=(seeds, items))
    return [np.stack([10 * row, np.full(items, 10.0)], axis=1) for row in nll]


@pytest.mark.parametrize(
    ("seeds", "spread", "most"), [(1, 0.0, 0.085), (2, 0.5, 0.085), (3, 0.5, 0.085), (3, 0.0, 0.03)]
)
def test_rows_that_do_not_differ_are_called_different_as_rarely_as_promised(seeds, spread, most):
    rng = np.random.default_rng(seeds)
    flagged = 0
    for trial in range(400):
        rows = {name: synthetic(rng, seeds=seeds, spread=spread, items=40) for name in "ab"}
        flagged += compare(rows, log_perplexity, replicates=400, seed=trial)[0].significant
    # 5 % of 400 is 20, with a standard deviation of 4.4; with equal seeds the items count twice, so there it is fewer.
    assert flagged / 400 <= most
    if spread or seeds == 1:
        assert flagged / 400 >= 0.02


def test_one_of_many_rows_is_called_different_by_chance_as_rarely():
    rng = np.random.default_rng(9)
    flagged = 0
    for trial in range(150):
        rows = {name: synthetic(rng, seeds=1, spread=0, items=80) for name in "abcd"}
        flagged += any(found.significant for found in compare(rows, log_perplexity, seed=trial, replicates=480))
    assert flagged / 150 <= 0.1


def test_a_clear_difference_is_found_and_its_direction_and_size():
    rng = np.random.default_rng(0)
    rows = {
        "0": synthetic(rng, seeds=3, spread=0.02),
        "same": synthetic(rng, seeds=3, spread=0.02),
        "worse": synthetic(rng, seeds=3, spread=0.02, shift=0.5),
    }
    found = {(d.base, d.row): d for d in compare(rows, log_perplexity)}
    assert list(found) == [("0", "same"), ("0", "worse"), ("same", "worse")]
    worse = found["0", "worse"]
    assert worse.significant
    assert worse.low < 0.5 < worse.high
    assert worse.low > 0.3
    assert worse.seeds
    assert not found["0", "same"].significant
    assert found["same", "worse"].significant


def test_a_pair_has_one_corrected_p():
    """Holm: the smallest of k p-values times k. Comparisons with the first row count alone; for other pairs, all count."""
    rng = np.random.default_rng(3)
    shifts = {"0": 0, "near": 0.04, "far": 1, "farther": 2, "farthest": 3}
    rows = {name: synthetic(rng, seeds=1, spread=0, shift=shift) for name, shift in shifts.items()}
    found = compare(rows, log_perplexity)
    smallest = min(d.p for d in found)
    assert [d.p for d in found].count(smallest) == 9, "all but those of the near rows"
    assert [d.p_corrected for d in found] == pytest.approx([found[0].p, *[4 * smallest] * 3, *[10 * smallest] * 6])
    alone = compare(rows, log_perplexity, to_first=True)
    assert [d.p_corrected for d in alone] == [d.p_corrected for d in found[:4]], "other pairs do not change it"


def test_a_difference_of_many_rows_can_still_be_real():
    rng = np.random.default_rng(0)
    rows = {str(i): synthetic(rng, seeds=1, spread=0, shift=i, items=50) for i in range(16)}
    assert all(found.significant for found in compare(rows, log_perplexity)), (
        "p is not held up by the number of replicates"
    )


def test_two_rows_have_the_same_interval_in_every_table():
    """Also where there are so many pairs that p takes more draws."""
    rng = np.random.default_rng(0)
    rows = {str(i): synthetic(rng, seeds=1 + i % 3, spread=0.1, shift=i / 9) for i in range(17)}
    among = {(d.base, d.row): (d.difference, d.low, d.high) for d in compare(rows, log_perplexity)}
    assert len(among) == 136
    for base, row in (("0", "3"), ("2", "5"), ("1", "13")):
        (alone,) = compare({base: rows[base], row: rows[row]}, log_perplexity)
        assert among[base, row] == pytest.approx((alone.difference, alone.low, alone.high), rel=1e-9)


def test_the_spread_of_seeds_widens_the_interval():
    rng = np.random.default_rng(0)
    base, row = (synthetic(rng, seeds=1, spread=0)[0] for _ in range(2))

    def width(spread):
        def seeds(items):
            return [items + spread * sign * np.array([10.0, 0.0]) for sign in (-1, 0, 1)]

        (found,) = compare({"a": seeds(base), "b": seeds(row)}, log_perplexity)
        assert found.difference == pytest.approx(float(log_perplexity(row.sum(0)) - log_perplexity(base.sum(0))))
        return found.high - found.low

    (one_seed,) = compare({"a": [base], "b": [row]}, log_perplexity)
    assert width(0.0) == pytest.approx(one_seed.high - one_seed.low)
    assert width(0.1) > 1.5 * width(0.0)
    # With a wide spread the interval is Student's: 2 * 2.776 standard errors for 4 degrees of freedom.
    assert width(5.0) == pytest.approx(2 * 2.776 * 5.0 * np.sqrt(2 / 3), rel=0.1)
    (mixed,) = compare({"a": [base - 1, base + 1], "b": [row]}, log_perplexity)
    assert not mixed.seeds, "the seeds of one row only"


def test_the_same_seed_gives_the_same_answer():
    rng = np.random.default_rng(0)
    rows = {name: synthetic(rng, seeds=2, spread=0.1) for name in "abc"}
    assert compare(rows, log_perplexity) == compare(rows, log_perplexity)
    assert compare({"a": rows["a"]}, log_perplexity) == []


def test_items_of_other_test_sets_cannot_be_paired():
    rng = np.random.default_rng(0)
    rows = {"a": synthetic(rng, seeds=1, spread=0, items=8), "b": synthetic(rng, seeds=1, spread=0, items=9)}
    with pytest.raises(ValueError, match=r"different numbers of items cannot be paired: \{'a': \[8\], 'b': \[9\]\}"):
        compare(rows, log_perplexity)
