"""How the rows of each task are scored and compared: its columns, their units, and what a plot shows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hf_freeze import scores
from hf_freeze.lab.tasks.items import accuracy, bleu, log_perplexity

# name -> (heading, where it is in a record, format). A column that no row has is not shown.
Columns = dict[str, tuple[str, tuple[str, ...], str]]
TO_FIRST = "first"  # in place of a place in a record: how many times the first row has what this row has of a column

_COSTS: Columns = {
    "epochs": ("best epoch", ("epochs_to_convergence",), ".1f"),
    "steps": ("steps to 90 %", ("steps_to_90",), ",.0f"),  # from its log (report/convergence.py)
    "share": ("share %", ("parameters", "trainable_share"), ".1%"),
    "total": ("total k", ("parameters", "total"), ",.0f"),  # shown where the rows differ in it
    "work": ("macs k", ("multiply_adds",), ",.0f"),  # the same
    "stored": ("stored MB", ("parameters", "stored_bytes"), ".2f"),
    "minutes": ("train min", ("seconds", "train"), ".1f"),
}

_UNITS = {"total": 1e-3, "work": 1e-3, "stored": 1e-6, "minutes": 1 / 60}

_IMAGE_COSTS: Columns = {
    "epochs": ("epochs", ("epochs_trained",), ".0f"),
    "steps": ("steps to 90 %", ("steps_to_90",), ",.0f"),
    "total": ("parameters", ("parameters", "total"), ",.0f"),
    "fewer": ("times fewer", (TO_FIRST, "total"), ".2f"),
    "stored": ("stored kB", ("parameters", "stored_bytes"), ",.1f"),
    "smaller": ("times smaller", (TO_FIRST, "stored"), ".2f"),
    "minutes": ("train min", ("seconds", "train"), ".1f"),
}


@dataclass(frozen=True)
class Axis:
    """Of a plot of quality against a cost. `unit`: of the axis, in that of the column; `asks`: what the plot answers."""

    label: str
    unit: float
    asks: str


_STORED_ASKS = "What a smaller checkpoint costs"


@dataclass(frozen=True)
class TaskScoring:
    """How the rows of a task are compared: by the first of its columns."""

    name: str  # of that column, in a sentence
    qualities: dict[str, tuple[str, tuple[str, ...], str]]
    higher: bool  # is a higher score better?
    score: Callable[[np.ndarray], np.ndarray]  # of summed items
    item: str  # what is resampled
    scale: Callable[[float], float]  # of the column to the scale of `score`, on which differences are taken
    costs: Columns = field(default_factory=lambda: _COSTS)
    units: dict[str, float] = field(default_factory=lambda: _UNITS)
    axes: dict[str, Axis] = field(
        default_factory=lambda: {
            "share": Axis("trained parameters, % of all", 100, "What training fewer parameters costs"),
            "total": Axis("parameters, thousands", 1, "What fewer parameters cost"),
            "stored": Axis("stored in the checkpoint, MB", 1, _STORED_ASKS),
        }
    )
    rows_are: str = "trained"  # heading of the labels
    digits: int = 1  # of a difference in the table
    margin: float = 1.0  # on the scale of `score`: a loss below it counts as none, if the interval excludes larger ones

    @property
    def columns(self) -> Columns:
        return self.qualities | self.costs

    @property
    def quality(self) -> str:
        return next(iter(self.qualities))

    def loses_at_most(self, low: float, high: float) -> bool:
        """Whether an interval of differences excludes every loss above the margin (a test of non-inferiority)."""
        return low > -self.margin if self.higher else high < self.margin

    def loses(self, low: float, high: float) -> bool:
        """Whether all of an interval of differences is a loss, and some of it as large as the margin."""
        return (high < 0 if self.higher else low > 0) and not self.loses_at_most(low, high)

    @property
    def unit(self) -> str:
        """What a difference is counted in: BLEU, points of accuracy, or the perplexity that it is a ratio of."""
        return self.name if self.name.isupper() or self.scale is math.log else "points"

    @property
    def margin_in_words(self) -> str:
        """Such as "1 BLEU" or "2 %"."""
        if self.scale is math.log:
            return f"{100 * (math.exp(self.margin) - 1):.0f} %"
        return f"{self.margin:g} {'point' if self.unit == 'points' and self.margin == 1 else self.unit}"

    def signed(self, difference: float, digits: int | None = None) -> str:
        """A difference of scores as it is shown: of BLEU in points, of log-perplexity as a ratio of perplexities."""
        digits = self.digits if digits is None else digits
        if self.scale is math.log:
            return f"×{math.exp(difference):.{digits + 2}f}"
        text = f"{difference:+.{digits}f}"
        return (text if float(text) else text[1:]).replace("-", "−")


def _in_percent(
    name: str,
    short: str,
    metric: str,
    score: Callable[[np.ndarray], np.ndarray],
    *,
    item: str = "examples",
    **more: str,
) -> TaskScoring:
    """Scores in %, the higher the better. `more`: metric -> heading of further columns."""
    return TaskScoring(
        name,
        {
            metric: (f"{short} %", ("metrics", f"test_{metric}"), ".1f"),
            **{other: (f"{heading} %", ("metrics", f"test_{other}"), ".1f") for other, heading in more.items()},
            f"dev_{metric}": (f"dev {short} %", ("metrics", f"dev_{metric}"), ".1f"),
        },
        higher=True,
        score=lambda sums: 100 * score(sums),
        item=item,
        scale=float,
        units=_UNITS | dict.fromkeys((metric, f"dev_{metric}", *more), 100),
    )


def _perplexity(name: str, more: Columns, **units: float) -> TaskScoring:
    """`more`: columns between the perplexities on the test and on the dev split."""
    return TaskScoring(
        name,
        {
            "test_perplexity": ("test ppl", ("metrics", "test_perplexity"), ".2f"),
            **more,
            "perplexity": ("dev ppl", ("metrics", "dev_perplexity"), ".2f"),
        },
        higher=False,
        score=log_perplexity,
        item="blocks of text",
        scale=math.log,
        margin=math.log(1.02),
        units=_UNITS | units,
    )


SCORING = {
    "translation": TaskScoring(
        "BLEU",
        {
            "bleu": ("BLEU", ("metrics", "test_bleu"), ".1f"),
            "chrf": ("chrF", ("metrics", "test_chrf"), ".1f"),
            "perplexity": ("dev ppl", ("metrics", "dev_perplexity"), ".2f"),
        },
        higher=True,
        score=bleu,
        item="sentences",
        scale=float,
    ),
    "language-modelling": _perplexity("test perplexity", {}),
    "masked-lm": _perplexity(
        "test perplexity of masked tokens",
        {"accuracy": ("masked acc %", ("metrics", "test_accuracy"), ".1f")},
        accuracy=100,
    ),
    "sequence-classification": TaskScoring(
        "accuracy",
        {
            "accuracy": ("accuracy %", ("metrics", "test_accuracy"), ".1f"),
            "mismatched": ("mismatched %", ("metrics", "mismatched_accuracy"), ".1f"),
            "dev_accuracy": ("dev acc %", ("metrics", "dev_accuracy"), ".1f"),
        },
        higher=True,
        score=accuracy,
        item="examples",
        scale=float,
        units=_UNITS | {"accuracy": 100, "mismatched": 100, "dev_accuracy": 100},
    ),
    "regression": _in_percent("Pearson correlation", "Pearson", "pearson", scores.pearson, spearman="Spearman"),
    "token-classification": _in_percent(
        "F1 of entities", "F1", "f1", scores.of_spans, item="sentences", precision="precision", recall="recall"
    ),
    "question-answering": _in_percent("F1 of words", "F1", "f1", scores.mean, item="questions", exact="exact match"),
    "multiple-choice": _in_percent("accuracy", "accuracy", "accuracy", scores.mean, item="questions"),
    "image-classification": TaskScoring(
        "accuracy",
        {"accuracy": ("accuracy %", ("metrics", "test_accuracy"), ".2f")},
        higher=True,
        score=accuracy,
        item="images",
        scale=float,
        costs=_IMAGE_COSTS,
        units={"accuracy": 100, "stored": 1e-3, "minutes": 1 / 60},
        axes={
            "total": Axis("parameters", 1, "What fewer parameters cost"),
            "stored": Axis("stored in the checkpoint, kB", 1, _STORED_ASKS),
        },
        rows_are="method",
        digits=2,
    ),
}

_BY_METRIC = {  # of tasks with several: (task, metric), for those that are not the first
    ("sequence-classification", "f1"): _in_percent("F1 score", "F1", "f1", scores.f1, accuracy="accuracy"),
    ("sequence-classification", "matthews"): _in_percent(
        "Matthews correlation", "Matthews", "matthews", scores.matthews, accuracy="accuracy"
    ),
}


def scoring_of(task: str, metric: str = "") -> TaskScoring:
    """How rows of `task` are compared, by `metric` where the recipe names one."""
    return _BY_METRIC.get((task, metric), SCORING[task])
