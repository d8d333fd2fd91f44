"""What the command line takes of the laboratory: the only module of the library that imports it. Where the extra `lab` is not
installed, its commands are listed all the same, and say so in one line when they are called."""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_freeze import terminal
from hf_freeze.lab.cli import init as _init
from hf_freeze.lab.cli import recipes as _recipes
from hf_freeze.lab.cli import report as _report
from hf_freeze.lab.cli import run as _run
from hf_freeze.lab.cli import score as _score
from hf_freeze.lab.cli import search as _search


def _checked(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def checked(*args: Any, **kwargs: Any) -> None:
        with terminal.one_line_errors():
            import_module("hf_freeze.lab.installed")
        command(*args, **kwargs)

    return checked


init = _checked(_init.init)
recipes = _checked(_recipes.recipes)
report = _checked(_report.report)
run = _checked(_run.run)
score = _checked(_score.score)
search = _checked(_search.search)


def inputs_and_labels(
    model: str, data: str, columns: list[str] | None, label: str | None, settings: list[str] | None
) -> tuple[Any, Any]:
    """As `hf_freeze.lab.labelled.inputs_and_labels`. Raises MissingExtra."""
    from hf_freeze.lab import labelled

    return labelled.inputs_and_labels(model, data, columns, label, settings)


def texts_of_tables(files: Sequence[Path], unit: str, column: str) -> Sequence[str]:
    """The texts in a column of tables, among which there may be files of lines; memory-mapped. Raises MissingExtra."""
    from hf_freeze.lab.data import read_text

    return read_text(files, unit=unit, column=column)["text"]
