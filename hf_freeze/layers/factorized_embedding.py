"""Token embeddings of low rank, table · projection, for input and output (Lan et al., 2020, "ALBERT: A Lite BERT for
Self-supervised Learning of Language Representations", https://arxiv.org/abs/1909.11942).

Shapes: V rows of the vocabulary, E rank, H hidden size, N tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.architectures.roles import table_scale
from hf_freeze.layers.derived import Derived, scaled
from hf_freeze.layers.factorized import left_vectors


class Factors(Derived):
    """The table `weight` (V, E), named so because native models tie and resize by this name, and the `projection` (E, H)."""

    weight: nn.Parameter
    projection: nn.Parameter

    def gain(self, projection: torch.Tensor) -> float:
        """The factor that multiplies the freshly drawn `projection` and divides the table before training.

        It gives the projection the standard deviation sqrt(H) / E. A step of Adam moves every entry by about the learning rate.
        With h the hidden state, such a step moves a logit by the sum of |h| over H entries for a dense table, and by the sum of
        |projection · h| over E entries here; this standard deviation makes both equal. With a smaller one, such as E^-½, a
        low-rank table learns far more slowly than a dense one.
        """
        rank, hidden = projection.shape
        std = 0.0 if projection.is_meta else float(projection.std())
        # If a checkpoint does not fit, the projection is uninitialised memory here, and the error is reported later.
        return hidden**0.5 / rank / std if 0 < std < math.inf else 1.0

    def dense_weight(self) -> torch.Tensor:
        """(V, H)"""
        return self.weight @ self.projection

    def initialize_projection(self) -> None:
        """Draw the projection so that an entry of the product has the variance of an entry of the table."""
        initialization.normal_(self.projection, std=self.projection.shape[0] ** -0.5)


class LowRankEmbedding(Factors, nn.Embedding):
    """Replaces `table` (V, H) by a table (V, E) whose rows are projected, without bias.

    A padding row gets no gradient, as in nn.Embedding. If it is not zero, the projection gets a gradient from it.
    """

    def __init__(self, table: nn.Embedding, rank: int) -> None:
        hidden = (table.projection if isinstance(table, Factors) else table.weight).shape[1]
        rows = table.weight.shape[0]
        new: dict[str, Any] = {"device": table.weight.device, "dtype": table.weight.dtype}
        # Passing `_weight` keeps nn.Embedding from drawing the table, which would change the global random state.
        super().__init__(rows, rank, table.padding_idx, _weight=torch.zeros(rows, rank, **new))
        self.projection = nn.Parameter(torch.empty(rank, hidden, **new))
        self.scale = table.scale if isinstance(table, LowRankEmbedding) else table_scale(table)
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """Draw the projection. The native model draws the table, as every nn.Embedding."""
        self.initialize_projection()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        rows = super().forward(input)
        # The residual stream of a decoder starts here: it keeps the dtype of the table, under autocast too.
        return scaled((rows @ self.projection).to(rows.dtype), self.scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.projection.shape[1]}"


class LowRankOutput(Factors, nn.Linear):
    """Replaces `linear` (H -> V): hidden states are projected to E, without bias, and multiplied with the table.

    It is an nn.Linear, because transformers expects one as output embeddings.

    `std`: initial standard deviation of an entry of the dense matrix; None if both factors will be tied to a
    LowRankEmbedding's. The V x H matrix is never computed, not even in inference: E (H + V) multiply-adds for a token are fewer
    than H V unless E is almost H, and then more by the share H / V at most.
    """

    def __init__(self, linear: nn.Linear, rank: int, std: float | None) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would draw a weight
        rows, self.in_features = linear.weight.shape[0], linear.in_features
        self.std = std
        new: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.weight = nn.Parameter(torch.zeros(rows, rank, **new))
        self.projection = nn.Parameter(torch.zeros(rank, self.in_features, **new))
        self.register_parameter("bias", None if linear.bias is None else nn.Parameter(torch.zeros_like(linear.bias)))
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        if self.std is not None:
            initialization.normal_(self.weight, std=self.std)
            self.initialize_projection()

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        return functional.linear(functional.linear(x, self.projection), self.weight, self.bias)

    def table(self) -> nn.Linear:
        """A linear (E -> V) that shares the table as its weight; transformers can resize it."""
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias  # type: ignore[assignment]
        return linear

    def set_table(self, resized: nn.Linear) -> None:
        """Take the table and the bias of the linear `resized` (E -> V')."""
        self.weight, self.bias = resized.weight, resized.bias  # type: ignore[assignment]

    def extra_repr(self) -> str:
        rows, rank = self.weight.shape
        return f"in_features={self.in_features}, out_features={rows}, rank={rank}"


class ProjectedDropout(nn.Dropout):
    """Replaces the dropout after embeddings of width E: dropout, then a projection to H with a bias, as in ALBERT."""

    def __init__(self, dropout: nn.Dropout, rank: int, hidden: int, **new: Any) -> None:
        super().__init__(dropout.p)
        self.projection = nn.Linear(rank, hidden, **new)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., E) -> (..., H)"""
        return self.projection(super().forward(input))


def nearest_factors(weights: Sequence[torch.Tensor], rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One table (V, E) and a projection (E, H) for each weight (V, H): the best approximation of all weights together in the
    Frobenius norm.

    Computed by singular value decomposition in fp64: the projections, side by side, have orthonormal rows. A row of zeros
    remains zero.
    """
    stacked = torch.cat([weight.double() for weight in weights], dim=1)
    basis = principal_axes(stacked)[:, :rank]
    return stacked @ basis, [part.T for part in basis.split([weight.shape[1] for weight in weights])]


def principal_axes(rows: torch.Tensor) -> torch.Tensor:
    """(H, H), orthogonal, fp64: the columns are the right singular vectors of `rows` (V, H), by descending singular value."""
    rows = rows.double()
    missing = rows.shape[1] - rows.shape[0]
    if missing > 0:  # pad with rows of zeros, which add no direction, to get H axes
        rows = functional.pad(rows, (0, 0, 0, missing))
    return left_vectors(rows.T)[0]


def centred_axes(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """(H, E), fp64: the first E - 1 principal axes of the centred `rows` (V, H), rotated into E dimensions such that every
    projected vector has mean zero over E.

    A layer norm over E then acts like one over H; for E = H the two are exactly equal.
    """
    rows = rows.double()
    axes = principal_axes(rows - rows.mean(dim=1, keepdim=True))[:, : rank - 1]
    ones = rows.new_ones(rank, 1)
    rotation = torch.linalg.qr(torch.cat([ones, torch.eye(rank, dtype=rows.dtype, device=rows.device)[:, 1:]], dim=1)).Q
    return axes @ rotation[:, 1:].T
