"""Metrics that work offline. They are plain classes; `evaluate.load` downloads a script even for accuracy.

    metric = load("sacrebleu", tokenize="13a")
    metric.add_batch(predictions=["a cat"], references=[["the cat", "a cat"]])
    metric.compute()

They are subclasses of `evaluate.Metric` with its methods `add`, `add_batch` and `compute`, and work in `evaluate.combine`.
Importing this package imports evaluate, sacrebleu and scikit-learn, which takes seconds; `import hf_freeze` does not.
"""

from typing import Any

import hf_freeze.lab.installed  # noqa: F401  first, for its message

from ._base import OfflineMetric
from .classification import F1, Accuracy, MatthewsCorrelation
from .perplexity import Perplexity
from .translation import ChrF, SacreBLEU

METRICS: dict[str, type[OfflineMetric]] = {
    metric.name: metric for metric in (SacreBLEU, ChrF, Perplexity, Accuracy, F1, MatthewsCorrelation)
}
"""Name -> metric, such as `"sacrebleu"`, `"perplexity"` or `"accuracy"`."""


def load(name: str, **kwargs: Any) -> OfflineMetric:
    """The metric called `name`; `kwargs` are its options and those of `evaluate.Metric` (cache_dir, num_process ...).

    Raises ValueError for an unknown name or option.
    """
    if name not in METRICS:
        raise ValueError(f"unknown metric {name!r}; choose from {sorted(METRICS)}")
    return METRICS[name](**kwargs)


__all__ = [
    "F1",
    "METRICS",
    "Accuracy",
    "ChrF",
    "MatthewsCorrelation",
    "OfflineMetric",
    "Perplexity",
    "SacreBLEU",
    "load",
]
