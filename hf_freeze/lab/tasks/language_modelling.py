"""Language modelling: running text in blocks, scored by perplexity."""

from functools import partial
from typing import Any

import datasets

from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import BLOCK_SIZE, Data
from hf_freeze.lab.tasks.base import Task, tested
from hf_freeze.lab.tasks.splits import read_splits, reader, take


def load_data(data: Data) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the column `text`, as the recipe's `data` section says. The built-in text is the target
    side of the built-in translations."""
    if data.builtin is not None:
        corpus = hf_data.builtin_corpus(**data.builtin.given())
        texts = {name: split.select_columns("target").rename_column("target", "text") for name, split in corpus.items()}
        return take(texts, data)
    column = data.column or "text"
    files = partial(hf_data.read_text, unit=data.unit, column=column)
    return read_splits(data, reader(data, files, partial(hf_data.load_hub_text, column=column)))


def _encode(split: datasets.Dataset, tokenizer: Any, run: Run, progress: Progress | None = None) -> Any:
    return hf_data.cached_blocks(split, tokenizer, run.training.block_size or BLOCK_SIZE, progress=progress)


TASK = Task(
    head="causal-lm",
    eos="before",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, ["text"]),
    encode=_encode,
    test=tested(lambda items, encoded: items),
)
