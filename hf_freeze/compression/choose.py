"""Which shape stays nearest to the original within the limits: one integer program over layers, heads, neurons, tokens and
bits, solved by HiGHS (scipy.optimize.milp)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from hf_freeze.compression.blocks import Block
from hf_freeze.compression.distances import Distances
from hf_freeze.compression.prices import Prices
from hf_freeze.compression.shape import Shape

_LARGEST = 1e4  # cost of a choice, for the solver, which takes what is below 1e-6 for nothing
_GAP, _SECONDS = 1e-3, 20.0  # of the solver: relative distance from the optimum, and time
_WIDE = 64  # neurons from which on multiples are kept
_FREE = 1e-4  # share of the loss of all units, up to which some can go for nothing
_LEVELS = 12  # numbers of units that may be kept of a block, from none to all


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the program may choose. `bits`: of weights, the most first. `uniform`: as many units in each block of a kind, in
    multiples of `multiple`, as engines with one width for all layers need it; `mixed`: nevertheless in bits of their own.
    `by_layer`: attention and FFN of a layer in the same bits. `may_go`: kinds of parts among "layers", "heads", "neurons" and
    "tokens"."""

    bits: tuple[int, ...] = (8,)
    uniform: bool = False
    mixed: bool = False
    by_layer: bool = False
    multiple: int = 8
    may_go: frozenset[str] = frozenset({"layers", "heads", "neurons", "tokens"})


