"""Quantised factors: of linears of low rank, tensor trains and Tucker decompositions, and of factorised tables and outputs; and
quantised non-zero weights.

Each factor is a holder (`layers.quantized`) of a matrix whose rows have steps of their own. Factors are `balanced` first: where
the columns of one differ in size, another one takes the differences up, whose rows belong to these columns. A core (r, n, m, r')
of a tensor train is the matrix (r, n · m · r'), as it lies in memory, so that steps are few even for small modes.

The errors of factors add up. Of three cores of a decomposed random matrix, 512 x 2048 at rank 16, 8 bits lose 0.016 of the norm
of the weight, 4 bits 0.29 and 4 bits in groups 0.19.

A product with a linear of low rank is two products. If inputs are rounded, so is what lies between the two. Those of tensors are
computed with the dequantised factors, by the same plans and caches as before. A product of integers there is not: each
contraction would have to be rounded again.

Shapes: I inputs, O outputs, R rank; V rows of the vocabulary, E rank of the table, H hidden size.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization

from hf_freeze.layers.derived import Computed, DerivedLinear, first_float_tensor, is_compiled, is_traced, scaled
from hf_freeze.layers.factorized import TensorLinear
from hf_freeze.layers.factorized_embedding import Factors, LowRankEmbedding, LowRankOutput
from hf_freeze.layers.grids import Grid, packed_columns, unpack
from hf_freeze.layers.low_rank import LowRankLinear
from hf_freeze.layers.quantized import Quantized, QuantizedEmbedding, QuantizedLinear
from hf_freeze.layers.schemes import Scheme
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.layers.tensor_train import TensorTrainLinear
from hf_freeze.layers.tucker import TuckerLinear

AnyGrid = Grid | Scheme | str


class QuantizedFactor(Quantized):
    """A factor of a weight, as a matrix (O, I), whose rows are the first `axes` axes of `part`. It is no nn.Linear: PEFT adapts
    the whole weight."""

    is_factor = True

    def __init__(self, part: torch.Tensor, grid: AnyGrid, axes: int = 1) -> None:
        super().__init__()
        self.part_shape = part.shape
        rows = part.flatten(0, axes - 1).flatten(1)
        self.make_buffers(len(rows), rows.shape[1], grid, rows)

    def part(self) -> torch.Tensor:
        """The factor in its own shape."""
        return self.dense_weight().view(self.part_shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.multiply(x, None)

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, scheme={self.grid.weights!r}"


class _OfFactors(DerivedLinear):
    """A linear whose weight is a product of the holders `part_names`."""

    part_names: Sequence[str]
    is_chain = False

    def holders(self) -> list[QuantizedFactor]:
        """The factors in order, as matrices."""
        return [getattr(self, name) for name in self.part_names]

    def set_parts(self, values: Iterable[torch.Tensor]) -> None:
        """Quantise the factors. Raises ValueError for values that are not finite."""
        for holder, value in zip(self.holders(), values, strict=True):
            holder.fill(value.flatten(1))


class QuantizedLowRankLinear(_OfFactors):
    """Replaces a LowRankLinear: W = up · down with both factors quantised. The bias is not."""

    part_names = LowRankLinear.part_names
    is_chain = True
    down: QuantizedFactor
    up: QuantizedFactor

    def __init__(self, linear: LowRankLinear, grid: AnyGrid) -> None:
        super().__init__(linear)
        self.down, self.up = QuantizedFactor(linear.down, grid), QuantizedFactor(linear.up, grid)

    def dense_weight(self) -> torch.Tensor:
        return self.up.dense_weight() @ self.down.dense_weight()

    @property
    def selectable(self) -> bool:
        return self.up.selectable

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        (new.up.set_rows if outputs else new.down.set_columns)(kept)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        y = self.up(self.down(x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.up.shape[1]}, scheme={self.up.grid.weights!r}"


def check_inputs(grid: Any) -> None:
    """Raise ValueError if a grid for factors of a tensor rounds the inputs, too."""
    if getattr(grid, "activations", None) is not None:
        raise ValueError(
            f"activations={grid.activations!r}: the product with a tensor train or Tucker decomposition is a chain of "
            "contractions, not one of integers; give activations=None, or leave the linear out by components= or layers="
        )


class QuantizedTensor(_OfFactors, TensorLinear):
    """A mixin: the factors are holders, and are not trained. The bias is not quantised."""

    def __init__(self, linear: TensorLinear, grid: AnyGrid) -> None:
        check_inputs(grid)
        self.shape_like(linear)
        for name in self.part_names:
            self.add_module(name, QuantizedFactor(self._parameters.pop(name), grid))  # type: ignore[arg-type]

    def initialize_parameters(self) -> None:
        """Nothing: there are no parameters to draw, and the bias is zero."""

    def used_parts(self) -> list[torch.Tensor]:
        return [holder.part() for holder in self.holders()]

    def _sources(self) -> Iterable[Any]:
        return (*super()._sources(), *(buffer for holder in self.holders() for buffer in holder._buffers.values()))


class QuantizedTensorTrainLinear(QuantizedTensor, TensorTrainLinear):
    """Replaces a TensorTrainLinear: `core_0` ... are holders."""


class QuantizedTuckerLinear(QuantizedTensor, TuckerLinear):
    """Replaces a TuckerLinear: `core`, `factor_0` ... are holders."""


class _Projected(Quantized):
    """A mixin: the holder is that of a table (V, E). The projection (E, H) of `factors` is not quantised."""

    take_weight = Computed.take_weight
    selectable = False  # type: ignore[assignment]

    def add_projection(self, factors: Factors) -> None:
        self.projection = nn.Parameter(torch.empty_like(factors.projection))
        initialization.normal_(self.projection, std=self.projection.shape[0] ** -0.5)

    def dense_weight(self) -> torch.Tensor:
        return super().dense_weight() @ self.projection


class QuantizedLowRankEmbedding(_Projected, QuantizedEmbedding):
    """Replaces a LowRankEmbedding. The table (V, E) is quantised, the projection (E, H) is not."""

    def __init__(self, table: LowRankEmbedding, grid: AnyGrid) -> None:
        super().__init__(table, grid)
        self.scale = table.scale
        self.add_projection(table)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., H)"""
        rows = self.rows(input.flatten()).view(*input.shape, self.embedding_dim)
        return scaled((rows @ self.projection).to(rows.dtype), self.scale)


