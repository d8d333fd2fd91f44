"""What a grid can train: one entry a task, which says how to load, encode and test."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
from transformers import DataCollatorForSeq2Seq

from hf_freeze.experiments.fields import SPLITS, TASKS
from hf_freeze.training import TokenBatchTrainer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Test scores, what they were computed with, and what each test item adds to them (statistics.py)."""

    metrics: dict[str, float]
    items: np.ndarray
    signatures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a grid.

    `head`: the task of `make_variant`. `tokenizer`: its kind, where the recipe names none, and `eos`, where `</s>` stands
    (`train_tokenizer`). `load(data)` gives the splits as the recipe's section says, `texts(split)` what the tokenizer is trained
    on, `config(training split)` fields of the backbone's config that the data decide, `encode(split, tokenizer, run)` the
    columns `input_ids` and `labels`, `collator(tokenizer, model)` what makes batches of them for the `trainer`, which takes
    `arguments(training section)` besides, `test(run, folder, trainer, tokenizer, split, encoded split)` the outcome.
    """

    head: str
    load: Callable[[dict[str, Any]], dict[str, datasets.Dataset]]
    texts: Callable[[datasets.Dataset], list[str]]
    encode: Callable[..., datasets.Dataset]
    test: Callable[..., Outcome]
    tokenizer: str = "bpe"
    eos: str = "after"
    trainer: type[TokenBatchTrainer] = TokenBatchTrainer
    collator: Callable[[Any, Any], Any] = lambda tokenizer, model: DataCollatorForSeq2Seq(tokenizer, model=model)
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = lambda training: {}
    config: Callable[[datasets.Dataset], dict[str, Any]] = lambda split: {}


def scored(trainer: TokenBatchTrainer, encoded: datasets.Dataset) -> tuple[np.ndarray, dict[str, float]]:
    """What `trainer.score` gives, and the metrics of it, whose names begin with "test_"."""
    items = trainer.score(encoded).cpu().numpy()
    return items, {f"test_{name}": value for name, value in trainer.metrics(items.sum(0).tolist()).items()}


Report = Callable[[dict[str, Any]], None]  # receives {"step":, "steps":, "loss": ...} while the run goes on


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to, for its record. `log`: as the Trainer's `log_history`."""

    model: Any
    outcome: Outcome
    log: list[dict[str, Any]]
    epochs: float
    best_epoch: float
    steps: int
    train_seconds: float
    test_seconds: float
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that the Trainer does not serve.

    `execute(run, folder, report, checkpoint=, start=)` trains, tests and writes the model to `folder / "model"`; it goes on from
    `checkpoint`, a folder `folder / "checkpoints" / "checkpoint-*"`, and starts from the finished run in `start`, where these
    are not None.
    """

    execute: Callable[..., Trained]


def task_of(name: str) -> Task | OwnTask:
    """The task of that name in a recipe."""
    return importlib.import_module(f"hf_freeze.experiments.{TASKS[name]}").TASK


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
