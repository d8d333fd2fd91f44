"""Long-short range attention (Wu et al., 2020, "Lite Transformer with Long-Short Range Attention",
https://arxiv.org/abs/2004.11886): attention over half of the channels, a convolution over the other half, or over all.

Shapes: B batch, T tokens, H hidden size, h = H/2, K taps.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from hf_freeze.compat.transformers import cache_name
from hf_freeze.layers.convolution import KernelConvolution
from hf_freeze.layers.masks import token_mask
from hf_freeze.layers.no_attention import no_weights


class LongShortAttention(nn.Module):
    """Replaces a self-attention: `attention` (h inputs and outputs) and `conv` side by side.

    For generation, the inputs of the convolution are stored in the cache of the attention, as additional heads of its keys and
    values. So every kind of cache stores them, reorders them for beam search, and grows and shrinks with them.
    """

    def __init__(self, attention: Any, conv: KernelConvolution, head_size: int) -> None:
        super().__init__()
        self.attention, self.conv, self.head_size = attention, conv, head_size
        self.dropout = getattr(attention, "resid_dropout", nn.Identity())  # GPT-2 has it inside its attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), and the attention weights"""
        long, short = hidden_states.chunk(2, dim=-1)
        name = cache_name(kwargs)
        cache, seen = _cache_of(kwargs.get(name), self.attention)
        inputs = self.conv.inputs(short, token_mask(attention_mask, seen, hidden_states, "convolutions"))
        shared_cache = None if cache is None else _SharedCache(cache, inputs, self.head_size)
        if shared_cache is not None:
            kwargs[name] = shared_cache
        attended, weights = self.attention(long, attention_mask=attention_mask, **kwargs)
        past = None if shared_cache is None else shared_cache.past_inputs(seen, self.conv.taps - 1)
        convolved = self.dropout(self.conv(inputs, past))
        return torch.cat([attended, convolved.to(attended.dtype)], dim=-1), weights


class ConvolutionAlone(nn.Module):
    """Replaces the self-attention `attention` by `conv`, over all H channels. Its inputs are stored in the cache instead of
    keys and values."""

    def __init__(self, attention: Any, conv: KernelConvolution) -> None:
        super().__init__()
        self.conv, self.layer_idx, self.config = conv, attention.layer_idx, getattr(attention, "config", None)
        self.dropout = getattr(attention, "resid_dropout", nn.Identity())  # GPT-2 has it inside its attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), and the attention weights of no head"""
        cache, seen = _cache_of(kwargs.get(cache_name(kwargs)), self)
        inputs = self.conv.inputs(hidden_states, token_mask(attention_mask, seen, hidden_states, "convolutions"))
        past = None
        if cache is not None:
            half = hidden_states.shape[-1] // 2  # one head of keys, one of values
            shared_cache = _SharedCache(cache, inputs, half)
            none = inputs.new_zeros(len(inputs), 0, inputs.shape[1], half)
            shared_cache.update(none, none, self.layer_idx)
            past = shared_cache.past_inputs(seen, self.conv.taps - 1)
        return self.dropout(self.conv(inputs, past)), no_weights(hidden_states, seen + inputs.shape[1], self.config)


def _cache_of(cache: Any, owner: Any) -> tuple[Any, Any]:
    """The cache of self-attentions, or None, and the number of tokens in it at the layer of `owner`."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    # Adding 0 copies the length: a static cache returns its own counter, which it later increments in place.
    return cache, 0 if cache is None else cache.get_seq_length(owner.layer_idx) + 0


def _range(start: Any, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device) + start


class _SharedCache:
    """A wrapper of `cache` for the attention: it stores the convolution's `inputs` (B, T, h) beside the keys and values.

    The inputs are cut into heads of `head_size`; the first half of these heads is stored with the keys, the second with the
    values.
    """

    def __init__(self, cache: Any, inputs: torch.Tensor, head_size: int) -> None:
        self.cache, self.head_size = cache, head_size
        heads = inputs.unflatten(-1, (-1, head_size)).transpose(1, 2)  # (B, heads, T, D)
        self.channels = inputs.shape[-1]
        half = -(-heads.shape[1] // 2)
        self.with_keys, self.with_values = heads[:, :half], heads[:, half:]
        if self.with_values.shape[1] < half:  # keys and values need the same number of heads
            self.with_values = torch.cat([self.with_values, torch.zeros_like(self.with_keys[:, :1])], dim=1)
        self._stored: Any = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `update` of a cache; takes and returns the keys and values of the attention only."""
        heads = keys.shape[1]
        if keys.shape[-1] != self.head_size:  # all heads were removed: NoAttention stores one number for each token
            keys, values = (tensor.expand(*tensor.shape[:-1], self.head_size) for tensor in (keys, values))
        all_keys = torch.cat([keys, self.with_keys.to(keys.dtype)], dim=1)
        all_values = torch.cat([values, self.with_values.to(values.dtype)], dim=1)
        keys, values = self.cache.update(all_keys, all_values, layer_idx, *args, **kwargs)
        self._stored = keys[:, heads:], values[:, heads:]
        return keys[:, :heads], values[:, :heads]

    def past_inputs(self, seen: Any, count: int) -> torch.Tensor:
        """(B, `count`, h): the inputs of the `count` tokens before this forward's; zero before the first token."""
        positions = _range(seen, count, self._stored[0].device) - count
        inputs = torch.cat([part.index_select(2, positions.clamp(min=0)) for part in self._stored], dim=1)
        inputs = inputs * (positions >= 0)[:, None].to(inputs.dtype)
        return inputs.transpose(1, 2).flatten(2)[..., : self.channels]
