"""The cases of the contract tests: which methods on which architecture, tiny config, task and source of weights.

No name of a method or an architecture appears here or in the contract tests: registering one is enough for it to be tested.

A method comes with its example and with each of its modes, which are settings of another kind. The full product has thousands of
cases, so the tests draw from it, deterministically:

- `covering()`: for every method and architecture, few cases that hold every tiny config and every source, and for every
  method every task;
- `once_on_each_architecture()`: one case for every method and architecture, with rotating configs, tasks and sources;
- `once()`: one case for every method, on rotating architectures and configs;
- `pairs()`: one case for every pair of methods, in both orders where these differ, on rotating architectures and configs;
- `pairs_of_modes()`: the same for every mode with every method.

`HF_FREEZE_TESTS=all` in the environment has each of them return the full product instead.
"""

import functools
import inspect
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import AutoConfig

from hf_freeze.architectures.base import TRAINED, Architecture
from hf_freeze.architectures.registry import ARCHITECTURES, VARIANT_PREFIX
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.base import Method
from hf_freeze.methods.order import check_order
from hf_freeze.methods.parts import Schedule, SeededValues, parts_of
from hf_freeze.methods.registry import METHODS, method_to_dict
from hf_freeze.model.config import INITS

MODEL = "trained"  # the source that is a native model with weights; the others are a config, with that init
SOURCES = (MODEL, *(f"init_{init}" for init in INITS))
BASE = "base"  # the name of an architecture's first tiny config
ALL = os.environ.get("HF_FREEZE_TESTS") == "all"

Predicate = Callable[["Case"], bool]


@dataclass(frozen=True)
class Case:
    """Methods applied, in order, to a backbone. Without methods it is the baseline, for which the contract holds as well."""

    architecture: Architecture
    task: str
    source: str
    methods: tuple[Method, ...]
    finalized: bool = False  # the state after `finalize()`, for methods whose training ends with it
    config: str = BASE

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its methods, each with its mode if it has one."""
        return tuple(map(name_of, self.methods))

    @property
    def id(self) -> str:
        names = "+".join(self.names) or "baseline"
        config = "" if self.config == BASE else f"-{self.config}"
        model_type = self.architecture.model_type
        return f"{model_type}{config}-{self.task}-{self.source}-{names}{'-finalized' * self.finalized}"

    @property
    def exact(self) -> bool:
        of_all = [method.facts for method in self.methods]
        return all(facts.exact and not (self.finalized and facts.shrinks) for facts in of_all)

    @property
    def finalizable(self) -> bool:
        return not self.finalized and any(method.facts.finalizable for method in self.methods)

    @property
    def stochastic(self) -> bool:
        """Whether two forwards in training mode differ."""
        return not self.finalized and any(method.facts.stochastic for method in self.methods)

    @property
    def skips(self) -> bool:
        """Whether a training step may leave a trainable parameter without a gradient."""
        return not self.finalized and any(part.skips for _, part in parts_of(self.methods, Schedule))

    @property
    def seeded(self) -> bool:
        """Whether a part of it is regenerated from a seed instead of being stored."""
        return any(seeds(method, component) for method in self.methods for component in TRAINED)

    @property
    def scheduled(self) -> bool:
        """Whether the progress of training decides something."""
        return any(method.part(Schedule) is not None for method in self.methods)

    @property
    def from_model(self) -> bool:
        """Whether the backbone is a model with weights, not a config."""
        return self.source == MODEL

    @property
    def generates(self) -> bool:
        return self.causal and _generates(self.architecture.model_type, self.config, self.task)

    @property
    def causal(self) -> bool:
        """Whether some stack must not see the future."""
        return "decoder" in self.architecture.stacks or _is_decoder(self.architecture.model_type, self.config)

    @property
    def has_loss(self) -> bool:
        return self.task in _tasks_with_loss(self.architecture.model_type)

    @property
    def auto_class(self) -> Any:
        return AUTO_CLASSES[self.task]

    @property
    def native_class(self) -> Any:
        return _native_class(self.architecture.model_type, self.task)

    @property
    def tiny_config(self) -> dict[str, Any]:
        return self.architecture.tiny_configs[self.config]

    @property
    def takes_its_batch(self) -> bool:
        """Whether the model of this task takes all that the config asks for: with cross-attention, only some tasks do."""
        return _takes_its_batch(self.architecture.model_type, self.config, self.task)

    @property
    def accepted(self) -> bool:
        """Whether every method's `check` accepts the config."""
        return self.refusal is None

    @property
    def refusal(self) -> str | None:
        """Why the methods do not fit the config, or None where they do. Nothing is allocated."""
        return _refusal(self.architecture.model_type, self.config, json.dumps([*map(method_to_dict, self.methods)]))

    def batch(self) -> dict[str, torch.Tensor]:
        """The architecture's tiny batch; a decoder with cross-attention gets the states of an encoder too."""
        batch = _batch(self.architecture.model_type, self.config, self.task)
        return {name: value.clone() for name, value in batch.items()}


