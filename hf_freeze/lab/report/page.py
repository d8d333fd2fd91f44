"""Reports as one HTML page that needs no network: everything it shows is inside it."""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hf_freeze.lab.report.findings import answer, findings
from hf_freeze.lab.report.finished_runs import Run, Source, label_of
from hf_freeze.lab.report.fronts import default_axes, measures
from hf_freeze.lab.report.page_table import commit_of, filter_values, folder_name, method_names, rows_table
from hf_freeze.lab.report.plots.draw import svg_plots
from hf_freeze.lab.report.plots.style import named
from hf_freeze.lab.report.plots.training import has_dev
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import MARKERS, style_of
from hf_freeze.lab.report.wording import (
    head_scores,
    legend,
    machines,
    map_captions,
    method,
    pair_cells,
    setting_in_words,
    signatures,
    unmarked,
)

_DETAILED = 300  # runs of a page; the settings of more would fill megabytes
_TEMPLATES = jinja2.PackageLoader("hf_freeze.lab.report", "templates")

ENVIRONMENT = jinja2.Environment(
    loader=_TEMPLATES, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def page(reports: Sequence[Report], out: Path | None = None) -> str:
    """The whole page, a section a report. What records hold is escaped by the template; the SVG is ours, and escaped by
    matplotlib. `out`: the folder that the page will lie in, from which it links to the grids' own."""
    script = template_text("page.js")
    sources = list({source.letter: source for report in reports for source in report.sources}.values())
    few = sum(len(report.runs) for report in reports) <= _DETAILED
    return ENVIRONMENT.get_template("report.html").render(
        title=_title(sources) if len(reports) > 1 else reports[0].title,
        style=Markup(template_text("page.css")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sources=[_source(source, out) for source in sources] if len(sources) > 1 else [],
        groups=[_group(report, few) for report in reports],
        choices=_choices(reports, sources),
    )


def template_text(name: str) -> str:
    """Of a template that has nothing to fill in."""
    return _TEMPLATES.get_source(ENVIRONMENT, name)[0].rstrip("\n")


def _title(sources: Sequence[Source]) -> str:
    recipes = list(dict.fromkeys(recipe for source in sources for recipe in source.recipes))
    return ", ".join(recipes) if len(recipes) <= 4 else f"{len(sources)} grids of {len(recipes)} recipes"


def _group(report: Report, detailed: bool) -> dict[str, Any]:
    measured = measures(report)
    axes = default_axes(report, measured)
    columns, table = rows_table(report, axes, measured)
    return {
        "title": report.title,
        "number": report.number,
        "tested_on": report.tested_on,
        "first": report.rows[0]["row"],
        "quality": report.task.name,
        "notes": report.notes,
        "answer": answer(report),
        "findings": findings(report),
        "keys": [(*_key(number), name) for number, name in named(report).items()],
        "columns": columns,
        "rows": [
            line | {"cells": cells} for line, cells in zip(filter_values(report, axes, measured), table, strict=True)
        ],
        "weighed": axes,
        "weighed_by": [measured[name].heading for name in axes],
        "legend": legend(report),
        "plots": {name: Markup(svg) for name, svg in svg_plots(report).items()},
        "axes": report.axes,
        "setting": setting_in_words(report),
        "head_scores": head_scores(report),
        "map_captions": map_captions(report),
        "has_dev": has_dev(report),
        "matrix": _matrix(report) if report.all_pairs else [],
        "all_pairs": report.all_pairs,
        "unmarked": unmarked(report),
        "pairs": pair_cells(report),
        "method": method(report),
        "commands": report.commands,
        "seeds": report.seeds,
        "signatures": signatures(report),
        "machines": machines(report),
        "runs": [_details(run) for run in report.runs] if detailed else [],
    }


def _source(source: Source, out: Path | None) -> dict[str, Any]:
    """What is said of a grid, and where its own page lies, if it has one that this page does not replace."""
    pages = [] if out is None else [folder / "report.html" for folder in source.folders]
    own = [path for path in pages if path.exists() and out is not None and path.parent.resolve() != out.resolve()]
    return {
        "letter": source.letter,
        "recipes": ", ".join(source.recipes),
        "folders": ", ".join(map(folder_name, source.folders)),
        "page": Path(os.path.relpath(own[0], out)).as_posix() if own else "",
        "runs": len(source.runs),
        "seeds": ", ".join(map(str, sorted({run.record["seed"] for run in source.runs}))),
        "commits": ", ".join(dict.fromkeys(map(commit_of, source.runs))),
        "machines": "; ".join(dict.fromkeys(run.machine or "not kept" for run in source.runs)),
    }


def _choices(reports: Sequence[Report], sources: Sequence[Source]) -> dict[str, dict[str, str]]:
    """What rows can be filtered by: its values, and those in words. Where all rows have one value there is no choice."""
    runs = [run for report in reports for run in report.runs]
    methods = {name: name for name in sorted({name for run in runs for name in method_names(run)})}
    choices = {
        "group": {str(report.number): report.title for report in reports},
        "from": {source.letter: f"{source.letter}: {source.described}" for source in sources},
        "method": methods | {"none": "none"} if methods and not all(map(method_names, runs)) else methods,
        "machine": {name: name for name in dict.fromkeys(run.machine for run in runs) if name},
    }
    return {name: values for name, values in choices.items() if len(values) > 1}


def _key(index: int) -> tuple[str, str]:
    """The sign of a row in the plots, and its colour."""
    colour, marker = style_of(index)
    return MARKERS[marker], colour


def _matrix(report: Report) -> list[dict[str, Any]]:
    """For each row its cells against every row: the text, and whether it is significantly better or worse."""
    signed, better = report.task.signed, 1 if report.task.higher else -1
    lines = []
    for row in report.rows:
        line = []
        for base in report.rows:
            if test := report.tested(base["row"], row["row"]) or report.tested(row["row"], base["row"]):
                difference = test.difference if test.row == row["row"] else -test.difference
                real = test.significant and report.shows(difference)
                kind = ("better" if difference * better > 0 else "worse") if real else "chance"
                line.append((signed(difference) + (" *" if real else ""), kind))
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
