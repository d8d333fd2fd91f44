"""Layers that train for few bits: weights, and inputs if wanted, are rounded to their grid in the forward, and gradients go
straight through (`layers.grids`). `fixed()` gives the layer that stores integers (`layers.quantized`).

In training, a forward rounds from the step on at which `Rounding.active` is set; before, it computes in full precision. In eval
mode it always computes what the fixed layer will: the same numbers, steps and products, so that `fixed()` changes no bit.

Shapes: O outputs, I inputs, R rank, V rows of the vocabulary, H hidden size, G steps of a row.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_freeze.architectures.roles import table_scale, weight_as_rows
from hf_freeze.layers import quantized_factors
from hf_freeze.layers.derived import Derived, linear_like, scaled, taken
from hf_freeze.layers.factorized import FactorizedLinear, TensorLinear
from hf_freeze.layers.factorized_embedding import LowRankEmbedding, LowRankOutput
from hf_freeze.layers.grids import Grid, rounded
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.quantized import QuantizedEmbedding, QuantizedLinear
from hf_freeze.layers.rounding import Rounding
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.layers.tensor_train import TensorTrainLinear
from hf_freeze.layers.tucker import TuckerLinear


class Rounded(Derived):
    """The base of the layers here: parameters in full precision, and a `Rounding` for each weight."""

    rounding_names: Sequence[str] = ("rounding",)
    fixed_class: ClassVar[Any]  # of the layer that stores integers
    rounding: Rounding

    def add_roundings(self, grid: Grid) -> None:
        """Register them, with fresh steps."""
        for name, weight in zip(self.rounding_names, self.full_weights(), strict=True):
            self.add_module(name, Rounding(weight.shape, grid, device=weight.device, dtype=weight.dtype))

    def roundings(self) -> list[Rounding]:
        """One for each weight."""
        return [getattr(self, name) for name in self.rounding_names]

    def full_weights(self) -> list[torch.Tensor]:
        """(O, I) of each weight, in full precision."""
        return [self.weight]  # type: ignore[list-item]

    def dense_weight(self) -> torch.Tensor:
        (rounding,), (weight,) = self.roundings(), self.full_weights()
        return rounding.weight(weight)

    def start(self) -> None:
        """Set learnt steps from the weights."""
        for rounding, weight in zip(self.roundings(), self.full_weights(), strict=True):
            rounding.start(weight)

    @torch.no_grad()
    def fixed(self) -> Any:
        """The layer that stores integers. Raises ValueError as `Rounding.fix` does."""
        layer = self.fixed_class(self, self.roundings()[0].grid)
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            own = layer._parameters.get(name, layer._buffers.get(name))
            if own is not None and tensor is not None:
                own.copy_(tensor)
        triples = zip(self.roundings(), self.full_weights(), layer.holders(), strict=True)
        for rounding, weight, holder in triples:
            rounding.fix(weight, holder)
        return layer


class _Linear(Rounded):
    """A mixin for nn.Linear and Conv1D."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    fixed_class = QuantizedLinear

    def full_weights(self) -> list[torch.Tensor]:
        return [weight_as_rows(self)]

    @property
    def selectable(self) -> bool:
        """Whether inputs and outputs can be removed."""
        return self.rounding.grid.selectable

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.rounding.product(x, weight_as_rows(self), self.bias, [self.weight])


class FakeQuantizedLinear(_Linear, nn.Linear):
    """An nn.Linear on a grid."""


class FakeQuantizedConv1D(_Linear, Conv1D):
    """A Conv1D on a grid."""


def like(linear: Any, grid: Grid) -> Any:
    """A FakeQuantizedLinear or FakeQuantizedConv1D with fresh values, and the shapes of `linear`."""
    layer: Any = linear_like(linear, classes=(FakeQuantizedLinear, FakeQuantizedConv1D))
    layer.add_roundings(grid)
    return layer


class FakeQuantizedEmbedding(Rounded, nn.Embedding):
    """Replaces `table` (V, H). Its rows are rounded as those of a weight; there are no inputs to round."""

    fixed_class: ClassVar[Any] = QuantizedEmbedding

    def __init__(self, table: nn.Embedding, grid: Grid) -> None:
        rows, columns = table.weight.shape
        nn.Embedding.__init__(self, rows, columns, table.padding_idx, _weight=torch.empty_like(table.weight))
        self.scale = table_scale(table)
        self.add_roundings(grid)

    def add_roundings(self, grid: Grid) -> None:
        super().add_roundings(replace(grid, activations=None))

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


