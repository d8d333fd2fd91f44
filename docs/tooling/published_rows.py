"""docs/results/published_rows.yaml as Markdown: every row of the published tables, what it is here, and whether both agree.

`results.py` puts it into docs/results/published_rows.md, and checks that it stays what the archives give.
"""

import collections
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from statements import Reports, compare, filled, summary

from hf_freeze.analysis.significance import Difference
from hf_freeze.lab.report.findings import interval, quality, seeds_in_words
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.tasks.scoring import TaskScoring

EXPECTED = ("no loss", "a loss", "a gain")
UNITS = {"BLEU": (True, 1.0), "points": (True, 1.0), "perplexity": (False, math.log(1.02))}  # higher is better, margin
_HEADING = ["| published row | published | recipe: row | measured here | verdict |", "| --- | ---: | --- | --- | --- |"]
_AGREES = {"holds": "agrees", "does not hold": "disagrees", "not told apart": "not told apart"}


def verdict(task: TaskScoring, found: Difference, expects: str) -> str:
    """By the 95 % interval of one comparison: "holds" and "does not hold" only where the interval allows nothing else."""
    low, high = (found.low, found.high) if task.higher else (-found.high, -found.low)
    loss, gain, no_loss = high < 0, low > 0, task.loses_at_most(found.low, found.high)
    if expects not in EXPECTED:
        raise ValueError(f"expects: {expects!r}: choose from {list(EXPECTED)}")
    holds, fails = {
        "no loss": (no_loss, task.loses(found.low, found.high)),
        "a loss": (loss, no_loss and not loss),
        "a gain": (gain, high < task.margin and not gain),
    }[expects]
    return "holds" if holds else "does not hold" if fails else "not told apart"


def findings(reports: Reports, folder: Path) -> str:
    """The list of `findings`, with what the archives give in place of {score GRID ROW} and the like."""
    listed = _read(folder)["findings"]
    return "\n".join(f"- {filled(one['text'], reports, folder)} *({one['kind']})*" for one in listed)


def _read(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "published_rows.yaml").read_text(encoding="utf-8"))


def tables(reports: Reports, folder: Path) -> str:
    """A table for each published one."""
    lines: list[str] = []
    for table in _read(folder)["tables"]:
        lines += [f"### {table['title']}", "", f"{table['source'].rstrip('.')}. {table.get('note', '')}".strip(), ""]
        lines += [*_HEADING, *(line for row in table["rows"] for line in _lines(table, row, reports, folder)), ""]
    return "\n".join(lines).strip()


def _lines(table: dict[str, Any], row: list[Any], reports: Reports, folder: Path) -> Iterator[str]:
    name, figure, row_name, *more = row
    own = table | (more[0] if more else {})
    base = own.get("base", table["rows"][0][2])
    of_base = own.get("published_base", next((one[1] for one in table["rows"] if one[2] == base), None))
    change = None if row_name == base else _published_change(figure, of_base, own.get("unit"))
    start = f"| {name} | {figure}{'' if change is None else f' ({change.words})'} | {own['recipe']}: `{row_name}` |"
    if "measured" in own:
        yield f"{start} {filled(own['measured'], reports, folder)} | {own['verdict']} |"
        return
    expected = change or (Change("", own["expects"]) if "expects" in own else None)
    record = own.get("record", row_name)
    cells = (_measured(archive, record, base, expected, reports, folder) for archive in own["archives"])
    for measured, holds in [cell for cell in cells if cell is not None] or [("–", "not run")]:
        yield f"{start} {measured} | {holds} |"


@dataclass(frozen=True)
class Change:
    """A published difference in words, what it is (no loss, a loss, a gain), and its `size`: a share of the base's score, or a
    logarithm of a ratio of perplexities."""

    words: str
    expects: str
    size: float | None = None


def _published_change(figure: Any, base: Any, unit: str | None) -> Change | None:
    try:
        figure, base = float(figure), float(base)
    except (TypeError, ValueError):  # in words
        return None
    if unit is None:
        return None
    higher, margin = UNITS[unit]
    if higher:
        difference, size, words = figure - base, (figure - base) / base, f"{figure - base:+.1f}"
    else:
        difference = size = math.log(figure / base)
        words = f"×{figure / base:.3f}"
    better = difference if higher else -difference
    expects = "a loss" if better <= -margin else "a gain" if better >= margin else "no loss"
    return Change(words.replace("-", "−"), expects, size)


def _measured(
    archive: str, row: str, base: str, published: Change | None, reports: Reports, folder: Path
) -> tuple[str, str] | None:
    """(what was measured, verdict) of a row of an archive; None where that has no such row."""
    if (folder / f"{archive}.jsonl").exists():
        return _recorded(folder, archive, row, base)
    report = reports[archive]
    if not any(one["row"] == row for one in report.rows):
        return None
    of_row = summary(report, archive, row)
    link = f"[{archive}]({archive}_runs.tar.gz) `{row}`"
    words = f"{quality(report, of_row)} {report.task.unit}"
    found = compare(report, row, base)
    if found is None:
        return f"{words} ({seeds_in_words(of_row)}), {link}", "–"
    of_base = summary(report, archive, base)
    words += f"; {report.task.signed(found.difference)} ({interval(report, found)}; {seeds_in_words(of_row, of_base)})"
    return f"{words}, {link}", "–" if published is None else _agreement(report, found, published, of_base)


def _agreement(report: Report, found: Difference, published: Change, of_base: dict[str, Any]) -> str:
    """Whether a difference is of the published direction and, if it is a loss or a gain, of about the published size."""
    task, direction = report.task, _AGREES[verdict(report.task, found, published.expects)]
    if direction != "agrees" or published.expects == "no loss" or published.size is None:
        return direction
    expected = published.size * (of_base[task.quality][0] if task.higher else 1)
    if found.low - task.margin <= expected <= found.high + task.margin:
        return "agrees"
    more = abs(found.difference) > abs(expected)
    return f"{'loses' if published.expects == 'a loss' else 'gains'} {'more' if more else 'less'} here"


def _recorded(folder: Path, name: str, row: str, base: str) -> tuple[str, str] | None:
    """Of records without test items: accuracies, and no verdict."""
    records = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    scores: dict[str, list[float]] = collections.defaultdict(list)
    for record in records:
        scores[record["row"]].append(100 * record["metrics"]["test_accuracy"])
    if row not in scores:
        return None
    spread = f" ± {statistics.stdev(scores[row]):.2f}" if len(scores[row]) > 1 else ""
    words = f"{statistics.mean(scores[row]):.2f}{spread} %"
    if row != base:
        words += f"; {statistics.mean(scores[row]) - statistics.mean(scores[base]):+.2f}".replace("-", "−")
    return f"{words} ({seeds_in_words({'seeds': len(scores[row])})}), [{name}]({name}.jsonl) `{row}`", "no interval"
