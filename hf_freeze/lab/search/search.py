"""Search a space: draw rows, count them, train those within the bounds, stop the worse ones at the rungs."""

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna.trial import Trial
from rich.console import Console
from rich.markup import escape

from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.check import check
from hf_freeze.lab.recipes.expand import expand
from hf_freeze.lab.recipes.recipe import Recipe, Run
from hf_freeze.lab.recipes.rows import Row
from hf_freeze.lab.recipes.space import space_of
from hf_freeze.lab.runs.claim import check_files, check_folder, claim_all
from hf_freeze.lab.runs.collect import write_results
from hf_freeze.lab.runs.drive import drive, error_of
from hf_freeze.lab.runs.grid import FailedRuns
from hf_freeze.lab.runs.on_ray import RayOptions, RayTasks
from hf_freeze.lab.runs.processes import Processes
from hf_freeze.lab.runs.tracking import check_tracker
from hf_freeze.lab.search import study as study_module
from hf_freeze.lab.search.costs import Costs, Counter, costs_of
from hf_freeze.lab.search.halving import Point, front_of, goes_on
from hf_freeze.lab.search.locks import Locks
from hf_freeze.lab.search.rungs import dev_loss_at
from hf_freeze.lab.search.study import FINISHED, STOPPED, Study, outcome_of, suggest_of

_IN_VAIN = 100  # points in a row that are not worth training: the space has no more
_QUIET = Console(quiet=True)  # the bars of a terminal say what a log would repeat for every epoch
_FAILURES = 3  # trials that fail before any ends: not the trials are at fault


@dataclass
class _Job:
    """A run to train, until a rung or to its end. `trial` is None for rows of the recipe, which are never stopped."""

    run: Run
    trial: Trial | None = None
    costs: Costs | None = None
    until: float | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.run.row}-seed-{self.run.seed}"


@dataclass(frozen=True)
class Found:
    """What a search has come to. `front`: the rows that no other beats, with their goals as `goals` names them, the dev loss
    first; `busy`: names of the trials that other processes are at; `counts`: trials by outcome."""

    goals: tuple[str, ...]
    front: dict[str, Point]
    busy: list[str]
    counts: dict[str, int]
    seconds: float


