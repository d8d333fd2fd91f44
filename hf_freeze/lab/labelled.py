"""The inputs and labels for `hf-freeze compress`, from a recipe or from files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.architectures.tasks import task_of as head_of
from hf_freeze.compression.labels import Labelled, Labels
from hf_freeze.data import sample
from hf_freeze.lab.data import read_images
from hf_freeze.lab.data.questions import LETTERS
from hf_freeze.lab.init.data import data_section
from hf_freeze.lab.recipes.check import check_data
from hf_freeze.lab.recipes.find import find_recipe
from hf_freeze.lab.recipes.load import read_recipe
from hf_freeze.lab.recipes.settings import SPLITS, Data
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.lab.tasks.splits import held_out, paths_of, read_all
from hf_freeze.model.loading import empty_model

_MOST = {"train": 200_000, "dev": 2000, "test": 5000}  # inputs that are taken of a split
_TASKS = {  # our name of a model's task -> that of recipes
    "seq2seq-lm": "translation",
    "causal-lm": "language-modelling",
    "masked-lm": "masked-lm",
    "sequence-classification": "sequence-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "multiple-choice": "multiple-choice",
    "image-classification": "image-classification",
}


def inputs_and_labels(
    model: str, data: str, columns: Sequence[str] | None, label: str | None, settings: list[str] | None = None
) -> tuple[list[Any], Labels]:
    """(what the model reads of the training split, dev and test split with labels). `data`: a recipe, by its path or name, with
    `settings` in place of some of its own; or files as `hf-freeze init` takes them, with their `columns` and `label`.

    Raises ValueError for a task that has no labels here, another task than that of the recipe, and as the readers do.
    """
    names_files = Path(data).is_dir() or "," in data
    names_files = names_files or (Path(data).is_file() and Path(data).suffix not in (".yaml", ".yml"))
    if not names_files:
        find_recipe(data)
    empty = empty_model(model)
    head = head_of(empty)
    if head not in _TASKS:
        raise ValueError(f"--data: there are no labels for a {head} model; choose --texts, or one of {list(_TASKS)}")
    task = _TASKS[head]
    if head == "sequence-classification" and empty.config.num_labels == 1:
        task = "regression"
    metric = ""
    if names_files:
        if settings:
            raise ValueError(f"--set {settings[0]} is for a recipe, and --data {data} names files")
        section = Data.model_validate(data_section(task, data, None, None, columns, label))
    else:
        for option, given in (("--column", columns), ("--label", label)):
            if given:
                raise ValueError(f"{option} is for files, and --data {data} is a recipe, which names its columns")
        recipe = check_data(read_recipe(data, settings), data)
        if recipe.task != task:
            raise ValueError(f"--data {data} is for {recipe.task!r}, and the model for {task!r}")
        section, metric = recipe.data, recipe.metric
    splits = _images(section) if task == "image-classification" else task_of(task).load(section)  # type: ignore[union-attr]
    features = getattr(splits["train"], "features", {})
    kind = features["tags"].feature if task == "token-classification" else features.get("label")
    classes = list(getattr(kind, "names", ()))
    pairs = {name: _pairs(task, splits[name], _MOST[name], classes) for name in SPLITS}
    labels = Labels(dev=pairs["dev"], test=pairs["test"], classes=classes, metric=metric)
    return [item for item, _ in pairs["train"]], labels


def _pairs(task: str, split: Any, most: int, classes: Sequence[str]) -> Labelled:
    """(input, label) of some rows of a split, which are drawn, and of questions only those that have an answer."""
    rows = [split[i] for i in sorted(sample(range(len(split)), most))] if len(split) > most else list(split)
    found = [pair for row in rows if (pair := _PAIRS[task](row))[1] != []]
    return [(text, [classes[i] for i in tags]) for text, tags in found] if task == "token-classification" else found


def _sentences(row: dict[str, Any]) -> tuple[Any, Any]:
    return (row["sentence"], row["second"]) if "second" in row else row["sentence"], row["label"]


def _choices(row: dict[str, Any]) -> tuple[Any, Any]:
    question, options = row["question"], row["options"]
    asked = [question.replace("_", one) if "_" in question else f"{question} {one}" for one in options]
    return (row["article"], asked), LETTERS.index(row["answer"])


def _tagged(row: dict[str, Any]) -> tuple[Any, Any]:
    return " ".join(row["tokens"]), row["tags"]


_PAIRS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "translation": lambda row: (row["source"], row["target"]),
    "language-modelling": lambda row: (row["text"], None),
    "masked-lm": lambda row: (row["text"], None),
    "sequence-classification": _sentences,
    "regression": _sentences,
    "token-classification": _tagged,
    "question-answering": lambda row: ((row["question"], row["context"]), row["answers"]),
    "multiple-choice": _choices,
    "image-classification": lambda row: row,
}


def _images(data: Data) -> dict[str, list[tuple[np.ndarray, int]]]:
    """Of pairs of idx files, images and their classes."""
    splits: dict[str, list[tuple[np.ndarray, int]]] = {}
    for name, files in read_all(data, lambda named: paths_of(data, named), SPLITS).items():
        pixels, classes = read_images(*files)
        splits[name] = [(np.stack([one] * 3, -1), int(label)) for one, label in zip(pixels, classes, strict=True)]
    train = splits["train"]
    if "dev" not in splits and not data.holdout:
        data = data.changed(holdout=min(len(train) // 10, 1000))
    parts = held_out(len(train), data)
    splits |= {name: [train[i] for i in which] for name, which in parts.items()}
    return {name: split[: data.limit] for name, split in splits.items()}
