"""Write a report: Markdown, pictures and one self-contained page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_freeze.io import write_whole
from hf_freeze.lab.report.build import make_report, make_reports
from hf_freeze.lab.report.markdown import markdown
from hf_freeze.lab.report.page import page
from hf_freeze.lab.report.pictures import draw_kept
from hf_freeze.lab.report.plots.draw import draw
from hf_freeze.lab.report.report import Report


def write_reports(
    *folders: Path, out: Path | None = None, say: Callable[[str], Any] = print, notes: Sequence[str] = ()
) -> list[Report]:
    """As `write_report`, of any grids: a section, and a `report-2.png` and so on, for each group of rows that may be compared.
    `notes`: what else a reader must know, said first."""

    reports = make_reports(folders, say)
    reports[0].notes[:0] = notes
    write_pages(reports, out or folders[0])
    return reports


def write_report(*folders: Path, out: Path | None = None, say: Callable[[str], Any] = print) -> Report:
    """Write `report.md`, `report.html` and `report.png` of all `folders` of a grid into `out`, the first of them if not given;
    and `heads.png` and `schedules.png`, where heads were measured and methods followed a schedule."""
    report = make_report(folders, say)
    write_pages([report], out or folders[0])
    return report


def write_pages(reports: Sequence[Report], out: Path) -> None:
    """Write reports that are made already, as `write_reports` does."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "report.md", "\n".join(map(markdown, reports)))
    write_whole(out / "report.html", page(reports, out))
    for report in reports:
        draw(report, out / report.picture("report"))
        draw_kept(report, out)
