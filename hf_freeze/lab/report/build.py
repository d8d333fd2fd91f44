"""From finished runs to a report."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.analysis.significance import MANY, compare
from hf_freeze.lab.report.convergence import steps_to_share
from hf_freeze.lab.report.finished_runs import Run, Source, label_of, read_runs, split_of, unlike_settings
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.tasks.scoring import SCORING, TO_FIRST, TaskScoring, scoring_of
from hf_freeze.run_folder import commands_of

FEW_ITEMS = 100  # a bootstrap over fewer understates how far a score may be off


def make_report(folders: Sequence[Path], say: Callable[[str], Any] = print) -> Report:
    """Read and compare the finished runs of `folders`; the first row of the first is what all are compared with."""
    runs = read_runs(folders, say)
    if runs[0].task not in SCORING:
        raise ValueError(f"{folders[0]} holds runs of {runs[0].task!r}; reports are made of {sorted(SCORING)}")
    return report_of(runs, [Source(list(folders), runs)], say)


def report_of(runs: list[Run], sources: Sequence[Source], say: Callable[[str], Any] = print) -> Report:
    """Compare `runs` of one task, which came from `sources`; the first row is what all are compared with."""
    task = scoring_of(runs[0].task, runs[0].metric)
    steps = [steps_to_share(run.log, task.quality) for run in runs]
    rows = summarise(
        [run.record | {"row": run.row, "steps_to_90": step} for run, step in zip(runs, steps, strict=True)], task
    )
    items, notes = _items_of_rows(runs, task)
    notes = unlike_settings(runs) + notes
    if min(row["seeds"] for row in rows) == 1:
        single = [row["row"] for row in rows if row["seeds"] == 1]
        which = "One seed" if len(single) == len(rows) else f"One seed of {_rows(single)}"
        covers = f"the intervals and significance cover the choice of the {split_of(runs)} items only"
        covers += "; another seed may differ by more"
        notes.append(f"{which}: {covers if items else 'small differences mean nothing'}.")
    tested = len(next(iter(items.values()))[0]) if items else 0
    if 0 < tested < FEW_ITEMS:
        notes.append(f"Only {tested} {split_of(runs)} {task.item}: too few to trust the intervals and marks.")
    for note in notes:
        say(note)
    titles = dict.fromkeys(run.record.get("recipe") or run.grid.resolve().name for run in runs)
    return Report(
        title=", ".join(titles),
        task=task,
        runs=runs,
        rows=rows,
        differences=compare(items, task.score) if len(items) > 1 else [],
        items=tested,
        notes=notes,
        commands=[command for source in sources for folder in source.folders for command in commands_of(folder)],
        sources=sources,
    )


def _items_of_rows(runs: list[Run], task: TaskScoring) -> tuple[dict[str, list[np.ndarray]], list[str]]:
    """The items of every row that can be tested, and what keeps the others from it."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.row, []).append(run)
    items = {row: [run.items for run in group if run.items is not None] for row, group in groups.items()}
    lacking = [row for row, group in groups.items() if len(items[row]) < len(group)]
    items = {row: arrays for row, arrays in items.items() if row not in lacking}
    notes = []
    if lacking:
        whose = "Its" if len(lacking) < MANY else "Their"
        notes.append(f"Not tested: {_rows(lacking)}. {whose} runs kept no test items (items.npy); run them again.")
    # The last column is of the test set alone: words of the reference, tokens of a block.
    if len({array[:, -1].tobytes() for row in items.values() for array in row}) > 1:
        notes.append("Not tested: the runs were scored on different test sets, so their scores cannot be compared.")
        items = {}
    return items, notes


def _rows(names: list[str]) -> str:
    return f"row {', '.join(names)}" if len(names) < MANY else f"{len(names)} rows"


def summarise(records: list[dict[str, Any]], task: TaskScoring = SCORING["translation"]) -> list[dict[str, Any]]:
    """One dict a row, in grid order: for each column its mean and, over two or more seeds, standard deviation."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["row"], []).append(record)
    summaries: list[dict[str, Any]] = []
    for row, group in rows.items():
        columns: dict[str, list[float]] = {}
        for column, (_, where, _) in task.columns.items():
            if where[0] == TO_FIRST:
                own = columns[where[1]]
                columns[column] = [
                    (summaries[0][where[1]][0] if summaries else statistics.fmean(own)) / value for value in own
                ]
            else:
                values = [_value(record, where) for record in group]
                if column == task.quality or None not in values:  # old records lack some, and not every grid has all
                    columns[column] = [value * task.units.get(column, 1) for value in values]
        spreads = {
            column: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
            for column, values in columns.items()
        }
        score = statistics.fmean(map(task.scale, columns[task.quality]))
        summaries.append({"row": row, "label": label_of(group[0]), "seeds": len(group), "score": score} | spreads)
    return summaries


def _value(record: dict[str, Any], where: tuple[str, ...]) -> Any:
    """What a record holds there; None where it has no such value."""
    value: Any = record
    for key in where:
        value = (value or {}).get(key)
    return value
