"""From the folders of grids to reports: one for each group of rows that may be compared."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_freeze.analysis.significance import MANY, compare
from hf_freeze.lab.report.convergence import steps_to_share
from hf_freeze.lab.report.finished_runs import Run, Source, by_row, label_of, split_of, unlike_settings
from hf_freeze.lab.report.groups import groups_of, sources_of, tested_on, title_of
from hf_freeze.lab.report.measures import mean_and_spread
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.tasks.scoring import TO_FIRST, TaskScoring, scoring_of
from hf_freeze.run_folder import commands_of

FEW_ITEMS = 100  # a bootstrap over fewer understates how far a score may be off


def make_reports(folders: Sequence[Path], say: Callable[[str], Any] = print) -> list[Report]:
    """One report for each group of rows that may be compared, in the order of `folders`. Of several grids, names of rows
    begin with the letter of their grid. Raises ValueError as `read_folder` does, for a task of which no report is made, and
    where a folder is named twice."""
    sources, reports = sources_of(folders, say), []
    groups = groups_of(sources)
    for number, (basis, runs) in enumerate(groups.items(), 1):
        letters = {run.source for run in runs}
        report = _report_of(runs, [source for source in sources if source.letter in letters], say)
        if len(sources) > 1 or len(groups) > 1:
            report = replace(report, title=title_of(runs), number=number, tested_on=tested_on(basis, runs))
        reports.append(report)
    return reports


def make_report(folders: Sequence[Path], say: Callable[[str], Any] = print) -> Report:
    """The report of rows that may all be compared. Raises ValueError as `make_reports`, and where some may not be."""
    reports = make_reports(folders, say)
    if len(reports) > 1:
        titles = "; ".join(report.title for report in reports)
        raise ValueError(
            f"{', '.join(map(str, folders))} hold {len(reports)} groups of rows to compare, not one: {titles}"
        )
    return reports[0]


def _report_of(runs: list[Run], sources: Sequence[Source], say: Callable[[str], Any]) -> Report:
    """Compare `runs` of one task, which came from `sources`; the first row is what all are compared with."""
    task = scoring_of(runs[0].task, runs[0].metric)
    groups = by_row(runs)
    rows = _summarised(groups, task)
    known = {row: [run.items for run in group if run.items is not None] for row, group in groups.items()}
    lacking = [row for row, group in groups.items() if len(known[row]) < len(group)]
    items = {row: arrays for row, arrays in known.items() if row not in lacking}
    tested = len(next(iter(items.values()))[0]) if items else 0
    notes = unlike_settings(runs)
    if lacking:
        whose = "Its" if len(lacking) < MANY else "Their"
        notes.append(f"Not tested: {_rows(lacking)}. {whose} runs kept no test items (items.npy); run them again.")
    if single := [row["row"] for row in rows if row["seeds"] == 1]:
        which = "One seed" if len(single) == len(rows) else f"One seed of {_rows(single)}"
        covers = f"the intervals and significance cover the choice of the {split_of(runs)} items only"
        covers += "; another seed may differ by more"
        notes.append(f"{which}: {covers if items else 'small differences mean nothing'}.")
    if 0 < tested < FEW_ITEMS:
        notes.append(f"Only {tested} {split_of(runs)} {task.item}: too few to trust the intervals and marks.")
    for note in notes:
        say(note)
    return Report(
        title=", ".join(dict.fromkeys(run.recipe for run in runs)),
        task=task,
        runs=runs,
        rows=rows,
        differences=compare(items, task.score) if len(items) > 1 else [],
        items=tested,
        notes=notes,
        commands=[command for source in sources for folder in source.folders for command in commands_of(folder)],
        sources=sources,
    )


def _rows(names: list[str]) -> str:
    return f"row {', '.join(names)}" if len(names) < MANY else f"{len(names)} rows"


def _summarised(groups: dict[str, list[Run]], task: TaskScoring) -> list[dict[str, Any]]:
    """One dict a row: for each column its mean and, over two or more seeds, standard deviation."""
    summaries: list[dict[str, Any]] = []
    for row, group in groups.items():
        records = [run.record | {"steps_to_90": steps_to_share(run.log, task.quality)} for run in group]
        columns: dict[str, list[float]] = {}
        for column, (_, where, _) in task.columns.items():
            if where[0] == TO_FIRST:
                own = columns[where[1]]
                first = summaries[0][where[1]][0] if summaries else statistics.fmean(own)
                columns[column] = [first / value for value in own]
                continue
            values = [_value(record, where) for record in records]
            if column == task.quality or None not in values:  # old records lack some, and not every grid has all
                columns[column] = [value * task.units.get(column, 1) for value in values]
        score = statistics.fmean(map(task.scale, columns[task.quality]))
        known = {column: mean_and_spread(values) for column, values in columns.items()}
        summaries.append({"row": row, "label": label_of(records[0]), "seeds": len(group), "score": score} | known)
    return summaries


def _value(record: dict[str, Any], where: tuple[str, ...]) -> Any:
    """What a record holds there; None where it has no such value."""
    value: Any = record
    for key in where:
        value = (value or {}).get(key)
    return value
