"""A number for a sentence or a pair of them, such as how similar they are; scored by Pearson and Spearman correlation."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
from scipy.stats import spearmanr

from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.base import Outcome, scored
from hf_freeze.lab.tasks.labelled import labelled_reader, task_of_labelled
from hf_freeze.lab.tasks.splits import read_splits
from hf_freeze.lab.training import RegressionTrainer
from hf_freeze.training.loss import squared_loss


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the columns `sentence` and, of pairs, `second`, and `label`, a number.

    Raises ValueError for a label that is no finite number.
    """
    splits = read_splits(data, labelled_reader(data, numbers=True))
    return {name: _numbers(name, split) for name, split in splits.items()}


def _numbers(name: str, split: datasets.Dataset) -> datasets.Dataset:
    numbers = []
    for label in split["label"]:
        try:
            numbers.append(float(label))
        except ValueError:
            numbers.append(np.nan)
        if not np.isfinite(numbers[-1]):
            raise ValueError(f"the {name} split has label {label!r}: a regression needs finite numbers")
    if split.features["label"] == datasets.Value("float64"):
        return split
    return split.remove_columns("label").add_column("label", numbers)


def _test(run: Run, folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    items, metrics = scored(trainer, encoded)
    predicted, labels = items[:, 2], items[:, 6]
    ranked = min(np.ptp(predicted), np.ptp(labels)) > 0  # else there is no correlation, and scipy warns
    metrics["test_spearman"] = float(spearmanr(predicted, labels)[0]) if ranked else 0.0  # type: ignore[arg-type]
    return Outcome(metrics=metrics, items=items[:, 1:])


TASK = task_of_labelled(
    load=load_data,
    test=_test,
    trainer=RegressionTrainer,
    config=lambda split: {"num_labels": 1, "problem_type": "regression"},
    loss=lambda training, model: squared_loss,
)
