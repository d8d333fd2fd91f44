"""Tables of pages whose runs have no archive: those of records without test items (NAME.jsonl), and outputs of benchmarks.

Below `<!-- records NAME -->`, each cell of a table whose column a report has must be what NAME.jsonl gives. Stars are not
looked at: they come from test items, which were not kept. Below `<!-- output NAME -->` stands what a command has printed,
outputs/NAME.txt.
"""

import re
import shutil
import tempfile
from pathlib import Path

from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.table import table_cells

RECORDS = re.compile(r"(?s)<!-- records (\w+) -->\n(.*?)<!-- end -->\n")
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
    for found in RECORDS.finditer(text):
        known = _cells_of(folder / f"{found[1]}.jsonl")
        (headings, _, *rows) = ([cell.strip() for cell in line.split("|")[1:-1]] for line in _table(found[2]))
        checked = 0
        for row in rows:
            given = known.get(row[0], {})
            for heading, cell in zip(headings, row, strict=True):
                if heading in given and heading != "row":
                    checked += 1
                    if cell.removesuffix(" *") != given[heading]:
                        wrong.append(f"{found[1]}, row {row[0]}, {heading}: {cell}, not {given[heading]}")
        if not checked:
            raise ValueError(f"{found[1]}.jsonl has no row and column of the table below its name")
    return wrong


def _table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def _cells_of(path: Path) -> dict[str, dict[str, str]]:
    """Row -> heading -> cell, as a report shows it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder, "results.jsonl"))
        headings, rows = table_cells(make_report([Path(folder)], lambda _: None))
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
