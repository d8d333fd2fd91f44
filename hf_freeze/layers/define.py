"""DeFINE: token embeddings computed from a narrow table by a deep network of group linears (Mehta et al., 2020, "DeFINE: Deep
Factorized Input Token Embeddings for Neural Sequence Modeling", https://arxiv.org/abs/1911.12385).

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

from hf_freeze.layers.expanded_embedding import SLICE, ExpandedEmbedding
from hf_freeze.layers.group_linear import GroupLinear, mix
from hf_freeze.seeded import uniform

_GELU = 1 / 3 + 1 / (2 * math.pi * math.sqrt(3))  # the mean square of gelu(z), z ~ N(0, 1)


def group_counts(depth: int, groups: int) -> list[int]:
    """Groups of layers l = 1..depth: max(floor(groups / 2^(l-1)), 1)."""
    return [max(groups >> layer, 1) for layer in range(depth)]


def output_widths(inputs: int, width: int, counts: Sequence[int]) -> list[int]:
    """Outputs of each layer: linear from `inputs` (before the first layer) to `width` (of the last), rounded up to a multiple of
    its own group count and the next layer's, since both divide them."""
    widths = []
    for layer, (groups, next_groups) in enumerate(itertools.pairwise(counts), 1):
        step = math.lcm(groups, next_groups)
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
    def reset(self, name: str) -> None:
        """Draw fresh values. The blocks are a function of seed 0 and `name`."""
        shape, bound = tuple(self.linear.weight.shape), self.linear.bound
        self.linear.weight.copy_(uniform(0, name, shape, bound, device=self.linear.weight.device))
        self.norm.weight.fill_(1)
        for bias in (self.linear.bias, self.norm.bias):
            bias.zero_()  # type: ignore[union-attr]


class DeFINEEmbedding(ExpandedEmbedding):
    """The embedding of a token is (W x_N + b) / √H with x_1 = F_1(e) and x_l = F_l(mix(e, x_{l-1})), e its row of `weight`
    (V, n).

    With the factor 1/√H, W has weights of the usual size of a linear. Without it they would have to be small, because rows of a
    table have a small norm; some backbones multiply them by √H again. Initial values: W such that an entry of a row has the
    standard deviation `std`; blocks after Glorot.
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
        first: ExpandedEmbedding | None = None,
    ) -> None:
        super().__init__(table, inputs, dropout=dropout, first=first)
        new: dict[str, Any] = {"device": table.weight.device, "dtype": table.weight.dtype}
        self.std = std
        input_widths = [inputs, *(inputs + width for width in widths[:-1])]
        self.layers: Any = nn.ModuleList(
            HierarchicalLayer(*sizes, **new) for sizes in zip(input_widths, widths, counts, strict=True)
        )
        self.reduce: Any = GroupLinear(widths[-1], table.embedding_dim, 1, **new)
        self.initialize_parameters()

    @property
    def scale(self) -> float:
        return self.reduce.out_features**-0.5

    def initialize_parameters(self) -> None:
        """Draw the linears. The native model draws the table, as every nn.Embedding, and the norms."""
        for linear in (*(layer.linear for layer in self.layers), self.reduce):
            linear.initialize_parameters()
        initialization.normal_(self.reduce.weight, std=self.std / self.scale / (_GELU * self.reduce.in_features) ** 0.5)

    def layer_outputs(self, rows: torch.Tensor, dropout: float = 0.0) -> list[torch.Tensor]:
        """(T, n) rows of the table -> (T, O) of each layer, O its outputs; k of the last"""
        outputs: list[torch.Tensor] = []
        for layer in self.layers:
            inputs = mix(rows, outputs[-1], layer.linear.groups) if outputs else rows
            outputs.append(layer(inputs, dropout))
        return outputs

    def features(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, k)"""
        return self.layer_outputs(rows, dropout)[-1]

    def expand(self, rows: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        """(T, n) rows of the table -> (T, H), in the dtype of the table, under autocast too."""
        return (self.reduce(self.features(rows, dropout)) * self.scale).to(rows.dtype)

    @torch.no_grad()
    def fit(self, table: torch.Tensor, rows: torch.Tensor, name: str) -> None:
        """Approximate `table` (V, H) from `rows` (V, n), which become the `weight`.

        The group layers get fresh values, a function of seed 0 and `name`. W and b minimise the distance to the table in the
        Frobenius norm: least squares in fp64 by the normal equations, accumulated over slices.
        """
        self.weight.data = rows.to(self.weight, copy=True)  # not in place: `table` may have the same memory
        for number, layer in enumerate(self.layers):
            layer.reset(f"{name}.{number}")
        double = copy.deepcopy(self).double()
        gram, cross = 0, 0
        for part, target in zip(double.weight.split(SLICE), table.double().split(SLICE), strict=True):
            x = functional.pad(double.features(part), (0, 1), value=1)
            gram, cross = gram + x.T @ x, cross + x.T @ target
        solution = torch.linalg.pinv(gram, hermitian=True) @ cross / self.scale
        self.reduce.weight.copy_(solution[None, :-1])
        self.reduce.bias.copy_(solution[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.reduce.out_features}, dropout={self.dropout}"
