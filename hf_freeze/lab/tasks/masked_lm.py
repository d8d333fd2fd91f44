"""Masked language modelling: running text in blocks, scored by the perplexity of masked tokens."""

from pathlib import Path
from typing import Any

import datasets

from hf_freeze.lab.data import Progress, Texts, cached_blocks
from hf_freeze.lab.tasks.base import Outcome, Task, scored
from hf_freeze.lab.tasks.language_modelling import load_data
from hf_freeze.lab.training import MaskedTokenTrainer


def encode(split: datasets.Dataset, tokenizer: Any, run: dict[str, Any], progress: Progress | None = None) -> Any:
    """Blocks of `training.block_size` tokens. Raises ValueError where the backbone has fewer positions."""
    size = run["training"]["block_size"]
    if size > tokenizer.model_max_length:
        raise ValueError(
            f"training.block_size={size}: the backbone has {tokenizer.model_max_length} positions "
            "(backbone.config.max_position_embeddings)"
        )
    return cached_blocks(split, tokenizer, size, masked=True, progress=progress)


def _test(run: dict[str, Any], folder: Path, trainer: Any, tokenizer: Any, split: Any, encoded: Any) -> Outcome:
    items, metrics = scored(trainer, encoded)
    return Outcome(metrics=metrics, items=items[:, :2])


TASK = Task(
    head="masked-lm",
    tokenizer="wordpiece",
    load=load_data,
    texts=lambda split: Texts(split, ["text"]),
    encode=encode,
    test=_test,
    trainer=MaskedTokenTrainer,
    arguments=lambda training: {"masking": training["masking"]} if "masking" in training else {},
)
