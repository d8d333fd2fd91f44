"""Scores from sums over test items, so that any resample of a test set can be scored.

Most take sums `(..., k)` and return `(...)`; 0 where it is 0 / 0.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def mean(sums: Any) -> np.ndarray:
    """From the sum of a score and the number of items ..."""
    return _ratio(*(np.asarray(sums, float)[..., i] for i in range(2)))


def f1(sums: Any) -> np.ndarray:
    """2 TP / (2 TP + FP + FN), from TP, FP, FN ... of two classes."""
    tp, fp, fn = (np.asarray(sums, float)[..., i] for i in range(3))
    return _ratio(2 * tp, 2 * tp + fp + fn)


def matthews(sums: Any) -> np.ndarray:
    """Matthews correlation, from TP, FP, FN, TN ... of two classes."""
    tp, fp, fn, tn = (np.asarray(sums, float)[..., i] for i in range(4))
    return _ratio(tp * tn - fp * fn, np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))


def pearson(sums: Any) -> np.ndarray:
    """Pearson correlation of predictions x and references y, from 1, x, x², x y, y², y ..."""
    n, x, xx, xy, yy, y = (np.asarray(sums, float)[..., i] for i in range(6))
    spread_x, spread_y = np.maximum(n * xx - x * x, 0), np.maximum(n * yy - y * y, 0)
    equal = (spread_x <= 1e-12 * n * xx) | (spread_y <= 1e-12 * n * yy)  # rounding may leave a little of no spread
    return np.where(equal, 0.0, _ratio(n * xy - x * y, np.sqrt(spread_x * spread_y)))


def of_spans(sums: Any) -> np.ndarray:
    """F1 of found things, from the numbers of correct, found and true ones."""
    correct, found, true = (np.asarray(sums, float)[..., i] for i in range(3))
    return _ratio(2 * correct, found + true)


def bleu_items(translations: list[str], references: list[str]) -> np.ndarray:
    """int64 (N, 10): matching n-grams (n = 1..4), n-grams (n = 1..4), words of the translation, words of the reference.

    Their sums over a test set are what its BLEU is computed from (Papineni et al., 2002; sacrebleu's tokenizer 13a).
    """
    from sacrebleu.metrics.bleu import BLEU

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


def squad(answer: str, right: Sequence[str]) -> tuple[float, float]:
    """(F1 of words, exact match) with that of the `right` answers that is most alike; no right answer is the empty one. Case,
    punctuation and articles do not count (Rajpurkar et al., 2016)."""
    said = _words(answer)
    scores = []
    for text in right or [""]:
        words = _words(text)
        common = sum((Counter(said) & Counter(words)).values())
        both_empty = not said and not words
        f1 = 1.0 if both_empty else 2 * common / (len(said) + len(words))
        scores.append((f1, float(said == words)))
    return max(f1 for f1, _ in scores), max(exact for _, exact in scores)


def _words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.shape(below)), where=np.asarray(below) != 0)
