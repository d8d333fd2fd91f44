"""Which shapes are trained for a short time: those that lose least within the budget, as it is measured in the engine."""

from dataclasses import replace

import numpy as np

from hf_freeze.experiments.compress.allocation import Losses, allocate
from hf_freeze.experiments.compress.bench import Bench
from hf_freeze.experiments.compress.costs import Cost, Estimate
from hf_freeze.experiments.compress.shapes import Shape

CANDIDATES = 3
_TRIES = 10  # shapes that are measured for one candidate before its limits are called out of reach
_CHANGED = 4.0  # by which the price of one kind of part is raised and lowered for further candidates


def candidates_of(bench: Bench, losses: Losses, estimate: Estimate, smallest: list[Shape]) -> list[Shape]:
    """Different shapes that lose little within the budget, by different opinions about which kind of part is dear; else one of
    the `smallest`. Raises ValueError if none is within the budget."""
    opinions = [dict(losses.remains)]
    for kind in losses.remains:
        opinions += [opinions[0] | {kind: losses.remains[kind] * factor} for factor in (_CHANGED, 1 / _CHANGED)]
    found: list[Shape] = []
    for remains in opinions:
        shape = _within(bench, replace(losses, remains=remains), estimate)
        if shape is not None and shape not in found:
            found.append(shape)
    if not found:
        costs = [bench.cost(shape, losses.measured) for shape in smallest]
        kept = [not bench.budget.excess(cost.bytes, cost.ms) for cost in costs]
        found = [shape for shape, is_kept in zip(smallest, kept, strict=True) if is_kept][:1]
    if not found:
        raise ValueError(
            f"no shape was found within {bench.budget.words()}: each limit can be met, but not all together; give one of them "
            "more room"
        )
    return sorted(found, key=losses.of)[:CANDIDATES]


def _within(bench: Bench, losses: Losses, estimate: Estimate) -> Shape | None:
    """The best shape that is within the budget as measured; the estimate's errors are corrected on the way."""
    budget = bench.budget.with_reserve()
    limit = Cost(bytes=budget.max_bytes or np.inf, ms=budget.max_ms)
    for attempt in range(_TRIES):
        found = allocate(bench.whole, losses, estimate, limit)
        if found is None:
            return None
        shape = found[0]
        cost = bench.cost(shape, losses.measured)
        if not budget.excess(cost.bytes, cost.ms):
            return shape
        expected = estimate.cost(shape)
        factor = min(1.0, expected.bytes / cost.bytes) * 0.99 ** (attempt + 1)
        ms = limit.ms
        if budget.max_ms is not None and cost.ms is not None and expected.ms is not None:
            ms = budget.max_ms * min(1.0, expected.ms / cost.ms) * 0.99 ** (attempt + 1)
        limit = Cost(bytes=(budget.max_bytes or np.inf) * factor, ms=ms)
    return None
