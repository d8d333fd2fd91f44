"""What columns, marks and tests of a report mean, in words."""

import json

from hf_freeze.analysis.significance import LEVEL, REPLICATES, TOO_FEW, enough_replicates
from hf_freeze.lab.report.convergence import FEWEST, scores_of
from hf_freeze.lab.report.report import Report


def legend(report: Report) -> list[str]:
    """What the columns and marks of the table mean."""
    first, task = report.rows[0]["row"], report.task
    what = f"mean {task.name} minus that of row {first}"
    if task.signed(0).startswith("×"):
        what = f"{task.name} divided by that of row {first} (means over seeds are geometric); more than 1 is worse"
    marks = (
        f" * marks a significant difference (corrected p < {LEVEL}){unmarked(report)}." if report.differences else ""
    )
    lines = [f"vs row {first}: {what}.{marks}"]
    if len(report.seeds) > 1:
        lines.append("± is the standard deviation over seeds.")
    lines.append(_steps(report))
    stored = task.columns["stored"][0]
    if "fewer" in task.columns:
        sizes = f"parameters: of the whole network, biases too; {stored}: tensors of the file, with the places of weights that "
        return [*lines, f"{sizes}are left; times fewer, times smaller: row {first} divided by this row."]
    meanings = {
        "share": "share %: trained parameters of all; ",
        "total": "total k: all parameters, in thousands; ",
        "work": "macs k: thousands of multiply-adds for a token at length 32; ",
    }
    known = "".join(meaning for name, meaning in meanings.items() if name in report.columns)
    return [*lines, f"{known}{stored}: tensors that the checkpoint holds."]


def _steps(report: Report) -> str:
    """What "steps to 90 %" are."""
    heading = report.task.columns["steps"][0]
    if "steps" not in report.columns:
        return f"{heading} of the final score: not known, for fewer than {FEWEST} evaluations in training were kept."
    evaluations = [entry for run in report.runs for entry in run.log if "eval_loss" in entry]
    name = next(name for name in scores_of(report.task.quality) if any(name in entry for entry in evaluations))
    own, score = report.task.quality, name.removeprefix("eval_")
    goal = "at most 1/0.9 of" if score == "perplexity" else "at least 90 % of"
    what = report.task.name if score == own else score
    return f"{heading}: of training, until the {what} of an evaluation on the dev set was {goal} the final one."


def unmarked(report: Report) -> str:
    """What a difference without a mark means in this report."""
    with_seeds = {test.seeds for test in report.differences if not test.significant}
    if not with_seeds:
        return ""
    if with_seeds == {False}:
        return f"; others: {TOO_FEW}"
    return "; others are not significant" + f"; with one seed: {TOO_FEW}" * (False in with_seeds)


def one_head_cells(report: Report) -> list[list[str]]:
    """A line an attention: its best head alone, and what is lost with it; empty where it was not measured."""
    scores = report.measured.head_scores.get("one_head", {}) if report.measured else {}
    best = {name: min(enumerate(values), key=lambda pair: pair[1]) for name, values in scores.items()}
    return [[name, str(head), f"{0.0 - lost:+.2f}".replace("-", "−")] for name, (head, lost) in best.items()]


def method(report: Report) -> str:
    """How significance was tested."""
    if not report.differences:
        return "No difference was tested."
    times = enough_replicates(len(report.differences))
    middle = "its values" if times == REPLICATES else f"its first {REPLICATES:,} values"
    item, several = report.task.item, any(d.seeds for d in report.differences)
    return (
        f"A paired bootstrap: {times:,} times, {report.items:,} {report.split} {item} were drawn with replacement from the "
        f"{report.items:,}, and all rows were scored on the same draw. The 95 % interval of a difference holds the middle 95 % "
        f"of {middle}; p (two-sided) is the probability that chance alone gives a difference as large. "
        + ("For rows with several seeds, Student's t adds the spread between seeds. " if several else "")
        + "Among many comparisons some differ by luck, so p is corrected by Holm's method: over the comparisons with row "
        f"{report.rows[0]['row']}" + (" for these, and over all pairs for the others." if report.all_pairs else ".")
    )


def signatures(report: Report) -> list[str]:
    """Which version of a metric gave the scores, as sacrebleu writes it."""
    pairs = [sign for run in report.runs for sign in run.record.get("signatures", {}).items()]
    return list(dict.fromkeys(f"{name}: {signature}" for name, signature in pairs))


def machines(report: Report) -> list[str]:
    """The code and the machines that the runs were made by."""
    known = [
        run.record["environment"] | {"precision": run.precision} for run in report.runs if "environment" in run.record
    ]
    return [
        f"Code {e['commit'] or 'version ' + e['hf_freeze']}, torch {e['torch']}, transformers {e['transformers']}; "
        f"{e['device']}, {e['threads']} of {e['cores']} cores for each run{'; ' * bool(e['precision'])}{e['precision']}."
        for e in {json.dumps(environment, sort_keys=True): environment for environment in known}.values()
    ]


def pair_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows of the table of all pairs."""
    signed, cells = report.task.signed, []
    for d in report.differences:
        low, high = signed(d.low, 2), signed(d.high, 2)
        verdict = "significant *" if d.significant else d.unmarked
        # With many test items, or where both models give nonsense, such as one word for every sentence:
        if (d.significant and not report.shows(d.difference)) or low == high == signed(0.0, 2):
            verdict = "too small to show"
        p, corrected = ("< 0.001" if p < 0.001 else f"{p:.3f}" for p in (d.p, d.p_corrected))
        cells.append([d.row, d.base, signed(d.difference, 2), f"{low} to {high}", p, corrected, verdict])
    return ["row", "against", "difference", "95 % interval", "p", "p corrected", ""], cells
