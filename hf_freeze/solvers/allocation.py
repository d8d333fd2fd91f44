"""How much goes where: the least sum of costs over parts for a total number of removals."""

import heapq
import itertools
from collections.abc import Sequence


def allocate(costs: Sequence[Sequence[float]], removals: int, *, most: Sequence[int], step: int = 1) -> list[int]:
    """The number of units to remove of each part, so that their sum is `removals`, rounded up to a multiple of `step`.

    `costs`: of each part, the error after 0, 1, 2 … removals, not falling, as `columns.eliminate` gives it. `most`: of each part,
    how many may go. Each time, the `step` units go whose removal costs least for one unit, on the lower convex hull of the
    costs; for convex costs this is the least sum (Fox, 1966, https://doi.org/10.1287/mnsc.13.3.210).

    Raises ValueError if the parts cannot lose so many.
    """
    if removals > sum(most):
        raise ValueError(f"cannot remove {removals} units: at most {sum(most)} may go")
    return allocate_sizes(costs, removals, most=most, steps=[step] * len(costs), sizes=[1] * len(costs))


def allocate_sizes(
    costs: Sequence[Sequence[float]],
    size: float,
    *,
    most: Sequence[int],
    steps: Sequence[int],
    sizes: Sequence[float],
) -> list[int]:
    """As `allocate`, for units of different `sizes`, those of each part, which go in `steps` of its own: at least `size` goes,
    or all that may, where the cost is least for what it frees."""
    parts = zip(costs, most, steps, strict=True)
    slopes = [_hull(list(part)[: limit // step * step + 1 : step]) for part, limit, step in parts]
    frees = [step * each for step, each in zip(steps, sizes, strict=True)]
    removed = [0] * len(slopes)
    ready = [(part[0] / frees[number], number) for number, part in enumerate(slopes) if part]
    heapq.heapify(ready)
    while ready and size > 1e-9 * max(frees):
        _, number = heapq.heappop(ready)
        removed[number] += 1
        size -= frees[number]
        if removed[number] < len(slopes[number]):
            heapq.heappush(ready, (slopes[number][removed[number]] / frees[number], number))
    return [count * step for count, step in zip(removed, steps, strict=True)]


def _hull(costs: list[float]) -> list[float]:
    """The slope of the lower convex hull after each step."""
    corners: list[int] = []
    for place, cost in enumerate(costs):
        while len(corners) > 1:
            first, second = corners[-2:]
            if (costs[second] - costs[first]) * (place - first) < (cost - costs[first]) * (second - first):
                break
            corners.pop()
        corners.append(place)
    slopes: list[float] = []
    for start, end in itertools.pairwise(corners):
        slopes += [(costs[end] - costs[start]) / (end - start)] * (end - start)
    return slopes
