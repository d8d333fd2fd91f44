"""Choose the cut-offs that divide a vocabulary into bands for adaptive embeddings."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_freeze.methods.checks import check_integer, is_number

_MOST_BANDS = 4
_DISORDER = 2 / 3  # the largest share of the gain from an order by frequency that the ids may miss
_GRID = 128  # number of values to try for the last of three cut-offs
_DIGITS = 9  # to which expected logarithms are rounded, so that sums in different orders tie


def choose_cutoffs(
    token_counts: Sequence[int] | Any,
    budget: int | float,
    *,
    width: int,
    hidden_size: int | None = None,
    factor: int = 4,
    bands: int = 3,
) -> list[int]:
    """Cut-offs for `AdaptiveEmbedding(cutoffs=..., width=width, factor=factor)` that give frequent tokens wide rows.

        counts = analysis.count_tokens(tokenizer, texts)
        cutoffs = analysis.choose_cutoffs(counts, 0.5, width=model.config.d_model)

    `token_counts` (V,): the number of occurrences of each id, or shares. `budget`: the number of parameters of tables and
    projections, or a share in (0, 1) of the V x `hidden_size` parameters of a dense table (`hidden_size` None: `width`).

    Among all cut-offs for 2 to `bands` bands within the budget, the function returns those with the largest sum over ids of
    p(id) · log width(id), and among equal ones those with the fewest parameters. The sum is a proxy for quality: halving the
    width of a row costs the same at every width.

    With two bands the best cut-off lies at the edge of the budget, since a higher cut-off never narrows a row. With three, the
    search follows that edge for every value of the second cut-off. Both results are exact. With four bands, the third cut-off
    takes 128 values in a geometric sequence (all values if V is no larger), and the result is exact for each of them.

    Raises ValueError for ids whose order is too far from falling frequency for bands to make sense. An order by frequency gains
    something over a random order in the sum above; the chosen bands must not miss more than 2/3 of this gain. (Unigram
    vocabularies miss almost nothing; small BPE vocabularies up to about half, because characters come first.) It also raises
    ValueError for counts that are negative or all zero, a budget below the least possible, an invalid width, factor, hidden
    size or number of bands, and more bands than 4, than ids or than the width allows.
    """
    counts = _checked_counts(token_counts)
    for name, value, least in (("width", width, 1), ("factor", factor, 2), ("bands", bands, 2)):
        check_integer(value, least, "choose_cutoffs", name)
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
    results = [best for search in searches if (best := search.best(limit)) is not None]
    if not results:
        least = min(search.least for search in searches)
        raise ValueError(
            f"choose_cutoffs(budget={budget!r}): that is {limit} parameters, and with width={width}, factor={factor} and "
            f"hidden_size={hidden} at least {least} are needed"
        )
    cutoffs = max(results)[2]
    _check_order(counts, cutoffs, widths)
    return cutoffs


def _checked_counts(token_counts: Any) -> np.ndarray:
    counts = np.asarray(token_counts)
    fits = counts.ndim == 1 and counts.dtype.kind in "iuf" and len(counts) >= 2
    if not fits or not np.isfinite(counts).all() or (counts < 0).any() or not counts.any():
        raise ValueError(
            f"choose_cutoffs: token_counts must hold a number of at least 0 for each of at least 2 ids, and not only zeros; got "
            f"{counts.dtype} of shape {counts.shape}"
        )
    return counts.astype(np.float64)


def _limit(budget: Any, dense: int) -> int:
    """`budget` as a number of parameters; `dense` is that of a dense table."""
    if not is_number(budget) or budget <= 0 or (isinstance(budget, float) and budget >= 1):
        raise ValueError(
            f"choose_cutoffs(budget={budget!r}): must be a number of parameters, an integer of at least 1, or a share of the "
            "dense table in (0, 1)"
        )
    return budget if isinstance(budget, int) else int(budget * dense)


def _check_order(counts: np.ndarray, cutoffs: list[int], widths: list[int]) -> None:
    """Raise ValueError if the ids are too far from an order by frequency; `choose_cutoffs` explains the limit."""
    edges = np.array(cutoffs)
    gains = -np.diff(np.log(widths[: len(cutoffs) + 1]))
    covered, ordered = (np.cumsum(order)[edges - 1] / counts.sum() for order in (counts, np.sort(counts)[::-1]))
    if gains @ (ordered - covered) > _DISORDER * (gains @ (ordered - edges / len(counts))):
        worst = int((ordered - covered).argmax())
        raise ValueError(
            f"choose_cutoffs: the ids are not ordered by frequency: the first {cutoffs[worst]} cover {covered[worst]:.0%} of all "
            f"occurrences, and the most frequent {cutoffs[worst]} cover {ordered[worst]:.0%}, so "
            f"{ordered[worst] - covered[worst]:.0%} would be gained by sorting; number the tokens by frequency first"
        )


class _Search:
    """The search for the cut-offs of bands with these `widths`.

    Both the parameters and the expected logarithm of the width are sums over the cut-offs c_j, plus a constant. For the
    parameters, c_j adds c_j times the difference (`steps`) of the widths on its two sides. For the logarithm, it adds the share
    of occurrences of the first c_j ids times the logarithm of the ratio (`gains`) of these widths. The constants are the cost
    (`fixed`) and the logarithm of the narrowest width for all ids. `least`: the smallest cost.
    """

    def __init__(self, counts: np.ndarray, widths: list[int], hidden: int) -> None:
        self.counts, self.widths = counts, widths
        self.steps = [wide - narrow for wide, narrow in itertools.pairwise(widths)]
        self.gains = [math.log(wide / narrow) for wide, narrow in itertools.pairwise(widths)]
        self.fixed = widths[-1] * len(counts) + hidden * sum(widths)
        self.least = self.fixed + sum(step * cutoff for cutoff, step in enumerate(self.steps, 1))

    def best(self, limit: int) -> tuple[float, int, list[int]] | None:
        """(expected logarithm, minus the number of parameters, cut-offs); None if no cut-offs are within the limit."""
        covered = np.concatenate([[0.0], np.cumsum(self.counts)]) / self.counts.sum()
        result = self._best(covered, limit - self.fixed, len(self.steps), len(self.counts))
        if result is None:
            return None
        gain, cost, cutoffs = result
        return round(math.log(self.widths[-1]) + gain, _DIGITS), -(cost + self.fixed), cutoffs

    def _best(self, covered: np.ndarray, rest: int, number: int, end: int) -> tuple[float, int, list[int]] | None:
        """(gain, parameters, cut-offs) of the best `number` first cut-offs, all below `end`, with at most `rest` parameters."""
        steps, gains = self.steps, self.gains
        if number == 3:
            outer = np.arange(3, end) if end <= _GRID else np.unique(np.geomspace(3, end - 1, _GRID).astype(np.int64))
            results = []
            for last in outer.tolist():
                inner = self._best(covered, rest - steps[2] * last, 2, last)
                if inner is not None:
                    gain, cost, cutoffs = inner
                    results.append((gain + gains[2] * covered[last], cost + steps[2] * last, [*cutoffs, last]))
            return max(results, key=lambda result: (round(result[0], _DIGITS), -result[1]), default=None)
        # The largest first cut-off for each value of the second. With one cut-off, the second is the end and costs nothing.
        (step, beyond), (inside, outside) = (*steps[:number], 0)[:2], (*gains[:number], 0.0)[:2]
        second = np.arange(2, end) if beyond else np.array([end])
        first = np.minimum((rest - beyond * second) // step, second - 1)
        first, second = first[first >= 1], second[first >= 1]
        if not len(first):
            return None
        first = np.maximum(1, np.searchsorted(covered, covered[first]))  # the lowest cut-off with the same coverage
        gain = inside * covered[first] + outside * covered[second]
        cost = step * first + beyond * second
        rounded = gain.round(_DIGITS)
        most = np.flatnonzero(rounded == rounded.max())
        best = most[cost[most].argmin()]
        return float(gain[best]), int(cost[best]), [int(first[best]), *([int(second[best])] if beyond else [])]
