"""Sentences whose figures are filled in: what stands in braces, from the archives or from the kept output of a benchmark.

docs/results/statements.yaml has those of whole parts of pages; `results.py` puts them there. {loss GRID ROW BASE} and the
like are of an archive, GRID_runs.tar.gz. {cell OUTPUT | ROW | COLUMN} and the like are of outputs/OUTPUT.txt: of the rows whose
first cell is ROW or, if there is none, begins so.
"""

import collections
import json
import re
import statistics
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hf_freeze.analysis.significance import Difference
from hf_freeze.lab.report.findings import interval, quality, seeds_in_words
from hf_freeze.lab.report.report import Report
from hf_freeze.run_folder import HEAD_SCORES

_NUMBER = r"[-+]?[\d.]*\d"


class Reports(Protocol):
    """The report of each archive by its name."""

    def __getitem__(self, name: str, /) -> Report: ...


def filled(text: str, reports: Reports, folder: Path) -> str:
    """Raises ValueError for a figure of no known kind, or of a row or column that is not there."""

    def value(found: re.Match[str]) -> str:
        what, _, rest = found[1].partition(" ")
        if what in _OF_OUTPUTS:
            return _OF_OUTPUTS[what](_cells(folder, *(part.strip() for part in rest.split("|"))))
        grid, *rows = rest.split()
        if what in _OF_FILES:
            return _OF_FILES[what](folder, grid, *rows)
        if what not in _OF_ROWS:
            raise ValueError(f"{found[0]}: choose from {[*_OF_ROWS, *_OF_FILES, *_OF_OUTPUTS]}")
        return _OF_ROWS[what](reports[grid], *[summary(reports[grid], grid, row) for row in rows])

    return re.sub(r"{([^}]*)}", value, text)


# -- of the rows of an archive -------------------------------------------------------------------------------------------------


def compare(report: Report, row: str, base: str) -> Difference | None:
    """The difference of `row` from `base`; None where it was not tested."""
    found = next((one for one in report.differences if {one.base, one.row} == {base, row}), None)
    if found is not None and found.base == row:  # the other way round
        found = replace(found, base=base, row=row, difference=-found.difference, low=-found.high, high=-found.low)
    return found


def summary(report: Report, grid: str, row: str) -> dict[str, Any]:
    found = next((one for one in report.rows if one["row"] == row), None)
    if found is None:
        raise ValueError(f"{grid} has no row {row!r}; choose from {[one['row'] for one in report.rows]}")
    return found


def _score(report: Report, row: dict[str, Any]) -> str:
    return f"{quality(report, row)} {report.task.unit} ({seeds_in_words(row)})"


def _mean(report: Report, row: dict[str, Any]) -> str:
    return quality(report, row).partition(" ")[0]


def _kept(report: Report, row: dict[str, Any], base: dict[str, Any]) -> str:
    return f"{100 * row[report.task.quality][0] / base[report.task.quality][0]:.0f} %"


def _compared(report: Report, row: dict[str, Any], base: dict[str, Any]) -> Difference:
    found = compare(report, row["row"], base["row"])
    if found is None:
        raise ValueError(f"{report.title} does not compare row {row['row']} with row {base['row']}")
    return found


def _change(report: Report, row: dict[str, Any], base: dict[str, Any]) -> str:
    found = _compared(report, row, base)
    said = f"{report.task.signed(found.difference)}{' ' + report.task.unit if report.task.higher else ''}"
    return f"{said}, {interval(report, found)}, {seeds_in_words(row, base)}"


def _loss(report: Report, row: dict[str, Any], base: dict[str, Any]) -> str:
    """2.2 BLEU (1.2 to 3.1; 3 seeds); where it may be a gain, 0.1 points (1.9 lost to 1.7 gained; 3 seeds). Raises ValueError for
    a mean gain."""
    found = _compared(report, row, base)
    if found.difference > 0:
        raise ValueError(f"{report.title}: row {row['row']} gains: write {{signed ...}}")
    lost, least, most = (f"{abs(value):.1f}" for value in (found.difference, found.high, found.low))
    ends = f"{most} lost to {least} gained" if found.high > 0 else f"{least} to {most}"
    return f"{lost} {report.task.unit} ({ends}; {seeds_in_words(row, base)})"


def _signed(report: Report, row: dict[str, Any], base: dict[str, Any]) -> str:
    found = _compared(report, row, base)
    low, high = _with_sign(found.low, 1), _with_sign(found.high, 1)
    return f"{_with_sign(found.difference, 1)} {report.task.unit} ({low} to {high}; {seeds_in_words(row, base)})"


def _with_sign(value: float, digits: int) -> str:
    """Nothing before a zero."""
    shown = f"{value:.{digits}f}"
    return f"{abs(value):.{digits}f}" if float(shown) == 0 else f"{value:+.{digits}f}".replace("-", "−")


# -- of the files of its runs --------------------------------------------------------------------------------------------------


