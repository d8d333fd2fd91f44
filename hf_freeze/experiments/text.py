"""A report in words: the findings, what the marks mean, and the Markdown page."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_freeze.experiments.statistics import LEVEL, MANY, Difference, enough_replicates

if TYPE_CHECKING:
    from hf_freeze.experiments.report import Report


def findings(report: "Report") -> list[tuple[str, str]]:
    """(what, sentence) in plain words: what was asked, the best and the cheapest rows, which differences are real."""
    task, rows, first = report.task, report.rows, report.rows[0]
    better = "higher" if task.higher else "lower"
    counts = sorted({row["seeds"] for row in rows})
    seeds = "one seed" if counts == [1] else f"{'–'.join(map(str, counts))} seeds"
    on = f"the same {report.items:,} test {task.item}" if report.items else "the test set"
    asked = (
        f"What does each change of the model cost in quality, and what does it save? Each of {len(rows)} rows was trained "
        f"with {seeds} and scored on {on} by {task.name} ({better} is better). All are compared with row {_named(first)}."
    )
    found = [("Asked", asked)]
    best = sorted(rows, key=lambda row: row[task.quality][0], reverse=task.higher)
    found.append(
        (f"{'Highest' if task.higher else 'Lowest'} {task.name}", f"{quality(report, best[0])}, row {_named(best[0])}.")
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
        listed = "; ".join(f"row {_named(row)}, {task.name} {quality(report, row)}" for row in cheapest)
        if len(cheapest) < len(rows):
            found.append((what, f"{amount}, {listed}."))
    front = report.front("stored")
    if 1 < len(front) < len(rows):
        listed = "; ".join(f"row {_named(row)}, {quality(report, row)}" for row in front)
        found.append(
            (
                f"Best at their size in {stored}",
                f"{listed}. All other rows are no smaller and no better than one of these.",
            )
        )
    return found + _real(report)


def _real(report: "Report") -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {"worse": [], "better": [], "unclear": []}
    for row in report.rows[1:]:
        difference, test = report.to_first(row)
        if test is None:
            continue
        text = f"row {_named(row)} {report.task.signed(difference)}"
        if test.real_to_first:
            groups["better" if (difference > 0) is report.task.higher else "worse"].append(text)
        else:
            groups["unclear"].append(f"{text} ({interval(report, test)})")
    first = report.rows[0]["row"]
    found = [
        (f"Really {side} than row {first}", _listed(groups[side]) + ".") for side in ("worse", "better") if groups[side]
    ]
    if groups["unclear"]:
        unclear = (
            _listed(groups["unclear"]) + ". Such a difference may be chance; this does not show that they are equal."
        )
        found.append((f"Not told apart from row {first}", unclear))
    return found


def _listed(rows: list[str]) -> str:
    return "; ".join(rows) if len(rows) < MANY else f"{len(rows)} rows, as the table says"


def quality(report: "Report", row: dict[str, Any]) -> str:
    mean, spread = row[report.task.quality]
    form = report.task.columns[report.task.quality][2]
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if spread is not None else "")


def _named(row: dict[str, Any]) -> str:
    return f"{row['row']} ({row['label']})"


def interval(report: "Report", test: Difference) -> str:
    return f"95% interval {report.task.signed(test.low, 2)} to {report.task.signed(test.high, 2)}"


def p_value(p: float) -> str:
    return "< .001" if p < 0.001 else f"{p:.3f}".lstrip("0")


def legend(report: "Report") -> list[str]:
    """What the columns and marks of the table mean."""
    first, task = report.rows[0]["row"], report.task
    what = f"mean {task.name} minus that of row {first}"
    if task.signed(0).startswith("×"):
        what = f"{task.name} divided by that of row {first} (means over seeds are geometric); more than 1 is worse"
    lines = [f"vs row {first}: {what}."]
    if report.differences:
        lines[0] = lines[0][:-1] + f". * marks a real difference (corrected p < {LEVEL}); one without * may be chance."
    if len(report.seeds) > 1:
        lines.append("± is the standard deviation over seeds.")
    stored = task.columns["stored"][0]
    if "fewer" in task.columns:
        lines.append(
            f"parameters: of the whole network, biases too; {stored}: tensors of the file, with the places of weights that are "
            f"left; times fewer, times smaller: row {first} divided by this row."
        )
        return lines
    share = "share %: trained parameters of all; " if "share" in report.columns else ""
    total = "total k: all parameters, in thousands; " if "total" in report.columns else ""
    work = "macs k: thousands of multiply-adds for a token at length 32; " if "work" in report.columns else ""
    lines.append(f"{share}{total}{work}{stored}: tensors that the checkpoint holds.")
    return lines


def head_scores(report: "Report") -> str:
    """What the heat-maps of heads show, in a sentence; empty where no heads were measured."""
    run = report.measured
    if run is None:
        return ""
    meanings = {
        "importance": "importance is that of Michel et al. (2019) on the training set, divided by its norm over the attention",
        "ablation": f"ablation is what {report.task.name} on the dev set loses without the head",
        "one_head": f"one head is what {report.task.name} on the dev set loses where it alone is left of its attention",
    }
    shown = [meaning for name, meaning in meanings.items() if name in run.head_scores]
    return f"Row {run.row}, seed {run.record['seed']}: {'; '.join(shown)}."


def one_head_cells(report: "Report") -> list[list[str]]:
    """A line an attention: its best head alone, and what is lost with it; empty where it was not measured."""
    scores = report.measured.head_scores.get("one_head", {}) if report.measured else {}
    best = {name: min(enumerate(values), key=lambda each: each[1]) for name, values in scores.items()}
    return [[name, str(head), f"{0.0 - lost:+.2f}".replace("-", "−")] for name, (head, lost) in best.items()]


def method(report: "Report") -> str:
    """How it was decided which differences are real."""
    if not report.differences:
        return "No difference was tested."
    times = enough_replicates(len(report.differences))
    item, several = report.task.item, any(d.seeds for d in report.differences)
    return (
        f"A paired bootstrap: {times:,} times, {report.items:,} test {item} were drawn with replacement from "
        f"the {report.items:,}, the same ones for all rows, and all rows scored on them; the 95% interval of a difference holds "
        "the middle 95% of what came out, and p (two-sided) says how easily a difference as large arises by chance. "
        + ("Where rows have several seeds, Student's t adds the spread between seeds. " if several else "")
        + "Testing many rows finds some difference by luck, so p is corrected (Holm): over the comparisons with row "
        f"{report.rows[0]['row']}"
        + (
            " for the marks of the first table, and over all pairs for those of the second."
            if report.all_pairs
            else "."
        )
    )


def signatures(report: "Report") -> list[str]:
    """Which version of a metric gave the scores, as sacrebleu writes it."""
    found = [sign for run in report.runs for sign in run.record.get("signatures", {}).items()]
    return list(dict.fromkeys(f"{name}: {signature}" for name, signature in found))


def machines(report: "Report") -> list[str]:
    return [
        f"Code {e['commit'] or 'version ' + e['hf_freeze']}, torch {e['torch']}, transformers {e['transformers']}; "
        f"{e['device']}, {e['threads']} of {e['cores']} cores for each run{'; ' * bool(e['precision'])}{e['precision']}."
        for e in report.environments
    ]


def pair_cells(report: "Report") -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows of the table of all pairs."""
    signed = report.task.signed
    cells = [
        [
            d.row,
            d.base,
            signed(d.difference, 2),
            f"{signed(d.low, 2)} to {signed(d.high, 2)}",
            p_value(d.p),
            p_value(d.p_pairs),
            "real *" if d.real else "may be chance",
        ]
        for d in report.differences
    ]
    return ["row", "against", "difference", "95% interval", "p", "p corrected", ""], cells


