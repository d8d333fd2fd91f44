"""Weights in 8 or 4 bits, quantised and dequantised by bitsandbytes. They are buffers and are not trained.

`int8`: the step of a row is its largest absolute value / 127 (Dettmers et al., 2022, "LLM.int8()",
https://arxiv.org/abs/2208.07339). Unlike in that paper, inputs are not quantised: a row of a batch does not depend on the
others, and no outliers need separate treatment. `nf4` and `fp4`: each block of 64 weights, row by row, has 16 levels scaled by
its largest absolute value. The levels are quantiles of a normal distribution (nf4) or 4-bit floats with 2 exponent bits (fp4)
(Dettmers et al., 2023, "QLoRA", https://arxiv.org/abs/2305.14314, without its quantisation of the scales).

Shapes: O outputs or rows of a table, I inputs or columns, T tokens.
"""

import functools
import importlib
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.architectures.roles import table_scale
from hf_freeze.compat.transformers import NeverDrawn
from hf_freeze.install import how_to_install
from hf_freeze.layers.derived import Computed, DerivedLinear, autocast_dtype, is_traced, scaled, taken

SCHEMES = ("int8", "nf4", "fp4")
BLOCK = 64  # weights that share a scale in the 4-bit schemes
STORED = ("packed", "scales")


