"""The findings of a report in sentences."""

from typing import Any

from hf_freeze.experiments.report.report import Report
from hf_freeze.experiments.report.significance import MANY, Difference


def findings(report: Report) -> list[tuple[str, str]]:
    """(what, sentence) in plain words: what was asked, the best and the cheapest rows, which differences are significant."""
    task, rows, first = report.task, report.rows, report.rows[0]
    better = "higher" if task.higher else "lower"
    counts = sorted({row["seeds"] for row in rows})
    seeds = "one seed" if counts == [1] else f"{'–'.join(map(str, counts))} seeds"
    on = f"the same {report.items:,} {report.split} {task.item}" if report.items else f"the {report.split} set"
    question = (
        f"How much quality does each change of the model cost, and how much does it save? Each of {len(rows)} rows was trained "
        f"with {seeds} and scored by {task.name} ({better} is better) on {on}. All are compared with row {_row_and_label(first)}."
    )
    sentences = [("Question", question)]
    best = sorted(rows, key=lambda row: row[task.quality][0], reverse=task.higher)
    sentences.append(
        (
            f"{'Highest' if task.higher else 'Lowest'} {task.name}",
            f"{quality(report, best[0])}, row {_row_and_label(best[0])}.",
        )
    )
    stored = task.columns["stored"][0].split()[-1]  # MB
    for what, column, unit in (
        ("Fewest trained parameters" if report.one_size else "Smallest trained share", "share", "of all"),
        ("Smallest checkpoint", "stored", stored),
    ):
        if column not in task.columns:
            continue
        least = min(row[column][0] for row in rows)
        amount = f"{least:{task.columns[column][2]}} {unit}"
        cheapest = [row for row in best if row[column][0] == least]
        listed = "; ".join(f"row {_row_and_label(row)}, {task.name} {quality(report, row)}" for row in cheapest)
        if len(cheapest) < len(rows):
            sentences.append((what, f"{amount}, {listed}."))
    front = report.front("stored")
    if 1 < len(front) < len(rows):
        listed = "; ".join(f"row {_row_and_label(row)}, {quality(report, row)}" for row in front)
        sentences.append(
            (
                f"Best at their size in {stored}",
                f"{listed}. Every other row is at least as large as one of these and no better.",
            )
        )
    return sentences + _significant(report)


def _significant(report: Report) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {"worse": [], "better": [], "unclear": []}
    for row in report.rows[1:]:
        difference, test = report.to_first(row)
        if test is None:
            continue
        text = f"row {_row_and_label(row)} {report.task.signed(difference)}"
        if test.significant_to_first:
            groups["better" if (difference > 0) is report.task.higher else "worse"].append(text)
        else:
            groups["unclear"].append(f"{text} ({interval(report, test)})")
    first = report.rows[0]["row"]
    sentences = [
        (f"Significantly {side} than row {first}", _listed(groups[side]) + ".")
        for side in ("worse", "better")
        if groups[side]
    ]
    if groups["unclear"]:
        unclear = (
            _listed(groups["unclear"])
            + ". These differences may be chance, which does not show that the rows are equal."
        )
        sentences.append((f"No significant difference from row {first}", unclear))
    return sentences


def _listed(rows: list[str]) -> str:
    return "; ".join(rows) if len(rows) < MANY else f"{len(rows)} rows; see the table"


def quality(report: Report, row: dict[str, Any]) -> str:
    mean, spread = row[report.task.quality]
    form = report.task.columns[report.task.quality][2]
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if spread is not None else "")


def _row_and_label(row: dict[str, Any]) -> str:
    return f"{row['row']} ({row['label']})"


def interval(report: Report, test: Difference) -> str:
    return f"95 % interval {report.task.signed(test.low, 2)} to {report.task.signed(test.high, 2)}"


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
