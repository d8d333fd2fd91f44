"""Keep workers busy: what a grid and a search have in common."""

import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.on_ray import RayTasks
from hf_freeze.lab.runs.processes import Processes
from hf_freeze.lab.runs.progress import show_progress


class Queue(Protocol):
    """What is to be trained."""

    def next(self) -> tuple[Run, Path, float | None] | None:
        """A run, its folder, and the epochs until which it is trained; None where nothing can begin now."""
        ...

    def ended(self, folder: Path, reason: str, seconds: float) -> None:
        """What `next` gave has ended, or paused; `reason`: why, where it left no figures and no error."""
        ...

    def done(self) -> int:
        """How many of all have ended."""
        ...


def drive(queue: Queue, workers: Processes | RayTasks, total: int, title: str, bars: Console, lines: Console) -> None:
    """Start what `queue` gives while the workers have room, until it gives nothing and all have ended. `bars`: where progress is
    shown; `lines`: where a line for each epoch is printed, if that is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    progress = Progress(TextColumn("{task.description}"), *columns, TextColumn("{task.fields[note]}"), console=bars)
    running: dict[Path, Run] = {}
    shown: dict[Path, tuple[Any, float]] = {}  # of those that have said something
    try:
        with progress:
            everything = progress.add_task(title, total=total, completed=queue.done(), note="")
            while True:
                while workers.has_room() and (job := queue.next()) is not None:
                    run, folder, until = job
                    running[folder] = run
                    workers.start(run, folder, until)
                if not running:
                    return
                folder, message = workers.message() or (None, {})
                if folder in running:  # else the last words of a run that has ended
                    if folder not in shown:
                        named = f"row {running[folder].row} seed {running[folder].seed}"
                        shown[folder] = progress.add_task(named, total=None, note=""), time.monotonic()
                    show_progress(progress, shown[folder][0], message, lines, folder.name)
                for folder, reason in workers.ended():
                    del running[folder]
                    task, began = shown.pop(folder, (None, time.monotonic()))
                    if task is not None:
                        progress.remove_task(task)
                    queue.ended(folder, reason, time.monotonic() - began)
                    progress.update(everything, completed=queue.done())
    finally:
        workers.close()


def error_of(folder: Path, reason: str) -> str:
    """The last line of the error of a run that has failed; `reason` where it left none, which is written there."""
    log = folder / "error.log"
    if not log.exists() or not log.read_text(encoding="utf-8").strip():
        log.write_text(reason + "\n", encoding="utf-8")
    return log.read_text(encoding="utf-8").splitlines()[-1]
