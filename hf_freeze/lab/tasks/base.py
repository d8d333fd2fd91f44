"""What a task of the grids defines: how to load, encode and test, or how to execute it whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import DataCollatorForSeq2Seq

from hf_freeze.lab.data import Texts, TokenDataset
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data, Training
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.training import label_smoothed_loss


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
    on, `config(training split)` fields of the backbone's config that the data decide, `encode(split, tokenizer, run, progress)`
    the columns `input_ids` and `labels`, `collator(tokenizer, model)` what makes batches of them for the `trainer`, which takes
    `arguments(training section)` besides, `loss(training section, model)` its loss, `test(run, folder, trainer, tokenizer,
    split, encoded split)` the outcome.
    """

    head: str
    load: Callable[[Data], dict[str, datasets.Dataset]]
    texts: Callable[[datasets.Dataset], Texts]
    encode: Callable[..., datasets.Dataset | TokenDataset]
    test: Callable[..., Outcome]
    tokenizer: str = "bpe"
    eos: str = "after"
    trainer: type[TokenBatchTrainer] = TokenBatchTrainer
    collator: Callable[[Any, Any], Any] = lambda tokenizer, model: DataCollatorForSeq2Seq(tokenizer, model=model)
    arguments: Callable[[Training], dict[str, Any]] = lambda training: {}
    config: Callable[[datasets.Dataset], dict[str, Any]] = lambda split: {}
    loss: Callable[[Training, Any], Callable[..., Any]] = lambda training, model: label_smoothed_loss(
        training.label_smoothing, shift=model.shifts_labels
    )


ProgressCallback = Callable[[dict[str, Any]], None]  # receives {"step":, "steps":, "loss": ...} while the run goes on


@dataclass(frozen=True)
class Job:
    """A run to execute in its `folder`. `report` hears how far it is. `checkpoint`: the folder to go on from. `start`, `teacher`:
    the folders of the finished runs that it starts from and learns from. `until`: the epochs after which it pauses at a
    checkpoint. `trackers`: the Trainer's callbacks that see the curves, and the test scores."""

    run: Run
    folder: Path
    report: ProgressCallback = lambda _: None
    checkpoint: str | None = None
    start: Path | None = None
    teacher: Path | None = None
    until: float | None = None
    trackers: Sequence[Any] = ()


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

    `execute(job)` trains, tests and writes the model to `folder / "model"`; its checkpoints are `folder / "checkpoints" /
    "checkpoint-*"`.
    """

    execute: Callable[[Job], Trained]


def label_fields(names: Sequence[str]) -> dict[str, Any]:
    """Fields of the config that name the classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def tested(columns: Callable[[np.ndarray, Any], np.ndarray]) -> Callable[..., Outcome]:
    """A `test` by what the trainer scores. `columns(items, encoded split)`: what each item adds to the score."""

    def test(run: Run, folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
        items, metrics = scored(trainer, encoded)
        return Outcome(metrics=metrics, items=columns(items, encoded))

    return test


def scored(trainer: TokenBatchTrainer, encoded: Any) -> tuple[np.ndarray, dict[str, float]]:
    """What `trainer.score` gives, and the metrics of it, whose names begin with "test_"."""
    items = trainer.score(encoded).cpu().numpy()
    return items, {f"test_{name}": value for name, value in trainer.metrics(items.sum(0).tolist()).items()}
