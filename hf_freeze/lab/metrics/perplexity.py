"""Perplexity from summed negative log-likelihoods and token counts, which a language model's loss already gives."""

import math

from datasets import Features, Value

from ._base import OfflineMetric


class Perplexity(OfflineMetric):
    """exp(sum of nll / sum of tokens), with natural logarithms.

    `nll`: summed (not averaged) negative log-likelihoods, one for each batch or text. `tokens`: the number of tokens in each
    sum. Multiply a mean loss by its token count first.
    """

    name = "perplexity"
    inputs = Features({"nll": Value("float64"), "tokens": Value("int64")})

    def check_inputs(self, *, nll: list, tokens: list) -> dict[str, list]:  # type: ignore[override]
        for index, (loss, count) in enumerate(zip(nll, tokens, strict=True)):
            if not isinstance(loss, int | float):
                raise ValueError(f"nll[{index}] must be a number, not {type(loss).__name__}: {loss!r}")
            if loss < -1e-3:  # rounding can give values slightly below 0
                raise ValueError(f"nll[{index}] is {loss}: a negative log-likelihood is at least 0")
            if not isinstance(count, int | float) or count < 0 or not float(count).is_integer():
                raise ValueError(f"tokens[{index}] must be a count, not {count!r}")
        return {"nll": nll, "tokens": [int(count) for count in tokens]}

    def _compute(self, *, nll: list[float], tokens: list[int]) -> dict[str, float]:  # type: ignore[override]
        total = sum(tokens)
        if total == 0:
            raise ValueError(f"cannot compute the perplexity of {len(tokens)} items with 0 tokens in total")
        mean = sum(nll) / total if not all(map(math.isfinite, nll)) else math.fsum(nll) / total
        return {"perplexity": _exp(mean), "nll_per_token": mean, "tokens": total}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
