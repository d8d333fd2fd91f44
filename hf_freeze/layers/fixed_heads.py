"""Self-attention some of whose heads attend by position alone (Raganato et al., 2020, https://arxiv.org/abs/2002.10260).

Shapes: B batch, T tokens, H hidden size, N heads of D numbers. Positions count the n tokens of a sentence that are no padding,
from 0. In the context of token i, token j weighs

1. the token itself: [j = i]
2. the one before: [j = i - 1]
3. the one after: [j = i + 1]
4. what was before, the more the nearer: (j + 1)³ / Σ over j <= i - 2
5. what comes after, the more the nearer: (n - j)³ / Σ over j >= i + 2
6. all, the more towards the end: (j + 1)³ / Σ
7. all, the more towards the start: (n - j)³ / Σ
8. the last token: [j = n - 1]

None of these needs a matrix of T x T: they are shifts, running sums and single means. By words instead of tokens, i and j count
words, a word's weight is spread evenly over its tokens, and the tokens of a word have one context.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_freeze.compat.transformers import attention_implementation
from hf_freeze.layers.masks import unpadded

PATTERNS = range(1, 9)
EMPTY_ROWS = ("zero", "boundary")
UNITS = ("token", "word")


def padding_mask(attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor:
    """bool (B, T): True for tokens, from what the backbone gives its attentions: nothing where there is no padding, (B, T), or
    (B, 1, T or 1, T) of bool or of numbers to add, 0 for tokens.

    Raises ValueError for any other mask.
    """
    shape = hidden_states.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=hidden_states.device)
    mask = unpadded(attention_mask)
    if mask is not None and (attention_mask.ndim == 4 or mask.shape == shape):
        return mask.expand(shape)
    raise ValueError(
        f"fixed heads cannot read a mask of {type(attention_mask).__name__}, as this implementation of attention has: use "
        "'eager', 'sdpa' or 'flash_attention_2'"
    )


class Places:
    """Where the tokens of a batch are. `mask`: bool (B, T)."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask[..., None]  # (B, T, 1), as all below
        self.place = (mask.cumsum(1) - 1).clamp(min=0)[..., None]
        self.length = self.mask.sum(1, keepdim=True)
        self.first = self.mask & (self.place == 0)
        self.last = self.mask & (self.place == self.length - 1)

    def weights(self, *, ascending: bool) -> torch.Tensor:
        """fp32 (B, T, 1): (j + 1)³ or (n - j)³, 0 for padding."""
        base = self.place + 1 if ascending else self.length - self.place
        return torch.where(self.mask, base, 0).float() ** 3


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """(B, T, any): token i gets that of token i - `by`, or 0."""
    shifted = torch.zeros_like(x)
    if by > 0:
        shifted[:, by:] = x[:, :-by]
    else:
        shifted[:, :by] = x[:, -by:]
    return shifted


def context(values: torch.Tensor, pattern: int, places: Places, empty_rows: str) -> torch.Tensor:
    """(B, T, D) -> (B, T, D), fp32: what a head of this pattern gathers from its `values`.

    Rows that no weight is defined for (1 of patterns 2 and 3, up to 2 of 4 and 5) are 0, or those of the first or last token
    (`empty_rows="boundary"`).
    """
    values = torch.where(places.mask, values.float(), 0)
    if pattern == 1:
        return values
    if pattern == 8:
        return (values * places.last).sum(1, keepdim=True).expand_as(values)
    forwards = pattern in (2, 4, 6)
    if pattern in (6, 7):
        weights = places.weights(ascending=pattern == 6)
        return ((values * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)).expand_as(values)
    if pattern in (2, 3):
        gathered, empty = _shifted(values, 1 if forwards else -1), places.first if forwards else places.last
    else:
        weights = places.weights(ascending=forwards)
        sums = torch.cat([values * weights, weights], dim=2)
        sums = sums.cumsum(1) if forwards else sums.flip(1).cumsum(1).flip(1)
        sums = _shifted(sums, 2 if forwards else -2)
        total = sums[..., -1:]
        gathered, empty = sums[..., :-1] / total.clamp(min=1), total == 0
    if empty_rows == "zero":
        return gathered
    boundary = (values * (places.first if forwards else places.last)).sum(1, keepdim=True)
    return torch.where(empty & places.mask, boundary, gathered)


