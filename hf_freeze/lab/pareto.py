"""The Pareto front: which points no other point beats."""

from collections.abc import Sequence

import numpy as np


def on_front(points: Sequence[Sequence[float]], groups: Sequence[str] | None = None) -> list[bool]:
    """(n, k) numbers, of which less is better, to n: whether no other point is as good in each number and better in one. Points
    that are alike are all on the front, or none is. `groups`: points of different groups are not compared."""
    values = np.asarray(points, float)
    if not len(values):
        return []
    beats = np.all(values[None] <= values[:, None], axis=2) & np.any(values[None] < values[:, None], axis=2)
    if groups is not None:
        names = np.asarray(groups)
        beats &= names[None] == names[:, None]
    return [not beaten for beaten in beats.any(axis=1)]
