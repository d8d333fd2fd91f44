"""The `space` of a recipe, from which `hf-freeze search` draws rows, and whether that and its `search` section fit the recipe."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from hf_freeze.lab.recipes.explain import choose
from hf_freeze.lab.recipes.recipe import Recipe
from hf_freeze.lab.recipes.rows import Cost, Row, SpaceSection
from hf_freeze.methods.registry import METHODS

COSTS: tuple[str, ...] = get_args(Cost)
# Settings that change neither the meaning of the dev loss nor the length of the rungs.
_TRAINING = ("learning_rate", "max_grad_norm", "max_tokens", "warmup_steps", "weight_decay")
_KINDS = {"int": {"step", "log"}, "float": {"log"}, "choices": set()}  # of ranges, and what each may have besides

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


_PRESENT = Range(kind="choices", choices=(True, False))  # of an optional method


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

    def row(self, suggest: Suggest) -> tuple[Row, str]:
        """A row of a grid, whose values `suggest` chooses, and why it is refused, where methods meet that may not."""
        methods, words, present = [], [], set()
        for part in self.methods:
            if part.optional and not suggest(part.name, _PRESENT):
                continue
            present.add(part.name)
            values: dict[str, Any] = {}
            methods.append({"method": part.method} | _fill(part.settings, part.name, suggest, values))
            words.append(" ".join([part.method, *_words(values)]))
        values = {}
        sections = {name: _fill(section, name, suggest, values) for name, section in self.sections.items()}
        label = ", ".join([*words, *_words(values)]) or "no method"
        row = Row.model_validate({"label": label, "methods": methods} | sections)
        met = next((met for group in self.not_together if len(met := sorted(present & set(group))) > 1), [])
        return row, f"not_together: {' and '.join(met)}" if met else ""

    def ranges(self) -> dict[str, Range]:
        """Every setting that trials choose, by name; that of an optional method is its own name."""
        ranges: dict[str, Range] = {}
        for part in self.methods:
            ranges |= ({part.name: _PRESENT} if part.optional else {}) | dict(_ranges(part.settings, part.name))
        return ranges | {name: part for key, section in self.sections.items() for name, part in _ranges(section, key)}


def space_of(recipe: Recipe, path: str | Path) -> Space:
    """The space of a recipe. Raises ValueError, in one line, for anything in it that cannot be searched."""
    where, data = f"{path}: space", recipe.space or SpaceSection()
    if recipe.start is not None or (recipe.backbone is not None and recipe.backbone.pretrained is not None):
        raise ValueError(
            f"{where}: trials train from fresh weights, so there can be no 'start' or 'backbone.pretrained'"
        )
    methods: list[SpaceMethod] = []
    for entry in data.methods:
        methods.append(_method(entry, [part.method for part in methods], where))
    sections = {name: _parse(section, f"{where}.{name}") for name, section in data.given().items() if name in _CHECKS}
    for name, section in sections.items():
        _CHECKS[name](section, recipe, where)
    _check_together(data.not_together, methods, where)
    groups = tuple(map(tuple, data.not_together))
    space = Space(methods=tuple(methods), not_together=groups, sections=sections)
    if not space.ranges():
        raise ValueError(f"{where} has nothing to choose: no range and no optional method")
    return space


def check_search(recipe: Recipe, path: str | Path) -> None:
    """Whether the goals and rungs of a search fit the recipe."""
    goals, rungs, epochs = recipe.search.goals, recipe.search.rungs, recipe.training.epochs
    if "dev_loss" not in goals or len(set(goals)) < len(goals):
        raise ValueError(f"{path}: search.goals={goals!r} must be a list with 'dev_loss' in it and nothing twice")
    if rungs != sorted(set(rungs)) or any(not 0 < rung < epochs for rung in rungs):
        raise ValueError(f"{path}: search.rungs={rungs} must rise, each between 0 and training.epochs={epochs:g}")


def _method(entry: dict[str, Any], earlier: list[str], where: str) -> SpaceMethod:
    method, optional = entry.get("method"), entry.get("optional", False)
    if method not in METHODS:
        raise ValueError(f"{where}: unknown method {method!r}; {choose(sorted(METHODS), method)}")
    settings = {name: value for name, value in entry.items() if name not in ("method", "optional")}
    if method == "distillation":
        raise ValueError(f"{where}: 'distillation' needs the row of a teacher, which a trial does not have")
    known = [field.name for field in fields(METHODS[method])]
    for unknown in sorted(set(settings) - set(known)):
        raise ValueError(f"{where}: unknown setting {unknown!r} of {method!r}; {choose(known, unknown)}")
    if not isinstance(optional, bool):
        raise ValueError(f"{where}: optional={optional!r} of {method!r} must be true or false")
    count = earlier.count(method) + 1
    return SpaceMethod(
        name=method if count == 1 else f"{method}-{count}",
        method=method,
        optional=optional,
        settings=_parse(settings, f"{where}: {method}"),
    )


def _check_backbone(backbone: Any, recipe: Recipe, where: str) -> None:
    config = backbone.get("config", {})
    if not isinstance(config, dict) or set(backbone) - {"config"}:
        raise ValueError(
            f"{where}.backbone must hold values of the config, such as {{config: {{d_model: {{int: [64, 128]}}}}}}"
        )
    known = sorted(recipe.backbone.config) if recipe.backbone is not None else []
    for name in config:
        if name not in known:
            raise ValueError(
                f"{where}: unknown value backbone.config.{name}; {choose(known, name)}, those of the recipe"
            )


def _check_training(training: Any, recipe: Recipe, where: str) -> None:
    for name in training:
        if name not in _TRAINING:
            raise ValueError(f"{where}: training.{name} cannot be searched; {choose(_TRAINING, name)}")


_CHECKS = {"backbone": _check_backbone, "training": _check_training}


def _check_together(groups: list[list[str]], methods: list[SpaceMethod], where: str) -> None:
    by_name = {part.name: part for part in methods}
    for group in groups:
        for name in group:
            if name not in by_name:
                raise ValueError(f"{where}.not_together: {name!r} is not in the space; {choose(by_name, name)}")
        for one, other in combinations(group, 2):
            if not by_name[one].optional and not by_name[other].optional:
                raise ValueError(
                    f"{where}: all trials are refused: not_together names {one!r} and {other!r}, and neither is optional"
                )


def _parse(data: Any, where: str) -> Any:
    """Plain data, in which a mapping with the name of a kind is a Range."""
    if not isinstance(data, dict):
        return data
    kind = next((kind for kind in _KINDS if kind in data), None)
    if kind is None:
        return {name: _parse(value, f"{where}.{name}") for name, value in data.items()}
    for unknown in sorted(set(data) - {kind} - _KINDS[kind]):
        raise ValueError(f"{where}: unknown field {unknown!r} of a range of {kind}; choose from {sorted(_KINDS[kind])}")
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
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {value!r} is no number")
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


def _words(values: dict[str, Any]) -> list[str]:
    """Such as rank=4, of each value that was chosen."""
    shown = [(name.rsplit(".", 1)[-1], value) for name, value in values.items()]
    return [f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown]
