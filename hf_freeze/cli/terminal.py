"""What all commands print with, and how they report a user's mistakes."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

console = Console()


def say(text: str) -> None:
    """Print plain text, without wrapping it."""
    console.print(escape(text), soft_wrap=True, highlight=False)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors that a user can cause into one line and exit code 2, without a traceback."""
    try:
        yield
    except Exception as error:
        from huggingface_hub.errors import StrictDataclassError

        from hf_freeze.experiments.runs.grid import FailedRuns

        if not isinstance(error, (ValueError, OSError, FailedRuns, StrictDataclassError)):
            raise
        message = escape(" ".join(_in_words(error).split()))
        Console(stderr=True).print(f"[red]Error:[/red] {message}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error


def _in_words(error: Exception) -> str:
    """What an error says; of the system's own, such as "[Errno 2] No such file or directory: 'a.txt'", "a.txt: no such file or
    directory"."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)
