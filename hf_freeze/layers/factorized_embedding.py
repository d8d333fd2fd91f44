"""Token embeddings of low rank: table · projection, for the lookup and for the output (Lan et al., 2020, "ALBERT: A Lite BERT
for Self-supervised Learning of Language Representations", https://arxiv.org/abs/1909.11942).

Shapes: V rows of the vocabulary, E rank, H hidden size, N tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.derived import Derived
from hf_freeze.layers.factorized import left_vectors


class Factors(Derived):
    """`weight` (V, E), the table, has the name that native models tie by and resize; `projection` is (E, H)."""

    weight: nn.Parameter
    projection: nn.Parameter

    def gain(self, projection: torch.Tensor) -> float:
        """By what to multiply the `projection` just drawn, and to divide the table, before training.

        It gives the projection the standard deviation sqrt(H) / E. A step of Adam moves every entry by about the learning rate.
        With h the hidden state, it so moves a logit by the sum of |h| over H entries in a dense table, and by that of
        |projection · h| over E here: as much with this deviation. With less, such as E^-½, a table of low rank learns far slower
        than a dense one.
        """
        rank, hidden = projection.shape
        drawn = 0.0 if projection.is_meta else float(projection.std())
        # Where a checkpoint does not fit, which is said later, memory that nothing was drawn into is seen here: any number.
        return hidden**0.5 / rank / drawn if 0 < drawn < math.inf else 1.0

    def dense_weight(self) -> torch.Tensor:
        """(V, H)"""
        return self.weight @ self.projection

    def initialize_projection(self) -> None:
        """An entry of the product has the variance of an entry of the table, which is drawn as the dense one would be."""
        initialization.normal_(self.projection, std=self.projection.shape[0] ** -0.5)


class LowRankEmbedding(Factors, nn.Embedding):
    """Takes the place of `table` (V, H): a table (V, E) whose rows are projected, without bias.

    A padding row gets no gradient, as in nn.Embedding; the projection does, where that row is not zero.
    """

    def __init__(self, table: nn.Embedding, rank: int) -> None:
        rows, hidden = table.weight.shape
        new: dict[str, Any] = {"device": table.weight.device, "dtype": table.weight.dtype}
        # As an argument: nn.Embedding would draw the table from the global random state.
        super().__init__(rows, rank, table.padding_idx, _weight=torch.zeros(rows, rank, **new))
        self.projection = nn.Parameter(torch.empty(rank, hidden, **new))
        self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """The projection; the native model draws the table, as it draws every nn.Embedding."""
        self.initialize_projection()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        rows = super().forward(input)
        # What a decoder adds up from layer to layer begins here: under autocast too, it has the precision of the table.
        return (rows @ self.projection).to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.projection.shape[1]}"


class LowRankOutput(Factors, nn.Linear):
    """Takes the place of `linear` (H -> V): hidden states are projected to E, without bias, and multiplied with the table.

    It is an nn.Linear, as transformers expects of output embeddings.

    `std`: of an entry of the dense matrix when it is fresh; None where both factors will be tied to a LowRankEmbedding's. The
    V x H matrix is never made, in inference neither: E (H + V) multiply-adds of a token are fewer than its H V unless E is
    almost H, and then more by H / V at most.
    """

    def __init__(self, linear: nn.Linear, rank: int, std: float | None) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would draw a weight
        rows, self.in_features = linear.weight.shape
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
        """The linear (E -> V) with the table for a weight, which transformers can resize."""
        made = nn.Linear(self.weight.shape[1], self.weight.shape[0], bias=self.bias is not None, device="meta")
        made.weight, made.bias = self.weight, self.bias  # type: ignore[assignment]
        return made

    def set_table(self, resized: nn.Linear) -> None:
        """(E -> V'): other rows, and a bias of as many, from now on."""
        self.weight, self.bias = resized.weight, resized.bias  # type: ignore[assignment]

    def extra_repr(self) -> str:
        rows, rank = self.weight.shape
        return f"in_features={self.in_features}, out_features={rows}, rank={rank}"


class ProjectedDropout(nn.Dropout):
    """Takes the place of the dropout after embeddings in E: what it leaves is projected to H, with a bias, as ALBERT does."""

    def __init__(self, dropout: nn.Dropout, rank: int, hidden: int, **new: Any) -> None:
        super().__init__(dropout.p)
        self.projection = nn.Linear(rank, hidden, **new)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., E) -> (..., H)"""
        return self.projection(super().forward(input))


def nearest_factors(weights: Sequence[torch.Tensor], rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A table (V, E) and for each weight (V, H) a projection (E, H): the nearest in the Frobenius norm, of all weights together.

    By singular value decomposition: the projections, side by side, have orthonormal rows. A row of zeros stays one. fp64.
    """
    beside = torch.cat([weight.double() for weight in weights], dim=1)
    basis = principal_axes(beside)[:, :rank]
    return beside @ basis, [part.T for part in basis.split([weight.shape[1] for weight in weights])]


def principal_axes(rows: torch.Tensor) -> torch.Tensor:
    """(H, H), orthogonal: the right singular vectors of `rows` (V, H), in columns, by descending singular values; fp64."""
    rows = rows.double()
    missing = rows.shape[1] - rows.shape[0]
    if missing > 0:  # fewer rows than axes; zeros have none of their own
        rows = functional.pad(rows, (0, 0, 0, missing))
    return left_vectors(rows.T)[0]


def centred_axes(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """(H, E) with E - 1 orthonormal axes of the `rows` (V, H) without their means, so turned that all that is projected on them
    has the mean zero over E too: a norm over E then does what one over H does, exactly where E = H. fp64."""
    rows = rows.double()
    axes = principal_axes(rows - rows.mean(dim=1, keepdim=True))[:, : rank - 1]
    ones = rows.new_ones(rank, 1)
    around = torch.linalg.qr(torch.cat([ones, torch.eye(rank, dtype=rows.dtype, device=rows.device)[:, 1:]], dim=1)).Q
    return axes @ around[:, 1:].T
