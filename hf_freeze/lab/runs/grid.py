"""Run all rows and seeds of a recipe, each in its own process and folder.

Finished runs are skipped, interrupted runs resume from their last checkpoint.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.recipe import Recipe, Run
from hf_freeze.lab.runs.backbones import check_methods
from hf_freeze.lab.runs.claim import check_files, check_folder, check_free, check_other_grid, claim_all
from hf_freeze.lab.runs.collect import write_results
from hf_freeze.lab.runs.drive import drive, error_of
from hf_freeze.lab.runs.launcher import is_first_process, is_launched
from hf_freeze.lab.runs.on_ray import RayOptions, RayTasks
from hf_freeze.lab.runs.precision import precision_of
from hf_freeze.lab.runs.processes import Processes
from hf_freeze.lab.runs.progress import summary_line
from hf_freeze.lab.runs.reuse import reuse_finished
from hf_freeze.lab.runs.tracking import check_tracker
from hf_freeze.model.loading import check_exists
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
    reuse: Iterable[Path] = (),
) -> list[dict[str, Any]]:
    """Execute every run of `recipe` that `out` does not hold yet, `jobs` at a time; returns the records in grid order.
    A run that starts from another one waits until that one is finished, and fails with it.

    `ray`: the runs are tasks of Ray, as many at a time as its nodes have room for; `out` is on storage that all nodes see.
    Under a launcher (torchrun, accelerate launch) all processes work on one run after the other. `resume_anyway`: go on with
    a checkpoint that another version, commit, device or number of threads or processes left. `reuse`: folders of
    other grids, whose finished runs of the same settings are copied (`reuse_finished`).

    Writes `out/results.jsonl`, of all finished runs there, and `command` for the report. Raises ValueError where the recipe has
    no rows or `out` holds runs of another one, and FailedRuns at the end where runs failed; their tracebacks are in their
    folders.
    """
    launched = is_launched()
    if launched and not is_first_process():
        console = Console(quiet=True)
    console = console or Console()
    runs = expand(recipe)
    if not runs:
        raise ValueError(f"{recipe.name} has no rows to run; its space is for hf-freeze search")
    every = expand(recipe.changed(only=None))  # the order of a report

    _check(recipe, runs, out, jobs, ray, resume_anyway)
    if not launched or is_first_process():
        for line in reuse_finished(runs, out, reuse, resume_anyway=resume_anyway):
            console.print(escape(line), soft_wrap=True)
    if launched:
        from hf_freeze.lab.runs.launched import execute_launched  # it imports all that a run needs

        return execute_launched(runs, every, out, console, command, resume_anyway)
    waiting = claim_all(runs, out, command)
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already; skipped")
    if resumed := sum(any(run.folder(out).glob("checkpoints/*/trainer_state.json")) for run in waiting):
        console.print(f"{resumed} of {len(runs)} runs resume from a checkpoint")
    failed: list[Path] = []
    if waiting:
        if ray is None:
            check_free(run.folder(out) for run in waiting)
            workers = Processes(jobs, resume_anyway)
        else:
            workers = RayTasks(ray, resume_anyway, lambda text: console.print(escape(text), soft_wrap=True))
        failed = _execute_all(waiting, out, workers, console, lambda: write_results(out, every))
    records = write_results(out, every)
    if failed:
        raise FailedRuns(f"{len(failed)} of {len(runs)} runs failed; see {failed[0] / 'error.log'}")
    return records


def _check(recipe: Recipe, runs: list[Run], out: Path, jobs: int, ray: RayOptions | None, resume_anyway: bool) -> None:
    """Raise for what would stop every run, before any begins."""
    launched = is_launched()
    if launched and jobs > 1:
        raise ValueError(f"jobs={jobs}: under a launcher all processes work on one run at a time; leave --jobs out")
    if launched and ray is not None:
        raise ValueError("under a launcher all processes work on one run at a time; leave --on ray out")
    if ray is not None and jobs > 1:
        raise ValueError(f"jobs={jobs}: Ray has as many runs at a time as it has room for; leave --jobs out")
    check_files(recipe.data)
    check_tracker(recipe.report_to)
    for name in {run.pretrained for run in runs if run.pretrained is not None}:
        check_exists(name)
    for run in {run.row: run for run in runs if not run.is_finished(out)}.values():
        check_methods(run)
    for run in runs:
        check_folder(run.folder(out), run)
        check_other_grid(out, run)
    if ray is None:  # else the nodes decide, not this machine
        for run in runs:
            if not run.is_finished(out):
                precision_of(out, run, resume_anyway=resume_anyway)


def _execute_all(
    waiting: list[Run], out: Path, workers: Processes | RayTasks, console: Console, finished: Callable[[], Any]
) -> list[Path]:
    """Run all of `waiting`, calling `finished` after each; returns the folders of those that failed."""
    queue = _Waiting(waiting, out, console, finished)
    drive(queue, workers, len(waiting), "all runs", console, console)
    return queue.failed


class _Waiting:
    """The runs of a grid that are not finished. Each begins when those that it needs have ended, and fails with them."""

    def __init__(self, runs: list[Run], out: Path, console: Console, finished: Callable[[], Any]) -> None:
        self.runs, self.out, self.console, self.finished = list(runs), out, console, finished
        self.failed: list[Path] = []
        self._done = 0

    def next(self) -> tuple[Run, Path, float | None] | None:
        for run in self.runs:
            if all(origin.is_finished(self.out) for origin in run.origins.values()):
                self.runs.remove(run)
                return run, run.folder(self.out), None
        return None

    def done(self) -> int:
        return self._done

    def ended(self, folder: Path, reason: str, seconds: float) -> None:
        self._done += 1
        if (folder / "metrics.json").exists():
            record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
            self.console.print(escape(summary_line(record, seconds)), soft_wrap=True)
        else:
            self._fail(folder, error_of(folder, reason))
        self.finished()

    def _fail(self, folder: Path, why: str) -> None:
        """Also what waits for it, and what waits for that."""
        self.console.print(f"[red]{escape(str(folder))} failed[/red]: {escape(why)}", soft_wrap=True)
        self.failed.append(folder)
        for run in list(self.runs):
            for verb, origin in run.origins.items():
                if run in self.runs and origin.folder(self.out) == folder:
                    self.runs.remove(run)
                    self._done += 1
                    why = f"row {origin.row} with seed {origin.seed} failed, from which it {verb}"
                    (run.folder(self.out) / "error.log").write_text(why + "\n", encoding="utf-8")
                    self._fail(run.folder(self.out), why)
