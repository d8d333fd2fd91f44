"""Any rows and columns of a matrix that a seed defines, without the rest of it.

Shapes: (N, M) is the matrix of the definition, (R, C) what `kept` leaves of it.
"""

import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from hf_freeze.seeded.philox import philox, philox_on_cpu, stream
from hf_freeze.seeded.schemes import PER_CALL, normal, sparse
from hf_freeze.seeded.tensor import SeededTensor, few_bits

Stream: TypeAlias = tuple[int, int, int, int]
ALL = slice(None)
TILE = 1 << 17  # values of a tile at most: 512 KiB in fp32, which the second-level cache holds
_CALLS = TILE // 4
_MASK = 0xFFFFFFFF
_ON_CPU = ("cpu",)  # where numpy makes the values
_UNIFORM = ("glorot", "zero_diagonal", "embedding")

KINDS = ("uniform", *PER_CALL)
_FUSED = {"glorot": 0, "embedding": 0} | {
    f"{prefix}{kind}": number for number, kind in enumerate(PER_CALL, 1) for prefix in ("", "embedding_")
}


class _Scratch(threading.local):
    """The memory of a thread, which all tiles of all models use in turn: allocating it for each tile would cost a third of the
    time."""

    def __init__(self) -> None:
        self.products = np.empty((2, 2, _CALLS), dtype=np.uint64)
        self.outputs = np.empty((2, _CALLS), dtype=np.uint32)
        self.low = np.empty(_CALLS, dtype=np.uint32)
        self.steps = np.arange(_CALLS, dtype=np.uint32)
        self.values = torch.empty(TILE)
        self.tile = torch.empty(TILE)

    def nbytes(self) -> int:
        arrays = (self.products, self.outputs, self.low, self.steps, self.values, self.tile)
        return sum(int(array.nbytes) for array in arrays)


_SCRATCH = _Scratch()


def scratch_bytes() -> int:
    """Bytes of the memory in which a thread makes its tiles."""
    return _SCRATCH.nbytes()


def buffer(size: int) -> torch.Tensor:
    """fp32 memory (size,), at most TILE, for the tiles of this thread, one after another."""
    return _SCRATCH.tile[:size]


def whole_only(definition: SeededTensor) -> str | None:
    """Why a tensor can only be generated as a whole; None if any rows and columns can be generated alone."""
    if len(definition.shape) == 3:
        return "the experts of a mixture"
    if len(definition.shape) != 2:
        return "vectors"
    if definition.kind == "orthogonal":
        return f"scheme {definition.scheme!r}"
    if any(isinstance(entry, tuple) for _, index in definition.kept for entry in index):
        return "the experts of a mixture"
    return None


