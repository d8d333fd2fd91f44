"""Products and rows of seeded weights on a GPU, whose values exist only in registers: calls the kernels of fused_kernels.py and
fused_integers.py.

Triton is optional: PyTorch for GPUs on Linux comes with it.
"""

import functools
import importlib.util
import os
from typing import Any

import torch

from hf_freeze.seeded.schemes import PER_CALL
from hf_freeze.seeded.tiles import KINDS, Plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FEW = 16  # tokens, the fewest that a tensor core multiplies


class UnavailableError(RuntimeError):
    """Why there is no kernel, in one line."""


def check(device_type: str) -> None:
    """Raise UnavailableError without Triton, and for a device that it has no kernels for."""
    if device_type != "cuda" and not _interpreted():
        raise UnavailableError(f"there are no kernels for the device {device_type!r}, only for 'cuda' and 'cpu'")
    if importlib.util.find_spec("triton") is None:
        raise UnavailableError("Triton is not installed: pip install triton")
    try:
        _kernels()
    except Exception as error:  # of an old version, whatever it is
        raise UnavailableError(f"Triton cannot be used: {error}".splitlines()[0]) from error


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """fused_kernels and fused_integers."""
    from hf_freeze.seeded import fused_integers, fused_kernels

    return fused_kernels, fused_integers


def _key(matrix: Plain) -> list[int]:
    """The words of the stream as signed integers: Triton would compile the kernel once more for 64-bit ones, above 2^31."""
    return [word - (word >> 31 << 32) for word in matrix.stream]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _settings(matrix: Plain, dtype: torch.dtype) -> dict[str, Any]:
    by_hand = dtype == torch.bfloat16 and _interpreted()
    return {"KIND": matrix.kind, "ALIGNED": matrix.width % 4 == 0, "BF16_BY_HAND": by_hand}


def _sizes(kind: str, axis: int, tokens: int, is_fp32: bool) -> dict[str, int]:
    """Tokens, outputs and inputs of a tile, and warps. The threads make as many calls of the generator for a tile as they can
    without making one twice or spilling registers, by what Triton 3.9 compiled for compute capability 9.0."""
    wide = 128 if kind == "sign" else 64
    many = tokens > _FEW and not is_fp32  # fp32 without tensor cores takes four times the registers
    if many:
        most = 128 if tokens > 64 else 64
        return {"T": most, "N": wide if axis else 64, "K": 32 if axis else wide, "num_warps": most // 16}
    if axis:
        return {"T": 16, "N": wide, "K": 32, "num_warps": 1 if kind == "sign" and not is_fp32 else 4}
    inputs = 256 if kind == "sign" and not is_fp32 else wide
    return {"T": 16, "N": 16, "K": inputs, "num_warps": {"uniform": 4, "int8": 2, "sign": 4 if is_fp32 else 1}[kind]}


def multiply(matrix: Plain, x: torch.Tensor, axis: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x (T, K), fp32, bf16 or fp16, by the matrix (height, width) rounded to that dtype: (T, height) for `axis` 0, (T, width) for
    1, plus `bias`. Sums are fp32. Values of 8 bits are not rounded in bf16 and fp16 along axis 0; there, an infinite input gives
    NaN."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    by_integers = not axis and matrix.kind and x.dtype != torch.float32 and x.numel() and matrix.height
    by_integers = by_integers and torch.version.hip is None  # the kernel has an instruction of Nvidia
    with torch.cuda.device_of(x):  # Triton takes the current GPU, not that of its arguments
        return _by_integers(matrix, x, bias) if by_integers else _by_values(matrix, x, axis, bias)


def _by_values(matrix: Plain, x: torch.Tensor, axis: int, bias: torch.Tensor | None) -> torch.Tensor:
    """`multiply`, by a weight that is rounded to the dtype of x."""
    inputs, outputs = (matrix.height, matrix.width) if axis else (matrix.width, matrix.height)
    y = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    sizes = _sizes(KINDS[matrix.kind], axis, len(x), x.dtype == torch.float32)
    precision = "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    grid = (-(-len(x) // sizes["T"]), -(-outputs // sizes["N"]))
    if y.numel():
        _kernels()[0].product[grid](
            *(x, y, x if bias is None else bias, len(x), inputs, outputs, matrix.width),
            *(*_key(matrix), matrix.scale),
            AXIS=axis,
            HAS_BIAS=bias is not None,
            PRECISION=precision,
            **_settings(matrix, x.dtype),
            **sizes,
        )
    return y


def _by_integers(matrix: Plain, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (T, K), bf16 or fp16, by a matrix (height, width) of few bits: (T, height), plus `bias`."""
    kind, tokens, calls = KINDS[matrix.kind], len(x), 8
    block = calls * PER_CALL[kind]
    padded = -(-matrix.width // block) * block
    sizes = {"T": min(max(8, _power_of_two(tokens)), 128), "N": 64}
    grid = (-(-matrix.height // sizes["N"]), -(-tokens // sizes["T"]))
    tiles = grid[0] * grid[1]
    # As many programs as run at a time, in powers of two: each other number would be compiled anew.
    wanted = (4 if sizes["T"] <= _FEW else 2) * _processors(x.device) // tiles
    pieces = _power_of_two(max(min(wanted, padded // block), 1) + 1) // 2
    sums = tiles * pieces * sizes["T"] * sizes["N"] if pieces > 1 else 0
    numbers = torch.empty(sums + 2 * tokens, dtype=torch.float32, device=x.device)
    part, factor = numbers[:sums], numbers[sums:]
    count = torch.empty(tiles, dtype=torch.int32, device=x.device)
    arranged = torch.empty(grid[1] * sizes["T"], padded, dtype=torch.float16, device=x.device)
    at_once = min(max(_power_of_two(padded), block), 4096)
    kernels = _kernels()[1]
    kernels.arrange[(tokens,)](
        *(x, arranged, factor, count, matrix.width, padded, tiles), KIND=matrix.kind, C=calls, K=at_once, num_warps=8
    )
    y = torch.empty(tokens, matrix.height, dtype=x.dtype, device=x.device)
    scale = matrix.scale
    if kind == "sign":  # rounded as in memory; of 8 bits, each value would be rounded in its own way
        scale = torch.tensor(scale, dtype=torch.float32, device="cpu").to(x.dtype).item()
    kernels.product[(*grid, pieces)](
        *(arranged, factor, part, count, y, y if bias is None else bias, tokens, padded, matrix.height),
        *(*_key(matrix), scale),
        KIND=matrix.kind,
        HAS_BIAS=bias is not None,
        INTERPRETED=_interpreted(),
        C=calls,
        PIECES=pieces,
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    return y


def _power_of_two(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _processors(device: torch.device) -> int:
    return 4 if _interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def rows(matrix: Plain, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `ids`, of any shape, of a table (V, D), in `dtype`: (..., D). As on a GPU without seeds, ids outside of the table
    are not noticed: their rows have values, but no meaning."""
    flat = ids.flatten().contiguous()
    y = torch.empty(len(flat), matrix.width, dtype=dtype, device=ids.device)
    sizes = {"R": 4, "C": 128}
    if y.numel():
        grid = (-(-len(flat) // sizes["R"]), -(-matrix.width // sizes["C"]))
        with torch.cuda.device_of(flat):
            _kernels()[0].lookup[grid](
                *(flat, y, len(flat), matrix.width, *_key(matrix), matrix.scale), **_settings(matrix, dtype), **sizes
            )
    return y.view(*ids.shape, matrix.width)
