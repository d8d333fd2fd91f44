"""Language modelling: running text in blocks, scored by perplexity."""

from functools import partial
from pathlib import Path
from typing import Any

import datasets

from hf_freeze.lab import data as hf_data
from hf_freeze.lab.data import Progress
from hf_freeze.lab.tasks.base import Outcome, Task, scored
from hf_freeze.lab.tasks.data_forms import data_form
from hf_freeze.lab.tasks.splits import read_splits, reader, take


def load_data(settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with the column `text`, as the recipe's `data` section says. The built-in text is the target
    side of the built-in translations."""
    if data_form(settings) == "builtin":
        corpus = hf_data.builtin_corpus(**settings["builtin"])
        return take(
            {name: split.select_columns("target").rename_column("target", "text") for name, split in corpus.items()},
            settings,
        )
    column = settings.get("column", "text")
    files = partial(hf_data.read_text, unit=settings.get("unit", "lines"), column=column)
    return read_splits(settings, reader(settings, files, partial(hf_data.load_hub_text, column=column)))


def _encode(split: datasets.Dataset, tokenizer: Any, run: dict[str, Any], progress: Progress | None = None) -> Any:
    return hf_data.cached_blocks(split, tokenizer, run["training"]["block_size"], progress=progress)


def _test(run: dict[str, Any], folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    items, metrics = scored(trainer, encoded)
    return Outcome(metrics=metrics, items=items)


TASK = Task(
    head="causal-lm",
    eos="before",
    load=load_data,
    texts=lambda split: hf_data.Texts(split, ["text"]),
    encode=_encode,
    test=_test,
)
