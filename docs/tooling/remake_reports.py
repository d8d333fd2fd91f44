"""Make published report pages anew by today's code, where the folders of their runs are gone:

    python docs/tooling/remake_reports.py docs/results/*.html

Scores, sizes and times come from the records (NAME.jsonl beside NAME.html). Intervals, p-values, settings, learning curves,
scores of heads and times of decoding come from the page itself, which is replaced, with its pictures. Curves are read off the
drawing. It stops where a number would change. Where the folders of the runs exist, `hf-freeze report` makes the page.
"""

import functools
import html
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from results import publish

from hf_freeze.analysis.significance import Difference
from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.table import table_cells
from hf_freeze.lab.report.wording import pair_cells
from hf_freeze.run_folder import HEAD_SCORES, LATENCY, run_folder

Points = list[tuple[float, float]]
GROUP, USE, TEXT, PATH = (f"{{http://www.w3.org/2000/svg}}{name}" for name in ("g", "use", "text", "path"))


def remake(path: Path) -> None:
    """Raises ValueError where the new page would not hold the numbers of the old one."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        grid = Path(temporary)
        shutil.copy(path.with_suffix(".jsonl"), grid / "results.jsonl")
        records = [json.loads(line) for line in (grid / "results.jsonl").read_text(encoding="utf-8").splitlines()]
        write_runs(path, page, records, grid)
        report = as_tested(make_report([grid], lambda _: None), page)
        check(report, page)
        publish(report, path.stem, html=path.parent, pictures=path.parent)


def write_runs(path: Path, page: str, records: list[dict[str, Any]], grid: Path) -> None:
    """What the page in `path` holds of each run, in the files that a report reads."""
    settings = settings_of(path)
    for record in records:
        folder = run_folder(grid, record)
        (folder / "model").mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(settings[record["row"], record["seed"]]), encoding="utf-8")
        methods = json.dumps({"methods": methods_of(path, record["row"], record["seed"])})
        (folder / "model" / "config.json").write_text(methods, encoding="utf-8")
    made = page.split(">How it was made<")[1].split('<p class="mute">')[0]
    commands = [html.unescape(command) for command in re.findall(r"<pre>(.*?)</pre>", made, re.DOTALL)]
    (grid / "command.txt").write_text("".join(f"{command}\n" for command in commands), encoding="utf-8")
    write_logs(page, records, grid)
    if (drawing := figure(page, "heads")) is not None:
        row, seed = re.findall(r"What the heads are worth <span>(?:Of row|Row) (\S+), seed (\d+)[.:]", page)[0]
        scores = json.dumps(head_scores(drawing))
        (grid / f"row-{row}-seed-{seed}" / HEAD_SCORES).write_text(scores, encoding="utf-8")
    write_latencies(page, records, grid)


@functools.cache
def settings_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Row and seed -> the settings of the run, in the page as it was at first."""
    pattern = r"<summary>Row (\S+), seed (\d+):.*?<pre tabindex=\"0\">(.*?)</pre>"
    runs = re.findall(pattern, path.read_text(encoding="utf-8"), re.DOTALL)
    return {(html.unescape(row), int(seed)): json.loads(html.unescape(text)) for row, seed, text in runs}


def methods_of(path: Path, row: str, seed: int) -> list[dict[str, Any]]:
    """Those that a run started with, from this grid or that of another page, and its own."""
    settings = settings_of(path).get((row, seed), {})
    start, own = settings.get("start"), settings.get("methods", [])
    if not start:
        return own
    grid = Path(start["grid"]).name.replace("-", "_") if "grid" in start else path.stem
    other = path.with_name(f"{grid}.html")
    return (methods_of(other, start["row"], start["seed"]) if other.exists() else []) + own


