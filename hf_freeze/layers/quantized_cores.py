"""Tensor trains with cores on a symmetric grid of integers (`layers.grids`): rounded, and trained for that.

A core (r, n, m, r') is quantised as the matrix (r, n · m · r'), as it lies in memory: a step for each index of its left rank, or
for 64 neighbouring columns of that ("group-64"). So steps are few, even for small modes. Before, cores are `balanced`: where the
slices of a core differ in size, this moves along the train to the next core, whose rows have steps of their own.

The errors of the cores add up. Of three cores of a decomposed random matrix, 512 x 2048 at rank 16, 8 bits lose 0.016 of the norm
of the weight, 4 bits 0.29 and 4 bits in groups 0.19.

Products are those of a tensor train with the dequantised cores: the same plans, and the same caches in inference. A product of
integers, for rounded inputs, there is not: each contraction would have to be rounded again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_freeze.layers.fake_quantized import Rounded
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.integer_weights import IntegerFactor
from hf_freeze.layers.quantized_factors import equal_columns
from hf_freeze.layers.rounding import Rounding
from hf_freeze.layers.tensor_train import TensorTrainLinear


def balanced(cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cores of the same weight, fp32: of all but the last, the slices for each index of the right rank have equal norms."""
    result, core = [], cores[0].float()
    for following in cores[1:]:
        equal, ratios = equal_columns(core.flatten(0, 2))
        result.append(equal.view_as(core))
        core = following.float() * ratios[:, None, None, None]
    return [*result, core]


def _like(layer: Any, linear: TensorTrainLinear) -> None:
    """Make `layer` a tensor train with the shape of `linear` and fresh cores."""
    TensorTrainLinear.__init__(
        layer,
        linear,
        linear.in_modes,
        linear.out_modes,
        linear.ranks,
        std=linear.std,
        execution=linear.execution,
    )


class IntegerTensorTrainLinear(TensorTrainLinear):
    """Replaces a TensorTrainLinear: `core_0` ... hold integers and steps, and are not trained. The bias is not quantised."""

    def __init__(self, linear: TensorTrainLinear, grid: Grid) -> None:
        _like(self, linear)
        for k, core in enumerate(self.cores):
            delattr(self, f"core_{k}")
            matrix = IntegerFactor(len(core), core[0].numel(), grid, device=core.device, dtype=core.dtype)
            self.add_module(f"core_{k}", matrix)

    @property
    def stored(self) -> list[IntegerFactor]:
        """The cores in order, as matrices."""
        return [getattr(self, f"core_{k}") for k in range(len(self.in_modes))]

    def initialize_parameters(self) -> None:
        """Nothing: there are no parameters to draw, and the bias is zero."""

    def set_cores(self, cores: Sequence[torch.Tensor]) -> None:
        """Quantise the cores. Raises ValueError for values that are not finite."""
        for core, value in zip(self.stored, balanced(cores), strict=True):
            core.fill(value.flatten(1))

    def used_cores(self) -> list[torch.Tensor]:
        shapes = zip(self.ranks, self.in_modes, self.out_modes, self.ranks[1:], strict=False)
        return [core.dense_weight().view(shape) for core, shape in zip(self.stored, shapes, strict=True)]

    def _sources(self) -> Iterable[Any]:
        return (*super()._sources(), *(buffer for core in self.stored for buffer in core._buffers.values()))


class FakeQuantizedTensorTrainLinear(Rounded, TensorTrainLinear):
    """Replaces a TensorTrainLinear: its cores are rounded in the forward, and trained straight through that."""

    _in_full = False  # in a forward of training before rounding begins

    def __init__(self, linear: TensorTrainLinear, grid: Grid) -> None:
        _like(self, linear)
        for k, core in enumerate(self.cores):
            self.add_module(
                f"rounding_{k}", Rounding(core.flatten(1).shape, grid, device=core.device, dtype=core.dtype)
            )

    def roundings(self) -> list[Rounding]:
        return [getattr(self, f"rounding_{k}") for k in range(len(self.in_modes))]

    def full_weights(self) -> list[torch.Tensor]:
        return [core.flatten(1) for core in self.cores]

    def set_cores(self, cores: Sequence[torch.Tensor]) -> None:
        """Set the cores, `balanced`, in memory of their own: the old memory may belong to the model that is converted."""
        for core, value in zip(self.cores, balanced(cores), strict=True):
            core.data = value.to(core).contiguous()

    def used_cores(self) -> list[torch.Tensor]:
        if self._in_full:
            return super().used_cores()
        pairs = zip(self.roundings(), self.cores, strict=True)
        return [rounding.weight(core.flatten(1)).view_as(core) for rounding, core in pairs]

    def needs_gradient(self) -> bool:
        """Also in training without gradients, where nothing may be cached: rounding begins at some step."""
        learnt = (steps for rounding in self.roundings() for steps in rounding.parameters())
        return (
            self.training
            or super().needs_gradient()
            or (torch.is_grad_enabled() and any(steps.requires_grad for steps in learnt))
        )

    def _sources(self) -> Iterable[Any]:
        return (*super()._sources(), *(steps for rounding in self.roundings() for steps in rounding.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        self._in_full = self.training and not self.roundings()[0].active
        try:
            return super().forward(x)
        finally:
            self._in_full = False

    @torch.no_grad()
    def fixed(self) -> nn.Module:
        layer = IntegerTensorTrainLinear(self, self.roundings()[0].grid)
        for rounding, core, stored in zip(self.roundings(), self.full_weights(), layer.stored, strict=True):
            rounding.fix(core, stored)
        if layer.bias is not None:
            layer.bias.copy_(self.bias)  # type: ignore[arg-type]
        return layer
