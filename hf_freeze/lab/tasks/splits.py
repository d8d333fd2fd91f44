"""Training, dev and test splits, as the `data` section of a recipe asks for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_freeze.lab.tasks.data_forms import SPLITS, data_form


def held_out(size: int, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """split -> the items of a training split of this size that `holdout` and `holdout_test` draw for it, and those that are left
    to train on. Raises ValueError where none are."""
    held = {"dev": settings.get("holdout", 0), "test": settings.get("holdout_test", 0)}
    if not any(held.values()):
        return {}
    if sum(held.values()) >= size:
        words = [f"data.{name}={settings[name]}" for name in ("holdout", "holdout_test") if name in settings]
        raise ValueError(f"{' and '.join(words)} leaves nothing to train on: the training split has {size} items")
    order = np.random.default_rng(0).permutation(size)  # files may be sorted
    parts = zip((*held, "train"), np.split(order, np.cumsum(list(held.values()))), strict=True)
    return {name: np.sort(part) for name, part in parts if len(part)}


def take(splits: Any, settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """`splits` and what `held_out` draws from train, each cut to the first `limit` items. Raises its error."""
    train = splits["train"]
    splits |= {name: train.select(which) for name, which in held_out(len(train), settings).items()}
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