class Numpy:
    """Makes values before they are scaled, on the CPU by numpy and elsewhere by torch."""

    def uniform(
        self, words: Stream, width: int, rows: np.ndarray, start: int, stop: int, device: torch.device
    ) -> torch.Tensor:
        """fp32 (rows, stop - start): the numbers u + 1/2 - 2^23 at these rows and columns of a matrix with rows of `width`, from
        the stream `words`. They may lie in scratch memory, and are then valid until the next call."""
        size = len(rows) * (stop - start)
        if size == 0:
            return torch.empty(len(rows), stop - start, device=device)
        first = rows * width + start  # position of the first value of each row
        if stop - start == width and int(rows[-1]) - int(rows[0]) + 1 == len(rows) and np.all(np.diff(rows) == 1):
            first, length = first[:1], size  # all in one piece
        else:
            length = stop - start
        offsets, calls = first % 4, first // 4
        count = int((offsets.max() + length + 3) // 4)  # calls of each row
        if device.type in _ON_CPU:
            values = _words_on_cpu(words, calls, count)
        else:
            numbers = (torch.from_numpy(calls).to(device)[:, None] + torch.arange(count, device=device)).flatten()
            drawn = philox((numbers & _MASK, numbers >> 32, *words[2:]), words[:2])
            values = torch.stack([(word >> 8).float() + (0.5 - 2**23) for word in drawn], dim=1)
        values = values.reshape(len(first), 4 * count)
        if (offsets == offsets[0]).all():
            out = values[:, int(offsets[0]) : int(offsets[0]) + length]
        else:
            index = torch.from_numpy(offsets)[:, None] + torch.arange(length)
            out = values.gather(1, index.to(device))
        return out.reshape(len(rows), stop - start)

    def few_bits(self, kind: str, seed: int, name: str, rows: np.ndarray, start: int, stop: int) -> torch.Tensor:
        """fp32 (rows, stop - start) on the CPU: the integers of `hf_freeze.seeded.tensor.few_bits`."""
        return torch.from_numpy(few_bits(kind, seed, name, rows, start, stop))


class Cell(NamedTuple):
    """A matrix of a definition: the name of its stream, its first row and column, its rows and columns."""

    name: str
    row: int
    column: int
    height: int
    width: int


class Plain(NamedTuple):
    """What fused code needs to know of a matrix that is all of its definition, and of one piece.

    `kind`: a position in KINDS. A value is `scale` times an integer, or in the first kind u + 1/2 - 2^23.
    """

    kind: int
    stream: Stream
    height: int
    width: int
    scale: float


class Tiles:
    """A source of rows and columns of the matrix of `definition`.

    `shape`: (R, C). `plain`: for fused code; None for a matrix that it cannot make.

    Raises ValueError for a tensor that can only be generated as a whole (`whole_only`).
    """

    def __init__(self, definition: SeededTensor) -> None:
        if (reason := whole_only(definition)) is not None:
            raise ValueError(f"{definition.name!r} cannot be generated by tiles: {reason}")
        self.definition = definition
        maps: list[np.ndarray | None] = [None, None]
        if definition.interleaved:
            size = definition.shape[definition.dimension]
            places = np.arange(size) if definition.dimension == 0 else np.arange(size)[None]
            mixed = definition.mixed(torch.from_numpy(places))
            maps[definition.dimension] = mixed.flatten().numpy()
        for axis, index in definition.kept:
            kept = np.array(index, dtype=np.int64)
            before = maps[axis]
            maps[axis] = kept if before is None else before[kept]
        self._maps = maps
        self.shape: tuple[int, int] = cast(
            Any, tuple(definition.shape[axis] if maps[axis] is None else len(cast(Any, maps[axis])) for axis in (0, 1))
        )
        self.cells = self._cells()
        self.plain = self._plain()

    def _cells(self) -> list[Cell]:
        """Those of each matrix of `parts`."""
        definition, offset = self.definition, 0
        cells: list[Cell] = []
        matrices = definition.matrices()
        for number, (rows, columns) in enumerate(matrices):
            name = f"{definition.name}[{number}]" if len(matrices) > 1 else definition.name
            first = (offset, 0) if definition.dimension == 0 else (0, offset)
            cells.append(Cell(name, *first, rows, columns))
            offset += (rows, columns)[definition.dimension]
        return cells

    def _plain(self) -> "Plain | None":
        definition = self.definition
        if definition.scheme not in _FUSED or len(self.cells) > 1 or any(index is not None for index in self._maps):
            return None
        kind = _FUSED[definition.scheme]
        bound = (
            definition.scales()[0]
            if kind
            else torch.tensor(definition.bounds()[0], dtype=torch.float32).item() * 2.0**-23
        )
        return Plain(kind, stream(definition.seed, definition.name), *self.shape, bound)

    def places(self, axis: int, index: slice | np.ndarray) -> np.ndarray:
        """The positions in the matrix of the definition of the positions `index` of what is kept."""
        mapped = self._maps[axis]
        if mapped is not None:
            return mapped[index]
        return np.arange(*index.indices(self.shape[axis])) if isinstance(index, slice) else index

    def columns(self, index: slice) -> tuple[int, int, np.ndarray | None]:
        """(start, stop, positions within, or None for all) in the matrix of the definition."""
        if self._maps[1] is None:
            return (*index.indices(self.shape[1])[:2], None)
        places = self.places(1, index)
        if not len(places):
            return 0, 0, None
        start, stop = int(places.min()), int(places.max()) + 1
        within = places - start
        return start, stop, None if np.array_equal(within, np.arange(stop - start)) else within

    def generate(
        self,
        rows: slice | np.ndarray = ALL,
        columns: slice = ALL,
        *,
        out: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        by: Numpy | None = None,
    ) -> torch.Tensor:
        """fp32 (rows, columns): these entries of `definition.generate()`, bit for bit.

        `rows`: a slice, or positions (n,) int64. `out`, if given, takes the values; `by` makes them. Temporary memory does not
        depend on the number of rows.
        """
        by = by or Numpy()
        places = self.places(0, rows)
        start, stop, within = self.columns(columns)
        width = stop - start if within is None else len(within)
        out = torch.empty(len(places), width, device=device) if out is None else out
        # A call of the generator may lie across the ends of a row. Very wide rows are made in pieces.
        if len(places) and stop - start > TILE - 8:
            begin, end, _ = columns.indices(self.shape[1])
            middle = (begin + end) // 2
            for piece in (slice(begin, middle), slice(middle, end)):
                offset = piece.start - begin
                target = out[:, offset : offset + piece.stop - piece.start]
                self.generate(rows, piece, out=target, device=device, by=by)
            return out
        step = max((TILE - 8) // (stop - start + 8), 1) if width else len(places)
        if self.definition.shape[1] == stop - start and width:
            step = max((TILE - 8) // (stop - start), 1)
        for first in range(0, len(places), max(step, 1)):
            values = self._entries(places[first : first + step], start, stop, torch.device(device), by)
            out[first : first + step] = values if within is None else values[:, torch.from_numpy(within).to(device)]
        return out

    def _entries(self, rows: np.ndarray, start: int, stop: int, device: torch.device, by: Numpy) -> torch.Tensor:
        """fp32 (rows, stop - start) of the matrix of the definition, in scratch memory: valid until the next call."""
        definition = self.definition
        if definition.scheme in _UNIFORM:
            words = stream(definition.seed, definition.name)
            out = by.uniform(words, definition.shape[1], rows, start, stop, device)
            bounds = definition.bounds()
            out *= torch.tensor(bounds[0], dtype=torch.float32).item() * 2.0**-23
            for number, inside, first, last in self._overlaps(rows, start, stop):
                if bounds[number] != bounds[0]:
                    out[_selection(inside), first - start : last - start] *= bounds[number] / bounds[0]
                if definition.scheme == "zero_diagonal":
                    _set_diagonal(out, rows, start, stop, self.cells[number], 0.0)
            return out
        if definition.kind in PER_CALL:
            out = by.few_bits(definition.kind, definition.seed, definition.name, rows, start, stop)
            scales = definition.scales()
            for number, inside, first, last in self._overlaps(rows, start, stop):
                out[_selection(inside), first - start : last - start] *= scales[number]
            return out.to(device)
        out = torch.zeros(len(rows), stop - start)
        if definition.scheme == "ones":
            return out.fill_(1).to(device)
        for number, inside, first, last in self._overlaps(rows, start, stop):
            cell = self.cells[number]
            if definition.scheme == "diagonal":
                _set_diagonal(out, rows, start, stop, cell, 1.0)
            elif definition.scheme != "zeros":
                values = self._drawn(cell, rows[inside] - cell.row, first - cell.column, last - cell.column, by)
                out[_selection(inside), first - start : last - start] = values
        return out.to(device)

    def _overlaps(self, rows: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, np.ndarray, int, int]]:
        """(number of a cell, mask of the `rows` in it, its first and last column in [start, stop)) of each cell that has some."""
        for number, cell in enumerate(self.cells):
            inside = (rows >= cell.row) & (rows < cell.row + cell.height)
            first, last = max(start, cell.column), min(stop, cell.column + cell.width)
            if last > first and inside.any():
                yield number, inside, first, last

    def _drawn(self, cell: Cell, rows: np.ndarray, start: int, stop: int, by: Numpy) -> torch.Tensor:
        """fp32 entries of a cell of normal, sparse or block-diagonal values; rows and columns count from its first ones."""
        definition, cpu, words = self.definition, torch.device("cpu"), stream(self.definition.seed, cell.name)
        if definition.scheme != "blocks":
            std = definition.std(definition.kind != definition.scheme, cell.height, cell.width)
            drawn = by.uniform(words, cell.width, rows, start, stop, cpu)
            return normal(drawn, std) if definition.kind == "normal" else sparse(drawn, std, definition.density)
        definition.check()
        height, width = cell.height // definition.blocks, cell.width // definition.blocks
        bound = math.sqrt(6 / (height + width)) * definition.gain
        values = by.uniform(words, width, rows, 0, width, cpu)
        values *= torch.tensor(bound, dtype=torch.float32).item() * 2.0**-23
        out = torch.zeros(len(rows), stop - start)
        for block in range(start // width, -(-stop // width)):
            inside = rows // height == block
            first, last = max(start, block * width), min(stop, (block + 1) * width)
            if inside.any():
                chosen = _selection(inside)
                part = values[chosen, first - block * width : last - block * width]
                out[chosen, first - start : last - start] = part
        return out


def _set_diagonal(out: torch.Tensor, rows: np.ndarray, start: int, stop: int, cell: Cell, value: float) -> None:
    """Set the entries of `out`, the columns [start, stop) of `rows`, that lie on the main diagonal of the matrix of a cell."""
    places = rows - cell.row
    columns = places + cell.column
    on = (places >= 0) & (places < min(cell.height, cell.width)) & (columns >= start) & (columns < stop)
    index = np.flatnonzero(on)
    out[torch.from_numpy(index), torch.from_numpy(columns[index] - start)] = value


def _selection(inside: np.ndarray) -> Any:
    """A slice where a mask has no gap, which needs no copy; else positions."""
    index = np.flatnonzero(inside)
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(index)


def _words_on_cpu(key: Stream, calls: np.ndarray, count: int) -> torch.Tensor:
    """fp32 (calls · count, 4) in scratch memory: the numbers u + 1/2 - 2^23 of `count` calls from each of the numbers `calls`."""
    scratch, size = _SCRATCH, len(calls) * count
    fits = size <= _CALLS
    low = scratch.low[:size] if fits else np.empty(size, dtype=np.uint32)
    products = scratch.products[..., :size] if fits else np.empty((2, 2, size), dtype=np.uint64)
    outputs = scratch.outputs[:, :size] if fits else np.empty((2, size), dtype=np.uint32)
    steps = scratch.steps[:count] if fits else np.arange(count, dtype=np.uint32)
    values = scratch.values[: 4 * size] if fits else torch.empty(4 * size)
    np.add((calls & _MASK).astype(np.uint32)[:, None], steps, out=low.reshape(len(calls), count))  # modulo 2^32
    last = int(calls.max()) + count - 1
    high: Any = int(calls.min()) >> 32
    if high != last >> 32:
        high = ((calls[:, None] + np.arange(count)) >> 32).astype(np.uint32).ravel()
    words = philox_on_cpu((low, high, *key[2:]), key[:2], products, outputs)
    target = values.view(size, 4)
    array = target.numpy()
    for column, word in enumerate(words):
        array[:, column] = np.right_shift(word, np.uint32(8), out=low)
    array += np.float32(0.5 - 2**23)
    return target
