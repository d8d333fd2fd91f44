"""What the runs of one or several grids show: tables in Markdown, plots (`plots.py`) and one self-contained page (`html.py`)."""

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.experiments.grid import commands_of
from hf_freeze.experiments.plots import SIGNS, draw, draw_extra
from hf_freeze.experiments.results import Run, Source, label_of, read_runs, unlike_settings
from hf_freeze.experiments.rows import OF_A_ROW
from hf_freeze.experiments.statistics import MANY, Difference, accuracy, bleu, compare, log_perplexity
from hf_freeze.io import write_whole

Columns = dict[str, tuple[str, tuple[str, ...], str]]  # name -> (heading, where it is in a record, format)

TO_FIRST = "first"  # in place of a place in a record: how many times the first row has what this row has of a column
_COSTS: Columns = {
    "epochs": ("best epoch", ("epochs_to_convergence",), ".1f"),
    "share": ("share %", ("parameters", "trainable_share"), ".1%"),
    "total": ("total k", ("parameters", "total"), ",.0f"),  # shown where the rows differ in it
    "work": ("macs k", ("multiply_adds",), ",.0f"),  # the same
    "stored": ("stored MB", ("parameters", "stored_bytes"), ".2f"),
    "minutes": ("train min", ("seconds", "train"), ".1f"),
}
_UNITS = {"total": 1e-3, "work": 1e-3, "stored": 1e-6, "minutes": 1 / 60}
_IMAGE_COSTS: Columns = {
    "epochs": ("epochs", ("epochs_trained",), ".0f"),
    "total": ("parameters", ("parameters", "total"), ",.0f"),
    "fewer": ("times fewer", (TO_FIRST, "total"), ".2f"),
    "stored": ("stored kB", ("parameters", "stored_bytes"), ",.1f"),
    "smaller": ("times smaller", (TO_FIRST, "stored"), ".2f"),
    "minutes": ("train min", ("seconds", "train"), ".1f"),
}
FEW_ITEMS = 100  # a bootstrap over fewer understates how far a score may be off


@dataclass(frozen=True)
class Axis:
    """Of a plot of quality against a cost. `unit`: of the axis, in that of the column; `asks`: what the plot answers."""

    label: str
    unit: float
    asks: str


_STORED_ASKS = "What a smaller checkpoint costs"


@dataclass(frozen=True)
class Series:
    """Rows that are alike but for one setting: (its value, row) ascending, and those `without` the method that has it."""

    points: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    without: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [*self.without, *(row for _, row in self.points)]

    @property
    def name(self) -> str:
        """What the labels of its points have in common before and after the setting; else the first of them."""
        labels = [row["label"] for _, row in self.points] or [row["label"] for row in self.without]
        if len(labels) == 1:
            return labels[0]
        before = os.path.commonprefix(labels)
        after = os.path.commonprefix([label[len(before) :][::-1] for label in labels])[::-1]
        if "," not in before:
            return f"{labels[0]} …"
        return before[: before.rfind(",")] + after[after.find(",") :] * ("," in after)


@dataclass(frozen=True)
class Comparison:
    """How the rows of a task are compared: by the first of its columns."""

    name: str  # of that column, in a sentence
    qualities: dict[str, tuple[str, tuple[str, ...], str]]
    higher: bool  # is a higher score better?
    score: Callable[[np.ndarray], np.ndarray]  # of summed items
    item: str  # what is resampled
    scale: Callable[[float], float]  # of the column to the scale of `score`, on which differences are taken
    costs: Columns = field(default_factory=lambda: _COSTS)
    units: dict[str, float] = field(default_factory=lambda: _UNITS)
    axes: dict[str, Axis] = field(
        default_factory=lambda: {
            "share": Axis("trained parameters, % of all", 100, "What training fewer parameters costs"),
            "total": Axis("parameters, thousands", 1, "What fewer parameters cost"),
            "stored": Axis("stored in the checkpoint, MB", 1, _STORED_ASKS),
        }
    )
    rows_are: str = "trained"  # heading of the labels
    digits: int = 1  # of a difference in the table

    @property
    def columns(self) -> Columns:
        return self.qualities | self.costs

    @property
    def quality(self) -> str:
        return next(iter(self.qualities))

    def signed(self, difference: float, digits: int | None = None) -> str:
        """A difference of scores as it is shown: of BLEU in points, of log-perplexity as a ratio of perplexities."""
        digits = self.digits if digits is None else digits
        if self.scale is math.log:
            return f"×{math.exp(difference):.{digits + 2}f}"
        text = f"{difference:+.{digits}f}"
        return (text if float(text) else text[1:]).replace("-", "−")


