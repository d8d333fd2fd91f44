"""What each test item adds to a score, kept for every run.

Sums of items, `(..., 10)` or `(..., 2)`, give the score of a test set or of any resample of it.
"""

import hashlib

import numpy as np

from hf_freeze.scores import bleu as bleu
from hf_freeze.scores import bleu_items as bleu_items


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
