"""Questions whose answers are parts of a text, scored by F1 of words and by exact match (SQuAD 1.1 and 2.0)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from hf_freeze.io import write_whole
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.base import Outcome, Task
from hf_freeze.lab.tasks.splits import read_splits, reader
from hf_freeze.lab.training.question_answering import SpanTrainer
from hf_freeze.scores import squad
from hf_freeze.training.loss import span_loss

WINDOW = 384  # tokens of question and text together, unless training.block_size says otherwise


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the columns of `read_squad`."""
    return read_splits(data, reader(data, hf_data.read_squad, hf_data.load_hub_questions))


def encode(split: datasets.Dataset, tokenizer: Any, run: Run, progress: Progress | None = None) -> datasets.Dataset:
    """A row for each window of a text; neighbours share a third. The tokenizer's columns; `labels`, the first and the last token
    of the first answer, or 0 and 0 where it is not whole in the window; `example`, its row in `split`; `begins` and `ends`, the
    characters of `context` of each token, -1 for others.
    """
    size = min(run.training.block_size or WINDOW, tokenizer.model_max_length)

    def windows(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["question"],
            batch["context"],
            truncation="only_second",
            max_length=size,
            stride=size // 3,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        places, of = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
        columns: dict[str, list[Any]] = {"labels": [], "example": [], "begins": [], "ends": []}
        for number, (offsets, row) in enumerate(zip(places, of, strict=True)):
            within = [sequence == 1 for sequence in encoded.sequence_ids(number)]
            begins, ends = ([o[i] if w else -1 for o, w in zip(offsets, within, strict=True)] for i in (0, 1))
            columns["begins"].append(begins)
            columns["ends"].append(ends)
            columns["labels"].append(_span(begins, ends, batch["answers"][row], batch["starts"][row]))
            columns["example"].append(rows[row])
        return {**encoded, **columns}

    return split.map(windows, with_indices=True, batched=True, remove_columns=split.column_names, keep_in_memory=True)


def _span(begins: list[int], ends: list[int], answers: Sequence[str], starts: Sequence[int]) -> list[int]:
    """The first and the last token of the first answer."""
    if not answers:
        return [0, 0]
    start, end = starts[0], starts[0] + len(answers[0])
    inside = [i for i, (a, b) in enumerate(zip(begins, ends, strict=True)) if a >= 0 and a < end and b > start]
    whole = inside and begins[inside[0]] <= start and ends[inside[-1]] >= end
    return [inside[0], inside[-1]] if whole else [0, 0]


def collator(tokenizer: Any, model: Any) -> Any:
    """What makes batches: the tokenizer's columns, `labels` (B, 2) and `context` (B, T)."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        kept = [
            {name: example[name] for name in tokenizer.model_input_names if name in example} for example in examples
        ]
        batch = dict(tokenizer.pad(kept, return_tensors="pt"))
        batch["labels"] = torch.tensor([example["labels"] for example in examples])
        batch["context"] = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
        for row, example in zip(batch["context"], examples, strict=True):
            begins = torch.tensor(example["begins"])
            own = slice(len(row) - len(begins), None) if tokenizer.padding_side == "left" else slice(len(begins))
            row[own] = begins >= 0
        return batch

    return collate


def _test(run: Run, folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    windows = trainer.score(encoded).cpu().numpy()
    answers = answers_of(windows, encoded, split)
    if trainer.is_world_process_zero():
        given = dict(zip(split["id"], answers, strict=True))
        write_whole(folder / "answers.json", json.dumps(given, ensure_ascii=False, indent=1) + "\n")
    items = np.array(
        [
            [*squad(answer, right), 1, len(question)]
            for answer, right, question in zip(answers, split["answers"], split["question"], strict=True)
        ],
        dtype=float,
    )
    f1, exact = items[:, 0].mean(), items[:, 1].mean()
    loss = trainer.metrics(windows.sum(0).tolist())["loss"]
    metrics = {"test_f1": float(f1), "test_exact": float(exact), "test_loss": loss}
    return Outcome(metrics=metrics, items=items[:, [0, 2, 1, 3]])


def answers_of(windows: np.ndarray, encoded: Any, split: Any) -> list[str]:
    """The best span of all windows of each question. Where some questions of `split` have no answer, it is empty if no answer has
    at least its score, in the window where that is lowest (Devlin et al., 2019, section 4.3)."""
    best = np.full(len(split), -np.inf)
    none = np.full(len(split), np.inf)
    answers = [""] * len(split)
    contexts = split["context"]
    for (*_, first, last, score, without), row in zip(windows, encoded, strict=True):
        example = row["example"]
        none[example] = min(none[example], without)
        if score > best[example]:
            best[example] = score
            answers[example] = contexts[example][row["begins"][int(first)] : row["ends"][int(last)]]
    may_be_none = any(not right for right in split["answers"])
    return ["" if may_be_none and none[i] >= best[i] else answer for i, answer in enumerate(answers)]


TASK = Task(
    head="question-answering",
    tokenizer="wordpiece",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, ["question", "context"]),
    encode=encode,
    test=_test,
    trainer=SpanTrainer,
    collator=collator,
    loss=lambda training, model: span_loss,
)
