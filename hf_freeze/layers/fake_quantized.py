"""Layers that train for few bits: weights, and inputs if wanted, are rounded to their grid in the forward, and gradients go
straight through (`layers.grids`). `fixed()` gives the layer that stores integers (`layers.integer_weights`).

In training, a forward rounds from the step on at which `Rounding.active` is set; before, it computes in full precision. In eval
mode it always computes what the fixed layer will: the same numbers, steps and products, so that `fixed()` changes no bit.

Shapes: O outputs, I inputs, R rank, V rows of the vocabulary, H hidden size, G steps of a row.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.roles import table_scale
from hf_freeze.layers.derived import Derived, linear_like, scaled, taken
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.grids import Grid, rounded
from hf_freeze.layers.integer_weights import (
    IntegerEmbedding,
    IntegerLinear,
    IntegerLowRankEmbedding,
    IntegerLowRankLinear,
    IntegerLowRankOutput,
    IntegerSparseLinear,
)
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.rounding import Rounding
from hf_freeze.layers.sparse import SparseLinear


class Rounded(nn.Module):
    """The base of the layers here."""

    rounding: Rounding

    def roundings(self) -> list[Rounding]:
        """One for each weight."""
        return [self.rounding]

    def full_weights(self) -> list[torch.Tensor]:
        """(O, I) of each weight, in full precision."""
        raise NotImplementedError

    def start(self) -> None:
        """Set learnt steps from the weights."""
        for rounding, weight in zip(self.roundings(), self.full_weights(), strict=True):
            rounding.start(weight)

    def fixed(self) -> nn.Module:
        """The layer that stores integers. Raises ValueError as `Rounding.fix` does."""
        raise NotImplementedError


class _Linear(Rounded, Derived):
    """A mixin for nn.Linear and Conv1D."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def oriented(self) -> torch.Tensor:
        """The full-precision weight (O, I)."""
        return self.weight.T if isinstance(self, Conv1D) else self.weight

    def full_weights(self) -> list[torch.Tensor]:
        return [self.oriented()]

    @property
    def selectable(self) -> bool:
        """Whether inputs and outputs can be removed: not if a step is for several inputs but not for all."""
        return self.rounding.grid.granularity == "channel"

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        """A copy with only the outputs `kept`, or the inputs if `outputs` is False. It shares no tensor with this layer."""
        counts = {"outputs" if outputs else "inputs": len(kept)}
        new: Any = linear_like(self, **counts, classes=(FakeQuantizedLinear, FakeQuantizedConv1D))
        axis = int(outputs) if isinstance(self, Conv1D) else int(not outputs)
        new.weight = nn.Parameter(taken(self.weight, axis, kept))
        if self.bias is not None:
            new.bias = nn.Parameter(taken(self.bias, 0, kept) if outputs else self.bias.detach().clone())
        new.rounding = copy.deepcopy(self.rounding)
        new.rounding.select(kept, outputs=outputs)
        return new

    def dense_weight(self) -> torch.Tensor:
        return self.rounding.weight(self.oriented())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.rounding.product(x, self.oriented(), self.bias, [self.weight])

    @torch.no_grad()
    def fixed(self) -> nn.Module:
        layer = IntegerLinear(self, self.rounding.grid)
        if layer.bias is not None:
            layer.bias.copy_(self.bias)  # type: ignore[arg-type]
        return self.rounding.fix(self.oriented(), layer)


class FakeQuantizedLinear(_Linear, nn.Linear):
    """An nn.Linear on a grid."""


class FakeQuantizedConv1D(_Linear, Conv1D):
    """A Conv1D on a grid."""


def like(linear: Any, grid: Grid) -> Any:
    """A FakeQuantizedLinear or FakeQuantizedConv1D with fresh values, and the shapes of `linear`."""
    layer: Any = linear_like(linear, classes=(FakeQuantizedLinear, FakeQuantizedConv1D))
    weight = layer.oriented()
    layer.rounding = Rounding(weight.shape, grid, device=weight.device, dtype=weight.dtype)
    return layer


