"""How far a compression is: its trials, and the steps that a callback and the page are told."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_freeze.compression.phases import Phases
from hf_freeze.experiments.compress.costs import Cost
from hf_freeze.experiments.compress.scores import Scoring
from hf_freeze.experiments.compress.trainings import Trainings
from hf_freeze.experiments.compress.trials import FINAL, Trial, best_of

_PAUSE = 10.0  # seconds between two pages, at least
_SHARE = 0.01  # of the time that may go into pages
_PHASES = {
    "whole": "measuring the model in the engine",
    "taught": "translating the training texts by the model",
    "sensitivity": "measuring what layers, heads, neurons and ranks are worth",
    "tokens": "measuring smaller vocabularies",
    "prices": "measuring what parts cost in the engine",
    "remains": "training with half of each kind of part",
    "candidates": "choosing candidates",
    "chosen": "training the candidates for a short time",
    "epochs": "planning the last training",
    "end": "measuring the compressed model in the engine",
}
_OTHER = "measuring a shape or a candidate in the engine"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a callback gets: after each phase that was not kept from before, before each measurement of a part, and while models
    are trained.

    `phase`: its name in phases.json, or "training". `text`: what was done. `share`: of all epochs, 0 to 1. `seconds_left`:
    estimated from the trainings so far, and at most what is left of `hours`; None while neither is known. `best`: the smaller
    model that is best so far, None before the first is trained.
    """

    phase: str
    text: str
    share: float
    seconds_left: float | None
    best: Trial | None


# Called with each step. Where it returns True, the compression stops with `Stopped`; its exceptions stop it as well.
Callback = Callable[[Step], Any]


class Stopped(Exception):
    """A callback has stopped the compression. Called again with the same arguments, it goes on where it was."""


class Progress:
    """`epochs`: of all trainings; `hours`: for all of the work, None without a limit. `write` is called after phases and
    trainings, for the page: at most once in `_PAUSE` seconds and for `_SHARE` of the time, since drawing takes longer than
    measuring a shape."""

    def __init__(
        self,
        trainings: Trainings,
        scoring: Scoring,
        phases: Phases,
        *,
        epochs: float,
        hours: float | None,
        callback: Callback | None,
        write: Callable[[], Any],
    ) -> None:
        self._trainings, self._scoring, self._phases, self._callback = trainings, scoring, phases, callback
        self._epochs, self._hours, self._write = epochs, hours, write
        self._planned: dict[str, Trial] = {}
        self._running: dict[str, float] = {}  # epochs by trial, as the processes say them
        self._phase_began, self._next_page = time.monotonic(), 0.0
        self.last = Step(phase="", text="starting", share=0.0, seconds_left=None, best=None)

    def plan(
        self,
        name: str,
        kind: str,
        words: str,
        vocabulary: int,
        cost: Cost,
        *,
        estimated: bool = False,
        score: float | None = None,
    ) -> None:
        """Know of a model to train, or of the model itself. `name`: of its run; `score`: in the engine, where it is known."""
        share = self._trainings.share_of_labels(vocabulary)
        self._planned[name] = Trial(
            name=name,
            kind=kind,
            words=words,
            bytes=cost.bytes,
            ms=cost.ms,
            estimated=estimated,
            share_of_labels=share,
            score=score,
        )

    def trials(self) -> list[Trial]:
        """As far as they are."""
        found = []
        for name, planned in self._planned.items():
            folder = self._trainings.folder(name)
            trial, score = planned.trained(folder), planned.score
            if score is None:
                score = self._phases.kept(f"score-{name}")
            if score is None and trial.loss is not None and self._scoring.metric is None:
                score = self._scoring.score(np.load(folder / "items.npy"), self._trainings.splits["dev"])
            found.append(replace(trial, score=score))
        return found

    def phase_ended(self, name: str) -> None:
        self._phase_began = time.monotonic()
        self._tell(name, _PHASES.get(name, _OTHER), written=True)

    def goes_on(self, name: str, text: str) -> None:
        """Tell of a part of a phase that has many."""
        self._tell(name, f"{_PHASES[name]}: {text}", written=True)

    def heard(self, run: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """What a training says, as `run_grid` passes it on."""
        if message.get("stage") == "finished":
            self._tell("training", f"trained: {run['label']}", written=True)
        elif message.get("epoch") is not None and run["row"] in self._planned:
            self._running[run["row"]] = message["epoch"]
            self._tell("training", f"training {run['label']}: epoch {message['epoch']:.3g}")

    def _tell(self, phase: str, text: str, *, written: bool = False) -> None:
        trials = self.trials()
        epochs = {trial.name: max(trial.epochs, self._running.get(trial.name, 0.0)) for trial in trials}
        final, total = self._phases.kept("epochs"), self._epochs
        if final is not None:
            total = sum(epochs[trial.name] for trial in trials if trial.kind != FINAL) + final
        ended = any(trial.kind == FINAL and trial.loss is not None for trial in trials)
        share = 1.0 if ended else min(sum(epochs.values()) / total, 1.0)
        limits = []
        if any(trial.loss is not None and trial.epochs for trial in trials):
            limits.append((1 - share) * total * self._trainings.seconds_per_epoch())
        if self._hours is not None:
            spent = self._phases.seconds + time.monotonic() - self._phase_began
            limits.append(max(self._hours * 3600 - spent, 0.0))
        left = min(limits, default=None)
        self.last = Step(phase=phase, text=text, share=share, seconds_left=left, best=best_of(trials))
        began = time.monotonic()
        if written and began >= self._next_page:
            self._write()
            ended = time.monotonic()
            self._phases.spend("pages", ended - began)
            self._next_page = ended + max(_PAUSE, (ended - began) / _SHARE)
        if self._callback is not None and self._callback(self.last) is True:
            raise Stopped(f"the callback stopped it after “{text}”; the same call resumes from there")
