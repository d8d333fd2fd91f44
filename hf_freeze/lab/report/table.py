"""The rows of a report as a table of text, and as the table of its page with what a reader sorts and weighs them by."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_freeze.lab.report.finished_runs import Run, by_row
from hf_freeze.lab.report.measures import Measure, front
from hf_freeze.lab.report.report import Report

UNKNOWN = "not known"


@dataclass(frozen=True)
class Column:
    """Of the page's table, a text and a number a row. `measure`: what rows are weighed by; `hidden`: until it is asked for."""

    name: str
    heading: str
    texts: Sequence[str]
    values: Sequence[float | None]  # by which rows are sorted; where there is none, by the text
    measure: Measure | None = None
    left: bool = False
    hidden: bool = False


def table_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows."""
    task, first, columns = report.task, report.rows[0]["row"], report.columns
    shown = [heading for heading, _, _ in columns.values()]
    scores = len(report.qualities)
    headings = ["row", task.rows_are, shown[0], f"vs row {first}", *shown[1:scores], "seeds", *shown[scores:]]
    cells = []
    for row in report.rows:
        values = [cell_text(row[name], form) if name in row else UNKNOWN for name, (_, _, form) in columns.items()]
        against = (
            task.signed(report.to_first(row)[0]) + " *" * report.differs(row) if row is not report.rows[0] else "–"
        )
        seeds = str(row["seeds"])
        cells.append([row["row"], row["label"], values[0], against, *values[1:scores], seeds, *values[scores:]])
    return headings, cells


def cell_text(number: tuple[float, float | None], form: str) -> str:
    """A number as the table shows it, with its standard deviation where that is more than none."""
    mean, spread = number
    varies = spread is not None and f"{spread:{form}}" != f"{0:{form}}"
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if varies else "")


def page_columns(report: Report) -> list[Column]:
    """What `table_cells` has, whether a row is on the front, then what else rows are weighed by, and where they come from."""
    rows, measures, own = report.rows, report.measures, list(report.columns)
    headings, lines = table_cells(report)
    scores = len(report.qualities)
    names = ["row", "label", own[0], "to_first", *own[1:scores], "seeds", *own[scores:]]
    values = [{name: row[name][0] for name in own if name in row} | {"seeds": row["seeds"]} for row in rows]
    for number, row in enumerate(rows):
        values[number] |= {"row": number, "to_first": report.to_first(row)[0]}
    columns = [
        Column(name, heading, texts, [row.get(name) for row in values], measures.get(name), name in ("row", "label"))
        for name, heading, texts in zip(names, headings, zip(*lines, strict=True), strict=True)
    ]
    on = page_front(report)
    columns.append(
        Column("front", "front", ["front" if on.get(row["row"]) else "–" for row in rows], [None] * len(rows))
    )
    for name in [name for name in further(report) if name not in names]:
        measure = measures[name]
        known = [measure.values.get(row["row"]) for row in rows]
        texts = ["–" if number is None else cell_text(number, measure.form) for number in known]
        sorted_by = [number and number[0] for number in known]
        columns.append(Column(name, measure.heading, texts, sorted_by, measure, hidden=name not in report.weighed_by))
    return columns + _origins(report)


def page_front(report: Report) -> dict[str, bool]:
    """Row -> whether it is on the front that the page shows at first; no entry where that is not known."""
    return front([report.measures[name] for name in report.weighed_by], [row["row"] for row in report.rows])


def further(report: Report) -> list[str]:
    """The costs that rows differ in, besides the columns of a task: times and memory, and multiply-adds."""
    return [
        name
        for name, measure in report.measures.items()
        if measure.tells and (measure.kind == "time" or name in ("work", "resident", "read"))
    ]


def _origins(report: Report) -> list[Column]:
    """Where rows come from; of one grid only what its rows differ in."""
    of = {
        "folder": lambda run: folder_name(run.grid),
        "recipe": lambda run: run.recipe,
        "methods": lambda run: ", ".join(method_names(run)) or "–",
        "commit": commit_of,
        "machine": lambda run: run.machine or "not kept",
    }
    groups = by_row(report.runs).values()
    texts = {name: ["; ".join(dict.fromkeys(map(what, group))) for group in groups] for name, what in of.items()}
    return [
        Column(name, name, lines, [None] * len(lines), left=True, hidden=True)
        for name, lines in texts.items()
        if len(report.sources) > 1 or len(set(lines)) > 1
    ]


def folder_name(path: Path) -> str:
    """Its name: where it lies is nobody's business."""
    return path.resolve().name


def commit_of(run: Run) -> str:
    environment = run.record.get("environment")
    return environment["commit"] or f"version {environment['hf_freeze']}" if environment else "not kept"


def method_names(run: Run) -> list[str]:
    return list(dict.fromkeys(method["method"] for method in run.methods))