def write_logs(page: str, records: list[dict[str, Any]], grid: Path) -> None:
    """Of each run, or each that trained: its losses in training and, with markers, those on the dev set."""
    trained = [record for record in records if record.get("steps", 1)]
    lines = curves(drawing) if (drawing := figure(page, "curves")) is not None else []
    for kind, marked in (("loss", False), ("eval_loss", True)):
        some = [points for markers, points in lines if markers is marked]
        runs = next((group for group in (records, trained, []) if len(group) == len(some)), None)
        if runs is None:
            raise ValueError(
                f"the page has {len(some)} lines of {kind}, of {len(records)} runs, {len(trained)} of them trained"
            )
        for record, points in zip(runs, some, strict=True):
            with (run_folder(grid, record) / "log.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"epoch": round(x, 4), kind: y}) + "\n" for x, y in points)


def figure(page: str, name: str) -> ElementTree.Element | None:
    """The axes of a drawing of the page, those of the first plot."""
    for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        if f"{name}-figure_1" in text:
            return ElementTree.fromstring(text.replace("currentColor", "black"))
    return None


def curves(drawing: ElementTree.Element) -> list[tuple[bool, Points]]:
    """The lines of a plot with linear axes, in the order of drawing: whether it has markers, and its points."""
    (axes,) = (group for group in drawing.iter(GROUP) if group.get("id", "").endswith("axes_1"))
    x, y = (scale(group, axis) for group, axis in zip(axes.findall(GROUP)[1:3], "xy", strict=True))
    lines = []
    for line in axes.findall(GROUP)[3:]:
        if "line2d" not in line.get("id", ""):
            continue
        if marks := list(line.iter(USE)):
            places = [(mark.get("x", ""), mark.get("y", "")) for mark in marks]
        else:
            places = re.findall(r"[ML] (\S+) (\S+)", line.find(PATH).get("d", ""))  # pyright: ignore[reportOptionalMemberAccess]
        lines.append((bool(marks), [(x(float(a)), y(float(b))) for a, b in places]))
    return lines


def scale(group: ElementTree.Element, axis: str) -> Callable[[float], float]:
    """From a place in the drawing to the value that the ticks of an axis give it."""
    places = []
    for tick in group.findall(GROUP):
        if "tick" in tick.get("id", ""):
            (mark,), (text,) = tick.iter(USE), tick.iter(TEXT)
            places.append((float(mark.get(axis, "")), float((text.text or "").replace("−", "-"))))
    (a, low), (b, high) = places[0], places[-1]
    return lambda place: low + (place - a) * (high - low) / (b - a)


def head_scores(drawing: ElementTree.Element) -> dict[str, dict[str, list[float]]]:
    """The numbers in the cells of the heat-maps; the first of them has the names of the attentions."""
    scores: dict[str, dict[str, list[float]]] = {}
    names: list[str] = []
    for axes in (group for group in drawing.iter(GROUP) if "axes_" in group.get("id", "")):
        texts = [text.text or "" for text in axes.iter(TEXT)]
        heads, title = texts.index("head"), texts[-1]
        names = names or [text for text in texts[heads + 1 : -1] if re.match("[a-z]", text)]
        cells = [float(text) for text in texts[heads + 1 : -1] if not re.match("[a-z]", text)]
        lines = [cells[start : start + heads] for start in range(0, len(cells), heads)]
        scores[title.lower().replace(" ", "_")] = dict(zip(names, lines, strict=True))
    return scores


def write_latencies(page: str, records: list[dict[str, Any]], grid: Path) -> None:
    """Of each row, times of decoding that have the mean and the spread of the page."""
    rows: dict[str, dict[str, Any]] = {}
    for row, values in table_values(page).items():
        for batch in ("1", "64"):
            value, spread, on = values.get(f"latency_{batch}", (None, None, ""))
            if value is None:
                continue
            machine, conditions = on.split(": ", 1)
            device, threads, cores = re.findall(r"(.*), (\d+) of (\d+) cores", machine)[0]
            environment = {"device": device, "threads": int(threads), "cores": int(cores)}
            times = rows.setdefault(row, {"environment": environment, "conditions": conditions, "decoding": {}})
            times["decoding"][batch] = (value, spread)
    for row, times in rows.items():
        runs = [record for record in records if record["row"] == row]
        spreads = [spread for _, spread in times["decoding"].values()]
        runs = runs[:1] if None in spreads else runs
        for number, record in enumerate(runs):
            away = (number - (len(runs) - 1) / 2) * statistics_of(len(runs))
            decoding = {
                batch: {"ratio": 1.0, "first_ms": mean + away * (spread or 0)}
                for batch, (mean, spread) in times["decoding"].items()
            }
            (run_folder(grid, record) / LATENCY).write_text(
                json.dumps(times | {"decoding": decoding}), encoding="utf-8"
            )


def statistics_of(count: int) -> float:
    """By what evenly spaced numbers are apart whose standard deviation is 1."""
    return 1 / statistics.stdev(range(count)) if count > 1 else 0.0


def table_values(page: str) -> dict[str, dict[str, tuple[float | None, float | None, str]]]:
    """Row -> column -> value, spread and machine of the table of rows; empty of pages that are too old to hold them."""
    columns = re.findall(r'<th scope="col"[^>]* data-name="(\w+)"', page)
    values: dict[str, dict[str, tuple[float | None, float | None, str]]] = {}
    (body,) = re.findall(r'<table class="rows.*?<tbody>(.*?)</tbody>', page, re.DOTALL) or [""]
    for line in re.findall(r"<tr.*?</tr>", body, re.DOTALL):
        cells = re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", line, re.DOTALL)
        found = {}
        for name, (attributes, text) in zip(columns, cells, strict=True):
            data = dict(re.findall(r'data-(\w+)="([^"]*)"', attributes))
            data |= {"spread": text.split(" ± ")[1]} if " ± " in text and "spread" not in data else {}
            value, spread = (float(data[key]) if key in data else None for key in ("value", "spread"))
            found[name] = (value, spread, html.unescape(data.get("on", "")))
        values[html.unescape(cells[0][1])] = found
    return values


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The text of the cells of the first table whose first heading is `row` and that has `heading`."""
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        lines = [
            [html.unescape(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL)]
            for line in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        if lines[0][0] == "row" and any(cell.startswith(heading) for cell in lines[0]):
            return lines
    return []


def as_tested(report: Report, page: str) -> Report:
    """`report` with the tests and the notes of the page."""
    scores = {row["row"]: (row["score"], row["seeds"]) for row in report.rows}
    first, (headings, *lines) = report.rows[0]["row"], rows_of(page, "vs row")
    place = next(number for number, heading in enumerate(headings) if heading.startswith("vs row"))
    marked = {line[0] for line in lines if line[place].endswith("*")}
    differences = []
    for row, base, _, interval, p, p_corrected, _ in rows_of(page, "against")[1:]:
        low, high = (
            math.log(float(end[1:])) if end.startswith("×") else float(end.replace("−", "-"))
            for end in interval.split(" to ")
        )
        differences.append(
            Difference(
                base=base,
                row=row,
                difference=scores[row][0] - scores[base][0],
                low=low,
                high=high,
                p=number_of(p),
                p_corrected=number_of(p_corrected) if base != first else 0.0 if row in marked else 1.0,
                seeds=min(scores[row][1], scores[base][1]) > 1,
            )
        )
    tested = re.search(r"the same ([\d,]+) ", page)
    notes = re.findall(r"<strong>Mind:</strong> (.*?)</p>", page)
    items = int(tested[1].replace(",", "")) if tested else 0
    return replace(report, differences=differences, items=items, notes=list(map(html.unescape, notes)))


def number_of(p: str) -> float:
    """A p-value as it is shown; below 0.001, some such number."""
    return 0.0005 if p.startswith("<") else float(p)


def check(report: Report, page: str) -> None:
    """Raises ValueError where a number of the tables differs from those of the page."""
    headings, *old = rows_of(page, "vs row")
    new_headings, new = table_cells(report)
    for heading in new_headings:
        column = next((number for number, name in enumerate(headings) if name == heading), None)
        if column is None:
            print(f"  {heading}: a new column")
            continue
        for before, after in zip(old, new, strict=True):
            if before[column] != after[new_headings.index(heading)]:
                raise ValueError(
                    f"row {after[0]}, {heading}: {before[column]} before, {after[new_headings.index(heading)]} now"
                )
    for before, after in zip(rows_of(page, "against")[1:], pair_cells(report)[1], strict=True):
        shown = [re.sub(r"(^|[< ])\.", r"\g<1>0.", cell) for cell in before[:-1]]
        if shown != after[:-1] or before[-1].endswith("*") is not after[-1].endswith("*"):
            raise ValueError(f"{before} before, {after} now")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name)
        remake(Path(name))
