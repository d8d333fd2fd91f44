"""Random tensors defined by a seed: bit-identical on every device, in every version and for any range of rows.

Philox-4x32-10 (philox.py) maps a counter to four 32-bit words with integer operations only. Element i of a tensor is word i % 4
of block i // 4. The key and the upper half of the counter are a hash of (seed, name), so every tensor has its own stream.

A word is converted to fp32 by exact steps and one rounded multiplication: its top 24 bits u give u + 1/2 - 2^23, which is exact
in fp32, times bound * 2^-23. The values are symmetric around zero and lie in (-bound, bound).

The schemes of few bits make 16 or 128 values from a call, and count otherwise: the first word of the counter is the number of the
call in the row, the second the number of the row. So every row starts with a call of its own, whatever its width.

This file is copied into repositories (model/native_code.py), so it imports nothing from hf_freeze but `philox` and `schemes`,
which are copied too.
"""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from hf_freeze.seeded.philox import philox, philox_on_cpu, stream
from hf_freeze.seeded.schemes import (
    PER_CALL,
    UNIT,
    block_diagonal,
    normal,
    orthogonal,
    orthogonal_table,
    sparse,
    unpacked,
)

# Positions, or for each entry of dimension 0, such as an expert, positions of its own.
Index: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]

_OF_MATRICES = ("glorot", "diagonal", "zero_diagonal", "normal", "sparse", "orthogonal", "blocks", *PER_CALL)
_OF_TABLES = (
    *("embedding", "embedding_normal", "embedding_sparse", "embedding_orthogonal"),
    *(f"embedding_{kind}" for kind in PER_CALL),
)
SCHEMES = (*_OF_MATRICES, *_OF_TABLES, "zeros", "ones")
_MASK = 0xFFFFFFFF
_CPU_BLOCKS = 1 << 15  # blocks computed at a time, so that their words stay in the second-level cache
_GPU_BLOCKS = 1 << 24


def uniform(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    bound: float,
    *,
    rows: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """fp32 values of U(-bound, bound) in `shape`, or only its rows [start, stop) along dimension 0.

    On the CPU, `torch.get_num_threads()` threads share the blocks. Raises ValueError for rows outside the tensor.
    """
    start, stop = rows if rows is not None else (0, shape[0])
    if not 0 <= start <= stop <= shape[0]:
        raise ValueError(f"rows {(start, stop)} of {name!r} are outside 0..{shape[0]}")
    width = math.prod(shape[1:])
    first_block, last_block = start * width // 4, -(-stop * width // 4)
    key0, key1, counter2, counter3 = stream(seed, name)
    key, upper = (key0, key1), (counter2, counter3)
    scale = torch.tensor(bound, dtype=torch.float32).item() * 2.0**-23
    out = torch.empty(last_block - first_block, 4, dtype=torch.float32, device=device)
    on_cpu = out.device.type == "cpu"
    chunk = _CPU_BLOCKS if on_cpu else _GPU_BLOCKS

    def fill(blocks: range) -> None:
        for block in blocks:
            size = min(chunk, last_block - block)
            target = out[block - first_block : block - first_block + size]
            number = torch.arange(block, block + size, device=device)
            for column, word in enumerate(philox((number & _MASK, number >> 32, *upper), key)):
                target[:, column] = word >> 8
            target += 0.5 - 2**23
            target *= scale

    def fill_on_cpu(blocks: range) -> None:
        # Arrays are allocated once: allocating them for each chunk would cost a third of the time.
        products, outputs = np.empty((2, 2, chunk), dtype=np.uint64), np.empty((2, chunk), dtype=np.uint32)
        steps, lower, top_bits = np.arange(chunk, dtype=np.uint32), *np.empty((2, chunk), dtype=np.uint32)
        for block in blocks:
            size = min(chunk, last_block - block)
            target = out[block - first_block : block - first_block + size].numpy()
            np.add(steps, np.uint32(block & _MASK), out=lower)  # modulo 2^32
            # All blocks of a chunk have the same upper word, unless the chunk crosses a multiple of 2^32.
            is_shared = block >> 32 == (block + size - 1) >> 32
            higher = block >> 32 if is_shared else (np.arange(block, block + size) >> 32).astype(np.uint32)
            words = philox_on_cpu((lower[:size], higher, *upper), key, products[:, :, :size], outputs[:, :size])
            for column, word in enumerate(words):
                target[:, column] = np.right_shift(word, np.uint32(8), out=top_bits[:size])
            target += np.float32(0.5 - 2**23)
            target *= np.float32(scale)

    # Thread i computes the chunks i, i + threads, i + 2 · threads ...
    threads = torch.get_num_threads()
    shares = [range(first_block + thread * chunk, last_block, threads * chunk) for thread in range(threads)]
    if not on_cpu:
        fill(range(first_block, last_block, chunk))
    elif threads > 1 and len(shares[-1]):
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill_on_cpu, shares))
    else:
        fill_on_cpu(range(first_block, last_block, chunk))
    offset = start * width - 4 * first_block
    return out.view(-1)[offset : offset + (stop - start) * width].view(stop - start, *shape[1:])


