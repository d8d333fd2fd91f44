"""Self-attention in which some heads have fixed patterns: they attend by position alone (Raganato et al., 2020,
https://arxiv.org/abs/2002.10260).

Shapes: B batch, T tokens, H hidden size, N heads of D numbers. Positions count the n tokens of a sentence from 0, without
padding. The attention weight of token j for token i, by pattern:

1. the token itself: [j = i]
2. the previous token: [j = i - 1]
3. the next token: [j = i + 1]
4. earlier tokens, more weight for nearer ones: (j + 1)³ / Σ over j <= i - 2
5. later tokens, more weight for nearer ones: (n - j)³ / Σ over j >= i + 2
6. all tokens, more weight towards the end: (j + 1)³ / Σ
7. all tokens, more weight towards the start: (n - j)³ / Σ
8. the last token: [j = n - 1]

No pattern needs a T x T matrix: shifts, cumulative sums and means suffice. With words as units, i and j count words, the weight
of a word is spread evenly over its tokens, and all tokens of a word get the same context.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_freeze.compat.transformers import attention_implementation
from hf_freeze.layers.masks import unpadded, unreadable_mask
from hf_freeze.layers.no_attention import no_weights

PATTERNS = range(1, 9)
EMPTY_ROWS = ("zero", "boundary")
UNITS = ("token", "word")


def padding_mask(attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """bool (B, T), True for tokens, from the mask that the backbone passes to its attentions.

    `attention_mask` is None without padding, (B, T), or (B, 1, T or 1, T): bool, or additive with 0 for tokens. Raises
    ValueError for any other mask.
    """
    shape = hidden_states.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=hidden_states.device)
    mask = unpadded(attention_mask)
    if mask is not None and (attention_mask.ndim == 4 or mask.shape == shape):
        return mask.expand(shape)
    raise unreadable_mask("fixed heads", attention_mask)


class Positions:
    """Positions of the tokens of a batch, without padding. `mask`: bool (B, T), True for tokens."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask[..., None]  # (B, T, 1), the shape of all attributes but `length`, (B, 1, 1)
        self.position = (mask.cumsum(1) - 1).clamp(min=0)[..., None]
        self.length = self.mask.sum(1, keepdim=True)
        self.first = self.mask & (self.position == 0)
        self.last = self.mask & (self.position == self.length - 1)

    def weights(self, *, ascending: bool) -> torch.Tensor:
        """fp32 (B, T, 1): (j + 1)³ or (n - j)³, 0 for padding."""
        base = self.position + 1 if ascending else self.length - self.position
        return torch.where(self.mask, base, 0).float() ** 3


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """(B, T, any): token i gets the value of token i - `by`, or 0 if there is no such token."""
    tokens = x.shape[1]
    if by > 0:
        return nn.functional.pad(x, (0, 0, by, 0))[:, :tokens]
    return nn.functional.pad(x, (0, 0, 0, -by))[:, -by:]


def context(values: torch.Tensor, pattern: int, positions: Positions, empty_rows: str) -> torch.Tensor:
    """(B, T, D) -> (B, T, D), fp32: the output of a head with this pattern and these `values`.

    Patterns 2 and 3 define no weights for 1 token, patterns 4 and 5 for up to 2. The output for them is 0, or the value of the
    first or last token (`empty_rows="boundary"`).
    """
    values = torch.where(positions.mask, values.float(), 0)
    if pattern == 1:
        return values
    if pattern == 8:
        return (values * positions.last).sum(1, keepdim=True).expand_as(values)
    forwards = pattern in (2, 4, 6)
    if pattern in (6, 7):
        weights = positions.weights(ascending=pattern == 6)
        return ((values * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)).expand_as(values)
    if pattern in (2, 3):
        gathered, empty = _shifted(values, 1 if forwards else -1), positions.first if forwards else positions.last
    else:
        weights = positions.weights(ascending=forwards)
        sums = torch.cat([values * weights, weights], dim=2)
        sums = sums.cumsum(1) if forwards else sums.flip(1).cumsum(1).flip(1)
        sums = _shifted(sums, 2 if forwards else -2)
        total = sums[..., -1:]
        gathered, empty = sums[..., :-1] / total.clamp(min=1), total == 0
    if empty_rows == "zero":
        return gathered
    boundary = (values * (positions.first if forwards else positions.last)).sum(1, keepdim=True)
    return torch.where(empty & positions.mask, boundary, gathered)


