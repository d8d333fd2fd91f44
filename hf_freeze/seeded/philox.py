"""Philox-4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"), which maps a counter to four 32-bit words
with integer operations only. A call below is one such map.

This file is copied into repositories (model/native_code.py), so it imports nothing from hf_freeze.
"""

import hashlib
import sys
from typing import Any

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10
# positions of the halves of a 64-bit word viewed as 32-bit words
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def stream(seed: int, name: str) -> tuple[int, int, int, int]:
    """Two key words and two upper counter words for the tensor `name` with `seed`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key0, key1, counter2, counter3 = (int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
    return key0, key1, counter2, counter3


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Philox-4x32-10 of four 32-bit counter words, stored in ints or in integer arrays or tensors of at least 64 bits."""
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(key):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # In int64 a product may overflow. Its bits are correct, but the shift extends the sign, so mask the result.
        c0, c2 = ((p1 >> 32) & _MASK) ^ (c1 ^ k0), ((p0 >> 32) & _MASK) ^ (c3 ^ k1)
        c1, c3 = p1 & _MASK, p0 & _MASK
    return c0, c1, c2, c3


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    return [((key[0] + i * _WEYL[0]) & _MASK, (key[1] + i * _WEYL[1]) & _MASK) for i in range(_ROUNDS)]


def philox_on_cpu(
    counter: tuple[Any, Any, Any, Any], key: tuple[int, int], products: np.ndarray, outputs: np.ndarray
) -> tuple[Any, Any, Any, Any]:
    """The same as `philox` in half the time. Words are uint32 arrays of n values, or ints if all blocks share them.

    The time is saved in three ways. The halves of a product are strided views of it, instead of shifts and masks. Words that are
    ints, initially three of four, cost nothing. All arrays are preallocated: `products`, uint64 (2, 2, n), and `outputs`,
    uint32 (2, n). The result is a view of them.
    """
    c0, c1, c2, c3 = counter
    for i, (k0, k1) in enumerate(_round_keys(key)):
        # Two buffers alternate, because the lower halves are still needed in the next round, as c1 and c3.
        high0, low0 = _multiply(c0, _MULTIPLIERS[0], products[i % 2, 0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1], products[i % 2, 1])
        c0, c2 = _xor(high1, c1, k0, outputs[0]), _xor(high0, c3, k1, outputs[1])
        c1, c3 = low1, low0
    return c0, c1, c2, c3


def _multiply(word: Any, multiplier: int, product: np.ndarray) -> tuple[Any, Any]:
    if isinstance(word, int):
        return word * multiplier >> 32, word * multiplier & _MASK
    halves = np.multiply(word, np.uint64(multiplier), out=product, dtype=np.uint64).view(np.uint32)
    return halves[_HIGH::2], halves[_LOW::2]


def _xor(a: Any, b: Any, key: int, out: np.ndarray) -> Any:
    if isinstance(a, int):
        a, b = b, a
    if isinstance(a, int):
        return a ^ b ^ key
    if isinstance(b, int):
        return np.bitwise_xor(a, np.uint32(b ^ key), out=out)
    return np.bitwise_xor(np.bitwise_xor(a, b, out=out), np.uint32(key), out=out)
