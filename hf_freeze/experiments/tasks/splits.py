"""Training, dev and test splits, as the `data` section of a recipe asks for them."""

from collections.abc import Callable
from typing import Any

import datasets
import numpy as np

from hf_freeze.experiments.tasks.data_forms import SPLITS


def take(splits: dict[str, datasets.Dataset], settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """`splits`, a dev split drawn from train where `holdout` says how many, each cut to the first `limit` items.

    Raises ValueError where train is not larger than the holdout.
    """
    if holdout := settings.get("holdout"):
        size = len(splits["train"])
        if size <= holdout:
            raise ValueError(f"data.holdout={holdout} leaves nothing to train on: the training split has {size} items")
        order = np.random.default_rng(0).permutation(size)  # files may be sorted
        splits["dev"] = splits["train"].select(np.sort(order[:holdout]))
        splits["train"] = splits["train"].select(np.sort(order[holdout:]))
    limit = settings.get("limit")
    return {name: splits[name].select(range(min(limit or len(splits[name]), len(splits[name])))) for name in SPLITS}


def read_splits(settings: dict[str, Any], read: Callable[[Any], datasets.Dataset]) -> dict[str, datasets.Dataset]:
    """The splits that the recipe names, each read by `read`."""
    return take({name: read(settings[name]) for name in SPLITS if name in settings}, settings)
