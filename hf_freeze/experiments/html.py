"""The report as one HTML page that needs no network: everything it shows is inside it."""

import json
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from hf_freeze.experiments import text
from hf_freeze.experiments.plots import MARKERS, has_dev, named, style_of, svg_plots
from hf_freeze.experiments.results import Run, label_of

if TYPE_CHECKING:
    from hf_freeze.experiments.report import Report


def page(report: "Report") -> str:
    """The whole page. What records hold is escaped by the template; the SVG is ours, and escaped by matplotlib."""
    from hf_freeze.experiments.report import table_cells

    headings, cells = table_cells(report)
    loader = jinja2.PackageLoader("hf_freeze.experiments", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(
        title=report.title,
        first=report.rows[0]["row"],
        quality=report.task.name,
        notes=report.notes,
        findings=text.findings(report),
        keys=[(*_key(number), name) for number, name in named(report).items()],
        headings=headings,
        table=_sortable(report, cells),
        legend=text.legend(report),
        plots={name: Markup(svg) for name, svg in svg_plots(report).items()},
        axes=report.axes,
        setting=report.setting,
        head_scores=text.head_scores(report),
        has_dev=has_dev(report),
        matrix=_matrix(report),
        all_pairs=report.all_pairs,
        pairs=text.pair_cells(report),
        method=text.method(report),
        commands=report.commands,
        seeds=report.seeds,
        signatures=text.signatures(report),
        machines=text.machines(report),
        runs=[_details(run) for run in report.runs],
    )


def _key(index: int) -> tuple[str, str]:
    """The sign of a row in the plots, and its colour."""
    colour, marker = style_of(index)
    return MARKERS[marker], colour


def _sortable(report: "Report", cells: list[list[str]]) -> list[list[tuple[str, float | str]]]:
    """Each cell with what it is sorted by: the number, not how it is written."""
    keys: list[list[float | str]] = []
    for index, row in enumerate(report.rows):
        means = [row[column][0] for column in report.columns]
        means.insert(len(report.task.qualities), row["seeds"])
        keys.append([index, row["label"], means[0], report.to_first(row)[0], *means[1:]])
    return [list(zip(line, key, strict=True)) for line, key in zip(cells, keys, strict=True)]


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
