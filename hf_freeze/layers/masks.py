"""Reads the attention masks that backbones pass to their attentions."""

from typing import Any

import torch


def unpadded(attention_mask: Any) -> torch.Tensor | None:
    """bool (B, tokens), True for tokens and False for padding; None if the mask has another form than these two.

    The mask is (B, tokens), or (B, 1, any, tokens): bool, or additive with 0 for tokens. The row of the last query is read,
    because the last token attends to all others.
    """
    if not torch.is_tensor(attention_mask) or attention_mask.ndim not in (2, 4):
        return None
    if attention_mask.ndim == 2:
        return attention_mask.bool()
    row = attention_mask[:, 0, -1]
    return row if row.dtype == torch.bool else row == 0


def token_mask(attention_mask: Any, seen: Any, hidden_states: torch.Tensor, layer: str) -> torch.Tensor | None:
    """bool (B, T): True for the tokens of this forward, `hidden_states` (B, T, H), which follow `seen` cached ones, and False for
    padding; None without mask.

    Raises ValueError for a mask of unknown form; `layer` says what cannot read it.
    """
    if attention_mask is None:
        return None
    mask = unpadded(attention_mask)
    if mask is None:
        raise unreadable_mask(layer, attention_mask)
    batch, tokens = hidden_states.shape[:2]
    return mask.index_select(1, torch.arange(tokens, device=mask.device) + seen).expand(batch, -1)


def unreadable_mask(layer: str, attention_mask: Any) -> ValueError:
    """The error of a layer that supports no masks of this form."""
    return ValueError(
        f"{layer} cannot read a mask of {type(attention_mask).__name__}: choose the attention implementation 'eager', 'sdpa' or "
        "'flash_attention_2'"
    )