class _Factors(Rounded, FactorizedLinear):
    """A mixin: the factors are rounded in the forward, and trained straight through that."""

    def __init__(self, linear: FactorizedLinear, grid: Grid) -> None:
        self.shape_like(linear)
        self.add_roundings(grid)

    def full_weights(self) -> list[torch.Tensor]:
        return [part.flatten(1) for part in self.parts()]

    def used_parts(self) -> list[torch.Tensor]:
        pairs = zip(self.roundings(), self.parts(), strict=True)
        return [rounding.weight(part.flatten(1)).view_as(part) for rounding, part in pairs]

    def dense_weight(self) -> torch.Tensor:
        return self.product(self.used_parts())


class FakeQuantizedLowRankLinear(_Factors, LowRankLinear):
    """Replaces a LowRankLinear: W = up · down with both factors on a grid; if inputs are rounded, so is what lies between."""

    rounding_names = ("down_rounding", "up_rounding")
    fixed_class = quantized_factors.QuantizedLowRankLinear
    down_rounding: Rounding
    up_rounding: Rounding

    @property
    def selectable(self) -> bool:
        return self.up_rounding.grid.selectable

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        (new.up_rounding if outputs else new.down_rounding).select(kept, outputs=outputs)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        inner = self.down_rounding.product(x, self.down, None, [self.down])
        y = self.up_rounding.product(inner, self.up, None, [self.up])
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Tensor(_Factors, TensorLinear):
    """A mixin for decompositions of a tensor, whose inputs are not rounded."""

    _in_full = False  # in a forward of training before rounding begins

    def add_roundings(self, grid: Grid) -> None:
        quantized_factors.check_inputs(grid)
        super().add_roundings(grid)

    @property
    def rounding_names(self) -> list[str]:  # type: ignore[override]
        return [f"rounding_{k}" for k in range(len(self.part_names))]

    def used_parts(self) -> list[torch.Tensor]:
        return self.parts() if self._in_full else super().used_parts()

    def needs_gradient(self) -> bool:
        """Also in training without gradients, where nothing may be cached: rounding begins at some step."""
        learnt = any(steps.requires_grad for steps in self._learnt_steps())
        return self.training or super().needs_gradient() or (torch.is_grad_enabled() and learnt)

    def _learnt_steps(self) -> Iterable[nn.Parameter]:
        return (steps for rounding in self.roundings() for steps in rounding._parameters.values())  # type: ignore[misc]

    def _sources(self) -> Iterable[Any]:
        return (*super()._sources(), *self._learnt_steps())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        self._in_full = self.training and not self.roundings()[0].active
        try:
            return super().forward(x)
        finally:
            self._in_full = False


class FakeQuantizedTensorTrainLinear(_Tensor, TensorTrainLinear):
    """Replaces a TensorTrainLinear."""

    fixed_class = quantized_factors.QuantizedTensorTrainLinear


class FakeQuantizedTuckerLinear(_Tensor, TuckerLinear):
    """Replaces a TuckerLinear."""

    fixed_class = quantized_factors.QuantizedTuckerLinear


class FakeQuantizedLowRankEmbedding(FakeQuantizedEmbedding, LowRankEmbedding):
    """Replaces a LowRankEmbedding: the table (V, E) is on a grid, the projection (E, H) is not."""

    fixed_class = quantized_factors.QuantizedLowRankEmbedding

    def __init__(self, table: LowRankEmbedding, grid: Grid) -> None:
        LowRankEmbedding.__init__(self, table, table.weight.shape[1])
        self.add_roundings(grid)

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() @ self.projection

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        rows = self.rows(input)
        return scaled((rows @ self.projection).to(rows.dtype), self.scale)


class FakeQuantizedLowRankOutput(Rounded, LowRankOutput):
    """Replaces a LowRankOutput: the table (V, E) is on a grid, and what it is multiplied with; the projection (E, H) is not."""

    fixed_class = quantized_factors.QuantizedLowRankOutput

    def __init__(self, linear: LowRankOutput, grid: Grid) -> None:
        LowRankOutput.__init__(self, linear, linear.weight.shape[1], linear.std)
        self.add_roundings(grid)

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() @ self.projection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        hidden = functional.linear(x, self.projection)
        return self.rounding.product(hidden, self.weight, self.bias, [self.weight])


class FakeQuantizedSparseLinear(Rounded, SparseLinear):
    """Replaces a SparseLinear: its non-zero weights are on a grid, on which zero is a number, so that zeros stay zero."""

    fixed_class = quantized_factors.QuantizedSparseLinear

    def __init__(self, linear: SparseLinear, grid: Grid) -> None:
        SparseLinear.__init__(self, linear, linear.nonzeros)
        new: dict[str, Any] = {"device": self.values.device, "dtype": self.values.dtype}
        self.rounding = Rounding((self.out_features, self.in_features), grid, **new)

    def full_weights(self) -> list[torch.Tensor]:
        return [SparseLinear.dense_weight(self)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        (weight,) = self.full_weights()
        return self.rounding.product(x, weight, self.bias, [self.values, *self._buffers.values()])
