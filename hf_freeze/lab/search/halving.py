"""Successive halving with several goals: which trials go on after a rung, and which rows no other beats.

Optuna's pruners know one goal only: `Trial.report` and `should_prune` raise NotImplementedError in a study of several. And by the
dev loss alone, a small model would always be stopped for a large one. So a trial is compared by its dev loss with the trials that
cost no more than it does, in any goal. Without costs among the goals these are all trials.
"""

import math
from collections.abc import Sequence

from hf_freeze.lab.pareto import on_front

Point = tuple[float, ...]  # the dev loss, then the costs among the goals; less is better


def goes_on(trial: Point, others: Sequence[Point], keep: float) -> bool:
    """Whether the dev loss of `trial` at a rung is in the best share `keep` of it and those of `others`, which have come to the
    rung by now, that cost no more. A trial that no other beats always goes on."""
    cheaper = [other for other in others if all(a <= b for a, b in zip(other[1:], trial[1:], strict=True))]
    better = sum(other[0] < trial[0] for other in cheaper)
    return better < math.ceil(keep * (len(cheaper) + 1))


def front_of(points: dict[str, Point]) -> dict[str, Point]:
    """The points that no other is as good as in every goal and better than in one."""
    return {name: points[name] for name, best in zip(points, on_front(list(points.values())), strict=True) if best}
