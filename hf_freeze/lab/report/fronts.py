"""What the rows of a report may be weighed by, and which of them no other row beats in all of it (the Pareto front)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_freeze.lab.report.finished_runs import Run, machine_of
from hf_freeze.lab.report.report import Report

_COSTS = ("share", "total", "work", "stored", "minutes")  # of the columns of a task; of the others no less is wanted
_BATCHES = ("1", "64")  # of what benchmarks/run_latency.py decodes


@dataclass(frozen=True)
class Measure:
    """One number a row. Times are compared on one machine only, which `on` names by row."""

    heading: str
    meaning: str
    form: str  # of a number
    kind: str  # score, cost or time
    higher: bool  # is more better?
    values: dict[str, tuple[float, float | None]]  # row -> mean and, over several seeds, standard deviation
    on: dict[str, str]


def measures(report: Report) -> dict[str, Measure]:
    """By name, those that any row has: scores first, then costs."""
    task, measured = report.task, {}
    runs: dict[str, list[Run]] = {}
    for run in report.runs:
        runs.setdefault(run.row, []).append(run)
    for name, (heading, _, form) in task.columns.items():
        if name in task.qualities:
            measured[name] = _column(report, name, heading, form, "score", higher="perplexity" not in name)
        elif name in _COSTS and name != "minutes":
            measured[name] = _column(report, name, heading, form, "cost")
    for name, heading, meaning in (
        ("resident", "memory MB", "weights and buffers in memory, if seeded ones are generated where they are used"),
        ("read", "read MB", "weights that a decoding step reads from memory, likewise"),
    ):
        measured[name] = _memory(runs, name, heading, meaning)
    measured["minutes"] = _times(runs, "train min", "minutes of training", ".1f", _train_minutes, whole=True)
    what = "seconds of testing: on the test set, and the loss on the dev set"
    measured["test"] = _times(runs, "test s", what, ".1f", _test, whole=True)
    for batch in _BATCHES:
        meaning = (
            f"milliseconds a sentence in decoding, {'one at a time' if batch == '1' else f'in batches of {batch}'}"
        )

        def decoding(run: Run, batch: str = batch) -> tuple[float, str] | None:
            return _decoding(run, batch)

        measured[f"latency_{batch}"] = _times(runs, f"ms at batch {batch}", meaning, ".2f", decoding)
    return {name: measure for name, measure in measured.items() if measure.values}


def _column(report: Report, name: str, heading: str, form: str, kind: str, higher: bool = False) -> Measure:
    values = {row["row"]: row[name] for row in report.rows if name in row}
    return Measure(heading, _meaning(report, name), form, kind, higher, values, {})


def _meaning(report: Report, name: str) -> str:
    axis = report.task.axes.get(name)
    return axis.label if axis else {"work": "thousands of multiply-adds for a token at length 32"}.get(name, "")


def _memory(runs: dict[str, list[Run]], name: str, heading: str, meaning: str) -> Measure:
    """Records of earlier releases and of models without tokens do not have it."""
    values = {}
    for row, group in runs.items():
        known = [memory[name] / 1e6 for run in group if (memory := run.record.get("memory"))]
        if known:
            values[row] = (statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)
    return Measure(heading, meaning, ".2f", "cost", False, values, {})


def _times(
    runs: dict[str, list[Run]], heading: str, meaning: str, form: str, of: Any, *, whole: bool = False
) -> Measure:
    """A time of a row is the mean over its runs that have one, and its machine is that of these runs, or of all its runs.
    `whole`: a row has a time where all its runs have."""
    values, on = {}, {}
    for row, group in runs.items():
        known = [timing for timing in map(of, group) if timing is not None]
        if known and (not whole or len(known) == len(group)):
            times = [time for time, _ in known]
            values[row] = (statistics.fmean(times), statistics.stdev(times) if len(times) > 1 else None)
            on[row] = " and ".join(sorted({machine for _, machine in known}))
    return Measure(heading, meaning, form, "time", False, values, on)


def _train_minutes(run: Run) -> tuple[float, str] | None:
    seconds = run.record.get("seconds", {}).get("train")
    if seconds is None or run.record.get("resumed"):  # a resumed run knows that after its last restart only
        return None
    return seconds / 60, run.machine


def _test(run: Run) -> tuple[float, str] | None:
    seconds = run.record.get("seconds", {}).get("test")
    if seconds is None or run.settings.get("head_scores"):  # the time of measuring heads would be in it
        return None
    return seconds, run.machine


def _decoding(run: Run, batch: str) -> tuple[float, str] | None:
    """Row 0's time multiplied by the ratio that was measured in turns with it: machines get slower and faster meanwhile."""
    timing = run.latency.get("decoding", {}).get(batch)
    if timing is None:
        return None
    machine = machine_of(run.latency["environment"])
    return timing["ratio"] * timing["first_ms"], f"{machine}: {run.latency['conditions']}"


def front(axes: Sequence[Measure], rows: Sequence[str]) -> dict[str, bool]:
    """Row -> whether it is on the Pareto front over `axes`, of those that have all of them: no row is as good in each and better
    in one. By means: a difference that is not significant counts too. Times of unlike machines are not compared: neither is
    better."""
    known = [row for row in rows if all(row in axis.values for axis in axes)]
    if not known or not axes:
        return {}
    as_good = np.ones((len(known), len(known)), dtype=bool)  # [a, b]: row b beside row a
    better = ~as_good
    for axis in axes:
        values = np.array([(-1 if axis.higher else 1) * axis.values[row][0] for row in known])
        as_good &= values[None, :] <= values[:, None]
        better |= values[None, :] < values[:, None]
        if axis.kind == "time":
            machines = np.array([axis.on[row] for row in known])
            as_good &= machines[None, :] == machines[:, None]
    beaten = np.any(as_good & better, axis=1)
    return {row: not is_beaten for row, is_beaten in zip(known, beaten, strict=True)}


def default_axes(report: Report, measured: dict[str, Measure]) -> list[str]:
    """The score, what is stored, and what decoding costs: its time where that of half of the rows was measured, else
    multiply-adds; neither where rows do not differ in it."""
    axes = [report.task.quality, "stored"]
    for name in ("latency_1", "latency_64", "work"):
        values = [mean for mean, _ in measured[name].values.values()] if name in measured else []
        if 2 * len(values) >= len(report.rows) and len(set(values)) > 1:
            return [*axes, name]
    return axes
