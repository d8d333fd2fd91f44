"""What the runs of one or several grids show, as data: rows, series, fronts and tested differences."""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_freeze.analysis.significance import MANY, Difference
from hf_freeze.lab.recipes.rows import OF_A_ROW
from hf_freeze.lab.report.finished_runs import Run, Source, split_of
from hf_freeze.lab.report.measures import Measure, front_line, measures_of
from hf_freeze.lab.tasks.scoring import Axis, Columns, TaskScoring

MAPPED = 3  # rows whose pictures stand side by side
FEW = 7  # rows that a picture can name and a reader can tell apart


@dataclass(frozen=True)
class Series:
    """Rows that are alike except for one setting: (its value, row) ascending, and those `without` the method that has it."""

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
class Report:
    """What `make_report` found. `rows` have a mean and a spread for each column; `differences` are of the pairs of rows that
    could be tested."""

    title: str
    task: TaskScoring
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
    def split(self) -> str:
        """What the scores were taken on: test, or dev for the trials of a search."""
        return split_of(self.runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({run.record["seed"] for run in self.runs})

    @property
    def columns(self) -> Columns:
        """Those of the task that the table shows. Of the trained share and the number of parameters, one that tells no rows
        apart is left out, and so are multiply-adds that only some rows have or that are all equal."""
        known = {name for row in self.rows for name in row} - {"total" if self.one_size else ""}
        if not self.one_size and self._number_of("share") == 1:
            known -= {"share"}
        if self._number_of("work") == 1 or any("work" not in row for row in self.rows):
            known -= {"work"}
        return {name: column for name, column in self.task.columns.items() if name in known}

    @property
    def one_size(self) -> bool:
        """Whether all rows have equally many parameters."""
        return self._number_of("total") == 1

    def _number_of(self, column: str) -> int:
        """How many different values it has."""
        return len({row[column][0] for row in self.rows if column in row})

    @property
    def qualities(self) -> list[str]:
        """The columns that are scores, the one that rows are compared by first."""
        return [name for name in self.task.qualities if name in self.columns]

    @property
    def axes(self) -> dict[str, Axis]:
        """Those of the task that the plots show: the share, unless the number of parameters tells more rows apart."""
        left_out = "share" if self._number_of("total") > self._number_of("share") else "total"
        kept = {name: axis for name, axis in self.task.axes.items() if name != left_out}
        return kept if len(kept) > 1 else self.task.axes

    @functools.cached_property
    def measures(self) -> dict[str, Measure]:
        """What rows may be weighed by."""
        return measures_of(self.task, self.rows, self.runs)

    @property
    def weighed_by(self) -> list[str]:
        """The score, what is stored, and what decoding costs: its time where that of half of the rows was measured, else
        multiply-adds; neither where rows do not differ in it."""
        third = [
            name
            for name in ("latency_1", "latency_64", "work")
            if (measure := self.measures.get(name)) and measure.tells and 2 * len(measure.values) >= len(self.rows)
        ]
        return [self.task.quality, "stored", *third[:1]]

    def picture(self, name: str) -> str:
        """The file of a picture, such as report.png, or report-2.png of the second group of rows."""
        return f"{name}.png" if self.number == 1 else f"{name}-{self.number}.png"

    def name_of(self, row: str) -> str:
        """What plots call a row: its label, with the name of the row where other rows have the same label."""
        label = next(summary["label"] for summary in self.rows if summary["row"] == row)
        return label if sum(summary["label"] == label for summary in self.rows) == 1 else f"{label} ({row})"

    def front(self, cost: str) -> list[dict[str, Any]]:
        """The Pareto front: those rows of which none of no higher cost is as good, from the cheapest to the best."""
        rows = {row["row"]: row for row in self.rows}
        return [rows[name] for name in front_line(self.measures[self.task.quality], self.measures[cost], list(rows))]

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
        others = "head_pruning" if name == "heads" else name  # `heads` of a recipe is that method in its model
        runs = {run.row: run for run in reversed(self.runs)}
        series: dict[tuple[str, str], Series] = {}
        without = []
        for row in self.rows:
            run = runs[row["row"]]
            having = [method for method in run.methods if method["method"] == name]
            if name == "heads":
                having = [run.settings["heads"]] if "heads" in run.settings else []
            alike = [{**method, "seed": None} for method in run.methods if method["method"] != others]
            key = json.dumps([alike, *(run.settings.get(section) for section in OF_A_ROW)], sort_keys=True)
            rest = json.dumps([{**method, setting: None, "seed": None} for method in having], sort_keys=True)
            value: Any = having[0].get(setting) if having else None
            if not having:
                without.append((key, row))
            elif type(value) in (int, float):
                series.setdefault((key, rest), Series()).points.append((value, row))
        for key, row in without:
            place = next((place for place in series if place[0] == key), (key, ""))
            series.setdefault(place, Series()).without.append(row)
        for one_series in series.values():
            one_series.points.sort(key=lambda point: point[0])
        return list(series.values())

    def signs(self, most: int = MANY) -> dict[str, int]:
        """Row -> the number of its sign in the plots. Of more than `most` rows only some have one: the first, the best for their
        size, and then the best."""
        names = [row["row"] for row in self.rows]
        if len(names) > most:
            best = sorted(self.rows, key=lambda row: row[self.task.quality][0], reverse=self.task.higher)
            front = self.front("stored")
            ends = [self.rows[0], *front[:1], *front[::-1], *best]
            chosen = list(dict.fromkeys(row["row"] for row in ends))[:FEW]
            names = [name for name in names if name in chosen]
        return {name: number for number, name in enumerate(names)}

    @property
    def measured(self) -> Run | None:
        """The first run whose heads were measured."""
        return next((run for run in self.runs if run.head_scores), None)

    def mapped(self, picture: str) -> dict[str, Any]:
        """Row -> what a picture ("attention", "embeddings") of its first run shows, for the first three rows that have it."""
        found: dict[str, Any] = {}
        for run in self.runs:
            if run.row not in found and len(found) < MAPPED and picture in (maps := run.maps):
                found[run.row] = maps[picture]
        return found

    @property
    def all_pairs(self) -> bool:
        """Whether rows are compared with each other, and not with the first alone."""
        rows = {name for test in self.differences for name in (test.base, test.row)}
        return 0 < len(rows) < MANY

    def tested(self, base: str, row: str) -> Difference | None:
        return next((d for d in self.differences if (d.base, d.row) == (base, row)), None)

    def shows(self, difference: float) -> bool:
        """Whether the digits of the tables show a difference of scores. With many test items, or where models give nonsense, a
        smaller one can be significant, and matters to nobody."""
        return self.task.signed(difference) != self.task.signed(0.0)

    def differs(self, row: dict[str, Any]) -> bool:
        """Whether `row` differs significantly from the first, by so much that the tables show it."""
        difference, test = self.to_first(row)
        return test is not None and test.significant and self.shows(difference)

    def to_first(self, row: dict[str, Any]) -> tuple[float, Difference | None]:
        """The difference of mean scores between `row` and the first, and its test where there is one."""
        test = self.tested(self.rows[0]["row"], row["row"])
        return (test.difference if test else row["score"] - self.rows[0]["score"]), test
