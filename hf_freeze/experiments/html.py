"""Reports as one HTML page that needs no network: everything it shows is inside it."""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from hf_freeze.experiments import text
from hf_freeze.experiments.fronts import Measure, default_axes, front, measures
from hf_freeze.experiments.plots import MARKERS, has_dev, named, style_of, svg_plots
from hf_freeze.experiments.results import Run, Source, label_of

if TYPE_CHECKING:
    from hf_freeze.experiments.report import Report

_DETAILED = 300  # runs of a page; the settings of more would fill megabytes
_TEMPLATES = jinja2.PackageLoader("hf_freeze.experiments", "templates")
_ENVIRONMENT = jinja2.Environment(
    loader=_TEMPLATES, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


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


def page(reports: Sequence["Report"], out: Path | None = None) -> str:
    """The whole page, a section a report. What records hold is escaped by the template; the SVG is ours, and escaped by
    matplotlib. `out`: the folder that the page will lie in, from which it links to the grids' own."""
    script = _text("page.js")
    sources = list({source.letter: source for report in reports for source in report.sources}.values())
    few = sum(len(report.runs) for report in reports) <= _DETAILED
    return _ENVIRONMENT.get_template("report.html").render(
        title=_title(sources) if len(reports) > 1 else reports[0].title,
        style=Markup(_text("page.css")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sources=[_source(source, out) for source in sources] if len(sources) > 1 else [],
        groups=[_group(report, few) for report in reports],
        choices=_choices(reports, sources),
    )


def _text(name: str) -> str:
    """Of a template that has nothing to fill in."""
    return _TEMPLATES.get_source(_ENVIRONMENT, name)[0].rstrip("\n")


def _title(sources: Sequence[Source]) -> str:
    recipes = list(dict.fromkeys(recipe for source in sources for recipe in source.recipes))
    return ", ".join(recipes) if len(recipes) <= 4 else f"{len(sources)} grids of {len(recipes)} recipes"


def _group(report: "Report", detailed: bool) -> dict[str, Any]:
    found = measures(report)
    axes = default_axes(report, found)
    columns, table = _table(report, axes, found)
    return {
        "title": report.title,
        "number": report.number,
        "tested_on": report.tested_on,
        "first": report.rows[0]["row"],
        "quality": report.task.name,
        "notes": report.notes,
        "findings": text.findings(report),
        "keys": [(*_key(number), name) for number, name in named(report).items()],
        "columns": columns,
        "rows": [line | {"cells": cells} for line, cells in zip(_filtered_by(report, axes, found), table, strict=True)],
        "weighed": axes,
        "weighed_by": [found[name].heading for name in axes],
        "legend": text.legend(report),
        "plots": {name: Markup(svg) for name, svg in svg_plots(report).items()},
        "axes": report.axes,
        "setting": report.setting,
        "head_scores": text.head_scores(report),
        "has_dev": has_dev(report),
        "matrix": _matrix(report) if report.all_pairs else [],
        "all_pairs": report.all_pairs,
        "pairs": text.pair_cells(report),
        "method": text.method(report),
        "commands": report.commands,
        "seeds": report.seeds,
        "signatures": text.signatures(report),
        "machines": text.machines(report),
        "runs": [_details(run) for run in report.runs] if detailed else [],
    }


def _source(source: Source, out: Path | None) -> dict[str, Any]:
    """What is said of a grid, and where its own page lies, if it has one that this page does not replace."""
    pages = [] if out is None else [folder / "report.html" for folder in source.folders]
    own = [path for path in pages if path.exists() and out is not None and path.parent.resolve() != out.resolve()]
    return {
        "letter": source.letter,
        "recipes": ", ".join(source.recipes),
        "folders": ", ".join(map(_folder, source.folders)),
        "page": Path(os.path.relpath(own[0], out)).as_posix() if own else "",
        "runs": len(source.runs),
        "seeds": ", ".join(map(str, sorted({run.record["seed"] for run in source.runs}))),
        "commits": ", ".join(dict.fromkeys(map(_commit, source.runs))),
        "machines": "; ".join(dict.fromkeys(run.machine or "not kept" for run in source.runs)),
    }


def _folder(path: Path) -> str:
    """Its name: where it lies is nobody's business."""
    return path.resolve().name


def _commit(run: Run) -> str:
    environment = run.record.get("environment")
    return environment["commit"] or f"version {environment['hf_freeze']}" if environment else "not kept"


def _choices(reports: Sequence["Report"], sources: Sequence[Source]) -> dict[str, dict[str, str]]:
    """What rows can be filtered by: its values, and those in words. Where all rows have one value there is no choice."""
    runs = [run for report in reports for run in report.runs]
    methods = {name: name for name in sorted({name for run in runs for name in _methods(run)})}
    found = {
        "group": {str(report.number): report.title for report in reports},
        "from": {source.letter: f"{source.letter}: {source.described}" for source in sources},
        "method": methods | {"none": "none"} if methods and not all(map(_methods, runs)) else methods,
        "machine": {name: name for name in dict.fromkeys(run.machine for run in runs) if name},
    }
    return {name: values for name, values in found.items() if len(values) > 1}


def _methods(run: Run) -> list[str]:
    return list(dict.fromkeys(method["method"] for method in run.methods))


def _key(index: int) -> tuple[str, str]:
    """The sign of a row in the plots, and its colour."""
    colour, marker = style_of(index)
    return MARKERS[marker], colour


def _table(report: "Report", axes: list[str], found: dict[str, Measure]) -> tuple[list[Column], list[list[Cell]]]:
    """What `table_cells` has, whether a row is on a front, then what else it is weighed by, and where it comes from."""
    from hf_freeze.experiments.report import cell_text, table_cells

    names, own = [row["row"] for row in report.rows], report.columns
    headings, texts = table_cells(report)
    costs = [name for name in own if name not in report.task.qualities]
    shown = ["row", "label", report.task.quality, "to_first", *list(report.task.qualities)[1:], "seeds", *costs]
    columns = [
        _column(name, heading, found.get(name), left=name in ("row", "label"))
        for name, heading in zip(shown, headings, strict=True)
    ]
    table = []
    for index, (row, line) in enumerate(zip(report.rows, texts, strict=True)):
        keys = {"row": index, "label": row["label"], "to_first": report.to_first(row)[0], "seeds": row["seeds"]}
        keys |= {name: row[name][0] for name in own}
        table.append([_cell(row["row"], t, found.get(name), keys[name]) for name, t in zip(shown, line, strict=True)])

    columns.append(Column("front", "front", left=True))
    fronts = [front([found[name] for name in some], names) for some in (axes[:2], axes)]
    for cells, row in zip(table, names, strict=True):
        on = dict.fromkeys(f"{size}-D" for size, rows in zip((2, len(axes)), fronts, strict=True) if rows.get(row))
        cells.append(Cell(", ".join(on) or "–"))
    for name, measure in found.items():
        unlike = len({mean for mean, _ in measure.values.values()}) > 1
        if name in shown or not unlike or (measure.kind != "time" and name != "work"):
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


def _origins(report: "Report") -> dict[str, dict[str, str]]:
    """Heading -> row -> where it comes from; of one grid only what its rows differ in."""
    of: dict[str, Any] = {
        "folder": lambda run: _folder(run.grid),
        "recipe": lambda run: run.recipe,
        "methods": lambda run: ", ".join(_methods(run)) or "–",
        "commit": _commit,
        "machine": lambda run: run.machine or "not kept",
    }
    found: dict[str, dict[str, dict[str, None]]] = {name: {} for name in of}
    for run in report.runs:
        for name, what in of.items():
            found[name].setdefault(run.row, {})[what(run)] = None
    joined = {name: {row: "; ".join(values) for row, values in rows.items()} for name, rows in found.items()}
    grids = len(report.sources)
    return {name: rows for name, rows in joined.items() if grids > 1 or len(set(rows.values())) > 1}


def _filtered_by(report: "Report", axes: list[str], found: dict[str, Measure]) -> list[dict[str, Any]]:
    """Of each row, what `_choices` names, and whether another one beats it in all that the rows are weighed by."""
    runs: dict[str, list[Run]] = {}
    for run in report.runs:
        runs.setdefault(run.row, []).append(run)
    on_front = front([found[name] for name in axes], list(runs))
    return [
        {
            "source": group[0].source,
            "methods": " ".join(dict.fromkeys(name for run in group for name in _methods(run))) or "none",
            "machines": list(dict.fromkeys(run.machine for run in group if run.machine)),
            "beaten": not on_front.get(row, True),
        }
        for row, group in runs.items()
    ]


def _matrix(report: "Report") -> list[dict[str, Any]]:
    """For each row its cells against every row: the text, and whether it is better or worse, for real."""
    signed, better = report.task.signed, 1 if report.task.higher else -1
    lines = []
    for row in report.rows:
        line = []
        for base in report.rows:
            if test := report.tested(base["row"], row["row"]) or report.tested(row["row"], base["row"]):
                difference = test.difference if test.row == row["row"] else -test.difference
                kind = ("better" if difference * better > 0 else "worse") if test.real else "chance"
                line.append((signed(difference) + (" *" if test.real else ""), kind))
            else:
                line.append(("–", "none"))
        lines.append({"row": row["row"], "label": row["label"], "cells": line})
    return lines


def _details(run: Run) -> dict[str, Any]:
    record, settings = run.record, json.loads(json.dumps(run.settings))
    if isinstance(settings.get("data"), dict):
        settings["data"].pop("root", None)  # where the data lies is nobody's business
    facts: dict[str, Any] = {name: f"{value:.4g}" for name, value in record["metrics"].items()}
    facts |= {f"{name} (s)": f"{value:.1f}" for name, value in record.get("seconds", {}).items()}
    facts |= {"precision": run.precision} if run.precision else {}
    facts |= {name: record[name] for name in ("steps", "epochs_trained", "epochs_to_convergence") if name in record}
    if "peak_memory_bytes" in record:
        facts["peak memory (MB)"] = f"{record['peak_memory_bytes'] / 1e6:,.0f}"
    if "resumed" in record:
        facts["resumed"] = "yes; its training time is that after the last restart" if record["resumed"] else "no"
    parameters = {name: f"{n:,}" for name, n in record["parameters"].items() if isinstance(n, int)}
    return {
        "row": run.row,
        "label": label_of(record),
        "seed": record["seed"],
        "tables": {"Metrics, times": facts, "Parameters": parameters, "Environment": record.get("environment", {})},
        "settings": json.dumps(settings, indent=1, ensure_ascii=False) if settings else "",
    }
