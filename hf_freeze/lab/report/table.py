"""The rows of a report as a table of text."""

from typing import Any

from hf_freeze.lab.report.report import Report

UNKNOWN = "not known"


def table_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows."""
    task, first, columns = report.task, report.rows[0]["row"], report.columns
    shown = [heading for heading, _, _ in columns.values()]
    scores = len(report.qualities)
    qualities, costs = shown[:scores], shown[scores:]
    headings = ["row", task.rows_are, qualities[0], f"vs row {first}", *qualities[1:], "seeds", *costs]
    cells = []
    for row in report.rows:
        values = [
            cell_text(row[name][0], row[name][1], form) if name in row else UNKNOWN
            for name, (_, _, form) in columns.items()
        ]
        values.insert(scores, str(row["seeds"]))
        cells.append([row["row"], row["label"], values[0], _against_first(report, row), *values[1:]])
    return headings, cells


def _against_first(report: Report, row: dict[str, Any]) -> str:
    if row is report.rows[0]:
        return "–"
    difference, _ = report.to_first(row)
    return report.task.signed(difference) + (" *" if report.differs(row) else "")


def cell_text(mean: float, spread: float | None, form: str) -> str:
    """A number as the table shows it, with its standard deviation where that is more than none."""
    varies = spread is not None and f"{spread:{form}}" != f"{0:{form}}"
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if varies else "")
