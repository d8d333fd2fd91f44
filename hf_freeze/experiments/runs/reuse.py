"""Runs that another grid has finished already: the same dense row, trained once for several grids."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_freeze.experiments.runs.precision import note_precision, noted_precision, precision_of, resolve_precision
from hf_freeze.io import write_whole
from hf_freeze.run_folder import run_folder

_NAMES = ("name", "preset", "row", "label", "axis", "report_to")  # they change no result


def reuse_finished(runs: list[dict[str, Any]], out: Path, grids: Iterable[Path]) -> list[str]:
    """Copy into `out` each of `runs` that is not begun there and that one of `grids`, folders of runs, has finished with the
    same settings, seed and precision, under any name; returns a line about each. Where the data lie may differ, as for runs that
    are resumed. The record keeps the version, commit and device that made it.

    Runs that start from another run, or learn from one, are trained again. Raises ValueError for a folder without finished runs.
    """
    lines = []
    for grid in grids:
        found = sorted(path.parent for path in grid.glob("row-*/metrics.json"))
        if not found:
            raise ValueError(f"{grid} holds no finished runs to reuse")
        for run in runs:
            folder = run_folder(out, run)
            if (
                {"start", "teacher"} & run.keys()
                or (folder / "metrics.json").exists()
                or (folder / "checkpoints").exists()
            ):
                continue
            wanted = _settings(run, precision_of(out, run))
            same = next((other for other in found if _settings_of_folder(other) == wanted), None)
            if same is not None:
                _copy(same, folder, run)
                note_precision(out, run, precision_of(out, run))
                lines.append(f"row {run['row']} seed {run['seed']}: finished in {same}")
    return lines


def _settings_of_folder(folder: Path) -> dict[str, Any]:
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return _settings(run, noted_precision(folder.parent) or "fp32")


def _settings(run: dict[str, Any], precision: str) -> dict[str, Any]:
    settings = json.loads(json.dumps({key: value for key, value in run.items() if key not in _NAMES}))
    settings["data"].pop("root", None)
    settings.get("backbone", {}).setdefault("init", "backbone")  # as if it were not there
    if "bf16" in settings["training"]:
        resolve_precision(settings, precision == "bf16")
    return settings


def _copy(source: Path, folder: Path, run: dict[str, Any]) -> None:
    shutil.copytree(
        source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run.json", "metrics.json", "lock")
    )
    record = json.loads((source / "metrics.json").read_text(encoding="utf-8"))
    record |= {"recipe": run["name"], "row": run["row"], "label": run["label"]}
    # Written last: a run with metrics.json is a finished one.
    write_whole(folder / "metrics.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
