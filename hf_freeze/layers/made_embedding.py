"""Token embeddings whose rows a network makes of those of a narrow table.

Shapes: V rows of the vocabulary, n columns of the table, H hidden size, T tokens.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.layers.derived import Derived

SLICE = 4096  # rows worked on at a time where all are, so that what is between two layers stays small


class MadeEmbedding(Derived, nn.Embedding):
    """Takes the place of `table` (V, H): `expand` makes the row of a token of a row of `weight` (V, n).

    A row follows from its id alone. In eval mode, where no gradient is needed, all V rows are made once, kept until a parameter
    changes, and looked up. With gradients, what the batch repeats is made once; with dropout, each token by itself, so that no
    two share a mask. The padding row gets no gradient, as in nn.Embedding; what it gives is what the network makes of it.
    """

    def __init__(self, table: nn.Embedding, inputs: int, *, dropout: float) -> None:
        # As an argument: nn.Embedding would draw the table from the global random state.
        weight = torch.zeros(table.num_embeddings, inputs, device=table.weight.device, dtype=table.weight.dtype)
        super().__init__(table.num_embeddings, inputs, table.padding_idx, _weight=weight)
        self.dropout = dropout

    def expand(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, H), in the precision of the table under autocast too."""
        raise NotImplementedError

    def dense_weight(self) -> torch.Tensor:
        """(V, H)"""
        return torch.cat([self.expand(rows) for rows in self.weight.split(SLICE)])

    def kept_table(self) -> torch.Tensor:
        """(V, H), kept."""
        return self.keep("table", self.dense_weight, self._sources())

    def _sources(self) -> list[Any]:
        """As `parameters()`, which takes longer than the look-up."""
        found, modules = [], [self]
        while modules:
            module: Any = modules.pop()
            found += module._parameters.values()
            modules += module._modules.values()
        return found

    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._sources())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        if not self.training and not self.needs_gradient():
            return functional.embedding(input, self.kept_table())
        dropout = self.dropout if self.training else 0.0
        if dropout or input.is_meta:
            return self.expand(super().forward(input), dropout)
        ids, places = torch.unique(input, return_inverse=True)
        return functional.embedding(places, self.expand(super().forward(ids)))
