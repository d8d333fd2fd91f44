"""Tables of pages whose runs have no archive: those of records without test items (NAME.jsonl), and outputs of benchmarks.

Below `<!-- records NAME -->`, each cell of a table whose column a report has must be what NAME.jsonl gives. Stars are not
looked at: they come from test items, which were not kept. Below `<!-- output NAME -->` stands what a command has printed,
outputs/NAME.txt. Below `<!-- records calibration_rows MODEL -->`, scores and times are means over the rows of
calibration_rows.json, which benchmarks/calibration/run.py has written.
"""

import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path

from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.table import table_cells

RECORDS = re.compile(r"(?s)<!-- records (\w+)(?: (\w+))? -->\n(.*?)<!-- end -->\n")
METHODS = {  # in rows -> on the page
    "hf_freeze, no calibration": "without calibration",
    "hf_freeze, calibrated": "calibrated",
    "hf_freeze, calibrated and allocated": "calibrated, allocated over layers",
}
MACHINE = re.compile(r"; \{'hf_freeze': .*\}")  # at the end of what a benchmark prints; pages say it in words
OUTPUT = re.compile(r"(?s)(<!-- output (\w+) -->\n).*?(<!-- end -->\n)")


def with_outputs(text: str, folder: Path) -> tuple[str, int]:
    """A page with the outputs that it names, and how many these are."""

    def output(found: re.Match[str]) -> str:
        printed = (folder / "outputs" / f"{found[2]}.txt").read_text(encoding="utf-8").strip()
        return f"{found[1]}\n{MACHINE.sub('', printed)}\n\n{found[3]}"

    return OUTPUT.subn(output, text)


def wrong_cells(text: str, folder: Path) -> list[str]:
    """The cells of a page that its records do not give, in words. Raises ValueError for a table of which nothing was checked."""
    wrong = []
    for name, model, table in RECORDS.findall(text):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        headings, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        known = _means_of(folder / f"{name}.json", model) if model else _cells_of(folder / f"{name}.jsonl")
        checked = 0
        for row in rows:
            key = ", ".join(row[: 2 if model else 1])
            for heading, cell in zip(headings, row, strict=True):
                if (value := known.get(key, {}).get(heading)) is None:
                    continue
                checked += 1
                given = value if isinstance(value, str) else f"{value:.{len(cell.partition('.')[2])}f}"
                if cell.removesuffix(" *") != given:
                    wrong.append(f"{name}, row {key}, {heading}: {cell}, not {given}")
        if not checked:
            raise ValueError(f"{name} has no row and column of the table below its name")
    return wrong


def _cells_of(path: Path) -> dict[str, dict[str, str]]:
    """Row -> heading -> cell, as a report shows it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder, "results.jsonl"))
        headings, rows = table_cells(make_report([Path(folder)], lambda _: None))
    return {row[0]: dict(zip(headings[1:], row[1:], strict=True)) for row in rows}


def _means_of(path: Path, model: str) -> dict[str, dict[str, float]]:
    """ "cut, method" -> heading -> mean over the choices of texts."""
    groups: dict[str, list[dict[str, float]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8")).values():
        if row["model"] == model and "scores" in row:
            key = f"{row['cut'] or 'none'}, {METHODS.get(row['method'], row['method'])}"
            times = {"CPU s": row["cpu_seconds"]} if row["cut"] else {}
            groups.setdefault(key, []).append(row["scores"] | times)
    return {
        key: {name: statistics.fmean(one[name] for one in group) for name in group[0]} for key, group in groups.items()
    }
