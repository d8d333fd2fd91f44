"""Shared by all export formats: the model to export, optional packages, and the marker file of an exported folder."""

import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_freeze.install import how_to_install

MARK = "hf_freeze_export.json"  # marks an exported folder; holds format, quantization, task and positions


@dataclass(frozen=True)
class Export:
    """A model to export, in eval mode, with its task and its tokenizer, if any."""

    model: Any
    task: str
    tokenizer: Any
    quantization: str | None
    say: Callable[[str], Any]
    texts: Iterable[str] | None = None  # for the scales of activations
    row_steps: dict[bytes, float] = field(
        default_factory=dict
    )  # of what was quantised before: `trained_grid.steps_of_rows`


def require(package: str, format: str) -> Any:
    """The imported package. Raises ValueError if it is not installed."""
    extra = "executorch" if format == "executorch" else "export"
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{format} needs {package}, which is missing; {how_to_install(extra)}") from error


def mark_of(folder: Path) -> dict[str, Any]:
    """The marker written by `export_model`; empty for a folder that is not exported."""
    return json.loads((folder / MARK).read_text(encoding="utf-8")) if (folder / MARK).is_file() else {}


def read_mark(folder: Path, format: str | None, task: str) -> dict[str, Any]:
    """The marker written by `export_model`. Raises ValueError unless the folder holds a model of this format (None: of any that
    keeps the structure) and task."""
    if not (folder / MARK).is_file():
        raise ValueError(f"{folder} is no exported folder: it has no {MARK}; create one with hf-freeze export")
    try:
        mark = mark_of(folder)
        found = mark["format"], mark["task"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MARK} cannot be read; export the model again") from error
    if found != (format or mark["format"], task):
        raise ValueError(f"{folder} holds a {found[1]} model for {found[0]}, not {task} for {format or found[0]}")
    return mark