def few_bits(kind: str, seed: int, name: str, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
    """fp32 integers (rows, stop - start): the columns [start, stop) of `rows`, numbers below 2^32, of a matrix of the scheme
    `kind` before it is scaled, computed on the CPU."""
    per_call = PER_CALL[kind]
    calls = np.arange(start // per_call, -(-stop // per_call), dtype=np.uint32)
    key0, key1, counter2, counter3 = stream(seed, name)
    out = np.empty((len(rows), stop - start), dtype=np.float32)
    step = max(4 * _CPU_BLOCKS // max(per_call * len(calls), 1), 1)
    for first in range(0, len(rows), step):
        some = np.asarray(rows[first : first + step], dtype=np.uint32)
        size = len(some) * len(calls)
        products, outputs = np.empty((2, 2, size), dtype=np.uint64), np.empty((2, size), dtype=np.uint32)
        counter = (np.tile(calls, len(some)), np.repeat(some, len(calls)), counter2, counter3)
        words = np.stack(philox_on_cpu(counter, (key0, key1), products, outputs), axis=-1)
        values = unpacked(kind, words).reshape(len(some), -1)
        offset = start - start // per_call * per_call
        out[first : first + step] = values[:, offset : offset + stop - start]
    return out


def draws(seed: int, name: str, count: int) -> list[float]:
    """`count` numbers from U(0, 1); each is a function of (seed, name, index)."""
    key0, key1, counter2, counter3 = stream(seed, name)
    words = [
        word
        for block in range(-(-count // 4))
        for word in philox((block & _MASK, block >> 32, counter2, counter3), (key0, key1))
    ]
    return [((word >> 8) + 0.5) / 2**24 for word in words[:count]]


@dataclass(frozen=True)
class Origin:
    """The source of a parameter in a model that keeps parts of another.

    The values come from the parameter `name` of that other model: the entries `index` along `dimension`, which had `size`
    entries. `dimension` None: all values. `parts`, `interleaved`: those of `SeededTensor` there, if the model that is left does
    not tell.
    """

    name: str
    dimension: int | None = None
    index: Index = ()
    size: int = 0
    parts: tuple[int, ...] = ()
    interleaved: tuple[int, ...] = ()


def take(value: torch.Tensor, dimension: int, index: Index) -> torch.Tensor:
    """The entries `index` of `value`, of any shape, along `dimension`, which gets their number as its size; for each entry of
    dimension 0 its own, if `index` has such."""
    if not any(isinstance(entry, tuple) for entry in index):
        return value.index_select(dimension, torch.tensor(index, dtype=torch.long, device=value.device))
    return torch.stack(
        [take(matrix, dimension - 1, entry) for matrix, entry in zip(value, cast(Any, index), strict=True)]
    )


@dataclass(frozen=True)
class SeededTensor:
    """The definition of a tensor, which regenerates it, so that it need not be stored: (seed, name, shape, scheme).

    `name` is relative to the base model, so that a task model and its base model have the same values. Schemes (N, M are the
    dimensions of the matrix; Bogoychev, 2021, https://arxiv.org/abs/2010.11859, and Marian's initialisation):

    - `glorot`: U(±sqrt(6 / (N + M))) (Glorot & Bengio, 2010, eq. 16);
    - `embedding`: U(±sqrt(3 / d)), d the row width: Glorot with the fan-out only, which gives rows of norm 1 on average;
    - `diagonal`: ones on the main diagonal of the (rectangular) matrix, zeros elsewhere;
    - `zero_diagonal`: `glorot` with zeros on the main diagonal;
    - `zeros`: the bias of a random or diagonal linear, or of a norm; `ones`: the weight of a norm;
    - `normal`, `sparse` and `embedding_normal`, `embedding_sparse`: normal values, or two values and zeros in the share
      1 - `density`, with the variance of `glorot` or `embedding`;
    - `orthogonal`: orthonormal columns, or rows if there are fewer; `embedding_orthogonal`: orthogonal blocks of d rows;
    - `blocks`: `blocks` equal blocks on the diagonal, each of them `glorot` for its own sizes, and zeros elsewhere;
    - `int8`, `sign` and `embedding_int8`, `embedding_sign`: 256 or two equally likely values, 16 or 128 from one call of Philox,
      with the variance of `glorot` or `embedding`: integers times one number.

    `schemes.py` has the algorithms of these. `gain` multiplies random values.

    `parts`: the sizes of matrices that lie one after another along `dimension`, if there are several; the scheme applies to each
    of them (GPT-2 stores queries, keys and values in one matrix). `interleaved`: if these matrices lie mixed, the number of
    outputs that each gives to every block (BLOOM stores a head's query, key and value, then those of the next head). `kept`:
    (dimension, indices) of each slice that later methods took, in order; `shape` is the shape before the first slice.
    """

    seed: int
    name: str
    shape: tuple[int, ...]
    scheme: str
    parts: tuple[int, ...] = ()
    kept: tuple[tuple[int, Index], ...] = ()
    dimension: int = 1
    interleaved: tuple[int, ...] = ()
    gain: float = 1.0
    density: float = 1.0
    blocks: int = 1

    @property
    def bound(self) -> float:
        """Uniform values lie in (-bound, bound), those of the first of several parts; 1 if they are not uniform."""
        if self.scheme == "embedding":
            return math.sqrt(3 / self.shape[1]) * self.gain
        if self.scheme not in ("glorot", "zero_diagonal"):
            return 1.0
        rows, columns = (
            self.parts[0] if self.parts and axis == self.dimension - 2 else self.shape[axis] for axis in (-2, -1)
        )
        return math.sqrt(6 / (rows + columns)) * self.gain

    def check(self) -> None:
        """Raise ValueError for a matrix that cannot be divided into `blocks`."""
        if self.scheme == "blocks":
            for rows, columns in self.matrices():
                if rows % self.blocks or columns % self.blocks:
                    raise ValueError(
                        f"{self.name!r} ({rows} x {columns}) cannot be divided into {self.blocks} diagonal blocks: their number "
                        "must divide both sizes"
                    )

    def taken_from(self, origin: Origin) -> "SeededTensor":
        """The definition of this tensor as a slice of the parameter that `origin` names."""
        if origin.dimension is None:
            return replace(self, name=origin.name)
        shape = list(self.shape)
        shape[origin.dimension] = origin.size
        kept = ((origin.dimension, origin.index), *self.kept)
        parts, interleaved = self.parts, self.interleaved
        if origin.parts:
            parts, interleaved = origin.parts, origin.interleaved
        elif parts and origin.dimension == self.dimension:  # all projections have lost the same share of their outputs
            parts = tuple(part * origin.size // self.shape[self.dimension] for part in parts)
        return replace(self, name=origin.name, shape=tuple(shape), kept=kept, parts=parts, interleaved=interleaved)

    def generate(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The tensor in fp32, in the shape that is left of `shape` after `kept`. Raises ValueError for an unknown scheme."""
        value = self.mixed(self._generate_unsliced(device))
        for dimension, index in self.kept:
            value = take(value, dimension, index)
        return value

    def generate_rows(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The rows [start, stop) of `generate()`, fp32 (stop - start, ...). Of a whole random matrix nothing else is computed."""
        if self.scheme in ("glorot", "embedding") and len(self.shape) == 2 and not (self.kept or self.parts):
            return uniform(self.seed, self.name, self.shape, self.bound, rows=(start, stop), device=device)
        if self.kind in PER_CALL and len(self.shape) == 2 and not (self.kept or self.parts):
            values = few_bits(self.kind, self.seed, self.name, np.arange(start, stop), 0, self.shape[1])
            return torch.from_numpy(values).mul_(self.scales()[0]).to(device)
        return self.generate(device)[start:stop]

    def bounds(self) -> list[float]:
        """Of a uniform scheme: the bound of each matrix of `parts`."""
        if self.scheme == "embedding":
            return [self.bound]
        return [math.sqrt(6 / sum(sizes)) * self.gain for sizes in self.matrices()]

    @property
    def kind(self) -> str:
        """The scheme, without "embedding_"."""
        return self.scheme.removeprefix("embedding_")

    def scales(self) -> list[float]:
        """Of a scheme of few bits: the number, of fp32, by which the integers of each matrix of `parts` are multiplied."""
        of_table = self.kind != self.scheme
        return [
            torch.tensor(self.std(of_table, rows, columns) / UNIT[self.kind], dtype=torch.float32).item()
            for rows, columns in self.matrices()
        ]

    def std(self, of_table: bool, rows: int, columns: int) -> float:
        """The standard deviation of random values in a matrix (rows, columns), or a table."""
        return math.sqrt(1 / columns if of_table else 2 / (rows + columns)) * self.gain

    def mixed(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, a matrix (N, M) whose `parts` lie side by side, with them block by block instead."""
        if not self.interleaved:
            return value
        matrices = value.split(self.parts, dim=self.dimension)
        blocks = [
            matrix.unflatten(self.dimension, (-1, rows))
            for matrix, rows in zip(matrices, self.interleaved, strict=True)
        ]
        return torch.cat(blocks, dim=self.dimension + 1).flatten(self.dimension, self.dimension + 1)

    def _generate_unsliced(self, device: torch.device | str) -> torch.Tensor:
        if self.scheme == "zeros":
            return torch.zeros(self.shape, device=device)
        if self.scheme == "ones":
            return torch.ones(self.shape, device=device)
        if self.scheme == "embedding":
            return uniform(self.seed, self.name, self.shape, self.bound, device=device)
        if self.kind in PER_CALL:
            rows = np.arange(math.prod(self.shape[:-1]))
            values = few_bits(self.kind, self.seed, self.name, rows, 0, self.shape[-1])
            out = torch.from_numpy(values).view(self.shape)
            for matrix, scale in zip(self._split(out), self.scales(), strict=True):
                matrix *= scale
            return out.to(device)
        if self.scheme.startswith("embedding_"):
            return self._transformed(self.name, *self.shape).to(device)
        if self.scheme in ("glorot", "zero_diagonal"):
            bounds = self.bounds()
            out = uniform(self.seed, self.name, self.shape, bounds[0], device=device)
            for matrix, bound in zip(self._split(out), bounds, strict=True):
                if bound != bounds[0]:
                    matrix *= bound / bounds[0]
                if self.scheme == "zero_diagonal":
                    matrix.fill_diagonal_(0)
            return out
        out = torch.empty(self.shape, device=device)
        for number, matrix in enumerate(self._split(out)):
            if self.scheme == "diagonal":
                matrix.copy_(torch.eye(*matrix.shape))
            else:
                name = f"{self.name}[{number}]" if len(self.matrices()) > 1 else self.name
                matrix.copy_(self._transformed(name, *matrix.shape))
        return out

    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of each matrix: of each expert, or of `parts`."""
        if len(self.shape) == 3:
            return [self.shape[1:]] * self.shape[0]  # type: ignore[list-item]
        other = self.shape[1 - self.dimension]
        return [
            (other, size) if self.dimension else (size, other) for size in self.parts or (self.shape[self.dimension],)
        ]

    def _split(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of the matrices of `matrices`."""
        if len(self.shape) == 3:
            return value.unbind()
        return value.split(self.parts or (self.shape[self.dimension],), dim=self.dimension)

    def _transformed(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """fp32 (rows, columns) on the CPU, by an algorithm of `schemes.py` on the stream of `name`."""

        def draw(part: str, shape: tuple[int, ...]) -> torch.Tensor:
            return uniform(self.seed, f"{name}/{part}" if part else name, shape, 2.0**23)

        kind, of_table = self.kind, self.kind != self.scheme
        std = self.std(of_table, rows, columns)
        if kind == "normal":
            return normal(draw("", (rows, columns)), std)
        if kind == "sparse":
            return sparse(draw("", (rows, columns)), std, self.density)
        if kind == "orthogonal":
            return (orthogonal_table if of_table else orthogonal)(draw, rows, columns, self.gain)
        if self.scheme == "blocks":
            self.check()
            bound = math.sqrt(6 * self.blocks / (rows + columns)) * self.gain
            return block_diagonal(uniform(self.seed, name, (rows, columns // self.blocks), bound), self.blocks)
        raise ValueError(f"unknown scheme {self.scheme!r} of {self.name!r}; choose from {', '.join(SCHEMES)}")


def digest(tensor: torch.Tensor) -> str:
    """128 bits of SHA-256 over the fp32 values of `tensor`, of any shape, as 32 hexadecimal digits."""
    data: Any = tensor.detach().to("cpu", torch.float32).contiguous().view(torch.uint8).flatten()
    return hashlib.sha256(data.numpy()).hexdigest()[:32]


def fingerprint(model: Any) -> str:
    """256 bits of SHA-256 over the names and values of all tensors of a model, as 64 hexadecimal digits."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        sha.update(f"{name} {digest(value)}\n".encode())
    return sha.hexdigest()
