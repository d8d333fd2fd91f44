"""Where to divide a vocabulary for adaptive embeddings."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MOST_BANDS = 4
_DISORDER = 2 / 3  # of what an order by frequency gives over none: the most that may be missing
_GRID = 128  # values of the outermost of three cut-offs
_DIGITS = 9  # of expected logarithms: sums in another order still tie


def choose_cutoffs(
    token_counts: Sequence[int] | Any,
    budget: int | float,
    *,
    width: int,
    hidden_size: int | None = None,
    factor: int = 4,
    bands: int = 3,
) -> list[int]:
    """Cut-offs for `AdaptiveEmbedding(cutoffs=..., width=width, factor=factor)` that give the tokens of the text wide rows.

        counts = analysis.count_tokens(tokenizer, texts)
        cutoffs = analysis.choose_cutoffs(counts, 0.25, width=512)

    `token_counts` (V,): how often each id occurs; shares serve as well. `budget`: parameters of tables and projections, or a
    share in (0, 1) of the V x `hidden_size` parameters of a dense table (`hidden_size` None: `width`). Of all cut-offs of 2 to
    `bands` bands within the budget, those with the largest sum over ids of p(id) · log width(id): a stand-in for quality, in
    which a row of half the width costs as much whatever the width. Of several such, those with the fewest parameters.

    With two bands that is at the edge of the budget, since a higher cut-off never narrows a row. With three, the edge is walked
    along for every value of the second one: both are exact. With four, the third one takes 128 values in a geometric row (all
    where V is no larger), exact for each.

    Raises ValueError for ids that are ordered so unlike falling frequency that bands of them make little sense: where the bands
    chosen miss more than 2/3 of what ids in that order have over ids in no order in the sum above. (Unigram vocabularies miss
    next to nothing, those of BPE up to about a half where they are small: characters come first.) Also for counts that are
    negative or all zero, a budget below the least possible, a width, factor, hidden size or number of bands that is none, and
    more bands than 4, than ids or than the width allows.
    """
    counts = _checked_counts(token_counts)
    for name, value, least in (("width", width, 1), ("factor", factor, 2), ("bands", bands, 2)):
        if type(value) is not int or value < least:
            raise ValueError(f"choose_cutoffs({name}={value!r}): must be an integer of at least {least}")
    hidden = width if hidden_size is None else hidden_size
    if type(hidden) is not int or hidden < width:
        raise ValueError(f"choose_cutoffs(hidden_size={hidden_size!r}): must be an integer of at least width={width}")
    widths = [width // factor**band for band in range(bands)]
    if bands > min(_MOST_BANDS, len(counts)) or widths[-1] == 0:
        most = min(_MOST_BANDS, len(counts), sum(width // factor**band > 0 for band in range(_MOST_BANDS)))
        raise ValueError(
            f"choose_cutoffs(bands={bands}): must be in 2..{most} for {len(counts)} ids, width={width} and factor={factor}"
        )
    limit = _limit(budget, len(counts) * hidden)
    searches = [_Search(counts, widths[:number], hidden) for number in range(2, bands + 1)]
    found = [best for search in searches if (best := search.best(limit)) is not None]
    if not found:
        least = min(search.least for search in searches)
        raise ValueError(
            f"choose_cutoffs(budget={budget!r}): that is {limit} parameters, and with width={width}, factor={factor} and "
            f"hidden_size={hidden} at least {least} are needed"
        )
    cutoffs = max(found)[2]
    _check_order(counts, cutoffs, widths)
    return cutoffs


def _checked_counts(token_counts: Any) -> np.ndarray:
    counts = np.asarray(token_counts)
    numbers = counts.ndim == 1 and counts.dtype.kind in "iuf" and len(counts) >= 2
    if not numbers or not np.isfinite(counts).all() or (counts < 0).any() or not counts.any():
        raise ValueError(
            f"choose_cutoffs: token_counts must hold a number of at least 0 for each of at least 2 ids, and not only zeros; got "
            f"{counts.dtype} of shape {counts.shape}"
        )
    return counts.astype(np.float64)


def _limit(budget: Any, dense: int) -> int:
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not number or budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise ValueError(
            f"choose_cutoffs(budget={budget!r}): must be a number of parameters, an integer of at least 1, or a share of the "
            "dense table in (0, 1)"
        )
    return budget if isinstance(budget, int) else int(budget * dense)


def _check_order(counts: np.ndarray, cutoffs: list[int], widths: list[int]) -> None:
    places = np.array(cutoffs)
    gains = -np.diff(np.log(widths[: len(cutoffs) + 1]))
    found, ordered = (np.cumsum(each)[places - 1] / counts.sum() for each in (counts, np.sort(counts)[::-1]))
    if gains @ (ordered - found) > _DISORDER * (gains @ (ordered - places / len(counts))):
        worst = int((ordered - found).argmax())
        raise ValueError(
            f"choose_cutoffs: the ids are not ordered by frequency: the first {cutoffs[worst]} cover {found[worst]:.0%} of all "
            f"occurrences, and the most frequent {cutoffs[worst]} cover {ordered[worst]:.0%}, so "
            f"{ordered[worst] - found[worst]:.0%} would be gained by sorting; number the tokens by frequency first"
        )


@dataclass(frozen=True)
class _Search:
    """Cut-offs of bands of these widths, as many as are asked for.

    Parameters and the expected logarithm of the width are sums over the cut-offs c_j: of c_j times the step between the widths on
    its sides, and of the share of the first c_j ids times the logarithm of their ratio; plus what the narrowest width costs and
    gives for all ids.
    """

    counts: np.ndarray
    widths: list[int]
    hidden: int

    @property
    def steps(self) -> list[int]:
        return [wide - narrow for wide, narrow in itertools.pairwise(self.widths)]

    @property
    def gains(self) -> list[float]:
        return [math.log(wide / narrow) for wide, narrow in itertools.pairwise(self.widths)]

    @property
    def fixed(self) -> int:
        return self.widths[-1] * len(self.counts) + self.hidden * sum(self.widths)

    @property
    def least(self) -> int:
        return self.fixed + sum(step * cutoff for cutoff, step in enumerate(self.steps, 1))

    def best(self, limit: int) -> tuple[float, int, list[int]] | None:
        """(expected logarithm, minus the parameters, cut-offs), or None where none is within the limit."""
        covered = np.concatenate([[0.0], np.cumsum(self.counts)]) / self.counts.sum()
        found = self._best(covered, limit - self.fixed, len(self.steps), len(self.counts))
        if found is None:
            return None
        gain, cost, cutoffs = found
        return round(math.log(self.widths[-1]) + gain, _DIGITS), -(cost + self.fixed), cutoffs

    def _best(self, covered: np.ndarray, rest: int, number: int, end: int) -> tuple[float, int, list[int]] | None:
        """(gain, parameters, cut-offs) of the first `number` cut-offs, all below `end`, for parameters of at most `rest`."""
        steps, gains = self.steps, self.gains
        if number == 3:
            outer = np.arange(3, end) if end <= _GRID else np.unique(np.geomspace(3, end - 1, _GRID).astype(np.int64))
            found = []
            for last in outer.tolist():
                inner = self._best(covered, rest - steps[2] * last, 2, last)
                if inner is not None:
                    gain, cost, cutoffs = inner
                    found.append((gain + gains[2] * covered[last], cost + steps[2] * last, [*cutoffs, last]))
            return max(found, key=lambda each: (round(each[0], _DIGITS), -each[1]), default=None)
        # The first cut-off for every second one; where there is none, as if that were the end and cost nothing.
        (step, beyond), (inside, outside) = (*steps[:number], 0)[:2], (*gains[:number], 0.0)[:2]
        second = np.arange(2, end) if beyond else np.array([end])
        first = np.minimum((rest - beyond * second) // step, second - 1)
        first, second = first[first >= 1], second[first >= 1]
        if not len(first):
            return None
        first = np.maximum(1, np.searchsorted(covered, covered[first]))  # the lowest that covers as much
        gain = inside * covered[first] + outside * covered[second]
        cost = step * first + beyond * second
        rounded = gain.round(_DIGITS)
        most = np.flatnonzero(rounded == rounded.max())
        best = most[cost[most].argmin()]
        return float(gain[best]), int(cost[best]), [int(first[best]), *([int(second[best])] if beyond else [])]
