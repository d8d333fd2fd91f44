"""What a masked language model is to predict (Devlin et al., 2019, "BERT", section 3.1)."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling


class Masking:
    """Masks tokens of single blocks as `DataCollatorForLanguageModeling` does: of `probability` of them, eight in ten become
    `[MASK]`, one a random token, one stays.

    The draw is a function of `key` and of the block alone: whatever the batches, in whatever order, and in a resumed run too. A
    key such as (seed, epoch) masks anew in each epoch; a fixed one gives the same test to all. Special tokens, `[UNK]` too,
    are never masked. Of other tokens at least one is, as in BERT's own code: a batch without any has no loss.

    Raises ValueError for a tokenizer without `[MASK]` and a probability outside (0, 1].
    """

    def __init__(self, tokenizer: Any, probability: float = 0.15) -> None:
        if tokenizer.mask_token_id is None:
            raise ValueError("a masked language model needs a tokenizer with [MASK], such as kind 'wordpiece'")
        if not 0 < probability <= 1:
            raise ValueError(f"Masking(probability={probability!r}): must be above 0 and at most 1")
        self._collator: Any = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
        # One of our own: the collator's `seed` would go on from batch to batch, which a resumed run cannot catch up with.
        self._collator.generator = torch.Generator()

    def __call__(self, ids: Sequence[int], key: Sequence[int]) -> dict[str, list[int]]:
        """`input_ids` and `labels`, -100 where nothing is masked, of the same length as `ids`."""
        entropy = [*key, zlib.crc32(np.asarray(ids, dtype=np.int64).tobytes())]
        self._collator.generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
        block = torch.tensor([list(ids)])
        special = torch.tensor([self._collator.tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)])
        inputs, labels = self._collator.torch_mask_tokens(block.clone(), special_tokens_mask=special)
        while (labels == -100).all() and not special.all():
            inputs, labels = self._collator.torch_mask_tokens(block.clone(), special_tokens_mask=special)
        return {"input_ids": inputs[0].tolist(), "labels": labels[0].tolist()}