COMPARISONS = {
    "translation": Comparison(
        "BLEU",
        {
            "bleu": ("BLEU", ("metrics", "test_bleu"), ".1f"),
            "chrf": ("chrF", ("metrics", "test_chrf"), ".1f"),
            "perplexity": ("dev ppl", ("metrics", "dev_perplexity"), ".2f"),
        },
        higher=True,
        score=bleu,
        item="sentences",
        scale=float,
    ),
    "language-modelling": Comparison(
        "test perplexity",
        {
            "test_perplexity": ("test ppl", ("metrics", "test_perplexity"), ".2f"),
            "perplexity": ("dev ppl", ("metrics", "dev_perplexity"), ".2f"),
        },
        higher=False,
        score=log_perplexity,
        item="blocks of text",
        scale=math.log,
    ),
    "masked-lm": Comparison(
        "test perplexity of masked tokens",
        {
            "test_perplexity": ("test ppl", ("metrics", "test_perplexity"), ".2f"),
            "accuracy": ("masked acc %", ("metrics", "test_accuracy"), ".1f"),
            "perplexity": ("dev ppl", ("metrics", "dev_perplexity"), ".2f"),
        },
        higher=False,
        score=log_perplexity,
        item="blocks of text",
        scale=math.log,
        units=_UNITS | {"accuracy": 100},
    ),
    "sequence-classification": Comparison(
        "accuracy",
        {
            "accuracy": ("accuracy %", ("metrics", "test_accuracy"), ".1f"),
            "dev_accuracy": ("dev acc %", ("metrics", "dev_accuracy"), ".1f"),
        },
        higher=True,
        score=accuracy,
        item="examples",
        scale=float,
        units=_UNITS | {"accuracy": 100, "dev_accuracy": 100},
    ),
    "image-classification": Comparison(
        "accuracy",
        {"accuracy": ("accuracy %", ("metrics", "test_accuracy"), ".2f")},
        higher=True,
        score=accuracy,
        item="images",
        scale=float,
        costs=_IMAGE_COSTS,
        units={"accuracy": 100, "stored": 1e-3, "minutes": 1 / 60},
        axes={
            "total": Axis("parameters", 1, "What fewer parameters cost"),
            "stored": Axis("stored in the checkpoint, kB", 1, _STORED_ASKS),
        },
        rows_are="method",
        digits=2,
    ),
}


