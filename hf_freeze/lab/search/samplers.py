"""Optuna's samplers, reproducible although a search is stopped and goes on, or several processes share it."""

from collections.abc import Callable
from typing import Any

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler

# Generations of Optuna's default size, 50, would make a search of fewer trials a random one.
_POPULATION = 10

SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed),
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=_POPULATION),
    "random": lambda seed: RandomSampler(seed=seed),
}


class SeededByTrial(BaseSampler):
    """A sampler whose random numbers are those of the seed and the number of the trial. With one job at a time, a stopped search
    so goes on with the trials that it would have had."""

    def __init__(self, name: str, seed: int) -> None:
        self._make, self._seed = SAMPLERS[name], seed
        self._sampler = self._make(seed)

    def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        self._sampler = self._make((self._seed * 1_000_003 + trial.number) % 2**32)
        self._sampler.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: dict[str, Any]
    ) -> dict[str, Any]:
        return self._sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        return self._sampler.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: Any, state: Any, values: Any) -> None:
        self._sampler.after_trial(study, trial, state, values)
