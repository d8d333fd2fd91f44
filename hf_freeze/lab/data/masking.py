"""Masks tokens for masked language models (Devlin et al., 2019, "BERT", section 3.1)."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling


class Masking:
    """Masks the tokens of one block at a time, as `DataCollatorForLanguageModeling` does: each token is selected with
    `probability`; of the selected ones, 80 % become `[MASK]`, 10 % a random token, and 10 % stay.

    The draw is a function of `key` and the block alone. It does not depend on batches or their order, and is the same in a
    resumed run. A key such as (seed, epoch) draws new masks in each epoch; a fixed key gives every model the same test. Special
    tokens, including `[UNK]`, are never masked. At least one other token is masked, as in BERT's own code, because a batch
    without masked tokens has no loss.

    Raises ValueError for a tokenizer without `[MASK]` and a probability outside (0, 1].
    """

    def __init__(self, tokenizer: Any, probability: float = 0.15) -> None:
        if tokenizer.mask_token_id is None:
            raise ValueError("a masked language model needs a tokenizer with [MASK], such as kind 'wordpiece'")
        if not 0 < probability <= 1:
            raise ValueError(f"Masking(probability={probability!r}): must be above 0 and at most 1")
        self._collator: Any = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
        # A generator that is seeded for each block. With the collator's own `seed`, draws would depend on all previous batches,
        # and a resumed run could not repeat them.
        self._collator.generator = torch.Generator()

    def __call__(self, ids: Sequence[int], key: Sequence[int]) -> dict[str, list[int]]:
        """`input_ids` and `labels`, both as long as `ids`; labels are -100 for tokens that are not masked."""
        entropy = [*key, zlib.crc32(np.asarray(ids, dtype=np.int64).tobytes())]
        self._collator.generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
        block = torch.tensor([list(ids)])
        special = torch.tensor([self._collator.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)])
        inputs, labels = self._collator.torch_mask_tokens(block.clone(), special_tokens_mask=special)
        while (labels == -100).all() and not special.all():
            inputs, labels = self._collator.torch_mask_tokens(block.clone(), special_tokens_mask=special)
        return {"input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}
