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

from hf_freeze.lab.report import findings, table, wording
from hf_freeze.lab.report.finished_runs import Run, Source, label_of, left_out
from hf_freeze.lab.report.pictures import pictures_of, svg_plots
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import MARKERS, style_of

_DETAILED = 300  # runs of a page; the settings of more would fill megabytes
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("hf_freeze.lab.report", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(reports: Sequence[Report], out: Path | None = None) -> str:
    """The whole page, a section a report. What records hold is escaped by the template; the SVG is ours, and escaped by
    matplotlib. `out`: the folder that the page will lie in, from which it links to the grids' own."""
    script = template_text("page.js")
    sources = list({source.letter: source for report in reports for source in report.sources}.values())
    recipes = list(dict.fromkeys(recipe for source in sources for recipe in source.recipes))
    title = ", ".join(recipes) if len(recipes) <= 4 else f"{len(sources)} grids of {len(recipes)} recipes"
    return ENVIRONMENT.get_template("report.html").render(
        title=title if len(reports) > 1 else reports[0].title,
        style=Markup(template_text("page.css")),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sources=[_source(source, out) for source in sources] if len(sources) > 1 else [],
        groups=list(map(_group, reports)),
        detailed=sum(len(report.runs) for report in reports) <= _DETAILED,
        details=_details,
        words=_words([run for report in reports for run in report.runs]),
        wording=wording,
        findings=findings,
    )


def template_text(name: str) -> str:
    """Of a template that has nothing to fill in."""
    assert ENVIRONMENT.loader is not None
    return ENVIRONMENT.loader.get_source(ENVIRONMENT, name)[0].rstrip("\n")


def _group(report: Report) -> dict[str, Any]:
    """What the page shows of a report that it does not ask the report for: the table, and pictures by section."""
    svgs, sections = svg_plots(report), {}
    for picture in pictures_of(report):
        if picture.name in svgs:
            sections.setdefault(picture.section, []).append((picture, Markup(svgs[picture.name])))
    keys = [(style_of(sign), report.name_of(row)) for row, sign in report.signs().items()]
    keys += [(style_of(None), "other rows")] * (len(keys) < len(report.rows))
    return {
        "report": report,
        "columns": table.page_columns(report),
        "on_front": table.page_front(report),
        "keys": [(MARKERS.get(marker, "•"), colour, name) for (colour, marker), name in keys],
        "sections": sections,
        "matrix": _matrix(report) if report.all_pairs else [],
    }


def _source(source: Source, out: Path | None) -> list[Any]:
    """A line of the table of grids, with a link to the grid's own page, if it has one that this page does not replace."""
    folders = ", ".join(map(table.folder_name, source.folders))
    pages = [folder / "report.html" for folder in source.folders] if out else []
    for own in [path for path in pages if path.exists() and out and path.parent.resolve() != out.resolve()][:1]:
        folders = Markup('<a href="{}">{}</a>').format(Path(os.path.relpath(own, out)).as_posix(), folders)
    seeds = ", ".join(map(str, sorted({run.record["seed"] for run in source.runs})))
    commits = ", ".join(dict.fromkeys(map(table.commit_of, source.runs)))
    machines = "; ".join(dict.fromkeys(run.machine or "not kept" for run in source.runs))
    return [source.letter, ", ".join(source.recipes), folders, len(source.runs), seeds, commits, machines]


def _words(runs: Sequence[Run]) -> list[str]:
    """What the search suggests: methods, recipes and machines, where the rows have several."""
    methods = sorted({name for run in runs for name in table.method_names(run)})
    lists = methods, {run.recipe: 0 for run in runs}, {run.machine: 0 for run in runs if run.machine}
    return [word for words in lists if len(words) > 1 for word in words]


def _matrix(report: Report) -> list[list[str]]:
    """For each row its difference from every row, coloured where it is significantly better or worse."""
    lines = []
    for row in report.rows:
        line = [f"{row['row']}: {row['label']}"]
        for base in report.rows:
            test = report.tested(base["row"], row["row"]) or report.tested(row["row"], base["row"])
            if test is None:
                line.append("–")
                continue
            difference = test.difference if test.row == row["row"] else -test.difference
            real = test.significant and report.shows(difference)
            kind = ("better" if (difference > 0) is report.task.higher else "worse") if real else "mute"
            text = report.task.signed(difference) + " *" * real
            line.append(Markup('<span class="{}">{}</span>').format(kind, text))
        lines.append(line)
    return lines


def _details(run: Run) -> tuple[str, dict[str, str]]:
    """What is known of a run, as JSON. Where its data lies is nobody's business."""
    parts = {"Settings": run.settings, "Results": run.record}
    known = {name: left_out(part, ("root",)) for name, part in parts.items() if part}
    texts = {name: json.dumps(part, indent=1, ensure_ascii=False) for name, part in known.items()}
    return f"Row {run.row}, seed {run.record['seed']}: {label_of(run.record)}", texts
