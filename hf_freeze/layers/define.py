"""DeFINE: token embeddings that a deep, group-wise network makes of a narrow table (Mehta et al., 2020, "DeFINE: Deep Factorized
Input Token Embeddings for Neural Sequence Modeling", https://arxiv.org/abs/1911.12385).

Shapes: V rows of the vocabulary, n columns of the table, k outputs of the last group layer, H hidden size, T tokens.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.group_linear import GroupLinear, mix
from hf_freeze.layers.made_embedding import SLICE, MadeEmbedding
from hf_freeze.seeded import uniform

_GELU = 1 / 3 + 1 / (2 * math.pi * math.sqrt(3))  # the mean square of gelu(z), z ~ N(0, 1)


def group_counts(depth: int, groups: int) -> list[int]:
    """Of layers l = 1..depth: max(floor(groups / 2^(l-1)), 1), from many to one."""
    return [max(groups >> layer, 1) for layer in range(depth)]


def output_widths(inputs: int, width: int, counts: Sequence[int]) -> list[int]:
    """Outputs of each layer, on the line from `inputs` (before the first) to `width` (of the last), rounded up to a multiple of
    what its groups and those of the next layer, which divide them anew, have in common."""
    widths = []
    for layer, (groups, following) in enumerate(itertools.pairwise(counts), 1):
        step = math.lcm(groups, following)
        exact = Fraction((width - inputs) * layer, len(counts)) + inputs
        widths.append(step * math.ceil(exact / step))
    return [*widths, width]


class HierarchicalLayer(nn.Module):
    """Group linear, norm, GELU, dropout."""

    def __init__(self, inputs: int, outputs: int, groups: int, **new: Any) -> None:
        super().__init__()
        self.linear = GroupLinear(inputs, outputs, groups, **new)
        self.norm = nn.LayerNorm(outputs, **new)

    def forward(self, x: torch.Tensor, dropout: float) -> torch.Tensor:
        """(T, I) -> (T, O)"""
        return functional.dropout(functional.gelu(self.norm(self.linear(x))), dropout)

    @torch.no_grad()
    def start(self, name: str) -> None:
        """As fresh; a seed of 0 and `name` define the blocks."""
        shape, bound = tuple(self.linear.weight.shape), self.linear.bound
        self.linear.weight.copy_(uniform(0, name, shape, bound, device=self.linear.weight.device))
        self.norm.weight.fill_(1)
        for bias in (self.linear.bias, self.norm.bias):
            bias.zero_()  # type: ignore[union-attr]


class DeFINEEmbedding(MadeEmbedding):
    """Of a row e of `weight` (V, n), layer l makes x_l = F_l(mix(e, x_{l-1})), the first of e alone, and the row of the token is
    (W x_N + b) / √H.

    The factor 1/√H gives W weights of the size of any other linear's: without it, they would have to be small for rows as short
    as those of a table, which some backbones lengthen by √H again. Fresh: W such that an entry of a row has the standard
    deviation `std`; blocks after Glorot.

    `first`: the unit whose parameters this one will be tied to, and whose V x H rows it uses.
    """

    def __init__(
        self,
        table: nn.Embedding,
        inputs: int,
        widths: Sequence[int],
        counts: Sequence[int],
        *,
        dropout: float,
        std: float,
        first: "DeFINEEmbedding | None" = None,
    ) -> None:
        super().__init__(table, inputs, dropout=dropout)
        new: dict[str, Any] = {"device": table.weight.device, "dtype": table.weight.dtype}
        self.std = std
        taken = [inputs, *(inputs + width for width in widths[:-1])]
        self.layers: Any = nn.ModuleList(
            HierarchicalLayer(*sizes, **new) for sizes in zip(taken, widths, counts, strict=True)
        )
        self.reduce: Any = GroupLinear(widths[-1], table.embedding_dim, 1, **new)
        self._first = () if first is None else (first,)  # in a tuple: it is no part of this module
        self.initialize_parameters()

    @property
    def scale(self) -> float:
        return self.reduce.out_features**-0.5

    def initialize_parameters(self) -> None:
        """The native model draws the table, as it draws every nn.Embedding, and the norms."""
        for linear in (*(layer.linear for layer in self.layers), self.reduce):
            linear.initialize_parameters()
        initialization.normal_(self.reduce.weight, std=self.std / self.scale / (_GELU * self.reduce.in_features) ** 0.5)

    def features(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, k)"""
        made = rows
        for number, layer in enumerate(self.layers):
            made = layer(mix(rows, made, layer.linear.groups) if number else rows, dropout)
        return made

    def expand(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, H), in the precision of the table under autocast too."""
        return (self.reduce(self.features(rows, dropout)) * self.scale).to(rows.dtype)

    def kept_table(self) -> torch.Tensor:
        """(V, H), kept; by the first of those that are tied, for all."""
        return self._first[0].kept_table() if self._first else super().kept_table()

    @torch.no_grad()
    def start_from(self, table: torch.Tensor, rows: torch.Tensor, name: str) -> None:
        """Fresh group layers, which a seed of 0 and `name` define, on the `rows` (V, n), and W and b with which they come nearest
        to the `table` (V, H) in the Frobenius norm: least squares in fp64, by the normal equations, a slice at a time."""
        self.weight.copy_(rows)
        for number, layer in enumerate(self.layers):
            layer.start(f"{name}.{number}")
        twin = copy.deepcopy(self).double()
        gram, cross = 0, 0
        for part, wanted in zip(twin.weight.split(SLICE), table.double().split(SLICE), strict=True):
            x = functional.pad(twin.features(part), (0, 1), value=1)
            gram, cross = gram + x.T @ x, cross + x.T @ wanted
        found = torch.linalg.pinv(gram, hermitian=True) @ cross / self.scale
        self.reduce.weight.copy_(found[None, :-1])
        self.reduce.bias.copy_(found[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.reduce.out_features}, dropout={self.dropout}"
