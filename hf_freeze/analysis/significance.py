"""Which differences between rows are significant.

A paired bootstrap over test items (Koehn, 2004, as in sacrebleu), with Student's t for the seeds and Holm's correction (Holm,
1979) for the number of comparisons.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

MANY = 24  # rows, of which all pairs would fill pages
LEVEL = 0.05  # a difference is called significant where its corrected p lies below
TOO_FEW = "too few seeds to test"
REPLICATES = 10_000  # of every interval
_CHUNK = 1 << 22  # item weights that are held at a time


@dataclass(frozen=True)
class Difference:
    """Score of `row` minus score of `base`, means over seeds, in the units of the score that was compared."""

    base: str
    row: str
    difference: float
    low: float  # of the 95 % interval, of this comparison alone
    high: float
    p: float  # two-sided
    p_corrected: float = 1.0  # p after Holm's correction, as `compare` says
    seeds: bool = False  # whether the interval covers the choice of seeds, of both rows

    @property
    def significant(self) -> bool:
        return self.p_corrected < LEVEL

    @property
    def unmarked(self) -> str:
        """What is said of it where it is not significant: of one seed nothing is known of other seeds."""
        return "not significant" if self.seeds else TOO_FEW


def compare(
    rows: Mapping[str, Sequence[np.ndarray]],
    score: Callable[[np.ndarray], np.ndarray],
    *,
    replicates: int | None = None,
    seed: int = 0,
    to_first: bool = False,
) -> list[Difference]:
    """Every pair of `rows`, the first named first; with `to_first`, and of `MANY` rows and more, those with the first. Each row
    is one (N, k) array of items a seed, N and its order shared. The interval of two rows depends on these rows alone, and
    `seed`: it is the same in every table. p of a comparison with the first row, which a grid is made for, is corrected over these
    comparisons; that of any other pair over all pairs.

    Raises ValueError where the runs were tested on different numbers of items.
    """
    if len({len(items) for runs in rows.values() for items in runs}) > 1:
        counts = {row: [len(items) for items in runs] for row, runs in rows.items()}
        raise ValueError(f"runs tested on different numbers of items cannot be paired: {counts}")
    first = next(iter(rows), None)
    all_pairs = len(rows) < MANY and not to_first
    pairs = [pair for pair in combinations(rows, 2) if all_pairs or pair[0] == first]
    if not pairs:
        return []
    replicates = replicates or enough_replicates(len(pairs))
    observed = {row: np.array([float(score(items.sum(0))) for items in runs]) for row, runs in rows.items()}
    means = _bootstrap_means(rows, score, replicates, seed)
    differences = []
    for base, row in pairs:
        difference = float(observed[row].mean() - observed[base].mean())
        drawn = means[row] - means[base] + _seed_deviations(observed[base], observed[row], replicates, seed)
        low, high = np.quantile(drawn[:REPLICATES], [0.025, 0.975])
        beyond = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
        p = float(min(1.0, 2 * (beyond + 1) / (replicates + 1)))  # numpy may count in its own type
        if difference == 0 and not drawn.any():
            p = 1.0
        both = min(len(observed[base]), len(observed[row])) > 1
        differences.append(Difference(base, row, difference, float(low), float(high), p, seeds=both))
    return _corrected(differences, first=pairs[0][0])


def enough_replicates(pairs: int, level: float = LEVEL) -> int:
    """`REPLICATES`, or more for many pairs: the smallest p of B replicates is 2/(B+1), and Holm multiplies it by `pairs`."""
    return max(REPLICATES, int(4 / level) * pairs)


def holm(values: Sequence[float]) -> list[float]:
    """p-values after Holm's step-down correction, in the order given."""
    corrected, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected


def _bootstrap_means(
    rows: Mapping[str, Sequence[np.ndarray]], score: Callable, replicates: int, seed: int
) -> dict[str, np.ndarray]:
    """For each row (replicates,): its score, averaged over its seeds, on the same resampled items for all rows."""
    runs = [items for row in rows.values() for items in row]
    count, width = runs[0].shape
    stacked = np.concatenate([np.asarray(items, float) for items in runs], axis=1)
    drawn = (_draws if count * replicates > _CHUNK else _kept_draws)(count, replicates, seed)
    scores = [score((weights @ stacked).reshape(len(weights), len(runs), width)) for weights in drawn]
    columns = np.concatenate(scores).T
    means, at = {}, 0
    for row, items in rows.items():
        means[row], at = columns[at : at + len(items)].mean(0), at + len(items)
    return means


def resampled_sums(items: np.ndarray, replicates: int = REPLICATES, seed: int = 0) -> np.ndarray:
    """(N, k) items to (replicates, k): the sums over N items that are drawn from them with replacement."""
    return np.concatenate([weights @ items for weights in _draws(len(items), replicates, seed)])


def _draws(count: int, replicates: int, seed: int) -> Iterator[np.ndarray]:
    """How often each of `count` items is drawn, in (some of the replicates, count) integers at a time."""
    rng, chunk = np.random.default_rng(seed), max(1, _CHUNK // count)
    for start in range(0, replicates, chunk):
        yield rng.multinomial(count, np.full(count, 1 / count), size=min(chunk, replicates - start))


@lru_cache(maxsize=1)
def _kept_draws(count: int, replicates: int, seed: int) -> tuple[np.ndarray, ...]:
    """Drawing takes most of the time of a comparison, and all tables of a small test set draw the same."""
    return tuple(weights.astype(np.int32) for weights in _draws(count, replicates, seed))


def _seed_deviations(base: np.ndarray, row: np.ndarray, replicates: int, seed: int) -> np.ndarray:
    """(replicates,): how far the difference of two means over seeds may lie from that of all seeds; 0 for one seed each.

    Drawing seeds with replacement, as items are drawn, understates this: of S seeds by sqrt(S/(S-1)), and after that factor
    still, since so few seeds say little about their own spread. In 600 simulated tests of rows that differ by their seeds
    only, at a level of 5 %, it called 23 % significant with two seeds a row and 14 % with three. Student's t, with the degrees of
    freedom of both rows, called 5.5 %; where one row scatters four times as much as the other, 9 % and 7 %. The spread over
    seeds also holds some of the noise of the items, which so counts twice: where training scatters little, the test is cautious.
    """
    freedom = len(base) + len(row) - 2
    if freedom == 0:
        return np.zeros(replicates)
    variance = sum(scores.var(ddof=1) / len(scores) for scores in (base, row) if len(scores) > 1)
    return np.sqrt(variance) * np.random.default_rng((seed, freedom)).standard_t(freedom, size=replicates)


def _corrected(differences: list[Difference], first: str) -> list[Difference]:
    pairs = holm([d.p for d in differences])
    with_first = iter(holm([d.p for d in differences if d.base == first]))
    return [
        replace(d, p_corrected=next(with_first) if d.base == first else p)
        for d, p in zip(differences, pairs, strict=True)
    ]
