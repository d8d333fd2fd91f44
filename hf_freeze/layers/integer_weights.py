"""Weights on a symmetric grid of integers (`layers.grids`), stored as integers and steps: the result of training for few bits,
or of rounding a trained weight. They are buffers and are not trained.

If inputs are rounded too, the product is one of integers (`grids.product_on_grid`). Gradients go straight through the rounding of
the inputs. If not, the product is that of the dense weight, as in `layers.quantized`, whose buffers and rules these layers share.

Shapes: O outputs or rows of a table, I inputs or columns, G steps of a row, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.layers.derived import autocast_dtype, is_compiled, is_traced, taken
from hf_freeze.layers.grids import (
    GROUP,
    LEVELS,
    Grid,
    integer_product,
    pack,
    packed_columns,
    product_on_grid,
    rounded,
    token_steps,
    unpack,
)
from hf_freeze.layers.quantized import Quantized, QuantizedEmbedding, QuantizedLinear, product
from hf_freeze.layers.quantized_factors import (
    QuantizedFactor,
    QuantizedLowRankEmbedding,
    QuantizedLowRankLinear,
    QuantizedLowRankOutput,
)
from hf_freeze.layers.sparse import SparseLinear


class IntegerWeight(Quantized):
    """`packed` is int8 (O, I), or uint8 (O, ⌈I / 2⌉) of 4 bits, `scales` the bytes of the steps (O, G). `input_step`, if inputs
    have one step for all tokens, holds the bytes of that fp32 number."""

    grid: Grid
    input_step: torch.Tensor

    def make_buffers(self, rows: int, columns: int, scheme: Grid, **new: Any) -> None:
        self.grid, self.scheme, self.shape = scheme, scheme.weights, (rows, columns)
        if scheme.is_static:
            self.register_buffer("input_step", torch.zeros(4, dtype=torch.uint8, device=new["device"]))
        dtype = torch.int8 if scheme.weights == "int8" else torch.uint8
        self.register_stored(self.packed_shape(), dtype, rows * scheme.groups(columns), **new)

    def packed_shape(self) -> tuple[int, ...]:
        """The shape of `packed`."""
        return self.shape[0], packed_columns(self.shape[1], self.scheme)

    # -- values ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        if not weight.isfinite().all():
            raise ValueError(
                f"cannot quantise a weight of shape {tuple(weight.shape)}: it has values that are not finite"
            )
        weight = weight.detach().to("cpu", torch.float32)
        steps = self.grid.steps(weight)
        numbers = rounded(weight, self.grid.spread(steps, weight.shape[1]), self.grid.levels, clips=False)
        self.set_grid(numbers, steps)

    @torch.no_grad()
    def set_grid(self, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Store the numbers (O, I) and steps (O, G)."""
        self.packed.copy_(pack(numbers, self.scheme))
        self.scales.copy_(steps.float().contiguous().flatten().view(torch.uint8))

    def set_input_step(self, step: float) -> None:
        """Store the step of inputs."""
        self.input_step.copy_(torch.tensor([step]).view(torch.uint8))

    def steps(self) -> torch.Tensor:
        """(O, G), fp32"""
        return self._numbers().view(self.shape[0], -1)

    def integers(self) -> torch.Tensor:
        """int8 (O, I)"""
        return unpack(self.packed, self.shape[1])

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        if self.packed.is_meta:
            return self.packed.new_empty(self.shape, dtype=dtype)
        return (self.integers().float() * self.grid.spread(self.steps(), self.shape[1])).to(dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.packed.is_meta:
            return self.packed.new_empty(len(ids), self.shape[1], dtype=self.like.dtype)
        numbers = unpack(self.packed[ids], self.shape[1])
        return (numbers.float() * self.grid.spread(self.steps()[ids], self.shape[1])).to(self.like.dtype)

    # -- parts -----------------------------------------------------------------------------------------------------------

    @property
    def has_whole_rows(self) -> bool:
        return True

    @property
    def selectable(self) -> bool:
        """Whether inputs and outputs can be removed: not if a step is for several inputs but not for all."""
        return self.grid.granularity == "channel"

    def set_columns(self, kept: Sequence[int]) -> None:
        numbers = taken(self.integers(), 1, kept)
        self._buffers = self._buffers | {"packed": pack(numbers, self.scheme)}
        self.shape = (self.shape[0], len(kept))

    def store_numbers(self) -> None:
        super().store_numbers()
        if self.grid.is_static and self.input_step.dtype == torch.uint8:
            self.input_step = self.input_step.view(torch.float32)

    # -- products --------------------------------------------------------------------------------------------------------

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.grid.activations is None or x.is_meta:
            in_pairs = self.packed.dtype == torch.uint8 and self.packed.ndim == 2
            apart = in_pairs and is_compiled() and not torch.is_grad_enabled()
            return self._product_of_halves(x, bias) if apart else product(x, bias, self)
        if is_traced():
            return self._traced_product(x, bias)
        y = _IntegerProduct.apply(x, None if bias is None else bias.float(), self)
        return y.to(autocast_dtype(x.device.type) or x.dtype)  # type: ignore[union-attr]

    def input_steps(self, x: torch.Tensor) -> torch.Tensor:
        """The steps of inputs (..., I): (..., 1), or () for all tokens."""
        if not self.grid.is_static:
            return token_steps(x)
        step = self.input_step if self.input_step.dtype == torch.float32 else self.input_step.view(torch.float32)
        return step[0]

    def held_integers(self) -> torch.Tensor:
        """As `integers`, unpacked once."""
        return self.packed if self.scheme == "int8" else self.cached("integers", self.integers, [self.packed])

    def _product_of_halves(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `product`, where a compiled loop would take longer to put the two numbers of each byte side by side than to multiply
        by them: the first of each pair is multiplied, then the second."""
        dtype = autocast_dtype(x.device.type) or x.dtype
        x, steps = x.to(dtype), self.steps()
        if steps.shape[1] > 1:
            steps = steps.repeat_interleave(GROUP // 2, 1)[:, : self.packed.shape[1]]
        first, second = (((half.float() - 8) * steps).to(dtype) for half in (self.packed >> 4, self.packed & 15))
        y = functional.linear(x[..., ::2], first, None if bias is None else bias.to(dtype))
        return y + functional.linear(x[..., 1::2], second[:, : self.shape[1] // 2])

    def _traced_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """In operations that engines have."""
        steps = self.steps()
        if steps.shape[1] > 1:  # by one product; engines start them fast, but not as many as groups
            x_steps = self.input_steps(x)
            inputs = rounded_in_graph(x, x_steps)
            y = functional.linear(inputs, self.dequantized(torch.float32)) * x_steps
            return y if bias is None else y + bias
        x_steps = self.input_steps(x)
        inputs = rounded_in_graph(x, x_steps).reshape(-1, self.shape[1]).to(torch.int8)
        sums = integer_product(inputs, self.integers()).float().view(*x.shape[:-1], self.shape[0])
        y = sums * (x_steps * steps[:, 0])
        return y if bias is None else y + bias


def rounded_in_graph(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """As `grids.rounded` of inputs, by operations that engines have."""
    return (x / torch.where(steps > 0, steps, 1.0)).round().clamp(-LEVELS, LEVELS)


class _IntegerProduct(torch.autograd.Function):
    """x Wᵀ + b in integers, fp32. The gradient to x is that of the dense weight, and zero where x lies outside a fixed range."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: IntegerWeight) -> torch.Tensor:
        steps = weight.input_steps(x)
        ctx.weight = weight
        ctx.save_for_backward(x.abs() < LEVELS * steps if weight.grid.is_static else None)
        return product_on_grid(x, steps, weight.held_integers(), weight.steps(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,), (inside,) = gradients, ctx.saved_tensors
        grad_x = grad_y @ ctx.weight.dequantized(grad_y.dtype) if ctx.needs_input_grad[0] else None
        if grad_x is not None and inside is not None:
            grad_x = torch.where(inside, grad_x, 0)
        grad_bias = grad_y.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None


class IntegerLinear(IntegerWeight, QuantizedLinear):
    """Replaces a linear; the bias is not quantised."""


class _Table(IntegerWeight):
    """A table has no inputs to round."""

    def make_buffers(self, rows: int, columns: int, scheme: Grid, **new: Any) -> None:
        super().make_buffers(rows, columns, replace(scheme, activations=None), **new)


class IntegerEmbedding(_Table, QuantizedEmbedding):
    """Replaces a table. A look-up reads the rows that it needs."""


class IntegerFactor(IntegerWeight, QuantizedFactor):
    """A factor of a weight (O, I)."""


class IntegerLowRankLinear(QuantizedLowRankLinear):
    """Replaces a LowRankLinear: W = up · down; if inputs are rounded, so is what lies between the two."""

    factor_class = IntegerFactor

    @property
    def selectable(self) -> bool:
        return self.up.selectable  # type: ignore[attr-defined]


class IntegerLowRankEmbedding(_Table, QuantizedLowRankEmbedding):
    """Replaces a LowRankEmbedding. The table (V, E) is quantised, the projection (E, H) is not."""

    take_weight = QuantizedLowRankEmbedding.take_weight


class IntegerLowRankOutput(IntegerWeight, QuantizedLowRankOutput):
    """Replaces a LowRankOutput: the table (V, E) is quantised, the projection (E, H) is not."""

    take_weight = QuantizedLowRankOutput.take_weight


class IntegerSparseLinear(IntegerWeight, SparseLinear):
    """Replaces a SparseLinear: its non-zero weights as integers (`packed`: of all rows in one), and their positions."""

    def __init__(self, linear: SparseLinear, grid: Grid) -> None:
        SparseLinear.__init__(self, linear, linear.nonzeros)
        new: dict[str, Any] = {"device": self.values.device, "dtype": self.values.dtype}
        del self.values
        self.make_buffers(self.out_features, self.in_features, grid, **new)

    def packed_shape(self) -> tuple[int, ...]:
        return (packed_columns(self.nonzeros, self.scheme),)

    @property
    def weight_count(self) -> int:
        return self.nonzeros

    @property
    def selectable(self) -> bool:
        return False

    @torch.no_grad()
    def set_grid(self, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        kept = numbers.flatten()[self.positions()]
        self.packed.copy_(pack(kept[None], self.scheme)[0])
        self.scales.copy_(steps.float().contiguous().flatten().view(torch.uint8))

    def integers(self) -> torch.Tensor:
        return self.cached("integers", self._scattered_integers)

    def _scattered_integers(self) -> torch.Tensor:
        kept = unpack(self.packed[None], self.nonzeros)[0]
        if is_traced() or is_compiled():
            return self.scattered(kept.float()).to(torch.int8)
        return (
            kept.new_zeros(self.in_features * self.out_features).index_put((self.positions(),), kept).view(self.shape)
        )

    held_integers = integers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.multiply(x, self.bias)
