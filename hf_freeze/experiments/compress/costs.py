"""What shapes cost in an engine: measured for a few, estimated for all others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from hf_freeze.experiments.compress.shapes import Shape, StackShape, Weights


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of the folder that is served, and milliseconds of one text alone; None where no limit of time was asked for."""

    bytes: float
    ms: float | None = None


def probes(whole: Shape, stacks: dict[str, StackShape], vocabulary: int | None, rank: int | None) -> dict[str, Shape]:
    """Shapes whose costs tell those of all others: the whole, it with one part cut at a time, and it with all of them cut.

    `stacks`: the least that the search may keep of each. `vocabulary`, `rank`: of tables, None where they stay.
    """
    found = {"whole": whole}
    for name, least in stacks.items():
        full = whole.stacks[name]
        cuts = {f"{name} of {least.layers}": replace(full, layers=least.layers)} if least.layers < full.layers else {}
        cuts |= {f"{name}, fewer neurons": replace(full, neurons=least.neurons)} if least.neurons < 1 else {}
        cuts |= {f"{name}, fewer heads": replace(full, heads=least.heads)} if least.heads < 1 else {}
        ranks = {"ffn_ranks": least.ffn_ranks, "attention_ranks": least.attention_ranks}
        cuts |= {f"{name}, linears of lower rank": replace(full, **ranks)} if min(ranks.values()) < 1 else {}
        found |= {label: replace(whole, stacks=whole.stacks | {name: cut}) for label, cut in cuts.items()}
    if vocabulary is not None:
        found["fewer tokens"] = replace(whole, vocabulary=vocabulary)
    if rank is not None:
        found["table of lower rank"] = replace(whole, rank=rank)
    half = {
        name: StackShape(
            layers=max(stack.layers // 2, 1),
            neurons=0.5 if stacks[name].neurons < 1 else 1.0,
            ffn_ranks=max(stacks[name].ffn_ranks, 0.25),
        )
        for name, stack in whole.stacks.items()
    }
    return found | {"half of all": replace(whole, stacks=half)}


class Estimate:
    """Costs as a sum over parts, with one price for each kind of part, fitted to measured shapes (non-negative least squares).

    The price of bytes: a file, a layer, a weight of a stack, factors of a weight (nodes of a graph and scales, 2 kB in ONNX), a
    weight of a table, a token. That of time: a text, and for each stack a layer, a multiply-add and a linear that has become two
    products, since a decoder runs once for each token; a weight of the tables, by which tokens are predicted.
    """

    def __init__(self, weights: Weights, measured: Sequence[tuple[Shape, Cost]]) -> None:
        self._weights = weights
        self._stacks = list(measured[0][0].stacks)
        self._bytes = _fit([self._of_bytes(shape) for shape, _ in measured], [cost.bytes for _, cost in measured])
        times = [cost.ms for _, cost in measured if cost.ms is not None]
        self._ms = _fit([self._of_time(shape) for shape, _ in measured], times) if times else None

    def cost(self, shape: Shape) -> Cost:
        ms = None if self._ms is None else float(self._of_time(shape) @ self._ms)
        return Cost(bytes=float(self._of_bytes(shape) @ self._bytes), ms=ms)

    def _of_bytes(self, shape: Shape) -> np.ndarray:
        stacks = shape.stacks.items()
        layers, weights = sum(s.layers for _, s in stacks), sum(self._weights.of_stack(n, s) for n, s in stacks)
        factors = sum(self._weights.factors_of_stack(n, s) for n, s in stacks)
        tables = self._weights.of_tables(shape.vocabulary, shape.rank)
        return np.array([1.0, layers, weights, factors, tables, shape.vocabulary])

    def _of_time(self, shape: Shape) -> np.ndarray:
        found = [1.0]
        for name in self._stacks:
            found += [shape.stacks[name].layers, *self._weights.products_of_stack(name, shape.stacks[name])]
        return np.array([*found, self._weights.of_tables(shape.vocabulary, shape.rank)])


def _fit(rows: Sequence[np.ndarray], values: Sequence[float]) -> np.ndarray:
    """Prices, by relative errors: a small shape counts as much as a large one."""
    matrix, targets = np.array(rows), np.array(values)
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    prices, _ = nnls(matrix / scale / targets[:, None], np.ones(len(targets)))
    return prices / scale
