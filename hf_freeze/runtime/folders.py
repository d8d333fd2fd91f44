"""The marker of an exported folder, and what else its small files say. `publish.export` writes them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "hf_freeze_export.json"  # marks an exported folder; holds format, quantization, task, positions and digests of the files
MODEL_FILES = (".safetensors", ".bin", ".onnx", ".data", ".pt2", ".pte", ".gguf", ".xml")
_BLOCK = 1 << 20  # bytes that are read at once


def mark_of(folder: Path) -> dict[str, Any]:
    """The marker written by `export_model`; empty for a folder that is not exported."""
    return read_json(folder / MARK)


def read_json(path: Path) -> dict[str, Any]:
    """{} if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def digests(folder: Path) -> dict[str, str]:
    """name -> SHA-256 of each file with a part of the model"""
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.suffix in MODEL_FILES}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def read_mark(folder: Path, formats: str | Sequence[str] | None, tasks: str | Sequence[str]) -> dict[str, Any]:
    """The marker written by `export_model`, for what opens the model: its files are read once more, which takes about a second
    for each GB. Raises ValueError unless the folder holds a model of one of these formats (None: of any that keeps the
    structure) and of one of the tasks, and if one of its files has changed."""
    if not (folder / MARK).is_file():
        raise ValueError(f"{folder} is no exported folder: it has no {MARK}; create one with hf-freeze export")
    try:
        mark = mark_of(folder)
        kind, task = mark["format"], mark["task"]
        written = dict(mark.get("files", {}))  # 0.1 wrote no digests
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MARK} cannot be read; export the model again") from error
    choices, kinds = ([one] if isinstance(one, str) else one for one in (tasks, formats or kind))
    if kind not in kinds or task not in choices:
        raise ValueError(
            f"{folder} holds a model for {task} in {kind}, and this opens {' or '.join(choices)} in {' or '.join(kinds)}"
        )
    for name, digest in written.items():
        if (path := folder / name).is_file() and _digest(path) != digest:  # of one that is missing, the engine tells
            raise ValueError(f"{path} has changed since the export: copy it again, or export the model again")
    return mark