@dataclass(frozen=True)
class Report:
    """What `make_report` found; `rows` as of `summarise`, `differences` of all pairs of rows that could be tested."""

    title: str
    task: Comparison
    runs: list[Run]
    rows: list[dict[str, Any]]
    differences: list[Difference]
    items: int  # test items; 0 where no run kept them
    notes: list[str]  # what a reader must know before believing a number
    commands: list[str]
    sources: Sequence[Source] = ()  # the grids, where there are several
    number: int = 1  # of this group of rows among those of a page
    tested_on: str = ""  # what these rows have in common, and others do not

    @property
    def seeds(self) -> list[int]:
        return sorted({run.record["seed"] for run in self.runs})

    @property
    def one_size(self) -> bool:
        """Whether all rows have equally many parameters."""
        return len({row["total"][0] for row in self.rows}) == 1

    @property
    def _alike(self) -> set[str]:
        """Of the trained share and the number of parameters, what does not tell rows apart where the other does; and the
        multiply-adds where they tell none apart."""
        one_share = "share" in self.rows[0] and len({row["share"][0] for row in self.rows}) == 1
        work = {row["work"][0] if "work" in row else None for row in self.rows}
        alike = {"total"} if self.one_size else {"share"} if one_share else set()
        return alike | ({"work"} if None in work or len(work) == 1 else set())

    @property
    def columns(self) -> Columns:
        """Those of the task that the table shows."""
        return {name: column for name, column in self.task.columns.items() if name not in self._alike}

    @property
    def axes(self) -> dict[str, Axis]:
        """Those of the task that the plots show: the share, unless the number of parameters tells more rows apart."""
        values = {name: len({row[name][0] for row in self.rows if name in row}) for name in ("share", "total")}
        left_out = "share" if values["total"] > values["share"] else "total"
        kept = {name: axis for name, axis in self.task.axes.items() if name != left_out}
        return kept if len(kept) > 1 else self.task.axes

    @property
    def environments(self) -> list[dict[str, Any]]:
        found = [
            run.record["environment"] | {"precision": run.precision} for run in self.runs if "environment" in run.record
        ]
        return list({json.dumps(environment, sort_keys=True): environment for environment in found}.values())

    def picture(self, name: str) -> str:
        """The file of a picture, such as report.png, or report-2.png of the second group of rows."""
        return f"{name}.png" if self.number == 1 else f"{name}-{self.number}.png"

    def front(self, cost: str) -> list[dict[str, Any]]:
        """The Pareto front: those rows of which none of no higher cost is as good, from the cheapest to the best."""
        sign = -1 if self.task.higher else 1
        found: list[dict[str, Any]] = []
        for row in sorted(self.rows, key=lambda row: (row[cost][0], sign * row[self.task.quality][0])):
            if not found or sign * row[self.task.quality][0] < sign * found[-1][self.task.quality][0]:
                found.append(row)
        return found

    @property
    def setting(self) -> str | None:
        """What the recipe wants the score drawn against, such as factorized_embedding.rank, if any."""
        if len(self.sources) > 1:  # a setting is drawn of one recipe
            return None
        return next((run.settings["axis"] for run in self.runs if run.settings.get("axis")), None)

    def series(self) -> list[Series]:
        """The rows by the other methods that they have, the other settings of this one, and the sections of the recipe that rows
        may change; a row without the method is with the first that is alike otherwise. Those whose value is no number have no
        place among the points."""
        if self.setting is None:
            return []
        name, setting = self.setting.split(".")
        found: dict[tuple[str, str], Series] = {}
        runs = {run.row: run for run in reversed(self.runs)}
        for row in self.rows:
            run = runs[row["row"]]
            if name == "heads":  # a field of the recipe, which the model has as heads by name
                having, others = [run.settings["heads"]] if "heads" in run.settings else [], "head_pruning"
            else:
                having, others = [method for method in run.methods if method["method"] == name], name
            alike = [{**method, "seed": None} for method in run.methods if method["method"] != others]
            key = json.dumps([alike, *(run.settings.get(section) for section in OF_A_ROW)], sort_keys=True)
            rest = json.dumps([{**each, setting: None, "seed": None} for each in having], sort_keys=True)
            if not having:
                first = next((place for place in found if place[0] == key), (key, rest))
                found.setdefault(first, Series()).without.append(row)
                continue
            if (key, "[]") in found:  # begun by a row without the method
                found[key, rest] = found.pop((key, "[]"))
            value: Any = having[0].get(setting)
            if type(value) in (int, float):
                found.setdefault((key, rest), Series()).points.append((value, row))
        for series in found.values():
            series.points.sort(key=lambda point: point[0])
        return [series for series in found.values() if series.points or series.without]

    def signs(self) -> dict[str, int]:
        """Row -> the number of its sign in the plots: one of its own, or where the rows are many, that of its series or grid."""
        series = self.series()
        if len(self.rows) >= (MANY if len(self.sources) > 1 else SIGNS) and not series:
            letters = list(dict.fromkeys(run.source for run in self.runs))
            return {run.row: letters.index(run.source) for run in self.runs}
        if not series or len(self.rows) < MANY:
            return {row["row"]: number for number, row in enumerate(self.rows)}
        found = {row["row"]: number for number, each in enumerate(series) for row in each.rows}
        others = [row["row"] for row in self.rows if row["row"] not in found]
        return found | {name: len(series) + number for number, name in enumerate(others)}

    @property
    def measured(self) -> Run | None:
        """The first run whose heads were measured."""
        return next((run for run in self.runs if run.head_scores), None)

    @property
    def all_pairs(self) -> bool:
        """Whether rows are compared with each other, and not with the first alone."""
        rows = {name for test in self.differences for name in (test.base, test.row)}
        return 0 < len(rows) < MANY

    def tested(self, base: str, row: str) -> Difference | None:
        return next((d for d in self.differences if (d.base, d.row) == (base, row)), None)

    def to_first(self, row: dict[str, Any]) -> tuple[float, Difference | None]:
        """The difference of mean scores between `row` and the first, and its test where there is one."""
        test = self.tested(self.rows[0]["row"], row["row"])
        return (test.difference if test else row["score"] - self.rows[0]["score"]), test


