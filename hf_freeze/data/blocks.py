"""Running text cut into blocks, for language models."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import datasets
import numpy as np


def text_blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels`: the texts, one after the other, in blocks that predict `block_size` tokens.

    A block begins with the last token of the one before it, whose label is -100, so that every token but the first is
    predicted exactly once; the last block may be shorter. Labels are those of Hugging Face causal models, which shift them.
    Where the tokenizer puts `</s>` before every text, one more closes the last.

    Raises ValueError for a block size below 1, or a text that is shorter than one block.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: a block predicts at least 1 token")
    ids = np.fromiter(chain.from_iterable(tokenizer(list(texts))["input_ids"]), dtype=np.int64)
    if len(ids) and ids[0] == tokenizer.eos_token_id:
        ids = np.append(ids, tokenizer.eos_token_id)
    if len(ids) <= block_size:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than one block of {block_size} and the token before it"
        )
    blocks = [ids[start : start + block_size + 1].tolist() for start in range(0, len(ids) - 1, block_size)]
    return datasets.Dataset.from_dict({"input_ids": blocks, "labels": [[-100, *block[1:]] for block in blocks]})
