"""Masked language modelling: running text in blocks, scored by the perplexity of masked tokens."""

from typing import Any

import datasets

from hf_freeze.lab.data import Progress, Texts, cached_blocks
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import BLOCK_SIZE
from hf_freeze.lab.tasks.base import Task, tested
from hf_freeze.lab.tasks.language_modelling import load_data
from hf_freeze.lab.training import MaskedTokenTrainer


def encode(split: datasets.Dataset, tokenizer: Any, run: Run, progress: Progress | None = None) -> Any:
    """Blocks of `training.block_size` tokens. Raises ValueError where the backbone has fewer positions."""
    size = run.training.block_size or BLOCK_SIZE
    if size > tokenizer.model_max_length:
        raise ValueError(
            f"training.block_size={size}: the backbone has {tokenizer.model_max_length} positions "
            "(backbone.config.max_position_embeddings)"
        )
    return cached_blocks(split, tokenizer, size, masked=True, progress=progress)


TASK = Task(
    head="masked-lm",
    tokenizer="wordpiece",
    load=load_data,
    texts=lambda split: Texts(split, ["text"]),
    encode=encode,
    test=tested(lambda items, encoded: items[:, :2]),
    trainer=MaskedTokenTrainer,
    arguments=lambda training: {} if training.masking is None else {"masking": training.masking},
)
