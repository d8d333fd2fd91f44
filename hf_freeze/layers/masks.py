"""What backbones give their attentions as a mask, read."""

from typing import Any

import torch


def unpadded(attention_mask: Any) -> torch.Tensor | None:
    """bool (B, tokens): those that are no padding, of a mask (B, tokens), or (B, 1, any, tokens) of bool or of numbers
    to add, 0 for tokens. The last token sees all that are none. None for any other mask."""
    if not torch.is_tensor(attention_mask) or attention_mask.ndim not in (2, 4):
        return None
    if attention_mask.ndim == 2:
        return attention_mask.bool()
    row = attention_mask[:, 0, -1]
    return row if row.dtype == torch.bool else row == 0