def markdown(report: "Report") -> str:
    from hf_freeze.experiments.report import table_cells

    lines = [f"# {report.title}", "", *_table(*table_cells(report), left=2), ""]
    against = "trained share" if "share" in report.axes else "parameters"
    lines += [f"![{report.task.name} against {against} and stored size]({report.picture('report')})", ""]
    lines += [report.tested_on, ""] * bool(report.tested_on)
    lines += [f"**{note}**" for note in report.notes] + [""] * bool(report.notes)
    lines += [" ".join(legend(report)), ""]
    lines += [f"- {_plain(what)}: {_plain(sentence)}" for what, sentence in findings(report)] + [""]
    if report.measured:
        picture = report.picture("heads")
        lines += ["## Attention heads", "", f"![what the heads are worth]({picture})", "", head_scores(report), ""]
        if cells := one_head_cells(report):
            headings = ["attention", "best head", f"{report.task.name} with it alone"]
            lines += [*_table(headings, cells, left=1), ""]
    if any(run.schedules() for run in report.runs):
        picture = report.picture("schedules")
        lines += ["## Schedules", "", f"![what methods scheduled in training]({picture})", ""]
    if report.all_pairs:
        lines += ["## Differences between all rows", "", *_table(*pair_cells(report), left=2), ""]
    lines += [method(report), ""]
    if len(report.sources) > 1:
        lines += [*(f"- {source.letter}: {source.described}" for source in report.sources), ""]
    lines += [f"Command: `{command}`" for command in report.commands] + [""] * bool(report.commands)
    lines += [f"Seeds {', '.join(map(str, report.seeds))}. " + "; ".join(f"`{s}`" for s in signatures(report)), ""]
    return "\n".join([*lines, *machines(report)]) + "\n"


def _table(headings: Sequence[str], cells: Sequence[Sequence[str]], left: int) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * left + " ---: |" * (len(headings) - left)]
    return lines + ["| " + " | ".join(map(_plain, row)) + " |" for row in cells]


def _plain(text: str) -> str:
    """What a label holds is text, and no Markdown table or HTML."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", " ".join(text.split()).replace("|", "\\|"))
