"""Shared by all export formats: what a format is, the model to export, and the marker file of an exported folder."""

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_freeze.install import how_to_install

MARK = "hf_freeze_export.json"  # marks an exported folder; holds format, quantization, task, positions and digests of the files
MODEL_FILES = (".safetensors", ".bin", ".onnx", ".data", ".pt2", ".pte", ".gguf")
_BLOCK = 1 << 20  # bytes that are read at once


@dataclass(frozen=True)
class Export:
    """A model to export, in eval mode, with its task and its tokenizer, if any."""

    model: Any
    task: str
    tokenizer: Any
    quantization: str | None
    say: Callable[[str], Any]
    texts: Iterable[str] | None = None  # for the scales of activations
    # Of what was quantised before: `trained_grid.steps_of_rows`.
    row_steps: dict[bytes, float] = field(default_factory=dict)
    source: str | os.PathLike[str] = ""  # the directory or Hub id


@dataclass(frozen=True)
class Format:
    """A format of export. `write` writes a model to a folder, and raises ValueError for one that it cannot represent.

    `packages`: what it needs. `quantizations`: types of weights; those in `calibrated` need texts, those in `round_inputs` round
    the inputs of linears too. `tasks`: model type -> tasks; None: all of every family. `keeps_structure`: the methods of a
    variant stay; otherwise they are merged, and `after_merge` makes the native model smaller without changing its outputs.
    `learns`: whether texts change what it writes. `is_complete`: whether it writes all but the tokenizer. `for_browsers`: the
    folder opens in a browser alone.
    """

    write: Callable[[Export, Path], None]
    packages: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    calibrated: tuple[str, ...] = ()
    round_inputs: tuple[str, ...] = ()
    tasks: Mapping[str, tuple[str, ...]] | None = None
    needs_tokenizer: bool = False
    keeps_structure: bool = True
    after_merge: Callable[[Any], Any] | None = None
    learns: bool = False
    is_complete: bool = False
    for_browsers: bool = False


def require(package: str, format: str) -> Any:
    """The imported package. Raises ValueError if it is not installed."""
    extra = format if format in ("executorch", "gguf", "llama-cpp") else "export"
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{format} needs {package}, which is missing; {how_to_install(extra)}") from error


def mark_of(folder: Path) -> dict[str, Any]:
    """The marker written by `export_model`; empty for a folder that is not exported."""
    return json.loads((folder / MARK).read_text(encoding="utf-8")) if (folder / MARK).is_file() else {}


def digests(folder: Path) -> dict[str, str]:
    """name -> SHA-256 of each file with a part of the model"""
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.suffix in MODEL_FILES}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def read_mark(folder: Path, format: str | None, task: str) -> dict[str, Any]:
    """The marker written by `export_model`, for what opens the model: its files are read once more, which takes about a second
    for each GB. Raises ValueError unless the folder holds a model of this format (None: of any that keeps the structure) and
    task, and if one of its files has changed."""
    if not (folder / MARK).is_file():
        raise ValueError(f"{folder} is no exported folder: it has no {MARK}; create one with hf-freeze export")
    try:
        mark = mark_of(folder)
        found, written = (mark["format"], mark["task"]), dict(mark.get("files", {}))  # 0.1 wrote no digests
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MARK} cannot be read; export the model again") from error
    if found != (format or mark["format"], task):
        raise ValueError(f"{folder} holds a {found[1]} model for {found[0]}, not {task} for {format or found[0]}")
    for name, digest in written.items():
        if (path := folder / name).is_file() and _digest(path) != digest:  # of one that is missing, the engine tells
            raise ValueError(f"{path} has changed since the export: copy it again, or export the model again")
    return mark
