"""What the formats share: what is exported, which packages that needs, and the mark of an exported folder."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_freeze.install import how_to_install

MARK = "hf_freeze_export.json"  # in every exported folder: format, quantization, task, positions


@dataclass(frozen=True)
class Export:
    """A model to write, in eval mode, with its task and, where there is one, its tokenizer. It is native, or, where a method
    refuses to be merged (`refusal`) and the format holds variants, a variant."""

    model: Any
    refusal: str | None
    task: str
    tokenizer: Any
    quantization: str | None
    say: Callable[[str], Any]


def require(package: str, format: str) -> Any:
    """The imported package. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{format} needs {package}, which is missing; {how_to_install('export')}") from error


def read_mark(folder: Path, format: str, task: str) -> dict[str, Any]:
    """What `export_model` noted. Raises ValueError where the folder holds something else than `task` in `format`."""
    if not (folder / MARK).is_file():
        raise ValueError(f"{folder} is no exported folder: it has no {MARK}; make one with hf-freeze export")
    mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    if (mark["format"], mark["task"]) != (format, task):
        raise ValueError(f"{folder} holds a {mark['task']} model for {mark['format']}, not {task} for {format}")
    return mark
