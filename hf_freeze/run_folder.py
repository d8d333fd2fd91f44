"""Where the runs of a grid lie, and what their folders hold: names and readers of files, for all that write or read them."""

import json
from pathlib import Path
from typing import Any

COMMANDS = "command.txt"  # in the folder of a grid, a line each
PRECISION = "precision.txt"  # in the folder of a grid: what `training.bf16: auto` means in all of its runs
LATENCY = "latency.json"  # in the folder of a run: how long its model decodes, as benchmarks/run_latency.py leaves it
HEAD_SCORES = "head_scores.json"  # in the folder of a run: name of a score -> attention -> a number for each head
HEAD_TESTS = "head_tests.json"  # beside it: name of a score -> attention -> a corrected p for each head
MAPS = "maps.json"  # in the folder of a run: what the pictures of its attentions and embeddings show


def run_folder(out: Path, run: dict[str, Any]) -> Path:
    return out / f"row-{run['row']}-seed-{run['seed']}"


def commands_of(out: Path) -> list[str]:
    """The commands that the runs of a grid were made by."""
    file = out / COMMANDS
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def read_head_scores(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Those in the folder of a run; empty where none were measured."""
    return _read(folder / HEAD_SCORES)


def read_head_tests(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Corrected p of the scores in the folder of a run; empty where none were tested."""
    return _read(folder / HEAD_TESTS)


def read_maps(folder: Path) -> dict[str, Any]:
    """The maps of attentions and embeddings in the folder of a run; empty where none were measured."""
    return _read(folder / MAPS)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """The first value in which two pieces of plain data differ, in words; None where they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if difference := first_difference(old.get(key), new.get(key), f"{where}.{key}".lstrip(".")):
                return difference
        return None
    return None if old == new else f"{where} was {old!r}, now {new!r}"