def check_installed() -> None:
    """Raise ValueError if bitsandbytes is missing. Does not import it: that takes seconds, and only values need it."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"quantised weights need bitsandbytes, which is missing; {how_to_install('quantize')}")


@functools.cache
def _functions() -> Any:
    check_installed()
    return importlib.import_module("bitsandbytes.functional")


@torch.compiler.assume_constant_result
def _register_operators() -> None:
    """Import bitsandbytes, which registers `torch.ops.bitsandbytes`; torch.compile runs this instead of tracing it."""
    _functions()


class Quantized(NeverDrawn, Computed):
    """A weight (O, I) quantised by `scheme`, in two buffers.

    `packed` is int8 (O, I), or uint8 (⌈O I / 2⌉,) with two weights in a byte. `scales` holds the bytes of fp32 numbers, so that
    casting the model does not round them. `like`, an empty buffer that is not stored, follows the dtype and device of the model.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    like: torch.Tensor
    scheme: str
    shape: tuple[int, int]

    def make_buffers(self, rows: int, columns: int, scheme: Any, **new: Any) -> None:
        """Register the buffers with fresh values, for a model built from a config alone."""
        self.scheme, self.shape = scheme, (rows, columns)
        size = rows * columns
        as_int8 = scheme == "int8"
        shape: Sequence[int] = self.shape if as_int8 else (-(-size // 2),)
        scales = rows if as_int8 else -(-size // BLOCK)
        self.register_stored(shape, torch.int8 if as_int8 else torch.uint8, scales, **new)

    def register_stored(self, shape: Sequence[int], packed_dtype: torch.dtype, scales: int, **new: Any) -> None:
        """Register `packed`, that many fp32 `scales`, and `like`; draw and fill a weight, if weights are
        drawn at all."""
        device = new["device"]
        # Where values follow, from a checkpoint or `make_variant`, this draw is disabled, and returns nothing. Memory that is not
        # written before then is none.
        is_drawn = nn.init.normal_(torch.empty(0)) is not None
        new_buffer = torch.zeros if is_drawn else torch.empty
        self.register_buffer("packed", new_buffer(shape, dtype=packed_dtype, device=device))
        self.register_buffer("scales", new_buffer(4 * scales, dtype=torch.uint8, device=device))
        self.register_buffer("like", torch.zeros(0, **new), persistent=False)
        if is_drawn and not self.packed.is_meta:
            weight = torch.zeros(self.shape)
            nn.init.normal_(weight, std=(2 / sum(self.shape)) ** 0.5)  # Glorot's standard deviation
            self.fill(weight)

    @property
    def weight_count(self) -> int:
        """The number of weights, O · I."""
        return self.shape[0] * self.shape[1]

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Quantise `weight` (O, I). This happens on the CPU in fp32, so that the result is the same for every device.

        Raises ValueError for values that are not finite.
        """
        if not weight.isfinite().all():
            raise ValueError(
                f"cannot quantise a weight of shape {tuple(weight.shape)}: it has values that are not finite"
            )
        scales = self.scales.view(torch.float32)
        for start in range(0, len(weight) if weight.numel() else 0, _rows_at_once(weight.shape[1])):
            rows = slice(start, start + _rows_at_once(weight.shape[1]))
            part = weight[rows].detach().to("cpu", torch.float32).contiguous()
            if self.scheme == "int8":
                packed, steps, _ = _functions().int8_vectorwise_quant(part)
                packed[steps == 0] = 0  # bitsandbytes divides a row of zeros by zero
                self.packed[rows].copy_(packed)
                scales[rows].copy_(steps)
            else:
                packed, state = _functions().quantize_4bit(part, blocksize=BLOCK, quant_type=self.scheme)
                first = start * weight.shape[1]
                self.packed[first // 2 :][: packed.numel()].copy_(packed.flatten())
                scales[first // BLOCK :][: state.absmax.numel()].copy_(state.absmax)

    @property
    def has_whole_rows(self) -> bool:
        """Whether no scale is for weights of two rows, so that rows can be removed."""
        return self.scheme == "int8" or self.shape[1] % BLOCK == 0

    def rows_of_buffers(self, kept: Sequence[int]) -> dict[str, torch.Tensor]:
        """The buffers of the rows `kept` alone; the rows must be whole."""
        rows = {name: taken(getattr(self, name).view(self.shape[0], -1), 0, kept) for name in STORED}
        return {name: part if getattr(self, name).ndim == 2 else part.flatten() for name, part in rows.items()}

    def set_rows(self, kept: Sequence[int]) -> None:
        """Reduce the weight to the rows `kept`, which must be whole, in memory of its own."""
        self._buffers = self._buffers | self.rows_of_buffers(kept)
        self.shape = (len(kept), self.shape[1])

    def set_columns(self, kept: Sequence[int]) -> None:
        """Reduce the weight to the columns `kept`, in memory of its own; of int8, whose scales are those of rows."""
        self._buffers = self._buffers | {"packed": taken(self.packed, 1, kept)}
        self.shape = (self.shape[0], len(kept))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(O, I)"""
        if self.packed.is_meta or not self.packed.numel():
            return self.packed.new_empty(self.shape, dtype=dtype)
        return self._read(self.packed, self._numbers(), dtype).view(-1)[: self.weight_count].view(self.shape)

    def _numbers(self) -> torch.Tensor:
        """The scales, fp32 (rows or blocks,)."""
        return self.scales.view(torch.float32) if self.scales.dtype == torch.uint8 else self.scales

    def store_numbers(self) -> None:
        """Give the bytes of the scales the type of those numbers, before the layer is traced: graphs have no views of bytes."""
        self.scales = self._numbers()

    def _read(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if is_traced():
            return self._traced_read(packed, scales).to(dtype)
        _register_operators()
        operators = (
            torch.ops.bitsandbytes
        )  # unlike the functions that call them, they are in one graph with other operations
        if self.scheme == "int8":
            return operators.int8_vectorwise_dequant(packed, scales).to(dtype)
        shape = (1, 2 * packed.numel())
        return operators.dequantize_4bit(packed.view(-1, 1), scales, BLOCK, self.scheme, shape, dtype)

    def _traced_read(self, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """What bitsandbytes computes, by operations that engines have. The first of two weights is in the higher four bits."""
        if self.scheme == "int8":
            return packed.float() * scales[:, None] * (1 / 127)
        levels = torch.tensor(_functions().get_4bit_type(self.scheme, device="cpu").tolist())
        pairs = packed.to(torch.int32)
        numbers = torch.stack([pairs // 16, pairs % 16], dim=-1).flatten()
        return levels[numbers.long()] * scales[:, None].expand(-1, BLOCK).flatten()[: 2 * packed.numel()]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """(T,) -> (T, I)"""
        columns, dtype = self.shape[1], self.like.dtype
        if self.packed.is_meta:
            return self.packed.new_empty(len(ids), columns, dtype=dtype)
        scales = self._numbers()
        if self.scheme == "int8":
            return self._read(self.packed[ids], scales[ids], dtype)
        if columns % BLOCK or (not is_traced() and not len(ids)):  # a block may span several rows
            return self.dequantized(dtype)[ids]
        packed, scales = self.packed.view(-1, columns // 2)[ids], scales.view(-1, columns // BLOCK)[ids]
        return self._read(packed.flatten(), scales.flatten(), dtype).view(-1, columns)

    def dense_weight(self) -> torch.Tensor:
        return self.dequantized(self.like.dtype)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + b: (..., I) -> (..., O)"""
        return product(x, bias, self)

    def take_weight(self, weight: torch.Tensor) -> None:
        """Quantise `weight` in place of the current one; PEFT calls it to merge an adapter. Warns, because this rounds."""
        warnings.warn(
            f"merging an adapter into {self.scheme} weights rounds it; to keep it exact, merge() the variant first and load the "
            "adapter on the merged model",
            stacklevel=4,
        )
        self.fill(weight)


def _rows_at_once(columns: int) -> int:
    """So many rows that their weights are whole blocks, and that copies of them in fp32 take some megabytes."""
    return BLOCK * max(1, 2**21 // (BLOCK * columns))


class QuantizedLinear(Quantized, DerivedLinear):
    """Replaces `linear`; the bias is not quantised. No dense weight is cached: each forward and each backward computes it."""

    def __init__(self, linear: Any, scheme: Any) -> None:
        DerivedLinear.__init__(self, linear)
        new = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.make_buffers(self.out_features, self.in_features, scheme, **new)

    @property
    def selectable(self) -> bool:
        return self.scheme == "int8"  # a block of 4 bits lies across inputs

    def selected(self, kept: Sequence[int], *, outputs: bool) -> Any:
        new = super().selected(kept, outputs=outputs)
        if outputs:
            new.set_rows(kept)
        else:
            new.set_columns(kept)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., I) -> (..., O)"""
        return self.multiply(x, self.bias)

    def extra_repr(self) -> str:
        return f"{DerivedLinear.extra_repr(self)}, scheme={self.scheme!r}"


def product(x: torch.Tensor, bias: torch.Tensor | None, weight: Quantized) -> torch.Tensor:
    """x Wᵀ + b: (..., I) -> (..., O), in the dtype of autocast or of x."""
    if is_traced():
        return functional.linear(x, weight.dequantized(x.dtype), bias)
    dtype = autocast_dtype(x.device.type) or x.dtype
    return _Product.apply(x.to(dtype), None if bias is None else bias.to(dtype), weight)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """x Wᵀ + b, without storing the dense weight between forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: Quantized) -> torch.Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_y,) = gradients
        grad_x = grad_y @ ctx.weight.dequantized(grad_y.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad_y.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None


class QuantizedEmbedding(Quantized, nn.Embedding):
    """Replaces `table`. A lookup dequantises only the rows it needs; a 4-bit table whose row length is not a multiple of 64 is
    dequantised whole."""

    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False  # nn.Embedding's defaults

    def __init__(self, table: nn.Embedding, scheme: Any) -> None:
        nn.Module.__init__(self)  # nn.Embedding.__init__ would draw a table
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx
        self.scale = table_scale(table)
        new = {"device": table.weight.device, "dtype": table.weight.dtype}
        self.make_buffers(self.num_embeddings, self.embedding_dim, scheme, **new)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(...) token ids -> (..., I)"""
        return scaled(self.rows(input.flatten()).view(*input.shape, self.embedding_dim), self.scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme!r}"
