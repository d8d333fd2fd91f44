"""Which shape loses least within the limits: a choice of one option for each part of a model, solved by HiGHS
(scipy.optimize.milp) as an integer program."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from hf_freeze.analysis.sensitivity import BY_SHARE, Sensitivity
from hf_freeze.experiments.compress.costs import Cost, Estimate
from hf_freeze.experiments.compress.shapes import Shape, StackShape

KINDS = ("layers", *BY_SHARE, "tokens", "ranks")
_HALVES = {  # a square weight has half as many numbers at a quarter of its rank, that of an FFN at 0.4
    "ffn_ranks": "FFNs of lower rank",
    "attention_ranks": "attentions of lower rank",
    "ranks": "half of the rank of the token table",
}


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What fewer parts cost in loss, in nats a label of the whole model: measured before training, times `remains`, the share of
    it that a short training has left for this kind of part. `tokens`: number of tokens kept -> loss."""

    measured: Sensitivity
    tokens: Mapping[int, float]
    remains: Mapping[str, float]

    def of(self, shape: Shape) -> float:
        stacks = sum(self.of_stack(name, stack) for name, stack in shape.stacks.items())
        return stacks + self.of_tables(shape.vocabulary, shape.rank)

    def of_stack(self, name: str, stack: StackShape) -> float:
        depth = max(self.measured.layers[name])
        found = self._share("layers", self.measured.layers[name][stack.layers])
        part = stack.layers / depth  # of what all layers have of the other kinds
        for kind in BY_SHARE:
            if (share := getattr(stack, kind)) < 1:
                found += part * self._share(kind, getattr(self.measured, kind)[name][share])
        return found

    def of_tables(self, vocabulary: int, rank: int | None) -> float:
        found = self._share("tokens", self.tokens[vocabulary])
        return found if rank is None else found + self._share("ranks", self.measured.ranks[rank])

    def _share(self, kind: str, loss: float) -> float:
        return max(loss - self.measured.loss, 0.0) / self.measured.labels * self.remains.get(kind, 1.0)


def options_of_stack(measured: Sensitivity, name: str) -> list[StackShape]:
    """All shapes of a stack whose loss was measured, the whole one first; without those whose attentions lose heads and rank,
    which would be most of them."""
    layers = sorted(measured.layers[name], reverse=True)
    shares = ([1.0, *sorted(getattr(measured, kind).get(name, ()), reverse=True)] for kind in BY_SHARE)
    shapes = (
        StackShape(layers=count, **dict(zip(BY_SHARE, some, strict=True)))
        for count, *some in itertools.product(layers, *shares)
    )
    return [shape for shape in shapes if 1 in (shape.heads, shape.attention_ranks)]


def half_in_words(kind: str) -> str:
    """What `halves_of` does to one of `KINDS`."""
    return _HALVES.get(kind, f"half of the {kind}")


def halves_of(whole: Shape, measured: Sensitivity, tokens: Mapping[int, float], hidden: int) -> dict[str, Shape]:
    """Kind of part -> the whole with about half of that kind, for the kinds that can go. `tokens`: numbers that may be kept;
    `hidden`: the width of a token table."""

    def all_stacks(change: Callable[[str, StackShape], StackShape]) -> Shape:
        return replace(whole, stacks={name: change(name, stack) for name, stack in whole.stacks.items()})

    def nearest(values: Iterable[float], wanted: float) -> Any:
        return min(values, key=lambda value: (abs(value - wanted), value), default=None)

    shapes = {
        "layers": all_stacks(lambda n, s: replace(s, layers=nearest(measured.layers[n], s.layers / 2))),
        "neurons": all_stacks(lambda n, s: replace(s, neurons=0.5 if 0.5 in measured.neurons.get(n, ()) else 1.0)),
        "heads": all_stacks(lambda n, s: replace(s, heads=0.5 if 0.5 in measured.heads.get(n, ()) else 1.0)),
        "ffn_ranks": all_stacks(lambda n, s: replace(s, ffn_ranks=nearest(measured.ffn_ranks.get(n, ()), 0.4) or 1.0)),
        "attention_ranks": all_stacks(
            lambda n, s: replace(s, attention_ranks=nearest(measured.attention_ranks.get(n, ()), 0.25) or 1.0)
        ),
        "tokens": replace(whole, vocabulary=nearest(tokens, whole.vocabulary / 2)),
        "ranks": replace(whole, rank=nearest(measured.ranks, hidden / 2)),
    }
    return {kind: shapes[kind] for kind in KINDS if shapes[kind] != whole}