class QuantizedLowRankOutput(_Projected, QuantizedLinear):
    """Replaces a LowRankOutput: hidden states are projected to E and multiplied with the quantised table (V, E)."""

    def __init__(self, linear: LowRankOutput, grid: AnyGrid) -> None:
        super().__init__(linear.table(), grid)
        self.in_features = linear.in_features
        self.add_projection(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., H) -> (..., V)"""
        return super().forward(functional.linear(x, self.projection))


class QuantizedSparseLinear(Quantized, SparseLinear):
    """Replaces a SparseLinear: its non-zero weights on a grid of integers (`packed`: of all rows in one), and their positions."""

    take_weight = Computed.take_weight
    selectable = False  # type: ignore[assignment]

    def __init__(self, linear: SparseLinear, grid: AnyGrid) -> None:
        if not isinstance(grid, Grid):
            raise ValueError("bitsandbytes would store the zeros of a pruned weight; give weights= instead of scheme=")
        SparseLinear.__init__(self, linear, linear.nonzeros)
        del self.values
        self.make_buffers(self.out_features, self.in_features, grid, first_float_tensor(linear))

    def draw(self) -> None:
        """Nothing: the positions, of which a mask of zeros has none, come with the values."""

    def packed_shape(self) -> tuple[int, ...]:
        return (packed_columns(self.nonzeros, self.grid.weights),)

    @property
    def weight_count(self) -> int:
        return self.nonzeros

    def set_grid(self, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        super().set_grid(numbers.flatten()[self.positions()][None], steps)

    def integers(self) -> torch.Tensor:
        return self.cached("integers", self._scattered_integers)

    def _scattered_integers(self) -> torch.Tensor:
        kept = unpack(self.packed[None], self.nonzeros)[0]
        if is_traced() or is_compiled():
            return self.scattered(kept.float()).to(torch.int8)
        flat = kept.new_zeros(self.in_features * self.out_features)
        return flat.index_put((self.positions(),), kept).view(self.shape)

    held_integers = integers

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        if self.packed.is_meta:
            return self.packed.new_empty(self.shape, dtype=dtype)
        return self.grid.read(self.integers(), self.steps(), self.shape, dtype)

    def store_numbers(self) -> None:
        SparseLinear.store_numbers(self)
        super().store_numbers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.multiply(x, self.bias)
