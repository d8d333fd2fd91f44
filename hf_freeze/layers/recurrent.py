"""Recurrent units instead of the self-attention of a decoder: one state of a fixed size holds all earlier tokens.

- SSRU, the simpler simple recurrent unit (Kim et al., 2019, "From Research to Production and Back: Ludicrously Fast Neural
  Machine Translation", https://aclanthology.org/D19-5632): f = σ(W_f x + b_f), c = f ⊙ c' + (1 - f) ⊙ W x, y = ReLU(c).
- AAN, the average attention network (Zhang et al., 2018, "Accelerating Neural Transformer via an Average Attention Network",
  https://arxiv.org/abs/1805.00631): g is the mean of x and all earlier inputs, after an FFN if there is one; with a gate,
  (i, f) = σ(W [x; g] + b) and y = i ⊙ x + f ⊙ g, without one y = g.
- LSTM, as in nn.LSTM, with one bias.

Shapes: B batch, T tokens, H hidden size, S size of the state: H of SSRU, H + 1 of AAN, 2H of LSTM. States are in fp32 at least.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from hf_freeze.compat.transformers import cache_name, scan
from hf_freeze.layers.derived import is_traced
from hf_freeze.layers.masks import token_mask
from hf_freeze.layers.no_attention import no_weights


def linear_recurrence(factors: Tensor, terms: Tensor, start: Tensor) -> Tensor:
    """c_t = factors_t ⊙ c_{t-1} + terms_t, for `factors` and `terms` (B, T, H) and c_0 = `start` (B, H) -> (B, T, H).

    In ⌈log2 T⌉ rounds: each composes the map of every token with that of the token `distance` before it (Hillis and Steele, 1986,
    "Data Parallel Algorithms"). It divides by nothing, so that factors near 0 are safe.
    """
    if is_traced():  # for any number of tokens

        def step(state: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            state = values[0] * state + values[1]
            return state, state.clone()

        return scan(step, start, [factors, terms])[1]
    distance, tokens = 1, terms.shape[1]
    if tokens == 1:  # a step of generation
        return terms + factors * start[:, None]
    terms = torch.cat([terms[:, :1] + factors[:, :1] * start[:, None], terms[:, 1:]], dim=1)
    while distance < tokens:
        later = factors[:, distance:]
        terms = torch.cat([terms[:, :distance], terms[:, distance:] + later * terms[:, :-distance]], dim=1)
        factors = torch.cat([factors[:, :distance], later * factors[:, :-distance]], dim=1)
        distance *= 2
    return terms


class SSRU(nn.Module):
    def __init__(self, hidden: int, **new: Any) -> None:
        super().__init__()
        self.state_size = hidden
        self.forget = nn.Linear(hidden, hidden, **new)
        self.input = nn.Linear(hidden, hidden, bias=False, **new)

    def forward(self, x: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H), bool (B, T) with False for padding, and the state (B, S) -> (B, T, H), and the state after these tokens."""
        forget = torch.sigmoid(self.forget(x).to(state.dtype))
        terms = (1 - forget) * self.input(x)
        if mask is not None:  # padding keeps the state
            padding = ~mask[..., None]
            forget, terms = forget.masked_fill(padding, 1), terms.masked_fill(padding, 0)
        states = linear_recurrence(forget, terms, state)
        return states.relu().to(x.dtype), states[:, -1]