class Search:
    """The search of `recipe` in `out`: a journal, a grid of its trials, and locks. `jobs`: trials at a time, 1 if not given; with
    `ray`, trials are tasks of Ray, as many at a time as its nodes have room for, but at most `jobs`.

    Raises ValueError where `out` holds another search or has no locks, and files of the data that are not there.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        *,
        sampler: str = "tpe",
        seed: int = 0,
        jobs: int | None = None,
        console: Console | None = None,
        command: str | None = None,
        resume_anyway: bool = False,
        ray: RayOptions | None = None,
    ) -> None:
        check_files(recipe.data)
        check_tracker(recipe.report_to)
        self.recipe, self.out, self.grid = recipe, out, out / "trials"
        self.jobs, self.ray, self.command, self._resume_anyway = jobs, ray, command, resume_anyway
        self.console = console or Console()
        self._space, self._settings = space_of(recipe, recipe.name), recipe.search
        for name, row in recipe.rows.items():
            if needed := row.needs:
                raise ValueError(
                    f"row {name!r} has {next(iter(needed))!r}: rows beside a space train from fresh weights"
                )
            if re.fullmatch(r"t\d+", name):
                raise ValueError(f"row {name!r}: the name is reserved for trials; choose another")
        self.hand_made = self._expand(recipe.rows, recipe.seeds[:1])
        self.grid.mkdir(parents=True, exist_ok=True)
        self.locks = Locks(out / "locks")
        self.study = Study(out, self._settings, _identity(recipe), sampler, seed)
        self._waiting: deque[_Job] = deque()
        self._counter: Counter | None = None
        self._failed: list[Path] = []
        self._running: dict[Path, _Job] = {}
        self._trials = 0

    def run(self, trials: int) -> Found:
        """Train until `trials` trials were trained, those of earlier calls and other processes included; what was drawn and
        refused is not among them.

        Raises ValueError where the space has no point that is worth training, and FailedRuns where the first trials all fail.
        """
        began = time.monotonic()
        self._take_over()
        if (first := self._next(trials)) is None:
            return self._found(time.monotonic() - began)
        self._waiting.appendleft(first)
        self._trials = trials
        drive(self, self._workers(), trials, "trials", self.console, _QUIET)
        return self._found(time.monotonic() - began)

    def next(self) -> tuple[Run, Path, float | None] | None:
        """As `drive` asks for it."""
        if (job := self._next(self._trials)) is None:
            return None
        folder = job.run.folder(self.grid)
        self._running[folder] = job
        return job.run, folder, job.until

    def ended(self, folder: Path, reason: str, seconds: float) -> None:
        """As `drive` says it."""
        job = self._running.pop(folder)
        job.seconds += seconds
        self._after(job, reason)

    def done(self) -> int:
        return self.study.count_trained(ended=True)

    def train_other_seeds(self, names: Iterable[str]) -> None:
        """Train the named rows with the other seeds of the recipe too."""
        rows = {name: self.row(name) for name in names}
        self.hand_made += self._expand(rows, self.recipe.seeds[1:])
        self.run(0)

    def is_finished(self, run: Run) -> bool:
        """Whether a run was trained to its end."""
        # Shared storage may remember for a while that a file was not there; to list its folder asks again.
        with contextlib.suppress(FileNotFoundError):
            return "metrics.json" in os.listdir(run.folder(self.grid))
        return False

    def row(self, name: str) -> Row:
        """The row of that name: the recipe's, or of a trial."""
        if name in self.recipe.rows:
            return self.recipe.rows[name]
        values = self.study.values(int(name.removeprefix("t")))
        return self._space.row(lambda setting, _: values[setting])[0]

    def _workers(self) -> Processes | RayTasks:
        # A trial that a rung or a kill has stopped may go on on any machine that shares the search.
        if self.ray is None:
            return Processes(self.jobs or 1, self._resume_anyway, begin_again=True)

        def say(text: str) -> None:
            self.console.print(escape(text), soft_wrap=True)

        return RayTasks(self.ray, self._resume_anyway, say, jobs=self.jobs or math.inf, begin_again=True)

    def _grid_of(self, rows: dict[str, Row], seeds: list[int]) -> Recipe:
        """The recipe with other rows, and nothing to search."""
        left_out = {"space", "search", "only", "rows"}
        base = self.recipe.model_dump(exclude_unset=True, exclude=left_out)
        return Recipe.model_validate(base | {"rows": {name: row.given() for name, row in rows.items()}, "seeds": seeds})

    def _expand(self, rows: dict[str, Row], seeds: list[int]) -> list[Run]:
        return [run.changed(scored_on="dev") for run in expand(self._grid_of(rows, seeds))] if rows and seeds else []

    # -- what to do next -------------------------------------------------------------------------------------------------------

    def _next(self, trials: int) -> _Job | None:
        while not self._waiting and self.study.count_trained() < trials:
            if self.study.refused_in_a_row() >= _IN_VAIN:
                if not self.study.count_trained():
                    raise ValueError(
                        f"the first {_IN_VAIN} points of the space are all refused: {self.study.reasons()}"
                    )
                self.console.print(f"{_IN_VAIN} points in a row were refused or known: the search ends here")
                break
            self._draw()
        if not self._waiting:
            self._take_over()  # another process may have been killed meanwhile
        return self._waiting.popleft() if self._waiting else None

    def _take_over(self) -> None:
        """Queue what is to be done and no living process has: the rows of the recipe, and trials that a killed one left."""
        for run in self.hand_made:
            if run.folder(self.grid) not in self._failed:
                self._take(_Job(run))
        for number in self.study.running():
            self._revive(number)

    def _take(self, job: _Job) -> bool:
        """Queue a job, unless another process has it or it is finished."""
        if job.trial is None and self.is_finished(job.run):
            return False
        if not self.locks.take(job.name):
            return False
        if job.trial is None and self.is_finished(job.run):  # by another process, a moment ago
            self.locks.give(job.name)
            return False
        check_folder(job.run.folder(self.grid), job.run)
        claim_all([job.run], self.grid, self.command)
        if job.trial is None:
            self._waiting.append(job)
        else:
            self._advance(job)
        return True

    def _draw(self) -> None:
        trial = self.study.ask()
        if not self.locks.take(f"drawn-{trial.number}"):
            return
        self._settle(trial)
        self.locks.give(f"drawn-{trial.number}")

    def _revive(self, number: int) -> None:
        """Go on with a trial that a killed process left, unless a living one has it."""
        if self.locks.is_free(f"t{number}-seed-{self.recipe.seeds[0]}") and self.locks.take(f"drawn-{number}"):
            if (trial := self.study.revive(number)) is not None:
                self._settle(trial)
            self.locks.give(f"drawn-{number}")

    def _settle(self, trial: Trial) -> None:
        """Draw the row of a trial; refuse it, or train it."""
        name = f"t{trial.number}"
        row, refused = self._space.row(suggest_of(trial))
        if earlier := self.study.repeats(trial):
            self.study.repeat(trial, earlier)
            return
        if refused:
            self.study.refuse(trial, refused, 1.0)
            return
        try:
            check(self._grid_of({name: row}, self.recipe.seeds).given(), name)
            (run,) = self._expand({name: row}, self.recipe.seeds[:1])
            self._counter = self._counter or Counter(self.recipe)
            costs = self._counter.count(run)
        except ValueError as error:
            self.study.refuse(trial, " ".join(str(error).split()).replace(name, "a trial"), 1.0)
            return
        violation, why = costs.violation(self._settings.bounds)
        if violation > 0:
            self.study.refuse(trial, why, violation)
            return
        trial.set_user_attr("costs", asdict(costs))
        trial.set_user_attr("label", row.label)
        self._take(_Job(run, trial, costs))

    # -- after a training ------------------------------------------------------------------------------------------------------

    def _after(self, job: _Job, reason: str) -> None:
        folder = job.run.folder(self.grid)
        paused = job.until is not None and dev_loss_at(folder, job.until) is not None
        if (folder / "metrics.json").exists() or paused:
            self._advance(job)
            return
        why = error_of(folder, reason)
        self._failed.append(folder)
        self._say(job, f"[red]failed[/red]: {escape(why)}")
        if job.trial is not None:
            self.study.fail(job.trial, why)
        self.locks.give(job.name)
        if len(self._failed) >= _FAILURES and not self.study.finished():
            raise FailedRuns(f"the first {len(self._failed)} trials failed; see {folder / 'error.log'}")

    def _advance(self, job: _Job) -> None:
        """Queue a job for its next rung, or end its trial."""
        folder = job.run.folder(self.grid)
        if (folder / "metrics.json").exists():
            self._finish(job, json.loads((folder / "metrics.json").read_text(encoding="utf-8")))
            return
        assert job.trial is not None
        assert job.costs is not None
        for number, epochs in enumerate(self._settings.rungs):
            loss = study_module.noted_rung(job.trial, number)
            if loss is None:
                loss = dev_loss_at(folder, epochs)
                if loss is None:
                    job.until = epochs
                    self._waiting.appendleft(job)
                    return
                study_module.note_rung(job.trial, number, loss)
            passed = study_module.noted_passed(job.trial, number)
            if passed is None:
                others = self.study.at_rung(number, but=job.trial.number)
                passed = goes_on(self.study.point(loss, job.costs), others, self._settings.keep)
                study_module.note_passed(job.trial, number, passed)
            if not passed:
                self.study.tell(job.trial, STOPPED, f"after {epochs:g} epochs", loss, job.costs)
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
                self._say(job, f"stopped after {epochs:g} epochs", loss, job.costs)
                self.locks.give(job.name)
                return
        job.until = None
        self._waiting.appendleft(job)

    def _finish(self, job: _Job, record: dict[str, Any]) -> None:
        loss, costs = record["metrics"]["dev_loss"], costs_of(record)
        if job.trial is not None:
            self.study.tell(job.trial, FINISHED, "", loss, costs)
        write_results(self.grid, self.hand_made)
        self._say(job, "finished", loss, costs)
        self.locks.give(job.name)

    def _say(self, job: _Job, what: str, loss: float | None = None, costs: Costs | None = None) -> None:
        figures = ""
        if loss is not None and costs is not None:
            size, work = f"{costs.stored_bytes / 1e6:.2f} MB", f"{costs.multiply_adds / 1e3:,.0f}k multiply-adds"
            figures = f": dev loss {loss:.3f}, {size}, {work}"
        line = f"{job.run.row} {what}{figures}, {job.seconds:.0f} s; {escape(job.run.label)}"
        self.console.print(line, soft_wrap=True, highlight=False)

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def _found(self, seconds: float) -> Found:
        records = write_results(self.grid, self.hand_made)
        points = self.study.finished()
        goals: dict[str, Point] = {}
        for record in records:
            name, costs = record["row"], costs_of(record)
            if record["seed"] != self.recipe.seeds[0] or costs.violation(self._settings.bounds)[0] > 0:
                continue
            if name in points or name in self.recipe.rows:
                goals[name] = points.get(name) or self.study.point(record["metrics"]["dev_loss"], costs)
        busy = [f"t{number}" for number in self.study.running()]
        busy += [
            run.row for run in self.hand_made if not self.is_finished(run) and not self.locks.is_free(_Job(run).name)
        ]
        self._write_trials()
        return Found(tuple(self._settings.goals), front_of(goals), busy, self._counts(), seconds)

    def _counts(self) -> dict[str, int]:
        kinds = [outcome_of(trial)[0] or "running" for trial in self.study.trials()]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def _write_trials(self) -> None:
        """`trials.jsonl`: a line for each point that was drawn."""
        lines = []
        for trial in self.study.trials():
            outcome, why = outcome_of(trial)
            attributes = {key: value for key, value in trial.user_attrs.items() if key != "outcome"}
            line = {"trial": f"t{trial.number}", "outcome": outcome, "why": why, "values": trial.params} | attributes
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_whole(self.out / "trials.jsonl", "".join(lines))


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What must be the same for a search to go on. Where the data lies may change, and which rows stand beside the space."""
    left_out = {
        "presets": True,
        "smoke": True,
        "rows": True,
        "only": True,
        "axis": True,
        "about": True,
        "report_to": True,
    }
    return recipe.model_dump(exclude_unset=True, exclude={**left_out, "data": {"root"}}) | {"seeds": recipe.seeds[:1]}