def make_report(folders: Sequence[Path], say: Callable[[str], Any] = print) -> Report:
    """Read and compare the finished runs of `folders`; the first row of the first is what all are compared with."""
    runs = read_runs(folders, say)
    if runs[0].task not in COMPARISONS:
        raise ValueError(f"{folders[0]} holds runs of {runs[0].task!r}; reports are made of {sorted(COMPARISONS)}")
    return report_of(runs, [Source(list(folders), runs)], say)


def report_of(runs: list[Run], sources: Sequence[Source], say: Callable[[str], Any] = print) -> Report:
    """Compare `runs` of one task, which came from `sources`; the first row is what all are compared with."""
    task = COMPARISONS[runs[0].task]
    rows = summarise([run.record | {"row": run.row} for run in runs], task)
    items, notes = _items_of_rows(runs, task)
    notes = unlike_settings(runs) + notes
    if min(row["seeds"] for row in rows) == 1:
        single = [row["row"] for row in rows if row["seeds"] == 1]
        which = "One seed" if len(single) == len(rows) else f"One seed of {_rows(single)}"
        covers = "the intervals and marks cover the choice of the test items only; another seed may differ by more"
        notes.append(f"{which}: {covers if items else 'small differences mean nothing'}.")
    tested = len(next(iter(items.values()))[0]) if items else 0
    if 0 < tested < FEW_ITEMS:
        notes.append(f"Only {tested} test {task.item}: too few to trust the intervals and marks.")
    for note in notes:
        say(note)
    titles = dict.fromkeys(run.record.get("recipe") or run.grid.resolve().name for run in runs)
    return Report(
        title=", ".join(titles),
        task=task,
        runs=runs,
        rows=rows,
        differences=compare(items, task.score) if len(items) > 1 else [],
        items=tested,
        notes=notes,
        commands=[command for source in sources for folder in source.folders for command in commands_of(folder)],
        sources=sources,
    )