def native_config(architecture: Architecture, config: str = BASE) -> Any:
    """A tiny config without dropout, so that two forwards in training mode can be compared."""
    native = AutoConfig.for_model(architecture.model_type, **architecture.tiny_configs[config])
    for name, value in native.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(native, name, 0.0)
    native.classifier_dropout = 0.0  # where the config names none, some classes have 0.1
    return native


def seeds(method: Method, component: str) -> bool:
    """Whether a seed regenerates weights of this component."""
    part = method.part(SeededValues)
    return part is not None and component in part.components


def supports(method: type[Method], architecture: Architecture) -> bool:
    return method.refusal(architecture) is None


def name_of(method: Method) -> str:
    """Its name, and that of its mode if the method is registered with one of this setting."""
    mode = next((mode for mode, setting in type(method).modes.items() if setting == method), None)
    return method.name if mode is None else f"{method.name}({mode})"


def sources(methods: tuple[Method, ...]) -> tuple[str, ...]:
    """The sources that these methods can start from."""
    return SOURCES[1:] if any(method.facts.from_scratch for method in methods) else SOURCES


def plain(architecture: Architecture, *methods: Method, **changes: Any) -> Case:
    """A case with the first config, the first task, and trained weights where the methods can take them over."""
    return replace(Case(architecture, architecture.tasks[0], sources(methods)[0], methods), **changes)


@functools.cache
def _is_decoder(model_type: str, config: str) -> bool:
    return getattr(native_config(ARCHITECTURES[model_type], config), "is_decoder", False)


