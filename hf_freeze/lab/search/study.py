"""The trials of a search, as Optuna keeps them in a journal that a stopped search goes on with and processes may share."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from hf_freeze.lab.recipes.rows import SearchSettings
from hf_freeze.lab.recipes.space import Range, Suggest
from hf_freeze.lab.search.costs import Costs
from hf_freeze.lab.search.halving import Point
from hf_freeze.lab.search.samplers import SeededByTrial
from hf_freeze.run_folder import first_difference

JOURNAL = "journal.log"
_SEARCH = "search"  # the attribute of the study that says what is searched
# How a trial ended, or where it is.
FINISHED, STOPPED, REFUSED, REPEATED, FAILED = "finished", "stopped", "refused", "repeated", "failed"
_TRAINED = (FINISHED, STOPPED, FAILED)


class Study:
    """The trials in `out`. `identity`: plain data that says what is searched.

    Raises ValueError where `out` holds a journal of another search.
    """

    def __init__(self, out: Path, settings: SearchSettings, identity: dict[str, Any], sampler: str, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._settings = settings
        path = out / JOURNAL
        wanted = json.loads(json.dumps(identity | {"sampler": sampler, "seed": seed}))
        try:
            # This lock is freed 30 s after a kill. Optuna's default, a link to the path, is not where the path is relative.
            storage = JournalStorage(JournalFileBackend(str(path), JournalFileOpenLock(str(path))))
            self._study = optuna.create_study(
                storage=storage,
                study_name="search",
                directions=[StudyDirection.MINIMIZE] * len(settings.goals),
                sampler=SeededByTrial(sampler, seed),
                load_if_exists=True,
            )
        except (KeyError, json.JSONDecodeError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no journal of Optuna, or damaged ({error}); choose another --out") from error
        recorded = self._study.user_attrs.get(_SEARCH)
        if recorded is None:
            self._study.set_user_attr(_SEARCH, wanted)
        elif difference := first_difference(recorded, wanted):
            raise ValueError(
                f"{path} is the journal of another search ({difference}); choose another --out, or remove it"
            )

    def ask(self) -> Trial:
        return self._study.ask()

    def running(self) -> list[int]:
        """The numbers of the trials that have not ended, whichever process began them."""
        return [trial.number for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]

    def revive(self, number: int) -> Trial | None:
        """A trial that a process left without an end; None where it has ended by now. What was drawn of it stays as it is."""
        trial = self.trials()[number]
        return Trial(self._study, trial._trial_id) if trial.state == TrialState.RUNNING else None

    def values(self, number: int) -> dict[str, Any]:
        """What was drawn of a trial, by the name of the setting."""
        trial = self.trials()[number]
        choices = trial.distributions
        is_choice = {name: isinstance(part, CategoricalDistribution) for name, part in choices.items()}
        return {name: json.loads(value) if is_choice[name] else value for name, value in trial.params.items()}

    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def refused_in_a_row(self) -> int:
        """How many of the last trials were not worth training."""
        count = 0
        for trial in reversed(self.trials()):
            if outcome_of(trial)[0] not in (REFUSED, REPEATED):
                break
            count += 1
        return count

    def count_trained(self, *, ended: bool = False) -> int:
        """Trials that were or are being trained; `ended`: without those in training."""
        kinds = [outcome_of(trial)[0] for trial in self.trials()]
        return sum(kind in _TRAINED or (not ended and not kind) for kind in kinds)

    def repeats(self, trial: Trial) -> FrozenTrial | None:
        """An earlier trial of the same values, of which the outcome is known."""
        for other in self.trials():
            if other.number < trial.number and other.state == TrialState.COMPLETE and other.params == trial.params:
                return other
        return None

    def at_rung(self, rung: int, but: int) -> list[Point]:
        """The points of all trials but one that have come to a rung, wherever they are now."""
        return [
            self.point(trial.user_attrs[_rung(rung)], Costs(**trial.user_attrs["costs"]))
            for trial in self.trials()
            if _rung(rung) in trial.user_attrs and trial.number != but
        ]

    def point(self, dev_loss: float, costs: Costs) -> Point:
        """The goals of a trial, the dev loss first."""
        known = asdict(costs)
        return (dev_loss, *(known[goal] for goal in self._settings.goals if goal != "dev_loss"))

    def tell(self, trial: Trial, outcome: str, why: str, dev_loss: float, costs: Costs) -> None:
        """End a trial that was trained. A stopped one is told with the dev loss that it had by then."""
        violation, _ = costs.violation(self._settings.bounds)
        self._end(trial, outcome, why, self.point(dev_loss, costs), violation)

    def refuse(self, trial: Trial, why: str, violation: float) -> None:
        """End a trial that is not trained; a larger `violation` is further from what may be."""
        self._end(trial, REFUSED, why, [float("inf")] * len(self._settings.goals), violation)

    def repeat(self, trial: Trial, earlier: FrozenTrial) -> None:
        """End a trial as an earlier one of the same values ended."""
        violation = earlier.constraints.get("bounds", 0.0)
        self._end(trial, REPEATED, f"as t{earlier.number}", earlier.values, violation)

    def fail(self, trial: Trial, why: str) -> None:
        trial.set_user_attr("outcome", [FAILED, why])
        self._study.tell(trial.number, state=TrialState.FAIL)

    def _end(self, trial: Trial, outcome: str, why: str, values: Sequence[float], violation: float) -> None:
        trial.set_user_attr("outcome", [outcome, why])
        trial.set_constraint("bounds", violation)
        self._study.tell(trial.number, values=list(values))

    def finished(self) -> dict[str, Point]:
        """Name -> goals, of the trials that were trained to the end and are within the bounds."""
        return {
            f"t{trial.number}": tuple(trial.values)
            for trial in self.trials()
            if outcome_of(trial)[0] == FINISHED and all(value <= 0 for value in trial.constraints.values())
        }

    def reasons(self) -> str:
        """Why trials were refused, the most frequent reasons first."""
        whys = [why for kind, why in map(outcome_of, self.trials()) if kind == REFUSED]
        # Of costs that are above a bound, the least says how far the space is from it.
        bounds = {why.split(" ")[0] for why in whys if " is above " in why}
        counts = Counter(why for why in whys if " is above " not in why)
        words = [f"{count} x {why}" for why, count in counts.most_common(3)]
        for cost in sorted(bounds):
            above = [why for why in whys if why.startswith(f"{cost} ")]
            least = min(above, key=lambda why: int(why.split(" ")[1].replace(",", "")))
            words.append(f"{len(above)} x {cost} too large, at the least {least.removeprefix(cost).strip()}")
        return "; ".join(words)


def outcome_of(trial: FrozenTrial) -> tuple[str, str]:
    """How a trial ended, and why; empty for one that has not."""
    kind, why = trial.user_attrs.get("outcome", ("", ""))
    return kind, why


def note_rung(trial: Trial, rung: int, dev_loss: float) -> None:
    trial.set_user_attr(_rung(rung), dev_loss)


def noted_rung(trial: Trial, rung: int) -> float | None:
    """The dev loss of a trial at a rung; None where it has not come to it."""
    return trial.user_attrs.get(_rung(rung))


def note_passed(trial: Trial, rung: int, passed: bool) -> None:
    trial.set_user_attr(f"passed {rung}", passed)


def noted_passed(trial: Trial, rung: int) -> bool | None:
    """Whether a trial went on after a rung; None where that is not decided."""
    return trial.user_attrs.get(f"passed {rung}")


def _rung(rung: int) -> str:
    return f"rung {rung}"


def suggest_of(trial: Trial) -> Suggest:
    """What draws the values of a row for `trial`."""

    def suggest(name: str, part: Range) -> Any:
        if part.kind == "int":
            return trial.suggest_int(name, int(part.low), int(part.high), step=part.step, log=part.log)
        if part.kind == "float":
            return trial.suggest_float(name, part.low, part.high, log=part.log)
        # Optuna's categories are words and numbers; a choice may be any plain data.
        return json.loads(trial.suggest_categorical(name, [json.dumps(choice) for choice in part.choices]))

    return suggest