class AverageAttention(nn.Module):
    """`ffn_width`: neurons of the FFN; None: no FFN."""

    def __init__(self, hidden: int, ffn_width: int | None = None, gate: bool = True, **new: Any) -> None:
        super().__init__()
        self.hidden, self.state_size = hidden, hidden + 1  # the sum of the inputs, and their number
        self.fc1 = None if ffn_width is None else nn.Linear(hidden, ffn_width, **new)
        self.fc2 = None if ffn_width is None else nn.Linear(ffn_width, hidden, **new)
        self.gate = nn.Linear(2 * hidden, 2 * hidden, **new) if gate else None

    def forward(self, x: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """As `SSRU.forward`."""
        real = torch.ones_like(x[..., :1]) if mask is None else mask[..., None]
        summed = torch.cat([x.masked_fill(real == 0, 0), real.to(x.dtype)], dim=-1).to(state.dtype)
        states = summed.cumsum(1) + state[:, None]
        sums, counts = states.split([self.hidden, 1], dim=-1)
        mean = (sums / counts.clamp(min=1)).to(x.dtype)
        if self.fc1 is not None and self.fc2 is not None:
            mean = self.fc2(self.fc1(mean).relu())
        if self.gate is not None:
            kept, taken = torch.sigmoid(self.gate(torch.cat([x, mean.to(x.dtype)], dim=-1))).chunk(2, dim=-1)
            mean = kept * x + taken * mean
        return mean, states[:, -1]


class LSTM(nn.Module):
    """`input` gives, and `recurrent` adds, the input gate, the forget gate, the new value and the output gate, in this order."""

    def __init__(self, hidden: int, **new: Any) -> None:
        super().__init__()
        self.state_size = 2 * hidden  # output and cell
        self.input = nn.Linear(hidden, 4 * hidden, **new)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False, **new)

    def forward(self, x: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """As `SSRU.forward`."""

        def step(state: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            output, cell = state.chunk(2, dim=-1)
            gates = values[0] + self.recurrent(output.to(x.dtype)).to(state.dtype)
            taken, kept, new, shown = gates.chunk(4, dim=-1)
            cell = torch.sigmoid(kept) * cell + torch.sigmoid(taken) * torch.tanh(new)
            after = torch.cat([torch.sigmoid(shown) * torch.tanh(cell), cell], dim=-1)
            after = after if mask is None else torch.where(values[1], after, state)
            return after, after.chunk(2, dim=-1)[0].clone()

        sequences = [self.input(x).to(state.dtype)] + ([] if mask is None else [mask[..., None]])
        state, outputs = _steps(step, state, sequences)
        return outputs.to(x.dtype), state


def _steps(
    step: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]], state: Tensor, sequences: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Apply `step` to each token of `sequences` (B, T, ...) -> the last state, and what each step gives, (B, T, ...)."""
    if is_traced():
        return scan(step, state, sequences)
    outputs = []
    for values in zip(*(sequence.unbind(1) for sequence in sequences), strict=True):
        state, output = step(state, values)
        outputs.append(output)
    return state, torch.stack(outputs, dim=1)


KINDS: dict[str, Any] = {"ssru": SSRU, "aan": AverageAttention, "lstm": LSTM}


class StateLayer(DynamicLayer):
    """The layer of a cache for a recurrent unit. `values` is the state (B, 1, 1, S); `keys` (B, 1, P, 0) count the P tokens that
    it has seen, and take no memory. So caches reorder, repeat and move it as they do keys and values.

    `max_length`: that of the static layer which it replaces, by which masks are made for all layers; None without.
    """

    is_croppable = False  # a state cannot forget its last tokens
    keys: Any
    values: Any

    def __init__(self, max_length: int | None = None, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        super().__init__()
        self.max_length, self.keys, self.values = max_length, keys, values
        self.is_compileable = max_length is not None  # so masks leave out what a static layer has not filled yet

    @staticmethod
    def of(cache: Any, number: int) -> "StateLayer":
        """The layer `number` of `cache`, which it replaces if the cache has made one for an attention."""
        while len(cache.layers) <= number:
            cache.layers.append(cache.layer_class_to_replicate())
        if not isinstance(cache.layers[number], StateLayer):
            cache.layers[number] = StateLayer(getattr(cache.layers[number], "max_cache_len", None))
        return cache.layers[number]

    def put(self, state: Tensor, tokens: int) -> None:
        """Store `state` (B, S) after `tokens` further tokens."""
        new = state.new_empty(state.shape[0], 1, tokens, 0)
        self.keys = new if self.keys is None else torch.cat([self.keys, new], dim=2)
        state = state if tokens == 1 else state.clone()  # not a view of the states after all tokens
        self.values = state[:, None, None]
        self.dtype, self.device, self.is_initialized = state.dtype, state.device, True

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_length or self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length or -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.10

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless it has to remove nothing."""
        if tokens_to_remove:
            raise ValueError(
                f"the state of a recurrent unit cannot forget {abs(tokens_to_remove)} tokens: choose another search"
            )


class RecurrentAttention(nn.Module):
    """Replaces the causal self-attention `attention` by the recurrent `unit`."""

    def __init__(self, attention: Any, unit: Any) -> None:
        super().__init__()
        self.unit, self.layer_idx, self.config = unit, attention.layer_idx, getattr(attention, "config", None)
        self.dropout = getattr(attention, "resid_dropout", nn.Identity())  # GPT-2 has it inside its attention

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, H) -> (B, T, H), and the attention weights of no head"""
        batch, tokens = hidden_states.shape[:2]
        cache = kwargs.get(cache_name(kwargs))
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        layer = None if cache is None else StateLayer.of(cache, self.layer_idx)
        seen = 0 if layer is None else layer.get_seq_length()
        if layer is None or layer.values is None:
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            state = hidden_states.new_zeros(batch, self.unit.state_size, dtype=dtype)
        else:
            state = layer.values.flatten(1)
        mask = token_mask(attention_mask, seen, hidden_states, "recurrent units")
        outputs, state = self.unit(hidden_states, mask, state)
        if layer is not None:
            layer.put(state, tokens)
        return self.dropout(outputs), no_weights(hidden_states, seen + tokens, self.config)
