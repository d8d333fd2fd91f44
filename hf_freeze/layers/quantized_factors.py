"""Quantised factors: of linears of low rank, and of factorised tables and output matrices.

Shapes: I inputs, O outputs, R rank; V rows of the vocabulary, E rank of the table, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.derived import Computed, DerivedLinear, scaled
from hf_freeze.layers.factorized_embedding import Factors, LowRankEmbedding, LowRankOutput
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.quantized import Quantized, QuantizedEmbedding, QuantizedLinear


def equal_columns(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A factor (O, R), fp32, with columns of equal norm, and the numbers (R,) that its columns were divided by.

    The scale of a row is too coarse for a small column, and those of a truncated decomposition fall; the other factor has a scale
    for each of these numbers.
    """
    matrix = matrix.float()
    norms = matrix.norm(dim=0)
    ratios = torch.where(norms > 0, norms / norms.mean(), 1)
    return matrix / ratios, ratios


class QuantizedFactor(Quantized):
    """A factor of a weight, as a matrix (O, I). It is no nn.Linear: PEFT adapts the whole weight."""

    def __init__(self, outputs: int, inputs: int, scheme: Any, **new: Any) -> None:
        super().__init__()
        self.make_buffers(outputs, inputs, scheme, **new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.multiply(x, None)

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, scheme={self.scheme!r}"


class QuantizedLowRankLinear(DerivedLinear):
    """Replaces a LowRankLinear: W = up · down with both factors quantised. The bias is not."""

    down: QuantizedFactor
    up: QuantizedFactor
    factor_class: ClassVar[type[QuantizedFactor]] = QuantizedFactor

    def __init__(self, linear: LowRankLinear, scheme: Any) -> None:
        super().__init__(linear)
        new = {"device": linear.down.device, "dtype": linear.down.dtype}
        self.down = self.factor_class(linear.rank, self.in_features, scheme, **new)
        self.up = self.factor_class(self.out_features, linear.rank, scheme, **new)

    @torch.no_grad()
    def fill(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """Quantise the factors `down` (R, I) and `up` (O, R)."""
        up, ratios = equal_columns(up)
        self.up.fill(up)
        self.down.fill(down.float() * ratios[:, None])

    def dense_weight(self) -> torch.Tensor:
        return self.up.dense_weight() @ self.down.dense_weight()

    @property
    def selectable(self) -> bool:
        return self.up.scheme == "int8"

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        if outputs:
            new.up.set_rows(kept)
        else:
            new.down.set_columns(kept)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        y = self.up(self.down(x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.up.shape[1]}, scheme={self.up.scheme!r}"


def _projection_like(factors: Factors) -> nn.Parameter:
    """(E, H), fresh"""
    projection = nn.Parameter(torch.empty_like(factors.projection))
    initialization.normal_(projection, std=projection.shape[0] ** -0.5)
    return projection


class QuantizedLowRankEmbedding(QuantizedEmbedding):
    """Replaces a LowRankEmbedding. The table (V, E) is quantised, the projection (E, H) is not."""

    take_weight = Computed.take_weight

    def __init__(self, table: LowRankEmbedding, scheme: Any) -> None:
        super().__init__(table, scheme)
        self.scale = table.scale
        self.projection = _projection_like(table)

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() @ self.projection

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        rows = self.rows(input.flatten()).view(*input.shape, self.embedding_dim)
        return scaled((rows @ self.projection).to(rows.dtype), self.scale)


class QuantizedLowRankOutput(QuantizedLinear):
    """Replaces a LowRankOutput: hidden states are projected to E and multiplied with the quantised table (V, E)."""

    take_weight = Computed.take_weight

    def __init__(self, linear: LowRankOutput, scheme: Any) -> None:
        super().__init__(linear.table(), scheme)
        self.in_features = linear.in_features
        self.projection = _projection_like(linear)

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() @ self.projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        return super().forward(functional.linear(x, self.projection))
