"""Statistics over test items, against sacrebleu's own corpus scores."""

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from hf_freeze.experiments.statistics import bleu_items

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