def _items_of_rows(runs: list[Run], task: Comparison) -> tuple[dict[str, list[np.ndarray]], list[str]]:
    """The items of every row that can be tested, and what keeps the others from it."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.row, []).append(run)
    items = {row: [run.items for run in group if run.items is not None] for row, group in groups.items()}
    lacking = [row for row, group in groups.items() if len(items[row]) < len(group)]
    items = {row: found for row, found in items.items() if row not in lacking}
    notes = []
    if lacking:
        whose = "Its" if len(lacking) < MANY else "Their"
        notes.append(f"Not tested: {_rows(lacking)}. {whose} runs kept no test items (items.npy); run them again.")
    # The last column is of the test set alone: words of the reference, tokens of a block.
    if len({found[:, -1].tobytes() for row in items.values() for found in row}) > 1:
        notes.append("Not tested: the runs were scored on different test sets, so their scores cannot be compared.")
        items = {}
    return items, notes


def _rows(names: list[str]) -> str:
    return f"row {', '.join(names)}" if len(names) < MANY else f"{len(names)} rows"


def summarise(records: list[dict[str, Any]], task: Comparison = COMPARISONS["translation"]) -> list[dict[str, Any]]:
    """One dict a row, in grid order: for each column its mean and, over two or more seeds, standard deviation."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["row"], []).append(record)
    found: list[dict[str, Any]] = []
    for row, group in rows.items():
        columns: dict[str, list[float]] = {}
        for column, (_, where, _) in task.columns.items():
            if where[0] == TO_FIRST:
                own = columns[where[1]]
                columns[column] = [(found[0][where[1]][0] if found else statistics.fmean(own)) / each for each in own]
            elif column != "work" or all(record.get("multiply_adds") for record in group):  # old records have none
                columns[column] = _values(group, column, task)
        spreads = {
            column: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
            for column, values in columns.items()
        }
        score = statistics.fmean(map(task.scale, columns[task.quality]))
        found.append({"row": row, "label": label_of(group[0]), "seeds": len(group), "score": score} | spreads)
    return found


def _values(group: list[dict[str, Any]], column: str, task: Comparison) -> list[float]:
    values = []
    for record in group:
        value: Any = record
        for key in task.columns[column][1]:
            value = value[key]
        values.append(value * task.units.get(column, 1))
    return values


def table_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows."""
    task, first, columns = report.task, report.rows[0]["row"], report.columns
    shown = [heading for heading, _, _ in columns.values()]
    qualities, costs = shown[: len(task.qualities)], shown[len(task.qualities) :]
    headings = ["row", task.rows_are, qualities[0], f"vs row {first}", *qualities[1:], "seeds", *costs]
    cells = []
    for row in report.rows:
        values = [cell_text(row[column][0], row[column][1], form) for column, (_, _, form) in columns.items()]
        values.insert(len(task.qualities), str(row["seeds"]))
        cells.append([row["row"], row["label"], values[0], _against_first(report, row), *values[1:]])
    return headings, cells


def _against_first(report: Report, row: dict[str, Any]) -> str:
    if row is report.rows[0]:
        return "–"
    difference, test = report.to_first(row)
    return report.task.signed(difference) + (" *" if test and test.real_to_first else "")


def cell_text(mean: float, spread: float | None, form: str) -> str:
    """A number as the table shows it, with its standard deviation where that is more than none."""
    varies = spread is not None and f"{spread:{form}}" != f"{0:{form}}"
    return f"{mean:{form}}" + (f" ± {spread:{form}}" if varies else "")


def write_reports(*folders: Path, out: Path | None = None, say: Callable[[str], Any] = print) -> list[Report]:
    """As `write_report`, of any grids: a section, and a `report-2.png` and so on, for each group of rows that may be compared."""
    from hf_freeze.experiments.groups import make_reports

    reports = make_reports(folders, say)
    _write(reports, out or folders[0])
    return reports


def write_report(*folders: Path, out: Path | None = None, say: Callable[[str], Any] = print) -> Report:
    """Write `report.md`, `report.html` and `report.png` of all `folders` of a grid into `out`, the first of them if not given;
    and `heads.png` and `schedules.png`, where heads were measured and methods followed a schedule."""
    report = make_report(folders, say)
    _write([report], out or folders[0])
    return report


def _write(reports: Sequence[Report], out: Path) -> None:
    from hf_freeze.experiments.html import page
    from hf_freeze.experiments.text import markdown

    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "report.md", "\n".join(map(markdown, reports)))
    write_whole(out / "report.html", page(reports, out))
    for report in reports:
        draw(report, out / report.picture("report"))
        draw_extra(report, out)