def _files(folder: Path, grid: str, row: str, name: str) -> Iterator[Any]:
    """A JSON file of each run of a row."""
    with tarfile.open(folder / f"{grid}_runs.tar.gz") as archive:
        for member in sorted(archive.getnames()):
            if re.fullmatch(rf"row-{re.escape(row)}-seed-\d+/{re.escape(name)}", member):
                yield json.load(archive.extractfile(member))  # type: ignore[arg-type]


def _heads(folder: Path, grid: str, row: str) -> str:
    """How many heads each kind of attention keeps, in each run."""
    scores = next(_files(folder, grid, "scored", HEAD_SCORES))["importance"]
    kinds = collections.Counter(_kind(name) for name, heads in scores.items() for _ in heads)
    kept = []
    for config in _files(folder, grid, row, "model/config.json"):
        removed = [method["heads"] for method in config["methods"] if method["method"] == "head_pruning"]
        gone = collections.Counter(_kind(name) for one in removed for name, heads in one.items() for _ in heads)
        kept.append({kind: count - gone[kind] for kind, count in kinds.items()})
    listed = (f"{kind} {', '.join(str(one[kind]) for one in kept)} of {kinds[kind]}" for kind in kinds)
    return f"{'; '.join(listed)} ({seeds_in_words({'seeds': len(kept)})}, one number each)"


def _kind(name: str) -> str:
    """decoder.0.cross -> decoder.cross"""
    return ".".join(name.split(".")[::2])


def _alone(folder: Path, grid: str, row: str) -> str:
    """What the two attentions lose that lose most with their best head alone: means over the runs."""
    runs = [scores["one_head"] for scores in _files(folder, grid, row, HEAD_SCORES)]
    losses = {name: statistics.mean(min(run[name]) for run in runs) for name in runs[0]}
    (first, most), (second, less) = sorted(losses.items(), key=lambda item: -item[1])[:2]
    return f"−{most:.1f} for `{first}`, then −{less:.1f} for `{second}` ({seeds_in_words({'seeds': len(runs)})})"


# -- of the output of a benchmark ----------------------------------------------------------------------------------------------


def _cells(folder: Path, output: str, start: str, column: str) -> list[str]:
    """The cells of a column, in the rows whose first cell is `start` or, if there is none, begins so."""
    printed = (folder / "outputs" / f"{output}.txt").read_text(encoding="utf-8")
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()]
        for part in re.findall(r"(?m)(?:^\|.*\n)+", printed)
    ]
    of_column = [(headings.index(column), rows) for headings, _, *rows in tables if column in headings]
    if not of_column:
        raise ValueError(f"{output} has no column {column!r}; choose from {[table[0] for table in tables]}")
    named = [(row[0], row[place]) for place, rows in of_column for row in rows]
    found = [cell for name, cell in named if name == start] or [cell for name, cell in named if name.startswith(start)]
    if not found:
        raise ValueError(f"{output} has no row {start!r}; choose from {[name for name, _ in named]}")
    return found


def _cell(cells: list[str]) -> str:
    if len(cells) > 1:
        raise ValueError(f"{len(cells)} rows begin so: {cells}")
    return cells[0]


def _mean_of(digits: int) -> Callable[..., str]:
    """The mean of the first numbers of the cells."""

    def shown(cells: list[str]) -> str:
        return f"{statistics.fmean(_numbers(cell)[0] for cell in cells):.{digits}f}"

    return shown


def _ends(digits: int) -> Callable[..., str]:
    """The mean of differences, and the ends of their intervals: −0.009 (−0.016 to −0.002)."""

    def shown(cells: list[str]) -> str:
        means, lows, highs = zip(*(_numbers(cell) for cell in cells), strict=True)
        mean, low, high = (_with_sign(value, digits) for value in (statistics.fmean(means), min(lows), max(highs)))
        return f"{mean} ({low} to {high})"

    return shown


def _share(cells: list[str]) -> str:
    """What stands in brackets, a share of the model."""
    return _cell(cells).partition("(")[2].rstrip(")")


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(_NUMBER, cell)]


_OF_ROWS: dict[str, Callable[..., str]] = {
    "score": _score,
    "mean": _mean,
    "quality": quality,
    "kept": _kept,
    "change": _change,
    "loss": _loss,
    "signed": _signed,
    "steps": lambda report, row: f"{row['steps'][0]:,.0f}",
    "megabytes": lambda report, row: f"{row['stored'][0]:.3g}",
    "bytes": lambda report, row, base: f"{100 * row['stored'][0] / base['stored'][0]:.0f} %",
    "saved": lambda report, row, base: f"{100 - 100 * row['stored'][0] / base['stored'][0]:.0f} %",
}
_OF_FILES = {"heads": _heads, "alone": _alone}
_OF_OUTPUTS: dict[str, Callable[..., str]] = {
    "cell": _cell,
    "share": _share,
    **{f"mean{digits}": _mean_of(digits) for digits in range(5)},
    **{f"ends{digits}": _ends(digits) for digits in range(5)},
}
