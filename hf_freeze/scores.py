"""Scores from sums over test items, so that any resample of a test set can be scored.

Each takes sums `(..., k)` and returns `(...)`; 0 where it is 0 / 0.
"""

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


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.shape(below)), where=np.asarray(below) != 0)