def allocate(whole: Shape, losses: Losses, estimate: Estimate, limit: Cost) -> tuple[Shape, float] | None:
    """The shape of least loss whose estimated cost is within `limit`, and that loss in nats a label; None if no shape is.
    `limit.bytes` may be infinite."""
    parts, options, costs = _table(whole, losses, estimate)
    sizes = [len(some) for some in options]
    belongs = np.repeat(np.eye(len(parts)), sizes, axis=1)
    constraints = [LinearConstraint(belongs, 1, 1)]
    base = estimate.cost(whole)
    if np.isfinite(limit.bytes):
        constraints.append(LinearConstraint(costs[:, 1][None], -np.inf, limit.bytes - base.bytes))
    if limit.ms is not None and base.ms is not None:
        constraints.append(LinearConstraint(costs[:, 2][None], -np.inf, limit.ms - base.ms))
    flat = [(part, option) for part, some in zip(parts, options, strict=True) for option in some]
    found = milp(costs[:, 0], integrality=np.ones(len(flat)), bounds=Bounds(0, 1), constraints=constraints)
    if found.x is None:
        return None
    shape = whole
    for i in np.flatnonzero(found.x > 0.5):
        shape = _with(shape, *flat[i])
    return shape, float(found.fun)


def smallest(whole: Shape, losses: Losses, estimate: Estimate, cost: str) -> Shape:
    """The shape of the least `cost`, "bytes" or "ms"."""
    parts, options, costs = _table(whole, losses, estimate)
    column = {"bytes": 1, "ms": 2}[cost]
    shape, start = whole, 0
    for part, some in zip(parts, options, strict=True):
        of_part = costs[start : start + len(some), column]
        shape, start = _with(shape, part, some[int(of_part.argmin())]), start + len(some)
    return shape


def _table(whole: Shape, losses: Losses, estimate: Estimate) -> tuple[list[str], list[list], np.ndarray]:
    """(parts, options of each, (options of all, 3) loss and what bytes and ms become more by it). Options that are no better in
    anything than another one are left out: no best shape needs them, and they are most."""
    measured = losses.measured
    parts = [*whole.stacks, "tables"]
    options: list[list] = [options_of_stack(measured, name) for name in whole.stacks]
    options.append(list(itertools.product(sorted(losses.tokens, reverse=True), [None, *measured.ranks])))
    base = estimate.cost(whole)
    tables = []
    for number, (part, some) in enumerate(zip(parts, options, strict=True)):
        rows = []
        for option in some:
            loss = losses.of_tables(*option) if part == "tables" else losses.of_stack(part, option)
            cost = estimate.cost(_with(whole, part, option))
            ms = 0.0 if cost.ms is None or base.ms is None else cost.ms - base.ms
            rows.append((loss, cost.bytes - base.bytes, ms))
        table = np.array(rows)
        kept = _not_dominated(table)
        options[number] = [some[i] for i in kept]
        tables.append(table[kept])
    return parts, options, np.concatenate(tables)


def _not_dominated(table: np.ndarray) -> list[int]:
    """The rows that no other row is below in one column and not above in any; of equal rows the first."""
    kept: list[int] = []
    for i in np.lexsort((*table.T[::-1],)):  # whatever dominates a row comes before it
        if not (table[kept] <= table[i]).all(1).any():
            kept.append(int(i))
    return sorted(kept)


def _with(shape: Shape, part: str, option: StackShape | tuple[int, int | None]) -> Shape:
    if isinstance(option, StackShape):
        return replace(shape, stacks=shape.stacks | {part: option})
    return replace(shape, vocabulary=option[0], rank=option[1])
