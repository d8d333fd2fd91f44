"""Training, dev and test splits, as the `data` section of a recipe asks for them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_freeze.lab.recipes.settings import SPLITS, Data


def held_out(size: int, data: Data) -> dict[str, np.ndarray]:
    """split -> the items of a training split of this size that `holdout` and `holdout_test` draw for it, and those that are left
    to train on. Raises ValueError where none are."""
    held = {"dev": data.holdout, "test": data.holdout_test}
    if not any(held.values()):
        return {}
    if sum(held.values()) >= size:
        words = [f"data.{name}={value}" for name, value in data.given().items() if name in ("holdout", "holdout_test")]
        raise ValueError(f"{' and '.join(words)} leaves nothing to train on: the training split has {size} items")
    order = np.random.default_rng(0).permutation(size)  # files may be sorted
    parts = zip((*held, "train"), np.split(order, np.cumsum(list(held.values()))), strict=True)
    return {name: np.sort(part) for name, part in parts if len(part)}


def take(splits: Any, data: Data) -> dict[str, datasets.Dataset]:
    """`splits` and what `held_out` draws from train, each cut to the first `limit` items. Raises its error."""
    train = splits["train"]
    splits |= {name: train.select(which) for name, which in held_out(len(train), data).items()}
    return {name: first(splits[name], data.limit) for name in SPLITS}


def first(split: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """The first `limit` items; all where there is none."""
    return split.select(range(min(limit or len(split), len(split))))


def paths_of(data: Data, named: list[str]) -> list[Path]:
    """The files of a split."""
    return [Path(data.root) / file for file in named]


def reader(
    data: Data, files: Callable[[list[Path]], datasets.Dataset], hub: Callable[..., datasets.Dataset]
) -> Callable[[Any], datasets.Dataset]:
    """What reads a split, given its files or its name on the Hub, by `files(paths)` or `hub(id, split, name=)`."""
    if data.form == "hub":
        return lambda split: hub(data.hub, split, name=data.name)
    return lambda named: files(paths_of(data, named))


def read_splits(data: Data, read: Callable[[Any], datasets.Dataset]) -> dict[str, datasets.Dataset]:
    """The splits that the recipe names, each read by `read`."""
    return take(read_all(data, read, SPLITS), data)


def read_all(data: Data, read: Callable[[Any], Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of these splits that the recipe names, each read by `read`."""
    return {name: read(getattr(data, name)) for name in names if name in data.model_fields_set}
