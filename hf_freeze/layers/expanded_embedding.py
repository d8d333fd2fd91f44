"""Token embeddings that a network computes from the rows of a narrow table.

Shapes: V rows of the vocabulary, n columns of the table, H hidden size, T tokens.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.derived import Derived

SLICE = 4096  # rows expanded at a time when the whole table is, so that activations stay small


class ExpandedEmbedding(Derived, nn.Embedding):
    """Replaces `table` (V, H): `expand` computes the embedding of a token from its row of `weight` (V, n).

    An embedding depends on the token id alone. Eval mode without gradients computes all V rows once, caches them until a
    parameter changes, and looks tokens up. With gradients, each distinct token of the batch is computed once. With dropout,
    every token is computed separately, so that no two share a dropout mask. The padding row of `weight` gets no gradient, as
    in nn.Embedding; its embedding is the network's output, so it need not be zero.

    `first`: the embedding that this one will be tied to; this one uses its cached table (V, H).
    """

    once_per_id = True  # False has an id computed at each of its places, as on meta

    def __init__(
        self, table: nn.Embedding, inputs: int, *, dropout: float, first: "ExpandedEmbedding | None" = None
    ) -> None:
        # Passing `_weight` keeps nn.Embedding from drawing the table, which would change the global random state.
        weight = torch.zeros(table.num_embeddings, inputs, device=table.weight.device, dtype=table.weight.dtype)
        super().__init__(table.num_embeddings, inputs, table.padding_idx, _weight=weight)
        self.dropout = dropout
        self._first = () if first is None else (first,)  # in a tuple, so that it is not registered as a submodule

    def expand(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, H), in the dtype of the table, under autocast too."""
        raise NotImplementedError

    def dense_weight(self) -> torch.Tensor:
        """(V, H)"""
        return torch.cat([self.expand(rows) for rows in self.weight.split(SLICE)])

    def cached_table(self) -> torch.Tensor:
        """(V, H), cached once by the first of the tied embeddings."""
        if self._first:
            return self._first[0].cached_table()
        return self.cached("table", self.dense_weight, self._sources())

    def _sources(self) -> list[Any]:
        """The same as `parameters()`, which takes longer than the lookup itself."""
        parameters, modules = [], [self]
        while modules:
            module: Any = modules.pop()
            parameters += module._parameters.values()
            modules += module._modules.values()
        return parameters

    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._sources())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        if not self.training and not self.needs_gradient():
            return functional.embedding(input, self.cached_table())
        dropout = self.dropout if self.training else 0.0
        if dropout or input.is_meta or not self.once_per_id:
            return self.expand(super().forward(input), dropout)
        ids, index = torch.unique(input, return_inverse=True)
        return functional.embedding(index, self.expand(super().forward(ids)))
