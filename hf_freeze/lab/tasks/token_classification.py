"""Named entities: a tag for each word, scored by F1 of whole entities."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import DataCollatorForTokenClassification

from hf_freeze.data.entities import check_tags
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import Data
from hf_freeze.lab.tasks.base import Outcome, Task, label_fields
from hf_freeze.lab.tasks.splits import read_splits, reader
from hf_freeze.lab.training.token_classification import EntityTrainer


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the columns `tokens` and `tags`, lists, and `text`, the tokens in one. The tags, those that
    occur in any split in order, are numbers (`datasets.ClassLabel`).

    Raises ValueError for tags that name no entities.
    """
    tokens, tags = data.column or "tokens", data.label or "ner_tags"

    def of_hub(hub: str, named: str, name: str | None) -> datasets.Dataset:
        split = hf_data.load_hub_labelled(hub, named, [tokens], tags, name)
        kind: Any = getattr(split.features[tags], "feature", None)
        rows = [list(map(kind.int2str, row)) if hasattr(kind, "names") else list(map(str, row)) for row in split[tags]]
        check_tags((tag for row in rows for tag in row), f"{hub} ({named}), column {tags!r}: ")
        return datasets.Dataset.from_dict({"tokens": split[tokens], "tags": rows})

    splits = read_splits(data, reader(data, partial(hf_data.read_conll, tokens=tokens, tags=tags), of_hub))
    names = sorted({tag for split in splits.values() for row in split["tags"] for tag in row})
    number = {name: i for i, name in enumerate(names)}
    features = datasets.Features(
        tokens=datasets.Sequence(datasets.Value("string")),
        tags=datasets.Sequence(datasets.ClassLabel(names=names)),
        text=datasets.Value("string"),
    )
    return {
        name: datasets.Dataset.from_dict(
            {
                "tokens": split["tokens"],
                "tags": [[number[tag] for tag in row] for row in split["tags"]],
                "text": [" ".join(row) for row in split["tokens"]],
            },
            features,
        )
        for name, split in splits.items()
    }


def _names(split: datasets.Dataset) -> list[str]:
    feature: Any = split.features["tags"]
    return feature.feature.names


def encode(
    split: datasets.Dataset, tokenizer: Any, run: Run | None = None, progress: Progress | None = None
) -> datasets.Dataset:
    """The tokenizer's columns, and `labels`: the tag at the first token of each word, -100 at the others. What is too long is
    cut."""

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(batch["tokens"], is_split_into_words=True, truncation=True)
        labels = []
        for number, tags in enumerate(batch["tags"]):
            words = encoded.word_ids(number)
            before = [None, *words[:-1]]
            labels.append(
                [-100 if w in (None, b) else tags[w] for w, b in zip(words, before, strict=True)]  # b: the one before
            )
        return {**encoded, "labels": labels}

    return split.map(ids, batched=True, remove_columns=split.column_names, keep_in_memory=True)


def _test(run: Run, folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    items, names = trainer.score(encoded).cpu().numpy(), _names(split)
    # Entities beyond the model's positions are missed, not left out.
    items[:, 5] = [len(hf_data.entities([names[tag] for tag in tags])) for tags in split["tags"]]
    metrics = {f"test_{name}": value for name, value in trainer.metrics(items.sum(0).tolist()).items()}
    return Outcome(metrics=metrics, items=items[:, 3:].astype(np.int64))


TASK = Task(
    head="token-classification",
    tokenizer="wordpiece",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, ["text"]),
    encode=encode,
    test=_test,
    trainer=EntityTrainer,
    collator=lambda tokenizer, model: DataCollatorForTokenClassification(tokenizer),
    config=lambda split: label_fields(_names(split)),
)