@functools.cache
def _batch(model_type: str, config: str, task: str) -> dict[str, torch.Tensor]:
    architecture = ARCHITECTURES[model_type]
    batch, native = architecture.tiny_inputs(task), native_config(architecture, config)
    if getattr(native, "add_cross_attention", False):
        generator = torch.Generator().manual_seed(7)
        batch["encoder_hidden_states"] = torch.randn(2, 3, native.hidden_size, generator=generator)
        batch["encoder_attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    return batch


@functools.cache
def _native_class(model_type: str, task: str) -> Any:
    return AUTO_CLASSES[task]._model_mapping[type(AutoConfig.for_model(model_type))]


@functools.cache
def _tasks_with_loss(model_type: str) -> list[str]:
    architecture = ARCHITECTURES[model_type]
    return [
        task for task in architecture.tasks if {"labels", "start_positions"} & architecture.tiny_inputs(task).keys()
    ]


@functools.cache
def _generates(model_type: str, config: str, task: str) -> bool:
    """Whether the native model generates with a cache. BERT with cross-attention does not: it gets a cache of another kind."""
    native_class = _native_class(model_type, task)
    if not native_class.can_generate():
        return False
    model = native_class(native_config(ARCHITECTURES[model_type], config)).eval()
    batch = _batch(model_type, config, task)
    states = {name: value for name, value in batch.items() if name.startswith("encoder_")}
    try:
        model.generate(batch["input_ids"], max_new_tokens=2, min_new_tokens=2, use_cache=True, **states)
    except AttributeError:
        return False
    return True


@functools.cache
def _takes_its_batch(model_type: str, config: str, task: str) -> bool:
    case = Case(ARCHITECTURES[model_type], task, MODEL, (), config=config)
    return case.batch().keys() <= inspect.signature(case.native_class.forward).parameters.keys()


@functools.cache
def _refusal(model_type: str, config: str, methods: str) -> str | None:
    settings = ARCHITECTURES[model_type].tiny_configs[config] | {
        "methods": json.loads(methods),
        "original_fields": None,
    }
    try:
        AutoConfig.for_model(f"{VARIANT_PREFIX}{model_type}", **settings)
    except ValueError as error:
        return str(error)
    return None


# -- drawing from the product ------------------------------------------------------------------------------------------------

MODES = [setting for method in METHODS.values() for setting in method.modes.values()]
EXAMPLES = [method.example for method in METHODS.values()] + MODES


def _candidates(architecture: Architecture, methods: tuple[Method, ...]) -> list[Case]:
    """Every config, task and source of these methods on an architecture."""
    configs = [name for name in architecture.tiny_configs if plain(architecture, *methods, config=name).accepted]
    product = itertools.product(configs, architecture.tasks, sources(methods))
    cases = [Case(architecture, task, source, methods, config=config) for config, task, source in product]
    return [case for case in cases if case.takes_its_batch]


@functools.cache
def _choices() -> list[list[Case]]:
    """The candidates of each method, and of none, on each architecture."""
    return [_candidates(architecture, methods) for architecture, methods in _applied()]


def _applied() -> Iterator[tuple[Architecture, tuple[Method, ...]]]:
    """No method, and each one in each of its modes, on each architecture."""
    for methods in [(), *((method,) for method in EXAMPLES)]:
        for architecture in ARCHITECTURES.values():
            if all(supports(type(method), architecture) for method in methods):
                yield architecture, methods


def _usable(where: Predicate, finalized: bool) -> list[list[Case]]:
    """Of the candidates, the ones that a test is for."""
    choices = _choices()
    if finalized:
        choices = [[replace(case, finalized=True) for case in cases if case.finalizable] for cases in choices]
    return [[case for case in cases if where(case)] for cases in choices]


def _in_rotation(choices: Iterable[list[Case]]) -> list[Case]:
    """One case of each list: the next of its architectures and configs in turn, then the next of its tasks and sources."""
    if ALL:
        return [case for cases in choices for case in cases]
    drawn, turns = [], Counter[tuple[Any, ...]]()
    for cases in filter(None, choices):
        places = tuple(dict.fromkeys((case.architecture.model_type, case.config) for case in cases))
        turn, turns[places] = turns[places], turns[places] + 1
        place = places[turn % len(places)]
        there = [case for case in cases if (case.architecture.model_type, case.config) == place]
        drawn.append(there[(turn + turn // len(places)) % len(there)])
    return drawn


def covering(where: Predicate = lambda case: True) -> list[Case]:
    """For each method on each architecture, few cases that hold every config and every source; on all its architectures
    together, they hold every task. The cases without methods hold every task of each architecture.

    Pairs of these values differ from method to method. Finalized cases come once on each architecture.
    """
    drawn: list[Case] = []
    combined: Counter[Any] = Counter()
    of_methods = itertools.groupby(filter(None, _usable(where, finalized=False)), key=lambda cases: cases[0].methods)
    for methods, lists in of_methods:
        tasks_met: set[str] = set()
        lists = list(lists)
        for number, candidates in enumerate(lists):
            later = {case.task for cases in lists[number + 1 :] for case in cases}
            elsewhere = tasks_met | later if methods else set()
            chosen = candidates if ALL else _cover(candidates, elsewhere, combined)
            tasks_met |= {case.task for case in chosen}
            drawn += chosen
    return drawn + once_on_each_architecture(where, finalized=True)


def _cover(candidates: list[Case], elsewhere: set[str], combined: Counter[Any]) -> list[Case]:
    """Greedily, a few of the candidates that hold all their values, in the pairs that `combined` counts least of.

    Tasks in `elsewhere`, which the method meets on another architecture, are drawn while configs and sources are left to draw.
    """

    def values(case: Case) -> set[tuple[str, str]]:
        return {("config", case.config), ("task", case.task), ("source", case.source)}

    def pairs_of(case: Case) -> set[Any]:
        return {(case.architecture.model_type, *pair) for pair in itertools.combinations(sorted(values(case)), 2)}

    missing = set().union(*map(values, candidates))
    optional = {("task", task) for task in elsewhere}
    drawn = []
    while missing - optional:
        best = max(
            candidates,
            key=lambda case: (
                len(missing & values(case) - optional),
                len(missing & values(case)),
                -sum(combined[pair] for pair in pairs_of(case)),
            ),
        )
        missing -= values(best)
        combined.update(pairs_of(best))
        drawn.append(best)
    return drawn


def once_on_each_architecture(where: Predicate = lambda case: True, *, finalized: bool = False) -> list[Case]:
    """One case for each method on each architecture; configs, tasks and sources rotate."""
    return _in_rotation(_usable(where, finalized))


def once(where: Predicate = lambda case: True, *, finalized: bool = False) -> list[Case]:
    """One case for each method; architectures, configs, tasks and sources rotate."""
    of_methods: dict[str, list[list[Case]]] = {}
    for cases in filter(None, _usable(where, finalized)):
        of_methods.setdefault(str(cases[0].methods), []).append(cases)
    return _in_rotation(_interleaved(lists) for lists in of_methods.values())


def _interleaved(lists: Iterable[list[Any]]) -> list[Any]:
    """The first of each list, then the second of each, and so on."""
    return [item for turn in itertools.zip_longest(*lists) for item in turn if item is not None]


def pairs(where: Predicate = lambda case: True) -> Iterator[Case]:
    """One case for each pair of methods, a method with itself included (under another seed, if it takes one).

    In both orders where these have code of their own: where the two change the same parts, or one order is refused. Of the others
    in one, so that each method is the first in some and the second in others; in both if all are wanted. Architectures and
    configs rotate, among those that accept either method alone.
    """
    fitting = {method: _fitting(method) for method in METHODS.values()}
    order = list(METHODS.values())
    for number, (first, second) in enumerate(itertools.product(order, repeat=2)):
        if not (ALL or leads(order.index(first), order.index(second)) or _orders_differ(first, second)):
            continue
        example = second.example
        if first is second and "seed" in {field.name for field in fields(second)}:
            example = replace(example, seed=example.seed + 1)
        methods = (first.example, example)
        usable = [
            replace(place, methods=methods, source=sources(methods)[0])
            for place in _places()
            if {place.id} <= fitting[first] & fitting[second] and where(place)
        ]
        if usable:
            yield from usable if ALL else [_next_place(usable, number)]


def _next_place(usable: list[Case], number: int) -> Case:
    """One of them by turns: of those with two stacks, which take twice as long, in a third of the turns."""
    turn, third = divmod(number, 3)
    one_stack = [case for case in usable if len(case.architecture.stacks) == 1] if third else []
    usable = one_stack or usable
    return usable[(7 * turn + third) % len(usable)]


def leads(first: int, second: int) -> bool:
    """Of two methods by their numbers: whether the first comes first where one order is drawn."""
    return first == second or (first < second) == bool((first + second) % 2)


def _orders_differ(one: type[Method], other: type[Method]) -> bool:
    return bool(one.registered.needs & other.registered.needs) or _refused(one, other) or _refused(other, one)


def _refused(first: type[Method], second: type[Method]) -> bool:
    try:
        check_order(second.example, [first.example])
    except ValueError:
        return True
    return False


@functools.cache
def _places() -> list[Case]:
    """Without methods, every config of every architecture in turn."""
    return _interleaved([plain(a, config=config) for config in a.tiny_configs] for a in ARCHITECTURES.values())


def _fitting(method: type[Method]) -> set[str]:
    """The ids of the places that accept the method alone."""
    places = [place for place in _places() if supports(method, place.architecture)]
    return {place.id for place in places if replace(place, methods=(method.example,)).accepted}


def pairs_of_modes() -> Iterator[Case]:
    """As `pairs`, for each mode with the example of each method, in both orders; in one of the two unless all are wanted."""
    for mode, (number, other) in itertools.product(MODES, enumerate(METHODS.values())):
        for first, second in [(mode, other.example), (other.example, mode)]:
            usable = [
                replace(place, methods=(first, second), source=sources((first, second))[0])
                for place in _places()
                if supports(other, place.architecture)
                and all(replace(place, methods=(method,)).refusal is None for method in (first, second))
            ]
            if usable and (ALL or (first is mode) == (number + MODES.index(mode)) % 2):
                yield from usable if ALL else [usable[7 * number % len(usable)]]


BASELINES = [
    plain(architecture) for architecture in ARCHITECTURES.values()
]  # one without methods for each architecture


def _plain_cases() -> Iterator[Case]:
    for architecture, methods in _applied():
        case = plain(architecture, *methods)
        yield from [case, replace(case, finalized=True)] if case.finalizable else [case]


PLAIN = list(_plain_cases())  # each method, and none, on each architecture, with the first config, task and source
