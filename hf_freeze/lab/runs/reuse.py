"""Runs that another grid has finished already: the same dense row, trained once for several grids."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.claim import comparable
from hf_freeze.lab.runs.precision import note_precision, noted_precision, precision_of

_NAMES = ("name", "preset", "row", "label")  # they change no result


def reuse_finished(runs: list[Run], out: Path, grids: Iterable[Path], *, resume_anyway: bool = False) -> list[str]:
    """Copy into `out` each of `runs` that is not begun there and that one of `grids`, folders of runs, has finished with the
    same settings, seed and precision, under any name; returns a line about each. Where the data lie may differ, as for runs that
    are resumed. The record keeps the version, commit and device that made it.

    Runs that start from another run, or learn from one, are trained again. Raises ValueError for a folder without finished runs.
    """
    lines = []
    for grid in grids:
        found = {path.parent: _settings_of_folder(path.parent) for path in sorted(grid.glob("row-*/metrics.json"))}
        if not found:
            raise ValueError(f"{grid} holds no finished runs to reuse")
        for run in runs:
            folder = run.folder(out)
            if run.needed_folders(out) or run.is_finished(out) or (folder / "checkpoints").exists():
                continue
            precision = precision_of(out, run, resume_anyway=resume_anyway)
            wanted = _settings(run.given(), precision)
            same = next((other for other, settings in found.items() if settings == wanted), None)
            if same is not None:
                _copy(same, folder, run)
                note_precision(out, run, precision)
                lines.append(f"row {run.row} seed {run.seed}: finished in {same}")
    return lines


def _settings_of_folder(folder: Path) -> dict[str, Any]:
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return _settings(run, noted_precision(folder.parent) or "fp32")


def _settings(run: dict[str, Any], precision: str) -> dict[str, Any]:
    settings = comparable(run, precision == "bf16" if "bf16" in run["training"] else None)
    settings.get("backbone", {}).setdefault("init", "backbone")  # as if it were not there
    return {key: value for key, value in settings.items() if key not in _NAMES}


def _copy(source: Path, folder: Path, run: Run) -> None:
    shutil.copytree(
        source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run.json", "metrics.json", "lock")
    )
    record = json.loads((source / "metrics.json").read_text(encoding="utf-8"))
    record |= {"recipe": run.name, "row": run.row, "label": run.label}
    # Written last: a run with metrics.json is a finished one.
    write_whole(folder / "metrics.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
