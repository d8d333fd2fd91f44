"""A weight on a grid, stored as packed numbers and steps: the holder of its buffers, products with it, and the linear and the
table that are one. It is not trained; `layers.fake_quantized` trains for it.

Grids are those of `layers.grids` and `layers.schemes`. If a grid rounds inputs too, the product is one of integers
(`grids.product_on_grid`), and gradients go straight through the rounding of the inputs. If not, it is that of the dense weight,
which is not cached: each forward and each backward computes it.

Shapes: O outputs or rows of a table, I inputs or columns, G steps of a row, T tokens.
"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.architectures.roles import table_scale
from hf_freeze.compat.transformers import NeverDrawn
from hf_freeze.layers import grids
from hf_freeze.layers.derived import (
    Computed,
    DerivedLinear,
    autocast_dtype,
    first_float_tensor,
    is_compiled,
    is_traced,
    scaled,
    taken,
)
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.schemes import Scheme

STORED = ("packed", "scales")


class Quantized(NeverDrawn, Computed):
    """The holder of a weight (O, I) on `grid`, in two buffers or three.

    `packed` has the numbers: int8 (O, I), or two in a byte, uint8 (O, ⌈I / 2⌉), or of bitsandbytes (⌈O I / 2⌉,). `scales` has the
    bytes of the steps, which are fp32 numbers: no cast of the model rounds them. So has `input_step`, if inputs have one step for
    all tokens. `like`, an empty buffer that is not stored, follows the dtype and device of the model.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    input_step: torch.Tensor
    like: torch.Tensor
    grid: Any  # Grid | Scheme
    shape: tuple[int, int]
    is_factor = False  # of a weight
    is_chain = False  # whether inputs pass one holder after another, each of which can be rounded for what it sees

    def make_buffers(self, rows: int, columns: int, grid: Grid | Scheme | str, like: torch.Tensor) -> None:
        """Register the buffers, on the device of `like`, with fresh values if weights are drawn at all. A string is the name of a
        scheme."""
        self.grid, self.shape = Scheme(grid) if isinstance(grid, str) else grid, (rows, columns)
        # Where values follow, from a checkpoint or `make_variant`, this draw is disabled, and returns nothing. Memory that is not
        # written before then is none.
        is_drawn = nn.init.normal_(torch.empty(0)) is not None
        new_buffer = torch.zeros if is_drawn else torch.empty
        if self.grid.is_static:
            self.register_buffer("input_step", torch.zeros(4, dtype=torch.uint8, device=like.device))
        steps = 4 * self.grid.step_count(rows, columns)
        self.register_buffer("packed", new_buffer(self.packed_shape(), dtype=self.grid.dtype, device=like.device))
        self.register_buffer("scales", new_buffer(steps, dtype=torch.uint8, device=like.device))
        self.register_buffer("like", like.new_zeros(0), persistent=False)
        if is_drawn and not self.packed.is_meta:
            self.draw()

    def draw(self) -> None:
        """Fill with fresh values, of Glorot's standard deviation."""
        weight = torch.zeros(self.shape)
        nn.init.normal_(weight, std=(2 / sum(self.shape)) ** 0.5)
        self.fill(weight)

    def packed_shape(self) -> tuple[int, ...]:
        """The shape of `packed`."""
        return self.grid.packed_shape(*self.shape)

    def holders(self) -> "list[Quantized]":
        """Itself, as layers of several holders have them."""
        return [self]

    # -- values ----------------------------------------------------------------------------------------------------------

    @property
    def weight_count(self) -> int:
        """The number of weights, O · I."""
        return self.shape[0] * self.shape[1]

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Quantise `weight` (O, I). This happens on the CPU in fp32, so that the result is the same for every device.

        Raises ValueError for values that are not finite.
        """
        grids.check_finite(weight)
        self.set_grid(*self.grid.quantized(weight))

    @torch.no_grad()
    def set_grid(self, numbers: torch.Tensor, steps: torch.Tensor) -> None:
        """Store the numbers (O, I) and steps (O, G)."""
        self.packed.copy_(self.grid.packed(numbers).view(self.packed.shape))
        self.scales.copy_(steps.float().contiguous().flatten().view(torch.uint8))

    def set_input_step(self, step: float) -> None:
        """Store the step of inputs."""
        self.input_step.copy_(torch.tensor([step]).view(torch.uint8))

    def store_numbers(self) -> None:
        """Give the bytes of the steps the type of those numbers, before the layer is traced: graphs have no views of bytes."""
        self.scales = _as_numbers(self.scales)
        if self.grid.is_static:
            self.input_step = _as_numbers(self.input_step)

    def steps(self) -> torch.Tensor:
        """(O, G), fp32, where rows are whole"""
        return _as_numbers(self.scales).view(self.shape[0], -1)

    def integers(self) -> torch.Tensor:
        """int8 (O, I)"""
        return grids.unpack(self.packed, self.shape[1])

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(O, I)"""
        return self._read(self.packed, _as_numbers(self.scales), self.shape, dtype)

    def _read(
        self, packed: torch.Tensor, steps: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        if self.packed.is_meta or not (is_traced() or packed.numel()):
            return self.packed.new_empty(shape, dtype=dtype)
        return self.grid.read(packed, steps, shape, dtype)

    def dense_weight(self) -> torch.Tensor:
        return self.dequantized(self.like.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(T,) -> (T, I)"""
        if self.packed.is_meta or not self.has_whole_rows:
            return self.dequantized(self.like.dtype)[ids]
        # No view where none is needed: exports look for the look-up of the stored bytes.
        packed = self.packed if self.packed.ndim == 2 else self.packed.view(self.shape[0], -1)
        return self._read(packed[ids], self.steps()[ids], (len(ids), self.shape[1]), self.like.dtype)

    def take_weight(self, weight: torch.Tensor) -> None:
        """Quantise `weight` in place of the current one; PEFT calls it to merge an adapter. Warns, because this rounds."""
        warnings.warn(
            f"merging an adapter into {self.grid.weights} weights rounds it; to keep it exact, merge() the variant first and "
            "load the adapter on the merged model",
            stacklevel=4,
        )
        self.fill(weight)

    # -- rows and columns ------------------------------------------------------------------------------------------------

    @property
    def selectable(self) -> bool:
        """Whether inputs and outputs can be removed."""
        return self.grid.selectable

    @property
    def has_whole_rows(self) -> bool:
        """Whether no step is for weights of two rows, so that rows can be removed."""
        return self.grid.has_whole_rows(self.shape[1])

    def rows_of_buffers(self, kept: Sequence[int]) -> dict[str, torch.Tensor]:
        """The buffers of the rows `kept` alone; the rows must be whole."""
        rows = {name: taken(getattr(self, name).view(self.shape[0], -1), 0, kept) for name in STORED}
        return {name: part if getattr(self, name).ndim == 2 else part.flatten() for name, part in rows.items()}

    def set_rows(self, kept: Sequence[int]) -> None:
        """Reduce the weight to the rows `kept`, which must be whole, in memory of its own."""
        self._buffers = self._buffers | self.rows_of_buffers(kept)
        self.shape = (len(kept), self.shape[1])

    def set_columns(self, kept: Sequence[int]) -> None:
        """Reduce the weight to the columns `kept`, in memory of its own, where each row has one step."""
        numbers = taken(self.integers(), 1, kept)
        self._buffers = self._buffers | {
            "packed": numbers if self.packed.dtype == torch.int8 else grids.pack(numbers, "int4")
        }
        self.shape = (self.shape[0], len(kept))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.grid.weights!r}"

    # -- products --------------------------------------------------------------------------------------------------------

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + b: (..., I) -> (..., O), in the dtype of autocast or of x."""
        rounds_inputs = self.grid.activations is not None and not x.is_meta
        if is_traced():
            return self._traced_product(x, bias, rounds_inputs)
        dtype = autocast_dtype(x.device.type) or x.dtype
        if rounds_inputs:
            return _Product.apply(x, None if bias is None else bias.float(), self, True).to(dtype)  # type: ignore[union-attr]
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        in_pairs = self.packed.dtype == torch.uint8 and self.packed.ndim == 2
        if in_pairs and is_compiled() and not torch.is_grad_enabled():
            return self._product_of_halves(x, bias)
        return _Product.apply(x, bias, self, False)  # type: ignore[return-value]

    def input_steps(self, x: torch.Tensor) -> torch.Tensor:
        """The steps of inputs (..., I): (..., 1), or () for all tokens."""
        return _as_numbers(self.input_step)[0] if self.grid.is_static else grids.token_steps(x)

    def held_integers(self) -> torch.Tensor:
        """As `integers`, unpacked once."""
        return self.packed if self.grid.dtype == torch.int8 else self.cached("integers", self.integers, [self.packed])

    def _product_of_halves(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of the dense weight, where a compiled loop would take longer to put the two numbers of each byte side by
        side than to multiply by them: the first of each pair is multiplied, then the second."""
        steps = self.steps()
        if steps.shape[1] > 1:
            steps = steps.repeat_interleave(grids.GROUP // 2, 1)[:, : self.packed.shape[1]]
        first, second = (((half.float() - 8) * steps).to(x.dtype) for half in (self.packed >> 4, self.packed & 15))
        y = functional.linear(x[..., ::2], first, bias)
        return y + functional.linear(x[..., 1::2], second[:, : self.shape[1] // 2])

    def _traced_product(self, x: torch.Tensor, bias: torch.Tensor | None, rounds_inputs: bool) -> torch.Tensor:
        """In operations that engines have."""
        if not rounds_inputs:
            return functional.linear(x, self.dequantized(x.dtype), bias)
        steps, x_steps = self.steps(), self.input_steps(x)
        inputs = grids.rounded_in_graph(x, x_steps)
        if steps.shape[1] > 1:  # by one product; engines start them fast, but not as many as groups
            y = functional.linear(inputs, self.dequantized(torch.float32)) * x_steps
        else:
            rows = inputs.reshape(-1, self.shape[1]).to(torch.int8)
            sums = grids.integer_product(rows, self.integers()).float().view(*x.shape[:-1], self.shape[0])
            y = sums * (x_steps * steps[:, 0])
        return y if bias is None else y + bias


def _as_numbers(stored: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers whose bytes are stored, unless they are given as such."""
    return stored.view(torch.float32) if stored.dtype == torch.uint8 else stored


class _Product(torch.autograd.Function):
    """x Wᵀ + b, without storing the dense weight between forward and backward; or in integers, fp32. The gradient to x is that of
    the dense weight, and zero where x lies outside a fixed range."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: Quantized, rounds_inputs: bool
    ) -> torch.Tensor:
        ctx.weight, ctx.is_cut = weight, rounds_inputs and weight.grid.is_static
        if not rounds_inputs:
            return functional.linear(x, weight.dequantized(x.dtype), bias)
        steps = weight.input_steps(x)
        if ctx.is_cut:
            ctx.save_for_backward(x.abs() < grids.LEVELS * steps)
        return grids.product_on_grid(x, steps, weight.held_integers(), weight.steps(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = gradients
        grad_x = grad_y @ ctx.weight.dequantized(grad_y.dtype) if ctx.needs_input_grad[0] else None
        if grad_x is not None and ctx.is_cut:
            grad_x = torch.where(ctx.saved_tensors[0], grad_x, 0)
        grad_bias = grad_y.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None, None


class QuantizedLinear(Quantized, DerivedLinear):
    """Replaces `linear`; the bias is not quantised."""

    is_chain = True

    def __init__(self, linear: Any, grid: Grid | Scheme | str) -> None:
        DerivedLinear.__init__(self, linear)
        self.make_buffers(self.out_features, self.in_features, grid, first_float_tensor(linear))

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        (new.set_rows if outputs else new.set_columns)(kept)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.multiply(x, self.bias)


class QuantizedEmbedding(Quantized, nn.Embedding):
    """Replaces `table`. A lookup dequantises only the rows it needs; a 4-bit table of bitsandbytes whose row length is not a
    multiple of 64 is dequantised whole."""

    selectable = False  # type: ignore[assignment]
    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False  # nn.Embedding's defaults

    def __init__(self, table: nn.Embedding, grid: Grid | Scheme | str) -> None:
        nn.Module.__init__(self)  # nn.Embedding.__init__ would draw a table
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx
        self.scale = table_scale(table)
        grid = replace(grid, activations=None) if isinstance(grid, Grid) else grid  # a look-up has no inputs to round
        self.make_buffers(self.num_embeddings, self.embedding_dim, grid, first_float_tensor(table))

    def selected(self, kept: Sequence[int], *, outputs: bool = True) -> Any:
        """A copy with only the rows `kept`. It shares no row with this table."""
        new = copy.copy(self)
        new.set_rows(kept)
        new.num_embeddings = len(kept)
        return new

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., I)"""
        return scaled(self.rows(input.flatten()).view(*input.shape, self.embedding_dim), self.scale)