class Words:
    """Maps the tokens of a batch to words, for heads that count positions in words.

    `read` must be registered as a forward pre-hook of the stack, so that it sees the ids of every forward. `continuations`: ids
    of the tokens that continue a word; every other token starts a word.
    """

    def __init__(self, continuations: Sequence[int]) -> None:
        self.continuations = list(continuations)
        # The same ids on the device of the last forward; the model itself may have been created on meta.
        self._ids: torch.Tensor | None = None
        self.starts: torch.Tensor | None = None  # bool (B, T)

    def read(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pre-hook that reads `input_ids`. Raises ValueError if the forward gets other inputs."""
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not torch.is_tensor(ids) or ids.is_floating_point():
            raise ValueError("fixed heads by words need input_ids: other inputs do not show where a word starts")
        if self._ids is None or self._ids.device != ids.device:
            self._ids = torch.tensor(self.continuations, dtype=torch.long, device=ids.device)
        self.starts = ~torch.isin(ids, self._ids)

    def context(self, values: torch.Tensor, pattern: int, mask: torch.Tensor, empty_rows: str) -> torch.Tensor:
        """(B, T, D) -> (B, T, D), fp32: like the function `context`, computed on words whose value is the mean of their tokens'.

        Raises ValueError if `read` has not seen the ids of this batch.
        """
        if self.starts is None or self.starts.shape != mask.shape:
            raise ValueError("fixed heads by words have not seen the input_ids: call the whole model, not a part of it")
        first = mask & (mask.cumsum(1) == 1)
        word = (((self.starts | first) & mask).cumsum(1) - 1).clamp(min=0)[..., None]  # (B, T, 1)
        counts = torch.zeros_like(word, dtype=torch.float32).scatter_add(1, word, mask[..., None].float())
        token_values = torch.where(mask[..., None], values.float(), 0)
        sums = torch.zeros_like(token_values).scatter_add(1, word.expand_as(token_values), token_values)
        means = sums / counts.clamp(min=1)
        word_contexts = context(means, pattern, Positions(counts[..., 0] > 0), empty_rows)
        return word_contexts.gather(1, word.expand_as(word_contexts))


class FixedHeads(nn.Module):
    """Replaces the module that computes the heads of `attention`.

    The first heads have the fixed `patterns` and no queries or keys; the others stay as they were. The caller adds the
    projections as submodules. `projections` maps q, k, v and, if the module contains the output projection, o to their names.
    """

    def __init__(
        self,
        attention: Any,
        patterns: Sequence[int],
        empty_rows: str,
        words: Words | None,
        head_size: int,
        projections: dict[str, str],
    ) -> None:
        super().__init__()
        self.words = words
        self.patterns, self.empty_rows, self.size = tuple(patterns), empty_rows, head_size
        self.projections = projections
        self.config, self.scaling, self.is_causal = attention.config, attention.scaling, False
        dropout: Any = attention.dropout
        self.dropout: Any = dropout.p if isinstance(dropout, nn.Dropout) else dropout

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H) -> (B, heads, T, D)"""
        projected = self.get_submodule(self.projections[name])(x)
        return projected.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), or (B, T, N x D) without the output projection; and the attention weights of the other
        heads."""
        values = self._project("v", hidden_states)
        fixed = self._context(hidden_states, attention_mask)
        contexts = [fixed(values[:, head], pattern).to(values.dtype) for head, pattern in enumerate(self.patterns)]
        weights = no_weights(hidden_states, hidden_states.shape[1], self.config)
        if len(contexts) < values.shape[1]:
            learned, weights = self._attend(hidden_states, values[:, len(contexts) :], attention_mask, kwargs)
            contexts.append(learned.to(values.dtype).flatten(2))
        out = torch.cat(contexts, dim=-1)
        if "o" in self.projections:
            out = self.get_submodule(self.projections["o"])(out)
        return out, weights

    def _context(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        """(values, pattern) -> what the head of this pattern computes in this batch"""
        mask = padding_mask(attention_mask, hidden_states)
        if self.words is None:
            return functools.partial(context, positions=Positions(mask), empty_rows=self.empty_rows)
        return functools.partial(self.words.context, mask=mask, empty_rows=self.empty_rows)

    def fixed_weights(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """(B, T, H) -> fp32 (B, fixed heads, T, T): the attention weights of the fixed heads, for pictures. If they count words,
        a forward must have seen the batch."""
        tokens = torch.eye(hidden_states.shape[1], device=hidden_states.device).expand(len(hidden_states), -1, -1)
        fixed = self._context(hidden_states, attention_mask)
        return torch.stack([fixed(tokens, pattern) for pattern in self.patterns], dim=1)

    def _attend(
        self,
        hidden_states: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, heads, D) of the heads with queries and keys, by the model's configured attention implementation."""
        attend: Any = ALL_ATTENTION_FUNCTIONS.get(attention_implementation(self.config), _eager)
        return attend(
            self,
            self._project("q", hidden_states),
            self._project("k", hidden_states),
            values,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )

    def extra_repr(self) -> str:
        unit = UNITS[self.words is not None]
        return f"patterns={self.patterns}, unit={unit!r}, empty_rows={self.empty_rows!r}"


def _eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights
