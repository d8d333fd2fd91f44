"""Accuracy, F1 and Matthews correlation of class labels, computed by scikit-learn."""

from typing import Any, ClassVar

from datasets import Features, Value
from sklearn import metrics

from ._base import OfflineMetric

_AVERAGES = ("binary", "micro", "macro", "weighted", None)


class LabelMetric(OfflineMetric):
    """Predicted class labels against true ones, as integers."""

    inputs = Features({"predictions": Value("int64"), "references": Value("int64")})

    def check_inputs(self, **columns: list) -> dict[str, list]:
        for name, values in columns.items():
            for index, value in enumerate(values):
                if not isinstance(value, int | float) or not float(value).is_integer():
                    raise ValueError(
                        f"{name}[{index}] must be a class label (int), not {type(value).__name__} {value!r}; "
                        "convert logits with argmax(-1)"
                    )
        return {name: [int(value) for value in values] for name, values in columns.items()}


class Accuracy(LabelMetric):
    """The share of predictions that equal their references."""

    name = "accuracy"

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, float]:  # type: ignore[override]
        return {"accuracy": float(metrics.accuracy_score(references, predictions))}


class F1(LabelMetric):
    """2 TP / (2 TP + FP + FN), and 0 for 0 / 0. `average` combines the classes; None returns a list with one value per class."""

    name = "f1"
    options: ClassVar[dict[str, Any]] = {"average": "binary", "labels": None, "pos_label": 1}

    def check_options(self, *, average: str | None, **options: Any) -> None:  # type: ignore[override]
        if average not in _AVERAGES:
            raise ValueError(f"unknown average {average!r}; choose from {list(_AVERAGES)}")

    def _compute(  # type: ignore[override]
        self, *, predictions: list[int], references: list[int], average: str | None, **options: Any
    ) -> dict[str, Any]:
        classes = sorted({*predictions, *references})
        if average == "binary" and len(classes) > 2:
            raise ValueError(f"average='binary' needs two classes, not {classes}; choose from {list(_AVERAGES[1:])}")
        score = metrics.f1_score(references, predictions, average=average, zero_division=0.0, **options)  # type: ignore[arg-type]
        return {"f1": score.tolist() if average is None else float(score)}  # type: ignore[union-attr]


class MatthewsCorrelation(LabelMetric):
    """(TP TN - FP FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)), or its multi-class form; 0 for 0 / 0."""

    name = "matthews_correlation"

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, float]:  # type: ignore[override]
        return {"matthews_correlation": float(metrics.matthews_corrcoef(references, predictions))}