class FakeQuantizedEmbedding(Rounded, Derived, nn.Embedding):
    """Replaces `table` (V, H). Its rows are rounded as those of a weight; there are no inputs to round."""

    def __init__(self, table: nn.Embedding, grid: Grid) -> None:
        new: dict[str, Any] = {"device": table.weight.device, "dtype": table.weight.dtype}
        rows, columns = table.weight.shape
        nn.Embedding.__init__(self, rows, columns, table.padding_idx, _weight=torch.empty_like(table.weight))
        self.scale = table_scale(table)
        self.rounding = Rounding(table.weight.shape, replace(grid, activations=None), **new)

    def full_weights(self) -> list[torch.Tensor]:
        return [self.weight]

    def dense_weight(self) -> torch.Tensor:
        return self.rounding.weight(self.weight)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) -> (..., H), of the table as it is now."""
        rows = functional.embedding(ids, self.weight, self.padding_idx)
        rounding, grid = self.rounding, self.rounding.grid
        if self.training and not rounding.active:
            return rows
        if grid.weight_ranges == "learnt":
            steps = functional.embedding(ids, grid.spread(rounding.steps(self.weight), rows.shape[-1]))
        else:  # of these rows alone
            steps = grid.spread(grid.steps(rows.flatten(0, -2)), rows.shape[-1]).view(*ids.shape, -1)
        numbers = rounded(rows, steps, grid.levels, clips=grid.weight_ranges == "learnt")
        return (numbers * steps).to(rows.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        return scaled(self.rows(input), self.scale)

    def fixed(self) -> nn.Module:
        return self.rounding.fix(self.weight, IntegerEmbedding(self, self.rounding.grid))


class FakeQuantizedLowRankLinear(Rounded, LowRankLinear):
    """Replaces a LowRankLinear: W = up · down with both factors on a grid; if inputs are rounded, so is what lies between."""

    def __init__(self, linear: LowRankLinear, grid: Grid) -> None:
        LowRankLinear.__init__(self, linear, linear.rank, std=linear.std, solver=linear.solver)
        new: dict[str, Any] = {"device": linear.down.device, "dtype": linear.down.dtype}
        self.down_rounding = Rounding(self.down.shape, grid, **new)
        self.up_rounding = Rounding(self.up.shape, grid, **new)

    @property
    def selectable(self) -> bool:
        return self.up_rounding.grid.granularity == "channel"

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        (new.up_rounding if outputs else new.down_rounding).select(kept, outputs=outputs)
        return new

    def roundings(self) -> list[Rounding]:
        return [self.down_rounding, self.up_rounding]

    def full_weights(self) -> list[torch.Tensor]:
        return [self.down, self.up]

    def dense_weight(self) -> torch.Tensor:
        return self.up_rounding.weight(self.up) @ self.down_rounding.weight(self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        y = self.up_rounding.product(
            self.down_rounding.product(x, self.down, None, [self.down]), self.up, None, [self.up]
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @torch.no_grad()
    def fixed(self) -> nn.Module:
        layer = IntegerLowRankLinear(self, self.up_rounding.grid)
        self.down_rounding.fix(self.down, layer.down)
        self.up_rounding.fix(self.up, layer.up)
        if layer.bias is not None:
            layer.bias.copy_(self.bias)  # type: ignore[arg-type]
        return layer


class FakeQuantizedLowRankEmbedding(FakeQuantizedEmbedding, LowRankEmbedding):
    """Replaces a LowRankEmbedding: the table (V, E) is on a grid, the projection (E, H) is not."""

    def __init__(self, table: LowRankEmbedding, grid: Grid) -> None:
        LowRankEmbedding.__init__(self, table, table.weight.shape[1])
        new: dict[str, Any] = {"device": table.weight.device, "dtype": table.weight.dtype}
        self.rounding = Rounding(table.weight.shape, replace(grid, activations=None), **new)

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() @ self.projection

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        rows = self.rows(input)
        return scaled((rows @ self.projection).to(rows.dtype), self.scale)

    @torch.no_grad()
    def fixed(self) -> nn.Module:
        layer = self.rounding.fix(self.weight, IntegerLowRankEmbedding(self, self.rounding.grid))
        layer.projection.copy_(self.projection)
        return layer


class FakeQuantizedLowRankOutput(Rounded, LowRankOutput):
    """Replaces a LowRankOutput: the table (V, E) is on a grid, and what it is multiplied with; the projection (E, H) is not."""

    def __init__(self, linear: LowRankOutput, grid: Grid) -> None:
        LowRankOutput.__init__(self, linear, linear.weight.shape[1], linear.std)
        new: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.rounding = Rounding(linear.weight.shape, grid, **new)

    def full_weights(self) -> list[torch.Tensor]:
        return [self.weight]

    def dense_weight(self) -> torch.Tensor:
        return self.rounding.weight(self.weight) @ self.projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        hidden = functional.linear(x, self.projection)
        return self.rounding.product(hidden, self.weight, self.bias, [self.weight])

    @torch.no_grad()
    def fixed(self) -> nn.Module:
        layer = self.rounding.fix(self.weight, IntegerLowRankOutput(self, self.rounding.grid))
        layer.projection.copy_(self.projection)
        if layer.bias is not None:
            layer.bias.copy_(self.bias)
        return layer


class FakeQuantizedSparseLinear(Rounded, SparseLinear):
    """Replaces a SparseLinear: its non-zero weights are on a grid, on which zero is a number, so that zeros stay zero."""

    def __init__(self, linear: SparseLinear, grid: Grid) -> None:
        SparseLinear.__init__(self, linear, linear.nonzeros)
        new: dict[str, Any] = {"device": self.values.device, "dtype": self.values.dtype}
        self.rounding = Rounding((self.out_features, self.in_features), grid, **new)

    def full_weights(self) -> list[torch.Tensor]:
        return [SparseLinear.dense_weight(self)]

    def dense_weight(self) -> torch.Tensor:
        return self.rounding.weight(super().dense_weight())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        weight = SparseLinear.dense_weight(self)
        return self.rounding.product(x, weight, self.bias, [self.values, *self._buffers.values()])

    @torch.no_grad()
    def fixed(self) -> nn.Module:
        layer = IntegerSparseLinear(self, self.rounding.grid)
        for name in ("mask", "columns", "counts"):
            if name in self._buffers:
                layer.get_buffer(name).copy_(self.get_buffer(name))
        if layer.bias is not None:
            layer.bias.copy_(self.bias)  # type: ignore[arg-type]
        return self.rounding.fix(SparseLinear.dense_weight(self), layer)
