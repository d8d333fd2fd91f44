"""What each test item adds to a score, kept for every run so that differences between rows can be tested afterwards."""

import numpy as np
from sacrebleu.metrics import BLEU


def bleu_items(translations: list[str], references: list[str]) -> np.ndarray:
    """int64 (N, 10): matching n-grams (n = 1..4), n-grams (n = 1..4), words of the translation, words of the reference.

    Their sums over a test set are what its BLEU is computed from (Papineni et al., 2002; sacrebleu's tokenizer 13a).
    """
    metric = BLEU(effective_order=True)  # the order changes a sentence's score, which is not used, and not its counts
    scores = [metric.sentence_score(t, [r]) for t, r in zip(translations, references, strict=True)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=np.int64)
