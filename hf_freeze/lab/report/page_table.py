"""The table of rows of a page, and what its script needs to sort, filter and weigh them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_freeze.lab.report.finished_runs import Run
from hf_freeze.lab.report.fronts import Measure, front
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.table import cell_text, table_cells


@dataclass(frozen=True)
class Column:
    """Of the table. `kind`, `higher`: of what rows are weighed by; `hidden`: where there is a script, until it is asked for."""

    name: str
    heading: str
    left: bool = False
    hidden: bool = False
    kind: str = ""
    higher: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Cell:
    """`value`: what its row is weighed by; `key`: what it is sorted by, else `value` or its text; `on`: the machine of a time."""

    text: str
    key: float | str | None = None
    value: float | None = None
    spread: float | None = None
    on: str = ""


def rows_table(report: Report, axes: list[str], measured: dict[str, Measure]) -> tuple[list[Column], list[list[Cell]]]:
    """What `table_cells` has, whether a row is on a front, then what else it is weighed by, and where it comes from."""

    names, own = [row["row"] for row in report.rows], report.columns
    headings, texts = table_cells(report)
    costs = [name for name in own if name not in report.qualities]
    shown = ["row", "label", report.task.quality, "to_first", *report.qualities[1:], "seeds", *costs]
    columns = [
        _column(name, heading, measured.get(name), left=name in ("row", "label"))
        for name, heading in zip(shown, headings, strict=True)
    ]
    table = []
    for index, (row, line) in enumerate(zip(report.rows, texts, strict=True)):
        keys = {"row": index, "label": row["label"], "to_first": report.to_first(row)[0], "seeds": row["seeds"]}
        keys |= {name: row[name][0] for name in own if name in row}
        table.append(
            [_cell(row["row"], t, measured.get(name), keys.get(name)) for name, t in zip(shown, line, strict=True)]
        )

    columns.append(Column("front", "front", left=True))
    fronts = [front([measured[name] for name in some], names) for some in (axes[:2], axes)]
    for cells, row in zip(table, names, strict=True):
        on = dict.fromkeys(f"{size}-D" for size, rows in zip((2, len(axes)), fronts, strict=True) if rows.get(row))
        cells.append(Cell(", ".join(on) or "–"))
    for name, measure in measured.items():
        unlike = len({mean for mean, _ in measure.values.values()}) > 1
        if name in shown or not unlike or (measure.kind != "time" and name not in ("work", "resident", "read")):
            continue
        columns.append(_column(name, measure.heading, measure, hidden=name not in axes))
        for cells, row in zip(table, names, strict=True):
            value = measure.values.get(row)
            cells.append(_cell(row, "–" if value is None else cell_text(*value, measure.form), measure))
    for name, values in _origins(report).items():
        columns.append(Column(name, name, left=True, hidden=True))
        for cells, row in zip(table, names, strict=True):
            cells.append(Cell(values[row]))
    return columns, table


def _column(name: str, heading: str, measure: Measure | None, *, left: bool = False, hidden: bool = False) -> Column:
    if measure is None:
        return Column(name, heading, left, hidden)
    return Column(name, heading, left, hidden, measure.kind, measure.higher, measure.meaning)


def _cell(row: str, shown: str, measure: Measure | None, key: float | str | None = None) -> Cell:
    value, spread = measure.values.get(row, (None, None)) if measure else (None, None)
    return Cell(shown, key, value, spread, measure.on.get(row, "") if measure else "")


def _origins(report: Report) -> dict[str, dict[str, str]]:
    """Heading -> row -> where it comes from; of one grid only what its rows differ in."""
    of: dict[str, Any] = {
        "folder": lambda run: folder_name(run.grid),
        "recipe": lambda run: run.recipe,
        "methods": lambda run: ", ".join(method_names(run)) or "–",
        "commit": commit_of,
        "machine": lambda run: run.machine or "not kept",
    }
    origins: dict[str, dict[str, dict[str, None]]] = {name: {} for name in of}
    for run in report.runs:
        for name, what in of.items():
            origins[name].setdefault(run.row, {})[what(run)] = None
    joined = {name: {row: "; ".join(values) for row, values in rows.items()} for name, rows in origins.items()}
    grids = len(report.sources)
    return {name: rows for name, rows in joined.items() if grids > 1 or len(set(rows.values())) > 1}


def filter_values(report: Report, axes: list[str], measured: dict[str, Measure]) -> list[dict[str, Any]]:
    """Of each row, what `_choices` names, and whether another one beats it in all that the rows are weighed by."""
    runs: dict[str, list[Run]] = {}
    for run in report.runs:
        runs.setdefault(run.row, []).append(run)
    on_front = front([measured[name] for name in axes], list(runs))
    return [
        {
            "source": group[0].source,
            "methods": " ".join(dict.fromkeys(name for run in group for name in method_names(run))) or "none",
            "machines": list(dict.fromkeys(run.machine for run in group if run.machine)),
            "beaten": not on_front.get(row, True),
        }
        for row, group in runs.items()
    ]


def folder_name(path: Path) -> str:
    """Its name: where it lies is nobody's business."""
    return path.resolve().name


def commit_of(run: Run) -> str:
    environment = run.record.get("environment")
    return environment["commit"] or f"version {environment['hf_freeze']}" if environment else "not kept"


def method_names(run: Run) -> list[str]:
    return list(dict.fromkeys(method["method"] for method in run.methods))
