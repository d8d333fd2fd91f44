"""A linear that stores only its non-zero weights and their positions, and the base class of layers that convert to it.

Inference uses a cached dense weight. Positions are stored either as one bit for each weight, or as one column number for each
non-zero weight and one count for each row: whichever is smaller for the shape and the number of non-zeros.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.compat.transformers import NeverDrawn
from hf_freeze.layers.bits import pack, packed_size, unpack
from hf_freeze.layers.derived import (
    DerivedLinear,
    DerivedWeight,
    dense_class,
    first_float_tensor,
    is_compiled,
    is_traced,
)


# NeverDrawn: to draw its weight, native models would read the property `weight` before the mask is set.
class SparseLinear(NeverDrawn, DerivedLinear):
    """`values` (non-zeros,), trainable, row by row of the dense weight (O, I); positions in `mask`, or `columns` and `counts`.

    `columns` holds the bytes of 16- or 32-bit integers: DistributedDataParallel sends all buffers, and neither NCCL nor gloo
    can send 16-bit integers.

    Raises ValueError for `nonzeros` outside 0..O I.
    """

    def __init__(self, linear: Any, nonzeros: int) -> None:
        super().__init__(linear)
        entries = self.in_features * self.out_features
        if not 0 <= nonzeros <= entries:
            raise ValueError(
                f"nonzeros={nonzeros}: must be in 0..{entries} for {self.in_features} inputs, {self.out_features} outputs"
            )
        self.nonzeros = nonzeros
        reference = first_float_tensor(linear)  # the weight, which a SparseLinear would have to compute
        device = reference.device
        self.values = nn.Parameter(torch.zeros(nonzeros, device=device, dtype=reference.dtype))
        self._column = torch.int16 if self.in_features <= 1 << 15 else torch.int32
        as_columns = nonzeros * self._column.itemsize + self.out_features * 4
        if as_columns < packed_size(entries):
            self.register_buffer(
                "columns", torch.zeros(nonzeros * self._column.itemsize, dtype=torch.uint8, device=device)
            )
            self.register_buffer("counts", torch.zeros(self.out_features, dtype=torch.int32, device=device))
        else:
            self.register_buffer("mask", torch.zeros(packed_size(entries), dtype=torch.uint8, device=device))

    @classmethod
    @torch.no_grad()
    def of(cls, linear: Any, kept: torch.Tensor) -> "SparseLinear":
        """From an nn.Linear or Conv1D (or a subclass) and the entries to keep: bool, in the shape of its weight."""
        weight = linear.weight.detach()
        if dense_class(linear) is Conv1D:
            weight, kept = weight.T, kept.T
        sparse = cls(linear, int(kept.sum()))
        sparse.values.copy_(weight[kept])
        if sparse.bias is not None:
            sparse.bias.copy_(linear.bias)
        if hasattr(sparse, "columns"):
            sparse.get_buffer("columns").copy_(kept.nonzero()[:, 1].to(sparse._column).view(torch.uint8))
            sparse.get_buffer("counts").copy_(kept.sum(1))
        else:
            sparse.get_buffer("mask").copy_(pack(kept))
        return sparse.train(linear.training)

    def positions(self) -> torch.Tensor:
        """int64 (non-zeros,): the index of each value in the flattened dense weight."""
        return self.cached("positions", self._positions, self._buffers.values())

    def _positions(self) -> torch.Tensor:
        if not hasattr(self, "columns"):
            return unpack(self.get_buffer("mask"), self.in_features * self.out_features).nonzero()[:, 0]
        rows = torch.arange(self.out_features, device=self.get_buffer("counts").device).repeat_interleave(
            self.get_buffer("counts")
        )
        return rows * self.in_features + self.get_buffer("columns").view(self._column)

    def dense_weight(self) -> torch.Tensor:
        if self.values.is_meta:  # the positions are unknown without the values of the buffers
            return self.values.new_empty(self.out_features, self.in_features).requires_grad_(self.values.requires_grad)
        if is_traced() or is_compiled():
            return self.scattered(self.values)
        flat = self.values.new_zeros(self.out_features * self.in_features)
        return flat.index_put((self.positions(),), self.values).view(self.out_features, self.in_features)

    def scattered(self, values: torch.Tensor) -> torch.Tensor:
        """(non-zeros,) -> (O, I) by steps whose sizes do not depend on values, as a graph needs them."""
        size = self.out_features * self.in_features
        if not hasattr(self, "columns"):
            kept = unpack(self.get_buffer("mask"), size)
            numbers = (kept.cumsum(0) - 1).clamp(min=0)
            flat = torch.where(kept, values[numbers], 0) if self.nonzeros else values.new_zeros(size)
        else:
            counts = self.get_buffer("counts").long()
            starts = counts.cumsum(0) - counts
            rows = starts.new_zeros(self.nonzeros + 1).index_add(0, starts, torch.ones_like(starts))[:-1].cumsum(0) - 1
            columns = self.get_buffer("columns")
            columns = columns if columns.dtype == self._column else columns.view(self._column)
            positions = rows * self.in_features + columns
            flat = values.new_zeros(size).scatter(0, positions, values)
        return flat.view(self.out_features, self.in_features)

    def store_numbers(self) -> None:
        """Give the bytes of columns the type of the numbers that they are, before tracing: graphs have no views of bytes."""
        if hasattr(self, "columns"):
            self.columns = self.get_buffer("columns").view(self._column)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nonzeros={self.nonzeros}"


class Sparsifiable(DerivedWeight):
    """A mixin for nn.Linear or Conv1D: `weight` is dense, and entries outside `kept_entries()` act as zero."""

    weight: nn.Parameter

    def kept_entries(self) -> torch.Tensor:
        """bool, in the shape of `weight`: False where the effective weight is zero."""
        raise NotImplementedError

    def masked_weight(self) -> torch.Tensor:
        """`weight` with zeros outside `kept_entries()`."""
        # Multiplication by the mask would turn an infinite weight into NaN.
        return torch.where(self.kept_entries(), self.weight, 0)

    def dense_weight(self) -> torch.Tensor:
        weight = self.masked_weight()
        return weight.T if isinstance(self, Conv1D) else weight

    def sparse(self) -> SparseLinear:
        """A SparseLinear that computes the same function as this layer in eval mode."""
        return SparseLinear.of(self, self.kept_entries())
