"""The findings of a report in sentences."""

from typing import Any

from hf_freeze.analysis.significance import MANY, TOO_FEW, Difference
from hf_freeze.lab.report.report import Report

_LISTED = 2  # rows that share the lowest cost


def answer(report: Report) -> str:
    """What a reader looks for first, in one sentence: the smallest row that is not surely worse than the first, else the smaller
    row that loses least, else the best row; with its difference from the first row."""
    task, rows, first = report.task, report.rows, report.rows[0]
    if not _has_learned(report):
        return f"{_named(first)} has {task.name} {quality(report, first)}: it learned too little to compare others with it."
    best = min(rows, key=lambda row: _sign(report) * row[task.quality][0])
    top = f"{'Highest' if task.higher else 'Lowest'} {task.name}: {_named(best)}, {quality(report, best)}"
    tested = [row for row in rows[1:] if report.to_first(row)[1] is not None]
    if not tested:
        return f"{top} ({seeds_in_words(best)}{'; no difference was tested' * (len(rows) > 1)})."
    smaller = [row for row in tested if row["stored"][0] < first["stored"][0]]
    if kept := [row for row in smaller if not _worse(report, row) and not _loses_much(report, row)]:
        least = min(kept, key=lambda row: (row["stored"][0], _sign(report) * row[task.quality][0]))
        return f"{_without_loss(report, least)}: {_against_first(report, least)}."
    if smaller:
        least = min(smaller, key=lambda row: _sign(report) * row[task.quality][0])
        every = "Every smaller row is" if len(smaller) > 1 else "The smaller row is"
        closest = "; closest: " if len(smaller) > 1 else ": "
        return f"{every} measurably worse than {_named(first)}{closest}{_against_first(report, least)}."
    if best is first or best not in tested:
        return f"{top} ({seeds_in_words(best)}); no smaller row was tested."
    return f"{'Highest' if task.higher else 'Lowest'} {task.name}: {_against_first(report, best)}."


def _without_loss(report: Report, row: dict[str, Any]) -> str:
    """What is known of the loss of the smallest row that is not surely worse than the first."""
    _, test = report.to_first(row)
    if report.differs(row):
        return "Smallest without a loss, and better"
    if test is not None and not test.seeds:
        return f"Smallest without a significant loss ({TOO_FEW})"
    if test is not None and report.task.loses_at_most(test.low, test.high):
        return f"Smallest that loses less than {report.task.margin_in_words}"
    return f"Smallest that is not told apart from row {report.rows[0]['row']}"


def _sign(report: Report) -> int:
    """By which scores are multiplied, so that less is better."""
    return -1 if report.task.higher else 1


def _worse(report: Report, row: dict[str, Any]) -> bool:
    return report.differs(row) and report.to_first(row)[0] * _sign(report) > 0


def _loses_much(report: Report, row: dict[str, Any]) -> bool:
    """By the interval, also where too few seeds make the difference untested."""
    _, test = report.to_first(row)
    return test is not None and report.task.loses(test.low, test.high)


def _named(row: dict[str, Any]) -> str:
    return f"{row['label']} (row {row['row']})"


def seeds_in_words(*rows: dict[str, Any]) -> str:
    counts = sorted({row["seeds"] for row in rows})
    return "one seed" if counts == [1] else f"{' and '.join(map(str, counts))} seeds"


def _against_first(report: Report, row: dict[str, Any]) -> str:
    """A row, its size and its difference from the first row, with what is known of that."""
    task, first = report.task, report.rows[0]
    difference, test = report.to_first(row)
    unit, form = task.columns["stored"][0].split()[-1], task.columns["stored"][2]
    size, whole = (f"{each['stored'][0]:{form}}" for each in (row, first))
    size = f"{size} {unit} in place of {whole}" if size != whole else f"{size} {unit}"
    said = [*([interval(report, test)] if test else []), seeds_in_words(first, row)]
    return (
        f"{_named(row)}, {size}, {task.name} {task.signed(difference)} against row {first['row']} ({'; '.join(said)})"
    )


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
        amount = f"{least:{task.columns[column][2]}} {unit}".replace("%", " %")
        cheapest = [row for row in best if row[column][0] == least]
        listed = "; ".join(
            f"row {_row_and_label(row)}, {task.name} {quality(report, row)}" for row in cheapest[:_LISTED]
        )
        listed += f"; and {len(cheapest) - _LISTED} more" * (len(cheapest) > _LISTED)
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
    groups: dict[str, list[str]] = {"worse": [], "better": [], "margin": [], "unclear": [], "one seed": []}
    for row in report.rows[1:]:
        difference, test = report.to_first(row)
        if test is None:
            continue
        text = f"row {_row_and_label(row)} {report.task.signed(difference)}"
        if report.differs(row):
            groups["better" if (difference > 0) is report.task.higher else "worse"].append(text)
        else:
            within = "unclear"
            if _has_learned(report) and report.task.loses_at_most(test.low, test.high):
                within = "margin"
            groups[within if test.seeds else "one seed"].append(f"{text} ({interval(report, test)})")
    first = report.rows[0]["row"]
    sentences = [
        (f"Significantly {side} than row {first}", _listed(groups[side]) + ".")
        for side in ("worse", "better")
        if groups[side]
    ]
    if groups["margin"]:
        sentences.append(
            (f"Loses less than {report.task.margin_in_words} against row {first}", _listed(groups["margin"]) + ".")
        )
    if groups["unclear"]:
        unclear = (
            _listed(groups["unclear"])
            + ". Corrected for the number of comparisons, chance may explain such differences; a loss above "
            + f"{report.task.margin_in_words} is not excluded."
        )
        sentences.append((f"Not told apart from row {first}", unclear))
    if groups["one seed"]:
        sentences.append((f"{TOO_FEW.capitalize()} against row {first}", _listed(groups["one seed"]) + "."))
    return sentences


def _has_learned(report: Report) -> bool:
    """Whether the first row scores more than the margin: any other row loses less than that against one of 0 BLEU."""
    return not report.task.higher or report.rows[0]["score"] > report.task.margin


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
