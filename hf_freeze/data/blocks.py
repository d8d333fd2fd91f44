"""Cuts running text into blocks, for causal and masked language models."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import datasets
import numpy as np


def masked_blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels` (equal): the concatenated texts in blocks `[CLS] ... [SEP]` of `block_size` tokens.

    The last block may be shorter. `[SEP]` also ends each text, so a block may contain several texts. The masks are drawn later
    (`Masking`). Raises ValueError for a tokenizer without these tokens, a block size below 3, and texts without any token.
    """
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise ValueError("masked language models need a tokenizer with [CLS] and [SEP], such as kind 'wordpiece'")
    if block_size < 3:
        raise ValueError(f"block_size={block_size}: a block holds [CLS], [SEP] and at least 1 token")
    begin, end = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    ids = [i for text in tokenizer(list(texts), add_special_tokens=False)["input_ids"] if text for i in (*text, *end)]
    if not ids:
        raise ValueError("the text has no tokens")
    del ids[-1]  # the last block gets its own [SEP] below
    size = block_size - 2
    blocks = [begin + ids[start : start + size] + end for start in range(0, len(ids), size)]
    return datasets.Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def text_blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels`: the concatenated texts in blocks that predict `block_size` tokens each.

    A block begins with the last token of the previous block, labelled -100, so that every token except the first is predicted
    exactly once. The last block may be shorter. Labels are not shifted: Hugging Face causal models shift them. If the tokenizer
    puts `</s>` before every text, another one is added after the last text.

    Raises ValueError for a block size below 1, and for a text shorter than one block.
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