def levels(block: Block, options: Options) -> list[int]:
    """Numbers of units that may be kept, the most first. An attention keeps one head at least."""
    if block.kind not in options.may_go:
        return [block.units]
    wide = block.kind == "neurons" and block.units >= max(2 * options.multiple, _WIDE)
    step = options.multiple if wide else 1
    counts = {round(block.units * level / _LEVELS / step) * step for level in range(1, _LEVELS)} - {0}
    free = sum(loss <= _FREE * block.losses[-1] for loss in block.losses) - 1
    counts |= {-(-(block.units - free) // step) * step} - {0}
    return sorted({count for count in counts if count < block.units} | {block.units}, reverse=True)


@dataclass(frozen=True)
class _Variable:
    """A choice: of a block, (units, bits); of a stack, its depth; of the tables, (tokens, bits)."""

    part: str
    value: tuple[int, ...]
    distance: float
    bytes: float
    ms: float


class Program:
    """All choices for one model; `solve` may be called with many limits."""

    def __init__(self, blocks: Mapping[str, Block], distances: Distances, prices: Prices, options: Options) -> None:
        self._blocks, self._distances, self._prices, self._options = blocks, distances, prices, options
        self._variables = [*self._of_stacks(), *self._of_blocks(), *self._of_tables(), *self._of_widths()]
        self._rows, self._low, self._high = self._constraints()

    def solve(self, max_bytes: float, max_ms: float | None) -> tuple[Shape, float] | None:
        """(the nearest shape within the limits, its expected distance); None if there is none. `max_bytes` may be infinite."""
        limits = {"bytes": max_bytes - self._prices.fixed_bytes}
        limits |= {} if max_ms is None else {"ms": max_ms - self._prices.fixed_ms}
        return self._least("distance", {cost: limit for cost, limit in limits.items() if np.isfinite(limit)})

    def smallest(self, cost: str, max_ms: float | None = None) -> Shape:
        """The shape of the least "bytes" or "ms": of those within a time, or if there is none, the fastest."""
        limits = {} if max_ms is None else {"ms": max_ms - self._prices.fixed_ms}
        found = self._least(cost, limits) or self._least("ms", {})
        assert found is not None  # the whole model is one
        return found[0]

    def _least(self, aim: str, limits: Mapping[str, float]) -> tuple[Shape, float] | None:
        def of(cost: str) -> np.ndarray:
            return np.array([getattr(one, cost) for one in self._variables])

        rows = [*self._rows, *map(of, limits)]
        low, high = self._low + [-np.inf] * len(limits), [*self._high, *limits.values()]
        constraint: Any = LinearConstraint  # its annotations know numbers only
        costs = of(aim)
        scale = _LARGEST / (abs(costs).max() or 1.0)
        found = milp(
            scale * costs,
            integrality=np.ones(len(self._variables)),
            bounds=Bounds(0, 1),
            constraints=constraint(csr_matrix(np.stack(rows)), low, high),
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
        if found.x is None:
            return None
        chosen = [one for one, x in zip(self._variables, found.x, strict=True) if x > 0.5]
        return self._shape(chosen), float(found.fun) / scale

    def _of_stacks(self) -> list[_Variable]:
        found = []
        for stack, depths in self._distances.layers.items():
            for depth, (_, distance) in depths.items():
                if depth == max(depths) or "layers" in self._options.may_go:
                    cost = self._prices.of_layers(stack, depth)
                    found.append(_Variable(f"stack {stack}", (depth,), distance, *cost))
        return found

    def _of_blocks(self) -> list[_Variable]:
        found = []
        for name, block in self._blocks.items():
            for units in levels(block, self._options):
                for bits in self._options.bits:
                    distance = self._distances.of_units(block, units) + self._distances.of_bits(
                        name, bits, units / block.units
                    )
                    found.append(_Variable(name, (units, bits), distance, *self._prices.of_block(block, units, bits)))
        return found

    def _of_tables(self) -> list[_Variable]:
        found = []
        for tokens in self._distances.tokens:
            if tokens == max(self._distances.tokens) or "tokens" in self._options.may_go:
                for bits in self._options.bits:
                    total = self._distances.of_tokens(tokens) + self._distances.of_bits("tables", bits, 1.0)
                    found.append(_Variable("tables", (tokens, bits), total, *self._prices.of_tables(tokens, bits)))
        return found

    def _of_widths(self) -> list[_Variable]:
        """Where all blocks of a kind in a stack must be alike: what each of them keeps."""
        if not self._options.uniform:
            return []
        values = {(_width_of(self._blocks[one.part]), self._common(one.value)) for one in self._of_blocks()}
        return [_Variable(part, value, 0.0, 0.0, 0.0) for part, value in sorted(values)]

    def _common(self, value: tuple[int, ...]) -> tuple[int, ...]:
        """What of (units, bits) all blocks of a kind have in common, where they must be alike."""
        return value[:1] if self._options.mixed else value

    def _constraints(self) -> tuple[list[np.ndarray], list[float], list[float]]:
        """(rows, lower, upper ends): one choice for each stack, width and the tables; for a block one if its layer stays, else
        none, and that of its width. All attentions of a layer are in the same bits, since `Quantize` takes them together."""
        rows, low, high = [], [], []

        def add(row: np.ndarray, least: float, most: float) -> None:
            rows.append(row)
            low.append(least)
            high.append(most)

        def where(part: str, value: tuple[int, ...] | None = None) -> np.ndarray:
            chosen = (one.part == part and value in (None, one.value[: len(value or ())]) for one in self._variables)
            return np.fromiter(chosen, float, len(self._variables))

        def with_bits(part: str, bits: int) -> np.ndarray:
            chosen = (one.part == part and one.value[1] == bits for one in self._variables)
            return np.fromiter(chosen, float, len(self._variables))

        for part in dict.fromkeys(one.part for one in self._variables if one.part not in self._blocks):
            add(where(part), 1.0, 1.0)
        for name, block in self._blocks.items():
            stack, layer = block.place
            with_it = [depth for depth, (kept, _) in self._distances.layers[stack].items() if layer in kept]
            add(where(name) - sum(where(f"stack {stack}", (depth,)) for depth in with_it), 0.0, 0.0)
            if self._options.uniform:
                for value in dict.fromkeys(self._common(one.value) for one in self._variables if one.part == name):
                    add(where(name, value) - where(_width_of(block), value), -1.0, 0.0)
            kinds = None if self._options.by_layer else block.kind
            first = next(
                n for n, other in self._blocks.items() if other.place == block.place and kinds in (None, other.kind)
            )
            for bits in self._options.bits if first != name else ():
                add(with_bits(name, bits) - with_bits(first, bits), 0.0, 0.0)
        return rows, low, high

    def _shape(self, chosen: Sequence[_Variable]) -> Shape:
        values = {one.part: one.value for one in chosen}
        layers = {
            stack: self._distances.layers[stack][values[f"stack {stack}"][0]][0] for stack in self._distances.layers
        }
        units = {name: values[name][0] if name in values else block.units for name, block in self._blocks.items()}
        bits = {name: values[name][1] if name in values else self._options.bits[0] for name in self._blocks}
        tokens = values["tables"][0]
        return Shape(layers=layers, units=units, bits=bits | {"tables": values["tables"][1]}, tokens=tokens)


def _width_of(block: Block) -> str:
    return f"width {block.place[0]} {block.kind}"
