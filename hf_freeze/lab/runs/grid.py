"""Run all rows and seeds of a recipe, each in its own process and folder.

Finished runs are skipped, interrupted runs resume from their last checkpoint.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.recipe import Recipe, Run
from hf_freeze.lab.runs.claim import check_files, check_folder, check_free, check_other_grid, claim_all
from hf_freeze.lab.runs.collect import write_results
from hf_freeze.lab.runs.launcher import is_first_process, is_launched
from hf_freeze.lab.runs.on_ray import RayOptions, RayTasks
from hf_freeze.lab.runs.precision import precision_of
from hf_freeze.lab.runs.processes import Processes
from hf_freeze.lab.runs.progress import show_progress, summary_line
from hf_freeze.lab.runs.reuse import reuse_finished
from hf_freeze.lab.runs.tracking import check_tracker
from hf_freeze.model.loading import check_exists
from hf_freeze.run_folder import NOTHING
from hf_freeze.terminal import OneLineError


class FailedRuns(OneLineError):
    """Some runs of a grid failed; the others are finished."""


def run_grid(
    recipe: Recipe,
    out: Path,
    *,
    jobs: int = 1,
    console: Console | None = None,
    command: str | None = None,
    resume_anyway: bool = False,
    ray: RayOptions | None = None,
    scored_on: str = "test",
    unscored: Collection[str] = (),
    trainer: str | None = None,
    reuse: Iterable[Path] = (),
    watch: Callable[[Run, dict[str, Any]], Any] = lambda run, message: None,
) -> list[dict[str, Any]]:
    """Execute every run of `recipe` that `out` does not hold yet, `jobs` at a time; returns the records in grid order.
    A run that starts from another one waits until that one is finished, and fails with it.

    `ray`: the runs are tasks of Ray, as many at a time as its nodes have room for; `out` is on storage that all nodes see.
    Under a launcher (torchrun, accelerate launch) all processes work on one run after the other. `resume_anyway`: go on with
    a checkpoint that another version, commit, device or number of threads or processes left. `scored_on`: "dev" for runs that
    must not see the test split. `unscored`: rows that only others start from, which have no score but the dev loss. `trainer`:
    "module:class", instead of the task's. `reuse`: folders of other grids, whose finished runs of the same settings are copied
    (`reuse_finished`). `watch(run, message)` is called with what a run says, and with {"stage": "finished"}
    after its end; an exception in it stops all runs at their last checkpoints.

    Writes `out/results.jsonl`, of all finished runs there, and `command` for the report. Raises ValueError where the recipe has
    no rows or `out` holds runs of another one, and FailedRuns at the end where runs failed; their tracebacks are in their
    folders.
    """
    launched = is_launched()
    if launched and jobs > 1:
        raise ValueError(f"jobs={jobs}: under a launcher all processes work on one run at a time; leave --jobs out")
    if launched and ray is not None:
        raise ValueError("under a launcher all processes work on one run at a time; leave --on ray out")
    if ray is not None and jobs > 1:
        raise ValueError(f"jobs={jobs}: Ray has as many runs at a time as it has room for; leave --jobs out")
    if launched and not is_first_process():
        console = Console(quiet=True)
    console = console or Console()
    runs = expand(recipe)
    if not runs:
        raise ValueError(f"{recipe.name} has no rows to run; its space is for hf-freeze search")
    every = expand(recipe.changed(only=None))  # the order of a report

    def completed(run: Run) -> Run:
        split = NOTHING if run.row in unscored else scored_on
        return run.changed(**{"scored_on": split} if split != "test" else {}, **{"trainer": trainer} if trainer else {})

    runs, every = (list(map(completed, some)) for some in (runs, every))
    check_files(recipe.data)
    check_tracker(recipe.report_to)
    for name in {run.pretrained for run in runs if run.pretrained is not None}:
        check_exists(name)
    for run in runs:
        check_folder(run.folder(out), run)
        check_other_grid(out, run)
    if ray is None:  # else the nodes decide, not this machine
        for run in runs:
            if not run.is_finished(out):
                precision_of(out, run, resume_anyway=resume_anyway)
    if not launched or is_first_process():
        for line in reuse_finished(runs, out, reuse, resume_anyway=resume_anyway):
            console.print(escape(line), soft_wrap=True)
    if launched:
        from hf_freeze.lab.runs.launched import execute_launched  # it imports all that a run needs

        return execute_launched(runs, every, out, console, command, resume_anyway)
    waiting = claim_all(runs, out, command)
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already; skipped")
    failed: list[Path] = []
    if waiting:
        if ray is None:
            check_free(run.folder(out) for run in waiting)
            workers = Processes(jobs, resume_anyway)
        else:
            workers = RayTasks(ray, resume_anyway, lambda text: console.print(escape(text), soft_wrap=True))
        failed = _execute_all(waiting, out, workers, console, lambda: write_results(out, every), watch)
    records = write_results(out, every)
    if failed:
        raise FailedRuns(f"{len(failed)} of {len(runs)} runs failed; see {failed[0] / 'error.log'}")
    return records


def _execute_all(
    waiting: list[Run],
    out: Path,
    workers: Processes | RayTasks,
    console: Console,
    finished: Callable[[], Any],
    watch: Callable[[Run, dict[str, Any]], Any],
) -> list[Path]:
    """Run all of `waiting`, calling `finished` after each; returns the folders of those that failed."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bars = Progress(TextColumn("{task.description}"), *columns, console=console)
    waiting, failed = list(waiting), []
    running: dict[Path, Run] = {}
    tasks: dict[Path, tuple[Any, float]] = {}  # of those that have said something
    try:
        with bars:
            everything = bars.add_task("all runs", total=len(waiting), note="")
            while waiting or running:
                while workers.has_room() and (run := next((run for run in waiting if _is_ready(run, out)), None)):
                    waiting.remove(run)
                    running[run.folder(out)] = run
                    workers.start(run, run.folder(out))
                folder, message = workers.message() or (None, {})
                if folder in running:  # else the last words of a run that has ended
                    if folder not in tasks:
                        named = f"row {running[folder].row} seed {running[folder].seed}"
                        tasks[folder] = bars.add_task(named, total=None, note=""), time.monotonic()
                    show_progress(bars, tasks[folder][0], message, console, folder.name)
                    watch(running[folder], message)
                for folder, reason in workers.ended():
                    run = running.pop(folder)
                    task, started = tasks.pop(folder, (None, time.monotonic()))
                    if task is not None:
                        bars.remove_task(task)
                    bars.advance(everything)
                    if not _succeeded(folder, reason, time.monotonic() - started, console):
                        failed.append(folder)
                        while later := next(
                            (one for one in waiting if set(one.needed_folders(out)) & set(failed)), None
                        ):
                            waiting.remove(later)
                            _give_up(out, later, failed, console)
                            failed.append(later.folder(out))
                            bars.advance(everything)
                    finished()
                    watch(run, {"stage": "finished"})
    finally:
        workers.close()
    return failed


def _is_ready(run: Run, out: Path) -> bool:
    return all(origin.is_finished(out) for origin in run.origins.values())


def _give_up(out: Path, run: Run, failed: list[Path], console: Console) -> None:
    folder = run.folder(out)
    verb, origin = next((verb, origin) for verb, origin in run.origins.items() if origin.folder(out) in failed)
    reason = f"row {origin.row} with seed {origin.seed} failed, from which it {verb}"
    (folder / "error.log").write_text(reason + "\n", encoding="utf-8")
    console.print(f"[red]{escape(str(folder))} failed[/red]: {escape(reason)}", soft_wrap=True)


def _succeeded(folder: Path, reason: str, seconds: float, console: Console) -> bool:
    if (folder / "metrics.json").exists():
        record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        console.print(escape(summary_line(record, seconds)), soft_wrap=True)
        return True
    log = folder / "error.log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if not lines:
        lines = [reason]
        log.write_text(lines[0] + "\n")
    console.print(f"[red]{escape(str(folder))} failed[/red]: {escape(lines[-1])}", soft_wrap=True)
    return False
