"""Replacements for an attention whose heads were all removed: only the bias of its output projection remains."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from hf_freeze.compat.transformers import attention_implementation, cache_name


class NoHeads(nn.Module):
    """Replaces an output projection that has lost all its inputs: y = b, or 0 without a bias."""

    def __init__(self, linear: Any, outputs: int) -> None:
        super().__init__()
        self.out_features = outputs
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if linear.bias is None else nn.Parameter(torch.zeros_like(linear.bias)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., any) -> (..., O)"""
        shape = (*x.shape[:-1], self.out_features)
        return x.new_zeros(shape) if self.bias is None else self.bias.to(x.dtype).expand(shape)

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}, bias={self.bias is not None}"


class NoAttention(nn.Module):
    """Replaces the module that computes the heads, which may also contain the output projection.

    `removed`: {name: linear on meta} of the removed projections, for `merge()`. The module writes one number for each token
    into a cache, because caches count tokens by the entries of a layer. Where the others return attention weights, it returns
    those of no head, so that entries of `output_attentions` have the numbers of the layers.
    """

    def __init__(self, attention: nn.Module, removed: dict[str, nn.Module], output: str | None) -> None:
        super().__init__()
        self.layer_idx: Any = getattr(attention, "layer_idx", None)
        self.config: Any = getattr(attention, "config", None)
        self.removed = removed
        self.output = output  # the name of the output projection; None if it is outside this module

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, O), or (B, T, 0) if the output projection is outside; and weights (B, 0, T, keys), or None."""
        states = next(
            (kwargs[name] for name in ("key_value_states", "encoder_hidden_states") if kwargs.get(name) is not None),
            None,
        )
        keys = (hidden_states if states is None else states).shape[1]
        cache = kwargs.get(cache_name(kwargs))
        if cache is not None and states is None:
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            token = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            keys = cache.update(token, token, self.layer_idx)[0].shape[2]
        weights = no_weights(hidden_states, keys, self.config)
        if self.output is None:
            return hidden_states[..., :0], weights
        return self.get_submodule(self.output)(hidden_states), weights


def no_weights(hidden_states: torch.Tensor, keys: int, config: Any) -> torch.Tensor | None:
    """(B, T, H) -> (B, 0, T, keys), the weights of no head, where attentions return weights; otherwise None."""
    if config is None or attention_implementation(config) != "eager":
        return None
    return hidden_states.new_zeros(hidden_states.shape[0], 0, hidden_states.shape[1], keys)
