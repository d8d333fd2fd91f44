"""Before a grid runs: check that its folder fits the recipe and is free, and enter the settings of every run."""

import glob
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import SPLITS, Data
from hf_freeze.lab.runs.precision import auto_is_bf16, resolve_precision
from hf_freeze.run_folder import COMMANDS, commands_of, first_difference


def check_files(data: Data) -> None:
    """Raise FileNotFoundError once, rather than in every run."""
    splits = (*SPLITS, "mismatched") if data.form == "files" else ()
    for path in (Path(data.root) / file for split in splits for file in getattr(data, split) or ()):
        if not path.exists() and not glob.glob(str(path), recursive=True):
            raise FileNotFoundError(f"{path} does not exist; say where the files are: --set data.root=DIRECTORY")


def check_folder(folder: Path, run: Run) -> None:
    """Raise ValueError where `folder` holds a run of other settings. Where the data lies may change, and what is drawn."""
    path = folder / "run.json"
    if not path.exists():
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); remove {folder}") from error
    auto = auto_is_bf16(folder.parent) if "bf16" in run.training.model_fields_set else None
    if difference := first_difference(comparable(recorded, auto), comparable(run.given(), auto)):
        raise ValueError(f"{folder} holds a run of other settings ({difference}); choose another --out, or remove it")


def comparable(run: dict[str, Any], auto: bool | None) -> dict[str, Any]:
    """A copy of the settings of a run as they are in its folder, without what changes no result: where the data lies, the
    tracker, the axis of a report. `auto`: whether `training.bf16: auto` means bf16; None for a task without the setting."""
    settings = json.loads(_settings_in_file(run))
    settings["data"].pop("root", None)
    settings.pop("axis", None)
    if auto is not None:
        resolve_precision(settings, auto)
    return settings


def check_other_grid(out: Path, run: Run) -> None:
    """Raise ValueError where `run` is to start from a run of another grid that is not there, or not finished."""
    start = run.start
    if start is None or start.grid is None or run.is_finished(out) or start.is_finished(out):
        return
    raise ValueError(
        f"{start.grid} holds no finished run of row {run.row!r} with seed {run.seed} to start from: run that grid first, or say "
        "where it is: --set start=FOLDER"
    )


@contextmanager
def training_in(folder: Path) -> Iterator[None]:
    """Inside, `check_free` refuses `folder` to other processes. A process that is killed gives it back."""
    lock = FileLock(folder / "lock", timeout=0)
    with suppress(NotImplementedError):  # a file system without locks
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_free(folders: Iterable[Path]) -> None:
    """Raise ValueError where another process trains the run in one of `folders`."""
    for folder in folders:
        try:
            with training_in(folder):
                pass
        except Timeout:
            raise ValueError(
                f"another process is training in {folder}: wait until it has ended, or choose another --out"
            ) from None


def claim_all(runs: list[Run], out: Path, command: str | None) -> list[Run]:
    """Enter the settings of every run, and the command; returns the runs that are not finished."""
    for run in runs:
        _claim(run.folder(out), run)
    if command is not None:
        command = " ".join(command.splitlines())
        others = {path.parent for path in out.glob("row-*/run.json")} - {run.folder(out) for run in runs}
        # One for all the runs stands alone; of a grid that grew by several, such as a job each, all are kept.
        before = [earlier for earlier in commands_of(out) if earlier != command] if others else []
        write_whole(out / COMMANDS, "\n".join([*before, command]) + "\n")
    return [run for run in runs if not run.is_finished(out)]


def _claim(folder: Path, run: Run) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        write_whole(folder / "run.json", _settings_in_file(run.given()) + "\n")


def _settings_in_file(run: dict[str, Any]) -> str:
    """Without the tracker, which a resumed run may change freely."""
    return json.dumps({key: value for key, value in run.items() if key != "report_to"}, indent=1, ensure_ascii=False)