class Words:
    """Which word each token of a batch is in, for the heads that go by words. Told the ids in every forward of the stack that
    `read` is a hook of. `continuations`: ids of the tokens that go on with the word before them; all others start one."""

    def __init__(self, continuations: Sequence[int]) -> None:
        self.continuations = list(continuations)
        self._ids: torch.Tensor | None = None  # the same, where they were needed last: a model may be made on meta
        self.starts: torch.Tensor | None = None  # bool (B, T)

    def read(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not torch.is_tensor(ids) or ids.is_floating_point():
            raise ValueError("fixed heads by words need input_ids: other inputs do not say where a word starts")
        if self._ids is None or self._ids.device != ids.device:
            self._ids = torch.tensor(self.continuations, dtype=torch.long, device=ids.device)
        self.starts = ~torch.isin(ids, self._ids)

    def context(self, values: torch.Tensor, pattern: int, mask: torch.Tensor, empty_rows: str) -> torch.Tensor:
        """(B, T, D) -> (B, T, D), fp32: what `context` gives with the mean of a word's values for each word."""
        if self.starts is None or self.starts.shape != mask.shape:
            raise ValueError("fixed heads by words were not told the input_ids: call the model, not a part of it")
        first = mask & (mask.cumsum(1) == 1)
        word = (((self.starts | first) & mask).cumsum(1) - 1).clamp(min=0)[..., None]  # (B, T, 1)
        counted = torch.zeros_like(word, dtype=torch.float32).scatter_add(1, word, mask[..., None].float())
        whole = torch.where(mask[..., None], values.float(), 0)
        sums = torch.zeros_like(whole).scatter_add(1, word.expand_as(whole), whole)
        means = sums / counted.clamp(min=1)
        found = context(means, pattern, Places(counted[..., 0] > 0), empty_rows)
        return found.gather(1, word.expand_as(found))


class FixedHeads(nn.Module):
    """Takes the place of the module that computes the heads of `attention`. Its first heads have the `patterns`, and no queries
    or keys; the others are as before. The projections, which the caller adds, have the names that `projections` gives q, k, v
    and, where the output projection lies within, o.
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
        self.patterns, self.empty_rows, self.head_size = tuple(patterns), empty_rows, head_size
        self.projections = projections
        self.config, self.scaling, self.is_causal = attention.config, attention.scaling, False
        dropout: Any = attention.dropout
        self.dropout: Any = dropout.p if isinstance(dropout, nn.Dropout) else dropout

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """(B, T, H) -> (B, heads, T, D)"""
        projected = self.get_submodule(self.projections[name])(x)
        return projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) -> (B, T, H), or (B, T, N x D) where the output projection lies outside; attentions of the other heads."""
        values = self._project("v", hidden_states)
        mask = padding_mask(attention_mask, hidden_states)
        if self.words is None:
            gather = functools.partial(context, places=Places(mask), empty_rows=self.empty_rows)
        else:
            gather = functools.partial(self.words.context, mask=mask, empty_rows=self.empty_rows)
        gathered = [gather(values[:, head], pattern).to(values.dtype) for head, pattern in enumerate(self.patterns)]
        weights = None
        if len(gathered) < values.shape[1]:
            learnt, weights = self._attend(hidden_states, values[:, len(gathered) :], attention_mask, kwargs)
            gathered.append(learnt.to(values.dtype).flatten(2))
        out = torch.cat(gathered, dim=-1)
        if "o" in self.projections:
            out = self.get_submodule(self.projections["o"])(out)
        return out, weights

    def _attend(
        self,
        hidden_states: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, heads, D) by queries and keys, in the implementation that the model was told to take."""
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
