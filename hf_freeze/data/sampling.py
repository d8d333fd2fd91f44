"""Draw some of many texts."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def sample(items: Sequence[T], number: int, seed: int = 0) -> list[T]:
    """The first `number` of the items in an order that `seed` draws: more of them begin with the same ones. All in that order if
    there are fewer. Raises ValueError for a number below 1."""
    if number < 1:
        raise ValueError(f"sample(number={number}): must be at least 1")
    order = np.random.default_rng(seed).permutation(len(items))[:number]
    return [items[place] for place in order.tolist()]
