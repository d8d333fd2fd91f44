"""What all commands print with, and how they report a user's mistakes. In a terminal, no word and no number is ever broken."""

import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box as boxes
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()


def say(text: str) -> None:
    """Print plain text: in a terminal, wrapped between words; elsewhere as it is."""
    say_code(_wrapped(text, console.width) if console.is_terminal else text)


def say_code(text: str) -> None:
    """Print plain text that a user may copy, without wrapping it."""
    console.print(escape(text), soft_wrap=True, highlight=False)


def show_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    numbers: Collection[str] = (),
    sections: Collection[int] = (),
    box: boxes.Box = boxes.HEAVY_HEAD,
    padding: tuple[int, int] = (0, 1),
) -> None:
    """Print a table whose columns wrap between words; in a terminal too narrow for that, a list with an entry for each row.

    `numbers`: headings of the columns that are on the right and not wrapped. `sections`: rows that a line follows. In a list, the
    first cell of a row is its heading; where it is empty, the row goes on with the one before.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title, box=box, padding=padding, title_justify="left" if box is not boxes.HEAVY_HEAD else "center")
    widths, least = [], []
    for heading, *cells in zip(headings, *texts, strict=True):
        is_number = heading in numbers
        table.add_column(escape(heading), justify="right" if is_number else "left")
        lines = [line for text in (heading, *cells) for line in text.split("\n")]
        words = [*heading.split(), *(lines[1:] if is_number else " ".join(cells).split())]
        widths.append(max(map(cell_len, lines)))
        least.append(max(map(cell_len, words), default=0))
    for number, row in enumerate(texts):
        table.add_row(*map(escape, row), end_section=number in sections)
    frame = console.measure(table, options=console.options.update(width=1_000_000)).maximum - sum(widths)
    if frame + sum(least) > console.width:
        _show_list(headings, texts, title)
        return
    while frame + sum(widths) > console.width:
        widest = max(range(len(widths)), key=lambda column: (widths[column] > least[column]) * widths[column])
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    console.print(table)


def _show_list(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    lines = [] if title is None else [title, ""]
    for first, *others in rows:
        lines += [first] if first else []
        named = zip(headings[1:], others, strict=True)
        lines += [f"  {heading}: {' '.join(text.split())}" for heading, text in named if text.strip()]
    say_code(_wrapped("\n".join(lines), console.width))


def _wrapped(text: str, width: int) -> str:
    """With line breaks between words; a longer word, such as a path, is left whole."""
    wrapped: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        indent += 2 if indent or line.startswith("- ") else 0
        options = {"break_long_words": False, "break_on_hyphens": False}
        wrapped += textwrap.wrap(line, width, subsequent_indent=" " * indent, **options) or [""]
    return "\n".join(wrapped)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors that a user can cause into one line and exit code 2, without a traceback."""
    try:
        yield
    except Exception as error:
        if not _is_of_user(error):
            raise
        stderr = Console(stderr=True)
        message = " ".join(f"Error: {_in_words(error)}".split())
        message = _wrapped(message, stderr.width) if stderr.is_terminal else message
        stderr.print(escape(message).replace("Error:", "[red]Error:[/red]", 1), soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error


def _is_of_user(error: Exception) -> bool:
    if isinstance(error, (ValueError, OSError)):
        return True
    from huggingface_hub.errors import StrictDataclassError

    from hf_freeze.experiments.runs.grid import FailedRuns

    return isinstance(error, (FailedRuns, StrictDataclassError))


def _in_words(error: Exception) -> str:
    """What an error says; of the system's own, such as "[Errno 2] No such file or directory: 'a.txt'", "a.txt: no such file or
    directory"."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)
