"""Long-short range attention (Wu et al., 2020, "Lite Transformer with Long-Short Range Attention",
https://arxiv.org/abs/2004.11886): half of the channels attend, the other half is convolved.

Shapes: B batch, T tokens, H hidden size, h = H/2, K taps.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from hf_freeze.layers.convolution import KernelConvolution
from hf_freeze.layers.masks import unpadded


class LongShortAttention(nn.Module):
    """Takes the place of a self-attention: `attention`, of h inputs and outputs, beside `conv`.

    What generation keeps of the convolution lies in the cache of the attention, as further heads of its keys and values: so
    every kind of cache holds it, reorders it for beams, and grows and shrinks with it.
    """

    def __init__(self, attention: Any, conv: KernelConvolution, head_size: int) -> None:
        super().__init__()
        self.attention, self.conv, self.head_size = attention, conv, head_size
        self.dropout = getattr(attention, "resid_dropout", nn.Identity())  # GPT-2's, which lies within its attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), attentions of the first half"""
        long, short = hidden_states.chunk(2, dim=-1)
        cache = past_key_values
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        # A static cache gives its own counter, which it moves on: the sum is a copy.
        seen = 0 if cache is None else cache.get_seq_length(self.attention.layer_idx) + 0
        inputs = self.conv.inputs(short, _tokens(attention_mask, seen, hidden_states))
        kept = None if cache is None else _KeptBeside(cache, inputs, self.head_size)
        attended, weights = self.attention(long, past_key_values=kept, attention_mask=attention_mask, **kwargs)
        past = None if kept is None else kept.before(seen, self.conv.taps - 1)
        convolved = self.dropout(self.conv(inputs, past))
        return torch.cat([attended, convolved.to(attended.dtype)], dim=-1), weights


def _tokens(attention_mask: torch.Tensor | None, seen: Any, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """bool (B, T): which of the tokens of this forward, after `seen` others, are no padding; None where none is.

    Raises ValueError for a mask that cannot be read.
    """
    if attention_mask is None:
        return None
    mask = unpadded(attention_mask)
    if mask is None:
        raise ValueError(
            f"convolutions cannot read a mask of {type(attention_mask).__name__}, as this implementation of attention has: use "
            "'eager', 'sdpa' or 'flash_attention_2'"
        )
    batch, tokens = hidden_states.shape[:2]
    return mask.index_select(1, _from(seen, tokens, mask.device)).expand(batch, -1)


def _from(start: Any, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device) + start


class _KeptBeside:
    """Stands for `cache` in the attention: `inputs` (B, T, h) are kept with its keys and values."""

    def __init__(self, cache: Any, inputs: torch.Tensor, head_size: int) -> None:
        self.cache, self.head_size = cache, head_size
        pieces = inputs.unflatten(-1, (-1, head_size)).transpose(1, 2)  # (B, heads, T, D)
        self.channels = inputs.shape[-1]
        self.in_keys = -(-pieces.shape[1] // 2)
        self.first, self.second = pieces[:, : self.in_keys], pieces[:, self.in_keys :]
        if self.second.shape[1] < self.in_keys:  # keys and values must have equally many
            self.second = torch.cat([self.second, torch.zeros_like(self.first[:, :1])], dim=1)
        self.kept: Any = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As that of a cache, with keys and values of the attention alone."""
        heads = keys.shape[1]
        if keys.shape[-1] != self.head_size:  # of an attention that has lost its heads
            keys, values = (each.expand(*each.shape[:-1], self.head_size) for each in (keys, values))
        with_first = torch.cat([keys, self.first.to(keys.dtype)], dim=1)
        with_second = torch.cat([values, self.second.to(values.dtype)], dim=1)
        keys, values = self.cache.update(with_first, with_second, layer_idx, *args, **kwargs)
        self.kept = keys[:, heads:], values[:, heads:]
        return keys[:, :heads], values[:, :heads]

    def before(self, seen: Any, count: int) -> torch.Tensor:
        """(B, `count`, h): the inputs of the tokens before those of this forward, zero before the first."""
        places = _from(seen, count, self.kept[0].device) - count
        found = torch.cat([part.index_select(2, places.clamp(min=0)) for part in self.kept], dim=1)
        found = found * (places >= 0)[:, None].to(found.dtype)
        return found.transpose(1, 2).flatten(2)[..., : self.channels]
