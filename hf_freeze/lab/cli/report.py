"""`hf-freeze report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box

from hf_freeze import terminal

if TYPE_CHECKING:
    from hf_freeze.lab.report.report import Report

# A narrow terminal leaves these columns to the written report.
_FOR_WIDE_TERMINALS = ("chrF", "dev ppl", "seeds", "best epoch", "epochs", "total k", "parameters", "train min")


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `hf-freeze run` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the report; the first FOLDER if not given.")] = None,
) -> None:
    """Compare the rows of one or more grids, finished or not: a table, plots, and which differences are significant.

    Rows are compared only if they share test set, metric and training data; other rows get a section of their own.

    Example: hf-freeze report runs/freeze-ablation

    Example: hf-freeze report runs/freeze-ablation runs/ffn-compression runs/head-pruning --out runs/all
    """
    from hf_freeze.lab.report.write import write_reports

    with terminal.one_line_errors():
        reports = write_reports(*folders, out=out, say=terminal.say)
    for written in reports:
        if len(reports) > 1:
            terminal.say(f"\n{written.title}")
        _print_rows(written)
    files = ", ".join(str((out or folders[0]) / f"report.{kind}") for kind in ("html", "md", "png"))
    terminal.say(f"Written: {files}")


def _print_rows(report: "Report") -> None:
    from hf_freeze.lab.report.table import table_cells
    from hf_freeze.lab.report.wording import legend

    headings, cells = table_cells(report)
    options: Any = {"numbers": headings[2:], "optional": _FOR_WIDE_TERMINALS, "box": box.SIMPLE_HEAD, "padding": 0}
    terminal.show_table(headings, cells, **options)
    terminal.say("\n".join(legend(report)))
