"""What each test item adds to a score, kept for every run.

Sums of items, `(..., 10)` or `(..., 2)`, give the score of a test set or of any resample of it.
"""

import hashlib

import numpy as np
from sacrebleu.metrics.bleu import BLEU


def bleu_items(translations: list[str], references: list[str]) -> np.ndarray:
    """int64 (N, 10): matching n-grams (n = 1..4), n-grams (n = 1..4), words of the translation, words of the reference.

    Their sums over a test set are what its BLEU is computed from (Papineni et al., 2002; sacrebleu's tokenizer 13a).
    """
    metric = BLEU(effective_order=True)  # the order changes a sentence's score, which is not used, and not its counts
    scores = [metric.sentence_score(t, [r]) for t, r in zip(translations, references, strict=True)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], dtype=np.int64)


def bleu(sums: np.ndarray) -> np.ndarray:
    """(..., 10) sums of `bleu_items` to (...) corpus BLEU, as sacrebleu's `compute_bleu` with its smoothing "exp"."""
    matches, ngrams = np.asarray(sums[..., :4], float), np.asarray(sums[..., 4:8], float)
    words, reference_words = np.asarray(sums[..., 8], float), np.asarray(sums[..., 9], float)
    # An order without a match counts as 1/2, 1/4 ... of one, halved for each such order.
    halved = np.where(matches == 0, 0.5 ** np.cumsum(matches == 0, axis=-1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        brevity = np.where(words < reference_words, np.exp(1 - reference_words / words), 1.0)
        score = 100 * brevity * np.exp(np.log(halved / ngrams).mean(-1))
    return np.where(matches.any(-1) & (ngrams > 0).all(-1), score, 0.0)


def log_perplexity(sums: np.ndarray) -> np.ndarray:
    """(..., 2) sums of negative log-likelihood in nats and of tokens to (...) log-perplexity."""
    return sums[..., 0] / sums[..., 1]


def accuracy(sums: np.ndarray) -> np.ndarray:
    """(..., 3) sums of correct items, of items and of their classes (which only tell test sets apart) to (...) accuracy in %."""
    return 100 * sums[..., 0] / sums[..., 1]


def digest_of_test_set(items: np.ndarray) -> str:
    """Tells test sets apart, by the (N, k) items of any model: the last column is of the test set alone, such as the words of the
    reference or the tokens of a block."""
    last = np.ascontiguousarray(items[:, -1], dtype="<f8")
    return f"{len(last)} items, {hashlib.sha256(last.tobytes()).hexdigest()[:12]}"
