"""A linear that stores its non-zero weights only, and where they are; and what those share that come to it by training.

Inference keeps the dense weight. Where the weights are takes one bit a weight, or one column number a non-zero weight and one
count a row: whichever is smaller, which follows from the shape and the number of non-zeros.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_freeze.compat.transformers import NeverDrawn
from hf_freeze.layers.bits import pack, packed_size, unpack
from hf_freeze.layers.derived import DerivedLinear, DerivedWeight, dense_class


class SparseLinear(
    NeverDrawn, DerivedLinear
):  # to draw its weight, native models would compute it before it has a mask
    """`values` (non-zeros,), row by row of the dense weight (O, I), trainable; `mask` bits, or `columns` and `counts`.

    `columns` are the bytes of 16- or 32-bit integers: neither NCCL nor gloo can send 16-bit integers, and
    DistributedDataParallel sends all buffers.
    """

    def __init__(self, linear: Any, nonzeros: int) -> None:
        super().__init__(linear)
        entries = self.in_features * self.out_features
        if not 0 <= nonzeros <= entries:
            raise ValueError(
                f"nonzeros={nonzeros}: must be in 0..{entries} for {self.in_features} inputs, {self.out_features} outputs"
            )
        self.nonzeros = nonzeros
        device = linear.weight.device
        self.values = nn.Parameter(torch.zeros(nonzeros, device=device, dtype=linear.weight.dtype))
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
        """From an nn.Linear or Conv1D (or a class of it) and the entries to keep, bool in the shape of its weight."""
        weight = linear.weight.detach()
        if dense_class(linear) is Conv1D:
            weight, kept = weight.T, kept.T
        made = cls(linear, int(kept.sum()))
        made.values.copy_(weight[kept])
        if made.bias is not None:
            made.bias.copy_(linear.bias)
        if hasattr(made, "columns"):
            made.get_buffer("columns").copy_(kept.nonzero()[:, 1].to(made._column).view(torch.uint8))
            made.get_buffer("counts").copy_(kept.sum(1))
        else:
            made.get_buffer("mask").copy_(pack(kept))
        return made.train(linear.training)

    def positions(self) -> torch.Tensor:
        """int64 (non-zeros,): place of each value in the dense weight, row by row."""
        return self.keep("positions", self._positions, self._buffers.values())

    def _positions(self) -> torch.Tensor:
        if not hasattr(self, "columns"):
            return unpack(self.get_buffer("mask"), self.in_features * self.out_features).nonzero()[:, 0]
        rows = torch.arange(self.out_features, device=self.values.device).repeat_interleave(self.get_buffer("counts"))
        return rows * self.in_features + self.get_buffer("columns").view(self._column)

    def dense_weight(self) -> torch.Tensor:
        if self.values.is_meta:  # positions depend on values
            return self.values.new_empty(self.out_features, self.in_features).requires_grad_(self.values.requires_grad)
        flat = self.values.new_zeros(self.out_features * self.in_features)
        return flat.index_put((self.positions(),), self.values).view(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nonzeros={self.nonzeros}"


class Sparsifiable(DerivedWeight):
    """A linear with its whole `weight`, of which only `kept_entries()` count. To be combined with nn.Linear or Conv1D."""

    weight: nn.Parameter

    def kept_entries(self) -> torch.Tensor:
        """bool, in the shape of `weight`: False where it is zero."""
        raise NotImplementedError

    def masked_weight(self) -> torch.Tensor:
        """In the shape of `weight`."""
        # A product with the entries would make a weight of infinity NaN.
        return torch.where(self.kept_entries(), self.weight, 0)

    def dense_weight(self) -> torch.Tensor:
        weight = self.masked_weight()
        return weight.T if isinstance(self, Conv1D) else weight

    def sparse(self) -> SparseLinear:
        """The function of eval mode, stored sparse."""
        return SparseLinear.of(self, self.kept_entries())
