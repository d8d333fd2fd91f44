"""The findings of a report in sentences."""

from typing import Any

from hf_freeze.analysis.significance import MANY, TOO_FEW, Difference
from hf_freeze.lab.report.report import Report

_LISTED = 2  # rows that share the lowest cost


def answer(report: Report) -> str:
    """What a reader looks for first, in one sentence: the smallest row that is not surely worse than the first, else the smaller
    row that loses least, else the best row; with its difference from the first row."""
    rows, first, sign = report.rows, report.rows[0], -1 if report.task.higher else 1  # times a score, less is better
    if not _has_learned(report):
        score = f"{report.task.name} {quality(report, first)}"
        return f"{_named(first)} has {score}: it learned too little to compare others with it."

    def score_of(row: dict[str, Any]) -> float:
        return sign * row[report.task.quality][0]

    best, top = min(rows, key=score_of), _top(report)
    tested = [row for row in rows[1:] if report.to_first(row)[1] is not None]
    said = f"{top}: {_named(best)}, {quality(report, best)} ({seeds_in_words(best)}"
    if not tested:
        return f"{said}{'; no difference was tested' * (len(rows) > 1)})."
    smaller = [row for row in tested if row["stored"][0] < first["stored"][0]]
    if kept := [row for row in smaller if not _loses(report, row)]:
        least = min(kept, key=lambda row: (row["stored"][0], score_of(row)))
        return f"{_without_loss(report, least)}: {_against_first(report, least)}."
    if smaller:
        every = "Every smaller row is" if len(smaller) > 1 else "The smaller row is"
        least = f"{'; closest' * (len(smaller) > 1)}: {_against_first(report, min(smaller, key=score_of))}"
        return f"{every} measurably worse than {_named(first)}{least}."
    if best is first or best not in tested:
        return f"{said}); no smaller row was tested."
    return f"{top}: {_against_first(report, best)}."


def _top(report: Report) -> str:
    return f"{'Highest' if report.task.higher else 'Lowest'} {report.task.name}"


def _loses(report: Report, row: dict[str, Any]) -> bool:
    """Whether it is significantly worse; or by its interval, also where too few seeds make the difference untested."""
    difference, test = report.to_first(row)
    worse = report.differs(row) and (difference < 0) is report.task.higher
    return worse or (test is not None and report.task.loses(test.low, test.high))


def _without_loss(report: Report, row: dict[str, Any]) -> str:
    """What is known of the loss of the smallest row that is not surely worse than the first."""
    _, test = report.to_first(row)
    if report.differs(row):
        return "Smallest without a loss, and better"
    if test is not None and not test.seeds:
        return "Smallest without a significant loss (too few seeds)"
    if test is not None and report.task.loses_at_most(test.low, test.high):
        return f"Smallest that loses less than {report.task.margin_in_words}"
    return f"Smallest that is not told apart from row {report.rows[0]['row']}"


def _against_first(report: Report, row: dict[str, Any]) -> str:
    """A row, its size and its difference from the first row, with what is known of that."""
    task, first = report.task, report.rows[0]
    difference, test = report.to_first(row)
    unit, form = task.columns["stored"][0].split()[-1], task.columns["stored"][2]
    size, whole = (f"{each['stored'][0]:{form}}" for each in (row, first))
    size = f"{size} {unit} in place of {whole}" if size != whole else f"{size} {unit}"
    known = f"{interval(report, test)}; " if test else ""
    against = f"{task.name} {task.signed(difference)} against row {first['row']}"
    return f"{_named(row)}, {size}, {against} ({known}{seeds_in_words(first, row)})"


