"""How good a model is in its engine: by the score of its task, or by a metric of the user's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.analysis.significance import compare
from hf_freeze.experiments.compress.serving import Engine, answers_of, items_of, references_of
from hf_freeze.experiments.tasks.scoring import SCORING

# metric(predictions, references): translations, or numbers of classes, in the order of the split. Larger is better.
Metric = Callable[[Sequence[Any], Sequence[Any]], float]

_REPLICATES = 1000  # resamples of a split, each of which an own metric scores twice


class Scoring:
    """Of the models of one task. `measure` runs a model, and everything else is computed from what it returns.

    Raises ValueError for a metric that cannot be called, or that returns something else than a finite number.
    """

    def __init__(self, task: str, decoding: Mapping[str, Any], metric: Metric | None = None) -> None:
        if metric is not None and not callable(metric):
            raise ValueError(
                f"metric={metric!r}: must be a function of predictions and references that returns a number"
            )
        self._task, self._decoding, self.metric, self._scoring = task, decoding, metric, SCORING[task]
        own = getattr(metric, "__name__", type(metric).__name__).replace("_", " ")
        self.name = self._scoring.name if metric is None else own
        self.item = self._scoring.item
        self._form = ".1f" if metric is None else ".4g"

    def measure(self, folder: Path, engine: Engine, split: Any) -> np.ndarray:
        """For each example of `split`: (N, k) what it adds to the score of the task, or (N,) the prediction for an own metric."""
        if self.metric is None:
            return items_of(folder, engine, self._task, split, self._decoding)
        return np.array(answers_of(folder, engine, self._task, split, self._decoding))

    def score(self, measured: np.ndarray, split: Any) -> float:
        if self.metric is None:
            return float(self._scoring.score(measured.sum(0)))
        return self._own(measured.tolist(), references_of(self._task, split))

    def difference(self, before: np.ndarray, after: np.ndarray, split: Any) -> tuple[float, float, float]:
        """(difference of the scores, lower, upper end of its 95 % interval), by a paired bootstrap over the examples."""
        if self.metric is None:
            found = compare({"before": [before], "after": [after]}, self._scoring.score)[0]
            return found.difference, found.low, found.high
        answers, references = (before.tolist(), after.tolist()), references_of(self._task, split)
        rng, differences = np.random.default_rng(0), []
        for _ in range(_REPLICATES):
            drawn = rng.integers(len(references), size=len(references))
            scores = [self._own([one[i] for i in drawn], [references[i] for i in drawn]) for one in answers]
            differences.append(scores[1] - scores[0])
        low, high = np.quantile(differences, [0.025, 0.975])
        return self.score(after, split) - self.score(before, split), float(low), float(high)

    def shown(self, value: float, *, signed: bool = False) -> str:
        return f"{value:{'+' if signed else ''}{self._form}}"

    def _own(self, predictions: list[Any], references: list[Any]) -> float:
        assert self.metric is not None
        value: Any = self.metric(predictions, references)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"metric {self.name} returned {value!r}: must be a finite number, larger for better predictions"
            )
        return number
