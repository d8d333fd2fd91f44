"""Random matrices that are functions of a stream of random integers: normal, orthogonal, sparse and block-diagonal; and those of
few bits, int8 and sign.

`draw(part, shape)` returns fp32 numbers u + 1/2 with an integer u, uniform in (-2^23, 2^23); each `part` has a stream of its own.
All that follows is elementwise: additions, multiplications, divisions and square roots of float64, each of which IEEE 754 rounds
correctly, in a fixed order, without a matrix product, a sum of many terms or a function of the C library. So the values are
bit-identical on every machine, too. They are computed on the CPU.

This file is copied into repositories (model/native_code.py), so it imports nothing from hf_freeze.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

Draw: TypeAlias = Callable[[str, tuple[int, ...]], torch.Tensor]

_RANGE = 2.0**23
_CHUNK = 1 << 16  # numbers computed at a time, so that their float64 steps stay in the cache
_ROUNDS_PER_BIT = 3
_LN2 = 0.6931471805599453
PER_CALL = {"int8": 16, "sign": 128}  # values of one call of Philox, which gives 128 bits
# (256, 8): of the bits of an octet
_SIGNS = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(np.float32)
UNIT = {"int8": math.sqrt(21845), "sign": 1.0}  # their standard deviation before they are scaled
# Wichura (1988), "Algorithm AS 241: The percentage points of the normal distribution": numerator and denominator of two rational
# functions, from the highest power to the lowest.
# fmt: off
_CENTRE = (
    (
        2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
        13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608,
    ),
    (
        5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
        5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0,
    ),
)
_TAIL = (
    (
        7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
        3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734,
    ),
    (
        1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
        0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0,
    ),
)
# fmt: on


def normal(values: torch.Tensor, std: float) -> torch.Tensor:
    """fp32 N(0, std²), of the shape of `values` from `draw`, within 5.5 standard deviations of 0: the quantiles of 2^24
    equally likely numbers."""
    flat = values.flatten().numpy()
    out = np.empty(len(flat), dtype=np.float32)
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = _quantiles(flat[part].astype(np.float64) * 2.0**-24) * std
    return torch.from_numpy(out).view(values.shape)


def _quantiles(shares: np.ndarray) -> np.ndarray:
    """The quantiles of the standard normal distribution at 1/2 + `shares`, float64 in (-1/2, 1/2), exact to about 1e-15."""
    result = shares * _ratio(_CENTRE, 0.180625 - shares * shares)
    is_tail = np.abs(shares) > 0.425
    tail = shares[is_tail]
    root = np.sqrt(_minus_log(0.5 - np.abs(tail)))  # at most 4.2
    result[is_tail] = np.copysign(_ratio(_TAIL, root - 1.6), tail)
    return result


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: np.ndarray) -> np.ndarray:
    values = []
    for polynomial in coefficients:
        value = np.full_like(x, polynomial[0])
        for coefficient in polynomial[1:]:
            value = value * x
            value = value + coefficient
        values.append(value)
    return values[0] / values[1]


def _minus_log(x: np.ndarray) -> np.ndarray:
    """-log(x). Logarithms of C libraries differ in the last bit, this series in elementary steps does not."""
    mantissa, exponent = np.frexp(x)  # in [1/2, 1), exact
    is_low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(is_low, 2 * mantissa, mantissa), exponent - is_low
    s = (mantissa - 1) / (mantissa + 1)  # log((1 + s) / (1 - s)) = 2 (s + s³/3 + s⁵/5 + ...), |s| <= 0.172
    square, total = s * s, np.zeros_like(s)
    for odd in range(23, 0, -2):
        total = total * square
        total = total + 1 / odd
    return -(exponent * _LN2 + 2 * s * total)


def sparse(values: torch.Tensor, std: float, density: float) -> torch.Tensor:
    """fp32, of the shape of `values` from `draw`: ±std/√density with the probability `density`, else 0 (Achlioptas, 2003,
    "Database-friendly random projections", with 1/3; Li et al., 2006, with less)."""
    limit = max(round(density * _RANGE), 1)
    size = torch.tensor(std / math.sqrt(density), dtype=torch.float32)
    return torch.where(values.abs() < limit, values.sign() * size, torch.zeros_like(values))


def orthogonal(draw: Draw, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    """fp32 (rows, columns): `gain` times a matrix with orthonormal columns, or rows if there are fewer.

    The unit vectors are turned in 3 log2(n) rounds, n the larger size. A round puts all coordinates into random pairs and
    rotates each pair by a random angle; random signs follow. That mixes like a butterfly (Genz, 1998, "Methods for generating
    random orthogonal matrices"): entries are close to normal with the variance 1/n, but the matrix is not exactly Haar
    distributed.
    """
    size, width = max(rows, columns), min(rows, columns)
    q = np.eye(size, width)
    rounds, pairs = _ROUNDS_PER_BIT * (size - 1).bit_length(), size // 2
    orders = np.argsort(draw("orders", (rounds, size)).numpy(), axis=1, kind="stable")
    angles = draw("angles", (rounds, 2, pairs, 1)).numpy().astype(np.float64)
    for order, (x, y) in zip(orders, angles, strict=True):
        first, second = order[:pairs], order[pairs : 2 * pairs]
        length = np.sqrt(x * x + y * y)  # the sum of squares is exact
        cosine, sine = x / length, y / length
        a, b = q[first], q[second]
        q[first] = cosine * a - sine * b
        q[second] = sine * a + cosine * b
    q *= np.sign(draw("signs", (size, 1)).numpy().astype(np.float64)) * gain
    return torch.from_numpy((q if rows >= columns else q.T).astype(np.float32))


def orthogonal_table(draw: Draw, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    """fp32 (rows, columns): square orthogonal matrices one below the other, so every row has the norm `gain`, and a table that
    grows keeps its rows (Yu et al., 2016, "Orthogonal random features")."""
    blocks = [
        orthogonal(lambda part, shape, block=block: draw(f"{block}/{part}", shape), columns, columns, gain)
        for block in range(-(-rows // columns))
    ]
    return torch.cat(blocks)[:rows]


def block_diagonal(values: torch.Tensor, blocks: int) -> torch.Tensor:
    """(rows, columns) with `blocks` equal blocks on the diagonal and zeros elsewhere, of their `values`
    (rows, columns / blocks)."""
    return torch.block_diag(*values.chunk(blocks))


def unpacked(kind: str, words: np.ndarray) -> np.ndarray:
    """fp32 (..., 4 · values of a word) of contiguous uint32 `words` (..., 4), low bits first.

    `int8`: 2b + 1 for each signed byte b: the odd numbers -255, -253, ..., 255, all equally likely. They are symmetric, without a
    zero, exact in bf16 too, and have the variance (256² - 1) / 3 = 21845. `sign`: 1 for a bit 0, -1 for a bit 1; no bit is left
    over, since each of the 128 is a fair coin.
    """
    octets = words.astype("<u4", copy=False).view(np.uint8)
    if kind == "int8":
        values = octets.view(np.int8).astype(np.float32)
        values *= 2
        values += 1
        return values
    return np.take(_SIGNS, octets, axis=0).reshape(*words.shape[:-1], -1)