def findings(report: Report) -> list[tuple[str, str]]:
    """(what, sentence) in plain words: what was asked, the best and the cheapest rows, which differences are significant."""
    task, rows, first = report.task, report.rows, report.rows[0]
    counts = sorted({row["seeds"] for row in rows})
    seeds = "one seed" if counts == [1] else f"{'–'.join(map(str, counts))} seeds"
    on = f"the same {report.items:,} {report.split} {task.item}" if report.items else f"the {report.split} set"
    better = "higher" if task.higher else "lower"
    question = (
        f"How much quality does each change of the model cost, and how much does it save? Each of {len(rows)} rows was trained "
        f"with {seeds} and scored by {task.name} ({better} is better) on {on}. All are compared with row {_row_and_label(first)}."
    )
    best = sorted(rows, key=lambda row: row[task.quality][0], reverse=task.higher)
    sentences = [("Question", question)]
    sentences.append((_top(report), f"{quality(report, best[0])}, row {_row_and_label(best[0])}."))
    stored = task.columns["stored"][0].split()[-1]  # MB
    fewest = "Fewest trained parameters" if report.one_size else "Smallest trained share"
    for what, column, unit in ((fewest, "share", "of all"), ("Smallest checkpoint", "stored", stored)):
        if column not in task.columns:
            continue
        least = min(row[column][0] for row in rows)
        cheapest = [row for row in best if row[column][0] == least]
        listed = [f"row {_row_and_label(row)}, {task.name} {quality(report, row)}" for row in cheapest[:_LISTED]]
        listed += [f"and {len(cheapest) - _LISTED} more"] * (len(cheapest) > _LISTED)
        if len(cheapest) < len(rows):
            amount = f"{least:{task.columns[column][2]}} {unit}".replace("%", " %")
            sentences.append((what, f"{amount}, {'; '.join(listed)}."))
    front = report.front("stored")
    if 1 < len(front) < len(rows):
        listed = "; ".join(f"row {_row_and_label(row)}, {quality(report, row)}" for row in front)
        said = f"{listed}. Every other row is at least as large as one of these and no better."
        sentences.append((f"Best at their size in {stored}", said))
    return sentences + _significant(report)


def _significant(report: Report) -> list[tuple[str, str]]:
    task, against = report.task, f"row {report.rows[0]['row']}"
    margin = f"Loses less than {task.margin_in_words} against {against}"
    unclear, few = f"Not told apart from {against}", f"{TOO_FEW.capitalize()} against {against}"
    worse, better = (f"Significantly {side} than {against}" for side in ("worse", "better"))
    groups: dict[str, list[str]] = {worse: [], better: [], margin: [], unclear: [], few: []}
    for row in report.rows[1:]:
        difference, test = report.to_first(row)
        if test is None:
            continue
        text = f"row {_row_and_label(row)} {task.signed(difference)}"
        if report.differs(row):
            groups[better if (difference > 0) is task.higher else worse].append(text)
            continue
        within = _has_learned(report) and task.loses_at_most(test.low, test.high)
        groups[few if not test.seeds else margin if within else unclear].append(f"{text} ({interval(report, test)})")
    more = {
        unclear: " Corrected for the number of comparisons, chance may explain such differences; a loss above "
        f"{task.margin_in_words} is not excluded."
    }
    many = {what: f"{len(rows)} rows; see the table" for what, rows in groups.items() if len(rows) >= MANY}
    return [(what, f"{many.get(what, '; '.join(rows))}.{more.get(what, '')}") for what, rows in groups.items() if rows]


def _has_learned(report: Report) -> bool:
    """Whether the first row scores more than the margin: any other row loses less than that against one of 0 BLEU."""
    return not report.task.higher or report.rows[0]["score"] > report.task.margin


def _named(row: dict[str, Any]) -> str:
    return f"{row['label']} (row {row['row']})"


def _row_and_label(row: dict[str, Any]) -> str:
    return f"{row['row']} ({row['label']})"


def seeds_in_words(*rows: dict[str, Any]) -> str:
    counts = sorted({row["seeds"] for row in rows})
    return "one seed" if counts == [1] else f"{' and '.join(map(str, counts))} seeds"


def quality(report: Report, row: dict[str, Any]) -> str:
    mean, spread = row[report.task.quality]
    form = report.task.columns[report.task.quality][2]
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if spread is not None else "")


def interval(report: Report, test: Difference) -> str:
    return f"95 % interval {report.task.signed(test.low, 2)} to {report.task.signed(test.high, 2)}"
