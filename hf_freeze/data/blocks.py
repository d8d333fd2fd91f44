"""Running text cut into blocks, for causal and masked language models."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import datasets
import numpy as np


def masked_blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels`, which are equal: the texts, one after the other, in blocks of `block_size` tokens such as
    `[CLS] ... [SEP]`, of which the last may be shorter. `[SEP]` ends each text too, so that a block may hold several.

    What of it is masked is drawn later (`Masking`). Raises ValueError where the tokenizer has no such tokens, for a block size
    below 3, and for texts without any token.
    """
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise ValueError(
            "blocks of a masked language model need a tokenizer with [CLS] and [SEP], such as kind 'wordpiece'"
        )
    if block_size < 3:
        raise ValueError(f"block_size={block_size}: a block holds [CLS], [SEP] and at least 1 token")
    begin, end = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    ids = [i for text in tokenizer(list(texts), add_special_tokens=False)["input_ids"] if text for i in (*text, *end)]
    if not ids:
        raise ValueError("the text has no tokens")
    del ids[-1]  # its block ends with one
    size = block_size - 2
    blocks = [begin + ids[start : start + size] + end for start in range(0, len(ids), size)]
    return datasets.Dataset.from_dict({"input_ids": blocks, "labels": blocks})


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
