"""The `space` of a recipe, from which `hf-freeze search` draws rows, and its `search` section: goals, bounds, rungs."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

from hf_freeze.lab.recipes.merge import is_pretrained
from hf_freeze.methods.registry import METHODS

KINDS = ("int", "float", "choices")
COSTS = ("parameters", "stored_bytes", "multiply_adds")  # counted before a trial is trained
GOALS = ("dev_loss", *COSTS)  # all of them: less is better
# Settings that change neither the meaning of the dev loss nor the length of the rungs.
_TRAINING = ("learning_rate", "max_grad_norm", "max_tokens", "warmup_steps", "weight_decay")
_SECTIONS = ("methods", "not_together", "backbone", "training")
_SETTINGS = ("goals", "bounds", "rungs", "keep")

Suggest = Callable[[str, "Range"], Any]  # (name of a setting, its range) -> a value


@dataclass(frozen=True, kw_only=True)
class Range:
    """What one setting may be: a number between `low` and `high`, both included, or one of `choices`."""

    kind: str  # int, float or choices
    low: float = 0
    high: float = 0
    step: int = 1  # of an int
    log: bool = False
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpaceMethod:
    """A method that trials have, all of them or, if it is `optional`, some. `settings`: plain data with Ranges in it."""

    name: str  # that of the method; the second of the same method is low_rank-2
    method: str
    optional: bool
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space:
    """Methods in the order in which they are applied, names that may not meet, and sections of a row with Ranges in them."""

    methods: tuple[SpaceMethod, ...]
    not_together: tuple[tuple[str, ...], ...]
    sections: dict[str, Any]

    def row(self, suggest: Suggest) -> dict[str, Any]:
        """A row of a grid, whose values `suggest` chooses; with `refused` where methods meet that may not."""
        methods, words, present = [], [], set()
        for part in self.methods:
            if part.optional and not suggest(part.name, Range(kind="choices", choices=(True, False))):
                continue
            present.add(part.name)
            values: dict[str, Any] = {}
            settings = _fill(part.settings, part.name, suggest, values)
            methods.append({"method": part.method} | settings)
            words.append(" ".join([part.method, *(f"{_last(name)}={_word(value)}" for name, value in values.items())]))
        values = {}
        sections = {name: _fill(section, name, suggest, values) for name, section in self.sections.items()}
        words += [f"{_last(name)}={_word(value)}" for name, value in values.items()]
        row = {"label": ", ".join(words) or "no method", "methods": methods} | sections
        for group in self.not_together:
            if len(met := sorted(present & set(group))) > 1:
                row["refused"] = f"not_together: {' and '.join(met)}"
        return row

    def ranges(self) -> dict[str, Range]:
        """Every setting that trials choose, by name; that of an optional method is its own name."""
        found: dict[str, Range] = {}
        for part in self.methods:
            if part.optional:
                found[part.name] = Range(kind="choices", choices=(True, False))
            found |= dict(_ranges(part.settings, part.name))
        return found | {name: part for key, section in self.sections.items() for name, part in _ranges(section, key)}


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """`goals` to make small; `bounds`: cost -> the most that a trial may have; `rungs`: epochs after which only the share
    `keep` of the trials goes on."""

    goals: tuple[str, ...] = ("dev_loss", "stored_bytes", "multiply_adds")
    bounds: dict[str, float]
    rungs: tuple[float, ...] = ()
    keep: float = 0.5


def space_of(recipe: dict[str, Any], path: Any) -> Space:
    """The space of a recipe. Raises ValueError, in one line, for anything in it that cannot be searched."""
    where = f"{path}: space"
    data = recipe["space"]
    if recipe["task"] == "image-classification":
        raise ValueError(f"{where} is for transformers, not for task 'image-classification'")
    if "start" in recipe or is_pretrained(recipe.get("backbone")):
        raise ValueError(
            f"{where}: trials train from fresh weights, so there can be no 'start' or 'backbone.pretrained'"
        )
    for unknown in sorted(set(data) - set(_SECTIONS)):
        raise ValueError(f"{where}: unknown field {unknown!r}; choose from {list(_SECTIONS)}")
    if not isinstance(data.get("methods", []), list):
        raise ValueError(f"{where}.methods must be a list in the order of application, not {data['methods']!r}")
    methods: list[SpaceMethod] = []
    for entry in data.get("methods", []):
        methods.append(_method(entry, [part.method for part in methods], where))
    sections = {}
    for name in ("backbone", "training"):
        if name in data:
            sections[name] = _parse(data[name], f"{where}.{name}")
    _check_sections(sections, recipe, where)
    space = Space(methods=tuple(methods), not_together=_not_together(data, methods, where), sections=sections)
    if not space.ranges():
        raise ValueError(f"{where} has nothing to choose: no range and no optional method")
    return space


def search_settings(recipe: dict[str, Any], path: Any) -> SearchSettings:
    """The `search` section of a recipe. Raises ValueError, in one line, for anything that is wrong in it."""
    where, data = f"{path}: search", recipe.get("search", {})
    for unknown in sorted(set(data) - set(_SETTINGS)):
        raise ValueError(f"{where}: unknown field {unknown!r}; choose from {list(_SETTINGS)}")
    goals = data.get("goals", list(SearchSettings.goals))
    if not isinstance(goals, list) or not goals or "dev_loss" not in goals or len(set(goals)) < len(goals):
        raise ValueError(f"{where}.goals={goals!r} must be a list with 'dev_loss' in it and nothing twice")
    for goal in goals:
        if goal not in GOALS:
            raise ValueError(f"{where}: unknown goal {goal!r}; choose from {list(GOALS)}")
    bounds = data.get("bounds", {})
    if not isinstance(bounds, dict):
        raise ValueError(f"{where}.bounds={bounds!r} must give the maximum of a cost, such as {{stored_bytes: 2e6}}")
    for cost in bounds:
        if cost not in COSTS:
            raise ValueError(f"{where}: unknown bound {cost!r}; choose from {list(COSTS)}")
    bounds = {cost: _number(bound, f"{where}.bounds.{cost}") for cost, bound in bounds.items()}
    for cost, bound in bounds.items():
        if bound <= 0:
            raise ValueError(f"{where}.bounds.{cost}={bound:g} must be above 0")
    rungs = data.get("rungs", [])
    if not isinstance(rungs, list):
        raise ValueError(f"{where}.rungs={rungs!r} must be a list of epochs, such as [1, 3]")
    rungs = [_number(rung, f"{where}.rungs") for rung in rungs]
    epochs = recipe["training"]["epochs"]
    if rungs != sorted(set(rungs)) or any(not 0 < rung < epochs for rung in rungs):
        raise ValueError(f"{where}.rungs={rungs} must rise, each between 0 and training.epochs={epochs:g}")
    keep = _number(data.get("keep", SearchSettings.keep), f"{where}.keep")
    if not 0 < keep < 1:
        raise ValueError(f"{where}.keep={keep:g} must be a share in (0, 1)")
    return SearchSettings(goals=tuple(goals), bounds=bounds, rungs=tuple(rungs), keep=keep)


def _method(entry: Any, earlier: list[str], where: str) -> SpaceMethod:
    if not isinstance(entry, dict) or entry.get("method") not in METHODS:
        named = entry.get("method") if isinstance(entry, dict) else entry
        raise ValueError(f"{where}: unknown method {named!r}; choose from {sorted(METHODS)}")
    settings = {name: value for name, value in entry.items() if name not in ("method", "optional")}
    method, optional = entry["method"], entry.get("optional", False)
    if method == "distillation":
        raise ValueError(f"{where}: 'distillation' needs the row of a teacher, which a trial does not have")
    known = [field.name for field in fields(METHODS[method])]
    for unknown in sorted(set(settings) - set(known)):
        raise ValueError(f"{where}: unknown setting {unknown!r} of {method!r}; choose from {known}")
    if not isinstance(optional, bool):
        raise ValueError(f"{where}: optional={optional!r} of {method!r} must be true or false")
    count = earlier.count(method) + 1
    return SpaceMethod(
        name=method if count == 1 else f"{method}-{count}",
        method=method,
        optional=optional,
        settings=_parse(settings, f"{where}: {method}"),
    )


def _check_sections(sections: dict[str, Any], recipe: dict[str, Any], where: str) -> None:
    backbone, training = sections.get("backbone", {}), sections.get("training", {})
    config = backbone.get("config", {}) if isinstance(backbone, dict) else None
    if not isinstance(config, dict) or set(backbone) - {"config"}:
        raise ValueError(
            f"{where}.backbone must hold values of the config, such as {{config: {{d_model: {{int: [64, 128]}}}}}}"
        )
    for name in config:
        if name not in recipe["backbone"].get("config", {}):
            known = sorted(recipe["backbone"].get("config", {}))
            raise ValueError(f"{where}: unknown value backbone.config.{name}; choose from {known}, those of the recipe")
    if not isinstance(training, dict):
        raise ValueError(f"{where}.training must hold settings, such as {{learning_rate: {{float: [1e-4, 1e-2]}}}}")
    for name in training:
        if name not in _TRAINING:
            raise ValueError(f"{where}: training.{name} cannot be searched; choose from {list(_TRAINING)}")


def _not_together(data: dict[str, Any], methods: list[SpaceMethod], where: str) -> tuple[tuple[str, ...], ...]:
    groups = data.get("not_together", [])
    by_name = {part.name: part for part in methods}
    if not isinstance(groups, list) or not all(isinstance(group, list) and len(group) > 1 for group in groups):
        raise ValueError(f"{where}.not_together={groups!r} must be a list of lists of two or more methods")
    for group in groups:
        for name in group:
            if name not in by_name:
                raise ValueError(f"{where}.not_together: {name!r} is not in the space; choose from {list(by_name)}")
        for one, other in combinations(group, 2):
            if not by_name[one].optional and not by_name[other].optional:
                raise ValueError(
                    f"{where}: all trials are refused: not_together names {one!r} and {other!r}, and neither is optional"
                )
    return tuple(tuple(group) for group in groups)


def _parse(data: Any, where: str) -> Any:
    """Plain data, in which a mapping with the name of a kind is a Range."""
    if not isinstance(data, dict):
        return data
    kinds = [kind for kind in KINDS if kind in data]
    if not kinds:
        return {name: _parse(value, f"{where}.{name}") for name, value in data.items()}
    kind, extra = kinds[0], {"int": {"step", "log"}, "float": {"log"}, "choices": set()}[kinds[0]]
    for unknown in sorted(set(data) - {kind} - extra):
        raise ValueError(f"{where}: unknown field {unknown!r} of a range of {kind}; choose from {sorted(extra)}")
    ends = data[kind]
    if not isinstance(ends, list) or (kind != "choices" and len(ends) != 2):
        raise ValueError(f"{where}: {kind}={ends!r} must be {'a list' if kind == 'choices' else '[low, high]'}")
    if kind == "choices":
        if not ends or len({json.dumps(choice, sort_keys=True) for choice in ends}) < len(ends):
            raise ValueError(f"{where}: choices={ends!r} must be values, each once; the range is empty without any")
        return Range(kind=kind, choices=tuple(ends))
    low, high = (_number(end, where) for end in ends)
    step, log = data.get("step", 1), data.get("log", False)
    if low > high:
        raise ValueError(f"{where}: the range {kind}={ends} is empty: {low:g} is above {high:g}")
    if kind == "int" and (low != int(low) or high != int(high) or type(step) is not int or step < 1):
        raise ValueError(f"{where}: int={ends} step={step!r} must be integers, and the step at least 1")
    if not isinstance(log, bool) or (log and (low <= 0 or step != 1)):
        raise ValueError(f"{where}: log={log!r} needs a lower end above 0, not {low:g}, and no step")
    if kind == "int":
        high = low + (high - low) // step * step
    return Range(kind=kind, low=low, high=high, step=step, log=log)


def _number(value: Any, where: str) -> float:
    """YAML reads 2e6 as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {value!r} is no number") from None
    if not math.isfinite(number) or isinstance(value, bool):
        raise ValueError(f"{where}: {value!r} is no finite number")
    return number


def _fill(data: Any, name: str, suggest: Suggest, values: dict[str, Any]) -> Any:
    """`data` with every Range replaced by a value, which is also noted in `values` by its dotted name."""
    if isinstance(data, Range):
        values[name] = suggest(name, data)
        return copy.deepcopy(values[name])
    if isinstance(data, dict):
        return {key: _fill(value, f"{name}.{key}", suggest, values) for key, value in data.items()}
    return copy.deepcopy(data)


def _ranges(data: Any, name: str) -> Iterator[tuple[str, Range]]:
    if isinstance(data, Range):
        yield name, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _ranges(value, f"{name}.{key}")


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _word(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
