"""Training, dev and test splits, as the `data` section of a recipe asks for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_freeze.experiments.tasks.data_forms import SPLITS, data_form


def take(splits: Any, settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """`splits`, a dev and a test split drawn from train where `holdout` and `holdout_test` say how many, each cut to the first
    `limit` items.

    Raises ValueError where train is not larger than what is held out.
    """
    held = {"dev": settings.get("holdout", 0), "test": settings.get("holdout_test", 0)}
    if sum(held.values()):
        size = len(splits["train"])
        if size <= sum(held.values()):
            words = [f"data.{name}={settings[name]}" for name in ("holdout", "holdout_test") if name in settings]
            raise ValueError(f"{' and '.join(words)} leaves nothing to train on: the training split has {size} items")
        order = np.random.default_rng(0).permutation(size)  # files may be sorted
        train = splits["train"]
        for name, count in held.items():
            if count:
                splits[name] = train.select(np.sort(order[:count]))
            order = order[count:]
        splits["train"] = train.select(np.sort(order))
    limit = settings.get("limit")
    return {name: splits[name].select(range(min(limit or len(splits[name]), len(splits[name])))) for name in SPLITS}


def paths_of(settings: dict[str, Any], named: list[str]) -> list[Path]:
    """The files of a split."""
    return [Path(settings.get("root", ".")) / file for file in named]


def reader(
    settings: dict[str, Any], files: Callable[[list[Path]], datasets.Dataset], hub: Callable[..., datasets.Dataset]
) -> Callable[[Any], datasets.Dataset]:
    """What reads a split, given its files or its name on the Hub, by `files(paths)` or `hub(id, split, name=)`."""
    if data_form(settings) == "hub":
        return lambda split: hub(settings["hub"], split, name=settings.get("name"))
    return lambda named: files(paths_of(settings, named))


def read_splits(settings: dict[str, Any], read: Callable[[Any], datasets.Dataset]) -> dict[str, datasets.Dataset]:
    """The splits that the recipe names, each read by `read`."""
    return take({name: read(settings[name]) for name in SPLITS if name in settings}, settings)
