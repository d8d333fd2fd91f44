"""What the rows of a report may be weighed by, and which of them no other row beats in all of it (the Pareto front)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_freeze.lab.pareto import on_front
from hf_freeze.lab.report.finished_runs import Run, by_row, machine_of
from hf_freeze.lab.tasks.scoring import Axis, TaskScoring

_COSTS = ("share", "total", "work", "stored")  # of the columns of a task; of the others no less is wanted
_WORK = Axis("thousands of multiply-adds for a token at length 32", 1, "")
_OF_RUNS = {  # name -> heading, words for an axis, form and kind of what records of runs hold, besides the columns of tasks
    "resident": (
        "memory MB",
        "MB in memory, if seeded weights are generated where they are used",
        ".2f",
        "cost",
    ),
    "read": ("read MB", "weights that a decoding step reads from memory, likewise", ".2f", "cost"),
    "minutes": ("train min", "minutes of training", ".1f", "time"),
    "test": ("test s", "seconds of testing: on the test set, and the loss on the dev set", ".1f", "time"),
    "latency_1": ("ms at batch 1", "milliseconds a sentence in decoding, one at a time", ".2f", "time"),
    "latency_64": ("ms at batch 64", "milliseconds a sentence in decoding, in batches of 64", ".2f", "time"),
}


@dataclass(frozen=True)
class Measure:
    """One number a row. Times are compared on one machine only, which `on` names by row."""

    heading: str
    label: str  # in words, for an axis
    form: str  # of a number
    kind: str  # score, cost or time
    values: dict[str, tuple[float, float | None]]  # row -> mean and, over several seeds, standard deviation
    higher: bool = False  # is more better?
    unit: float = 1  # of an axis, in that of `values`
    on: dict[str, str] = field(default_factory=dict)

    @property
    def tells(self) -> bool:
        """Whether rows differ in it."""
        return len({mean for mean, _ in self.values.values()}) > 1

    @property
    def machine(self) -> str:
        """On which most of the rows were timed; empty of what no machine changes."""
        return statistics.mode(self.on.values()) if self.on else ""

    def drawn(self, row: str) -> bool:
        """Whether a row has a place in a plot of it, which shows times of one machine."""
        return row in self.values and self.on.get(row, "") == self.machine


def measures_of(task: TaskScoring, rows: Sequence[dict[str, Any]], runs: Sequence[Run]) -> dict[str, Measure]:
    """By name, those that any row has: scores first, then costs."""
    measured = {}
    for name, (heading, _, form) in task.columns.items():
        values = {row["row"]: row[name] for row in rows if name in row}
        axis = task.axes.get(name, _WORK if name == "work" else Axis("", 1, ""))
        if name in task.qualities:
            measured[name] = Measure(heading, "", form, "score", values, higher="perplexity" not in name)
        elif name in _COSTS:
            measured[name] = Measure(heading, axis.label, form, "cost", values, unit=axis.unit)
    groups = {row: list(map(_numbers, group)) for row, group in by_row(runs).items()}
    for name, (heading, label, form, kind) in _OF_RUNS.items():
        whole, values, on = name in ("minutes", "test"), {}, {}  # these a row has where all its runs have them
        for row, group in groups.items():
            known = [numbers[name] for numbers in group if name in numbers]
            if known and (not whole or len(known) == len(group)):
                values[row] = mean_and_spread([number for number, _ in known])
                on[row] = " and ".join(sorted({machine for _, machine in known}))
        measured[name] = Measure(heading, label, form, kind, values, on=on if kind == "time" else {})
    return {name: measure for name, measure in measured.items() if measure.values}


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """With the standard deviation of two or more values."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _numbers(run: Run) -> dict[str, tuple[float, str]]:
    """Of the measures of runs those that `run` has: the number and, of a time, the machine."""
    numbers = {name: (size / 1e6, "") for name, size in (run.record.get("memory") or {}).items()}
    seconds, latency = run.record.get("seconds", {}), run.latency
    if "train" in seconds and not run.record.get("resumed"):  # a resumed run knows that after its last restart only
        numbers["minutes"] = seconds["train"] / 60, run.machine
    if "test" in seconds and not run.settings.get("head_scores"):  # the time of measuring heads would be in it
        numbers["test"] = seconds["test"], run.machine
    for batch, timing in latency.get("decoding", {}).items():
        # Row 0's time multiplied by the ratio that was measured in turns with it: machines get slower and faster meanwhile.
        on = f"{machine_of(latency['environment'])}: {latency['conditions']}"
        numbers[f"latency_{batch}"] = timing["ratio"] * timing["first_ms"], on
    return numbers


def front(axes: Sequence[Measure], rows: Sequence[str]) -> dict[str, bool]:
    """Row -> whether it is on the Pareto front over `axes`, of those that have all of them: no row is as good in each and better
    in one. By means: a difference that is not significant counts too. Times of unlike machines are not compared: neither is
    better."""
    known = [row for row in rows if axes and all(row in axis.values for axis in axes)]
    points = [[(-1 if axis.higher else 1) * axis.values[row][0] for axis in axes] for row in known]
    machines = ["; ".join(axis.on.get(row, "") for axis in axes) for row in known]
    return dict(zip(known, on_front(points, machines), strict=True))


def front_line(score: Measure, cost: Measure, rows: Sequence[str]) -> list[str]:
    """The front of a score against a cost as plots draw it, from the cheapest row to the best; of equal ones, the first."""
    on = front([score, cost], [row for row in rows if cost.drawn(row)])
    points = {(cost.values[row][0], score.values[row][0]): row for row in reversed(rows) if on.get(row)}
    return [points[point] for point in sorted(points)]
