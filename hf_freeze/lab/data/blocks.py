"""Cuts running text into blocks, for causal and masked language models."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hf_freeze.lab.data.tokens import IDS, Encoder, Progress, Rows, cached_ids, id_tables

_SCHEMA = pa.schema([("input_ids", IDS), ("labels", IDS)])


def masked_blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels` (equal): the concatenated texts in blocks `[CLS] ... [SEP]` of `block_size` tokens.

    The last block may be shorter. `[SEP]` also ends each text, so a block may contain several texts. The masks are drawn later
    (`Masking`). Raises ValueError for a tokenizer without these tokens, a block size below 3, and texts without any token.
    """
    return cached_blocks(_split(texts), tokenizer, block_size, masked=True)


def text_blocks(texts: Iterable[str], tokenizer: Any, block_size: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels`: the concatenated texts in blocks that predict `block_size` tokens each.

    A block begins with the last token of the previous block, labelled -100, so that every token except the first is predicted
    exactly once. The last block may be shorter. Labels are not shifted: Hugging Face causal models shift them. If the tokenizer
    puts `</s>` before every text, another one is added after the last text.

    Raises ValueError for a block size below 1, and for a text shorter than one block.
    """
    return cached_blocks(_split(texts), tokenizer, block_size)


def _split(texts: Iterable[str]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": list(texts)})


def cached_blocks(
    split: datasets.Dataset, tokenizer: Any, block_size: int, *, masked: bool = False, progress: Progress | None = None
) -> Any:
    """`text_blocks` or `masked_blocks` of the column `text` of `split`: a TokenDataset, which the cache keeps, or a data set in
    memory if `split` is there."""
    encode = Encoder(tokenizer, split, "text", end=tokenizer.sep_token_id if masked else None)
    rows = Rows(split, {"ids": "text"}, encode, len(tokenizer))
    tables = id_tables(rows, progress=progress)
    ids = (chunk.flatten().to_numpy().astype(np.int32) for table in tables for chunk in table["ids"].chunks)
    blocks = (_masked if masked else _causal)(ids, tokenizer, block_size)
    return cached_ids("blocks", split, tokenizer, [block_size, masked], _SCHEMA, blocks)


def _causal(pieces: Iterable[np.ndarray], tokenizer: Any, block_size: int) -> Iterator[pa.Table]:
    """Blocks of running text, whose ids come piece by piece."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: a block predicts at least 1 token")
    if tokenizer("a")["input_ids"][:1] == [tokenizer.eos_token_id]:
        # It stands before every text, and then ends the last one too.
        pieces = chain(pieces, [np.array([tokenizer.eos_token_id], np.int32)])
    for number, blocks in enumerate(_windows(pieces, block_size + 1, block_size)):
        if number == 0 and blocks.size <= block_size:
            raise ValueError(
                f"the text has {blocks.size} tokens, fewer than one block of {block_size} and the token before it"
            )
        labels = blocks.copy()
        labels[:, 0] = -100
        yield _table(blocks, labels)


def _masked(pieces: Iterable[np.ndarray], tokenizer: Any, block_size: int) -> Iterator[pa.Table]:
    """As `_causal`."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    if first is None or last is None:
        raise ValueError("masked language models need a tokenizer with [CLS] and [SEP], such as kind 'wordpiece'")
    if block_size < 3:
        raise ValueError(f"block_size={block_size}: a block holds [CLS], [SEP] and at least 1 token")
    size = block_size - 2
    for inner in _windows(pieces, size, size, without_last=1):  # the last [SEP]: every block gets its own
        if not inner.size:
            raise ValueError("the text has no tokens")
        blocks = np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (first, last)))
        yield _table(blocks, blocks)


def _windows(pieces: Iterable[np.ndarray], width: int, step: int, without_last: int = 0) -> Iterator[np.ndarray]:
    """(B, T) ids: some windows of `width` ids, one every `step` ids; at the end one of what is left, also where there is nothing
    else. The last `without_last` ids are left out."""
    rest, is_first = np.empty(0, np.int32), True
    for piece in pieces:
        rest = np.concatenate([rest, piece])
        count = (len(rest) - without_last - width) // step + 1
        if count > 0:
            yield np.lib.stride_tricks.sliding_window_view(rest, width)[: count * step : step]
            rest, is_first = rest[count * step :], False
    rest = rest[: max(0, len(rest) - without_last)]
    if is_first or len(rest) > width - step:
        yield rest[None]


def _table(blocks: np.ndarray, labels: np.ndarray) -> pa.Table:
    """Both (B, T)."""
    ends = np.arange(len(blocks) + 1, dtype=np.int32) * blocks.shape[1]
    columns = [pa.ListArray.from_arrays(ends, pa.array(ids.reshape(-1), pa.int32())) for ids in (blocks, labels)]
    return pa.table(columns, _SCHEMA)
