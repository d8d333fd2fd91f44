"""Questions with several answers to choose from, on a text; scored by accuracy (RACE)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
from transformers import DataCollatorForMultipleChoice

from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.data.questions import LETTERS
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.base import Task, tested
from hf_freeze.lab.tasks.splits import read_splits, reader
from hf_freeze.lab.training import ClassificationTrainer

_COLUMNS = ["article", "question", "options"]


class ChoiceTrainer(ClassificationTrainer):
    """A ClassificationTrainer whose classes are the answers to choose from. `input_ids` hold all answers one after the other, so
    `max_tokens` limits the tokens of a batch without their padding."""

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"loss": sums[0] / sums[1], "accuracy": sums[2] / sums[1]}


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the columns `article`, `question`, `options`, `answer`, a letter, and `text`, the three
    first in one.

    Raises ValueError for an answer that is none of the options, and for questions with different numbers of them.
    """
    hub = partial(hf_data.load_hub_labelled, text=_COLUMNS, label="answer")
    splits = read_splits(data, reader(data, hf_data.read_race, hub))
    count = len(splits["train"][0]["options"])
    return {name: _checked(name, split, count) for name, split in splits.items()}


def _checked(name: str, split: datasets.Dataset, count: int) -> datasets.Dataset:
    texts = []
    for row in split:
        article, question, options = (row[column] for column in _COLUMNS)  # type: ignore[index]
        if len(options) != count:
            raise ValueError(f"the {name} split: {question!r} has {len(options)} options, others have {count}")
        if (answer := row["answer"]) not in LETTERS[:count]:  # type: ignore[index]
            raise ValueError(f"the {name} split: answer {answer!r} to {question!r}; choose from {LETTERS[:count]!r}")
        texts.append(" ".join([article, question, *options]))
    return split.add_column("text", texts)


def encode(
    split: datasets.Dataset, tokenizer: Any, run: Run | None = None, progress: Progress | None = None
) -> datasets.Dataset:
    """The tokenizer's columns of all answers one after the other, their `lengths`, and `labels`. An answer is the pair of the
    article, cut where that is too long, and the question with the answer instead of `_`, or after it."""

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"lengths": [], "labels": [LETTERS.index(letter) for letter in batch["answer"]]}
        for article, question, options in zip(*(batch[column] for column in _COLUMNS), strict=True):
            asked = [question.replace("_", option) if "_" in question else f"{question} {option}" for option in options]
            encoded = tokenizer([article] * len(options), asked, truncation="only_first")
            columns["lengths"].append([len(one) for one in encoded["input_ids"]])
            for name, values in encoded.items():
                columns.setdefault(name, []).append([value for one in values for value in one])
        return columns

    return split.map(ids, batched=True, remove_columns=split.column_names, keep_in_memory=True)


def collator(tokenizer: Any, model: Any) -> Any:
    """What makes batches of what `encode` gives: (B, answers, T) each, and `labels` (B,)."""
    collate = DataCollatorForMultipleChoice(tokenizer)

    def apart(example: dict[str, Any]) -> dict[str, Any]:
        ends = np.cumsum(example["lengths"]).tolist()
        names = [name for name in tokenizer.model_input_names if name in example]
        parts = {name: [example[name][a:b] for a, b in zip([0, *ends], ends, strict=False)] for name in names}
        return {**parts, "labels": example["labels"]}

    return lambda examples: collate([apart(example) for example in examples])


TASK = Task(
    head="multiple-choice",
    tokenizer="wordpiece",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, ["text"]),
    encode=encode,
    test=tested(lambda items, encoded: np.column_stack([items[:, [2, 1]], encoded["labels"]]).astype(np.int64)),
    trainer=ChoiceTrainer,
    collator=collator,
)
