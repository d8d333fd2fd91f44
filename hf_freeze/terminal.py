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

from hf_freeze.install import MissingExtra

_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}


class OneLineError(Exception):
    """Reported in one line, as a user's mistake is."""


class _Console(Console):
    """Lines longer than a terminal is wide are wrapped between words; where the output goes to a file, they stay whole."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        if soft_wrap and self.is_terminal:
            options |= {"overflow": "ignore", "crop": False}  # a longer word, such as a path, stays whole
        super().print(*objects, soft_wrap=soft_wrap and not self.is_terminal, **options)


console = _Console()


def say(text: str) -> None:
    """Print plain text: in a terminal, wrapped between words; elsewhere as it is."""
    say_code(_wrapped(text, console.width) if console.is_terminal else text)


def say_code(text: str) -> None:
    """Print plain text that a user may copy, without wrapping it."""
    console.out(text, highlight=False)


def show_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    numbers: Collection[str] = (),
    optional: Collection[str] = (),
    sections: Collection[int] = (),
    box: boxes.Box = boxes.HEAVY_HEAD,
    padding: int = 1,
) -> None:
    """Print a table whose columns wrap between words. Where the terminal is too narrow for that, the columns with the headings
    `optional` are left out, and if that is not enough, it is a list with an entry for each row.

    `numbers`: headings of the columns that are on the right and not wrapped. `sections`: rows that a line follows. In a list, the
    first cell of a row is its heading; where it is empty, the row belongs to the one before.
    """
    if title is not None:
        say(title)
    rows = [[str(cell) for cell in row] for row in rows]
    kept = [column for column, heading in enumerate(headings) if heading not in optional]
    fewer = [headings[column] for column in kept], [[row[column] for column in kept] for row in rows]
    for names, cells in ((headings, rows), fewer):
        table = Table(box=box, padding=(0, padding))
        for heading, *texts in zip(names, *cells, strict=True):
            is_number = heading in numbers
            lines = [line for text in texts for line in text.split("\n")]
            words = [*heading.split(), *(lines if is_number else " ".join(lines).split())]
            table.add_column(
                escape(heading),
                justify="right" if is_number else "left",
                width=max(map(cell_len, (heading, *lines))),
                min_width=max(map(cell_len, words)),
            )
        if _fits(table):
            for number, row in enumerate(cells):
                table.add_row(*map(escape, row), end_section=number in sections)
            console.print(table)
            if names is not headings:
                say(f"Left out, as the terminal is narrow: {', '.join(name for name in headings if name in optional)}.")
            return
    _show_list(headings, rows)


def _fits(table: Table) -> bool:
    """Make columns narrower, the widest first, until the table fits into the terminal. False if their `min_width` is too much."""
    excess = console.measure(table, options=console.options.update(width=1_000_000)).maximum - console.width
    widths: list[Any] = [column.width for column in table.columns]
    for _ in range(excess):
        widest = max(
            range(len(widths)), key=lambda number: (widths[number] > table.columns[number].min_width) * widths[number]
        )
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return all(width >= column.min_width for column, width in zip(table.columns, widths, strict=True))


def _show_list(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines: list[str] = []
    indent = 4 + max(map(cell_len, headings[1:]))
    for first, *others in rows:
        lines += [first] if first else []
        for heading, text in zip(headings[1:], others, strict=True):
            if words := " ".join(text.split()):
                name = f"  {heading:{indent - 4}}  "
                lines.append(
                    textwrap.fill(words, console.width, initial_indent=name, subsequent_indent=" " * indent, **_WHOLE)
                )
    say_code("\n".join(lines))


def _wrapped(text: str, width: int) -> str:
    """With line breaks between words; a longer word, such as a path, is left whole."""
    wrapped: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        indent += 2 if indent or line.startswith("- ") else 0
        wrapped += textwrap.wrap(line, width, subsequent_indent=" " * indent, **_WHOLE) or [""]
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
    if isinstance(error, (ValueError, OSError, MissingExtra, OneLineError)):
        return True
    from huggingface_hub.errors import StrictDataclassError

    return isinstance(error, StrictDataclassError)


def _in_words(error: Exception) -> str:
    """What an error says; of the system's own, such as "[Errno 2] No such file or directory: 'a.txt'", "a.txt: no such file or
    directory"."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without its number
    return str(error)
