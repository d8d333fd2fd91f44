"""Run transformers' own model tests on a variant or on its backbone."""

import copy
import functools
import importlib
import re
import sys
import types
import unittest
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from families.contract import tiny_config
from transformers import AutoConfig

from hf_freeze import make_variant
from hf_freeze.architectures.registry import ARCHITECTURES, architecture_of
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.base import Method

PACKAGE = "transformers_model_tests"
PASSED = "passed"
_EXPANDED = re.compile(r"(test_\w+?)_(\d+)_\w+")  # by the package `parameterized`: name, number, parameters


class _Absent(types.ModuleType):
    """A module that the source distribution leaves out, such as the tests of generation. Its classes are empty."""

    __path__: list[str] = []  # noqa: RUF012 (a module's)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@functools.cache
def load_suite(file: Path) -> Any:
    """The module with transformers' `ModelTesterMixin`, which knows variants by the names of their backbones' classes."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(file.parent)]
    sys.modules[PACKAGE] = package
    while True:
        try:
            suite: Any = importlib.import_module(f"{PACKAGE}.{file.stem}")
            break
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(f"{PACKAGE}."):
                raise
            sys.modules[error.name] = _Absent(error.name)
    native_values = suite.get_values
    suite.get_values = lambda names: [known for name in native_values(names) for known in (name, f"Variant{name}")]
    return suite


class ModelTester:
    """What a test file of transformers says about its model: a tiny config, and inputs."""

    batch_size = 3
    seq_length = 7
    is_training = True

    def __init__(self, config: Any) -> None:
        self._config = config
        self.num_hidden_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> Any:
        return copy.deepcopy(self._config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(3, self._config.vocab_size, shape, generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": torch.ones_like(ids)}
        return self.get_config(), inputs


@dataclass(frozen=True)
class Cell:
    """A variant by its backbone and methods, for some tasks (None: all); `methods=None` is the backbone itself."""

    model_type: str
    methods: tuple[Method, ...] | None
    some_tasks: tuple[str, ...] | None = None

    @property
    def id(self) -> str:
        names = "+".join(method.name for method in self.methods or ())
        return f"{self.model_type}-{names or 'no_method'}"

    @functools.cached_property
    def config(self) -> Any:
        if self.model_type in ARCHITECTURES:
            return AutoConfig.for_model(self.model_type, **ARCHITECTURES[self.model_type].tiny)
        return tiny_config(self.model_type)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.some_tasks or architecture_of(self.config).tasks

    @property
    def backbone(self) -> "Cell":
        return replace(self, methods=None)

    @functools.cached_property
    def models(self) -> list[Any]:
        """One on meta for each task."""
        config = copy.deepcopy(self.config)
        with torch.device("meta"):
            if self.methods is None:
                return [AUTO_CLASSES[task].from_config(config) for task in self.tasks]
            return [make_variant(config, list(self.methods), task=task) for task in self.tasks]

    def test_case(self, suite: Any) -> type[unittest.TestCase]:
        """transformers' tests for the classes of these tasks."""
        config = self.models[0].config
        config = type(config).from_dict(config.to_dict())  # without what a model adds, such as the attention

        def set_up(case: Any) -> None:
            torch.manual_seed(0)
            suite.global_rng.seed(0)
            case.model_tester = ModelTester(config)

        members = {
            "all_model_classes": tuple(map(type, self.models)),
            "is_encoder_decoder": config.is_encoder_decoder,
            "setUp": set_up,
        }
        return type("ModelTests", (suite.ModelTesterMixin, unittest.TestCase), members)


class Outcomes(unittest.TestResult):
    """Of each test: PASSED, or why not."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, str] = {}

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._current = test._testMethodName
        self.by_name[self._current] = PASSED

    def addSkip(self, test: Any, reason: str) -> None:
        self.by_name[self._current] = f"skipped: {reason}"

    def addFailure(self, test: Any, err: Any) -> None:
        self.by_name[self._current] = self._exc_info_to_string(err, test)

    def addError(self, test: Any, err: Any) -> None:
        self.addFailure(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


def names_of(suite: Any) -> list[str]:
    return unittest.TestLoader().getTestCaseNames(suite.ModelTesterMixin)


def in_turn(names: Iterable[str], slow: Iterable[str], number: int, count: int, share: int = 1) -> list[str]:
    """The tests of cell `number` of `count`: each expansion of a parameterized test, and each slow test, goes to one cell.

    Of the others, one in `share`: those that the cells before and after it leave out.
    """
    chosen = []
    for place, name in enumerate(names):
        expansion = _EXPANDED.fullmatch(name)
        turn = int(expansion[2]) if expansion else place
        everywhere = expansion is None and name not in slow
        if turn % count == number or (everywhere and place % share == number % share):
            chosen.append(name)
    return chosen


def run(cell: Cell, suite: Any, names: Iterable[str]) -> dict[str, str]:
    """Test -> PASSED, or why it did not pass."""
    test_case, outcomes = cell.test_case(suite), Outcomes()
    for name in names:
        test_case(name).run(outcomes)
    return outcomes.by_name
