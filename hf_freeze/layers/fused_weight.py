"""Generates a seeded weight and multiplies by it at once: in the registers of a GPU by Triton, in the first-level cache of a CPU
by a small library that is compiled on first use. Both are optional; without them, tiles are streamed.
"""

import functools
from typing import Any

import torch

from hf_freeze.layers.seeded_weight import Engine, SeededWeight
from hf_freeze.seeded import fused_cpu, fused_gpu
from hf_freeze.seeded.tiles import Tiles

FEW_TOKENS = (
    16  # up to here, products beside the generator are as fast as those of BLAS with a tile in the second-level cache
)


@functools.cache
def why_not(device_type: str) -> str | None:
    """Why weights on such a device are streamed instead, in one line; None if they are fused."""
    try:
        if device_type == "cpu":
            fused_cpu.library()
        else:
            fused_gpu.check(device_type)
    except (fused_cpu.UnavailableError, fused_gpu.UnavailableError) as error:
        return str(error)
    return None


def on_cpu(weight: torch.Tensor) -> bool:
    """Whether a weight is made by the CPU."""
    return weight.device.type == "cpu"


class Fused(Engine):
    """Weights that are not `Tiles.plain` are made by tiles; on the CPU, quickly too."""

    name = "fused"

    def fill(self, source: Tiles, rows: Any, columns: slice, out: torch.Tensor) -> None:
        if out.device.type != "cpu" or why_not("cpu"):
            super().fill(source, rows, columns, out)
            return
        matrix, (start, stop, _) = source.plain, columns.indices(source.shape[1])
        if matrix is None or out.stride(-1) != 1:
            source.generate(rows, columns, out=out, by=fused_cpu.Compiled())
        else:
            fused_cpu.fill(matrix, source.places(0, rows), start, stop, out)

    def multiply(self, weight: SeededWeight, x: torch.Tensor, axis: int, bias: torch.Tensor | None) -> torch.Tensor:
        matrix, others = weight.tiles.plain, (x,) if bias is None else (x, bias)
        # The libraries read memory: what does not fit is left to torch, which says so.
        fits = all(other.device == weight.device and other.dtype == weight.dtype for other in others)
        if matrix is None or not fits or why_not(weight.device.type) is not None:
            return super().multiply(weight, x, axis, bias)
        if not on_cpu(weight) and weight.dtype in fused_gpu.DTYPES:
            return fused_gpu.multiply(matrix, x, axis, bias)
        if on_cpu(weight) and len(x) <= FEW_TOKENS and weight.dtype == torch.float32:
            return fused_cpu.multiply(matrix, x, axis, bias)
        return super().multiply(weight, x, axis, bias)

    def rows(self, weight: SeededWeight, ids: torch.Tensor) -> torch.Tensor:
        matrix, on_device = weight.tiles.plain, ids.device == weight.device and weight.dtype in fused_gpu.DTYPES
        if matrix is None or on_cpu(weight) or not on_device or why_not(weight.device.type) is not None:
            return super().rows(weight, ids)
        return fused_gpu.rows(matrix, ids, weight.dtype)
