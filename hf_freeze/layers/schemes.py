"""Grids of bitsandbytes, of 8 or 4 bits, which quantises and dequantises.

`int8`: the step of a row is its largest absolute value / 127 (Dettmers et al., 2022, "LLM.int8()",
https://arxiv.org/abs/2208.07339). Unlike in that paper, inputs are not quantised: a row of a batch does not depend on the
others, and no outliers need separate treatment. `nf4` and `fp4`: each block of 64 weights, row by row, has 16 levels scaled by
its largest absolute value. The levels are quantiles of a normal distribution (nf4) or 4-bit floats with 2 exponent bits (fp4)
(Dettmers et al., 2023, "QLoRA", https://arxiv.org/abs/2305.14314, without its quantisation of the scales).

Shapes: O outputs or rows of a table, I inputs or columns.
"""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from hf_freeze.install import how_to_install
from hf_freeze.layers.derived import is_traced

SCHEMES = ("int8", "nf4", "fp4")
BLOCK = 64  # weights that share a scale in the 4-bit schemes


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


@dataclass(frozen=True)
class Scheme:
    """One of SCHEMES, with the members that a holder reads of `layers.grids.Grid`."""

    weights: str
    activations: ClassVar[str | None] = None
    granularity: ClassVar[str] = "block"
    is_static: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.weights == "int8" else torch.uint8

    @property
    def selectable(self) -> bool:
        return self.weights == "int8"  # a block of 4 bits lies across inputs

    def has_whole_rows(self, columns: int) -> bool:
        return self.weights == "int8" or columns % BLOCK == 0

    def packed_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows, columns) if self.weights == "int8" else (-(-rows * columns // 2),)

    def step_count(self, rows: int, columns: int) -> int:
        return rows if self.weights == "int8" else -(-rows * columns // BLOCK)

    def quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(O, I) -> what is stored, and the scales."""
        if not weight.numel():
            return torch.empty(self.packed_shape(*weight.shape), dtype=self.dtype), torch.empty(0)
        packed, scales = zip(*self._in_parts(weight.detach()), strict=True)
        return torch.cat(packed), torch.cat(scales)

    def _in_parts(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in weight.split(_rows_at_once(weight.shape[1])):
            part = part.to("cpu", torch.float32).contiguous()
            if self.weights == "int8":
                packed, scales, _ = _functions().int8_vectorwise_quant(part)
                packed[scales == 0] = 0  # bitsandbytes divides a row of zeros by zero
                yield packed, scales
            else:
                packed, state = _functions().quantize_4bit(part, blocksize=BLOCK, quant_type=self.weights)
                yield packed.flatten(), state.absmax

    def packed(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def read(
        self, packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        rows, columns = shape
        packed, scales = packed if self.weights == "int8" else packed.flatten(), scales.flatten()
        if is_traced():
            values = self._traced_read(packed, scales).to(dtype)
        else:
            _register_operators()
            # Unlike the functions that call them, operators are in one graph with other operations.
            operators = torch.ops.bitsandbytes
            if self.weights == "int8":
                values = operators.int8_vectorwise_dequant(packed, scales).to(dtype)
            else:
                whole = (1, 2 * packed.numel())
                values = operators.dequantize_4bit(packed.view(-1, 1), scales, BLOCK, self.weights, whole, dtype)
        if not self.has_whole_rows(columns):  # the last byte may hold one weight
            values = values.view(-1)[: rows * columns]
        return values.view(-1, columns)

    def _traced_read(self, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """What bitsandbytes computes, by operations that engines have. The first of two weights is in the higher four bits."""
        if self.weights == "int8":
            return packed.float() * scales[:, None] * (1 / 127)
        levels = torch.tensor(_functions().get_4bit_type(self.weights, device="cpu").tolist())
        pairs = packed.to(torch.int32)
        numbers = torch.stack([pairs // 16, pairs % 16], dim=-1).flatten()
        return levels[numbers.long()] * scales[:, None].expand(-1, BLOCK).flatten()[: 2 * packed.numel()]


def _rows_at_once(columns: int) -> int:
    """So many rows that their weights are whole blocks, and that copies of them in fp32 take some megabytes."""
    return BLOCK * max(1, 2**21 // (BLOCK * columns))
