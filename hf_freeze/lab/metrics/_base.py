"""The base class of the metrics: an `evaluate.Metric` that works offline, checks its input and has named options."""

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

import evaluate
from datasets import Features


class OfflineMetric(evaluate.Metric):
    """An `evaluate.Metric` with

    - options that are passed to the constructor, to `compute`, or to both (`compute` takes precedence);
    - predictions in memory, unless `cache_dir` or `num_process` request files. In memory, any number of instances work at
      the same time; with files, each waits a second for the lock of the previous one;
    - a ValueError for input that cannot be scored, before anything is stored.

    The inputs of `add_batch`, `add` and `compute` are the names in `inputs`.
    """

    name: ClassVar[str]  # pyright: ignore[reportIncompatibleMethodOverride]
    inputs: ClassVar[Features]
    options: ClassVar[dict[str, Any]] = {}
    citation: ClassVar[str] = ""  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, config_name: str | None = None, keep_in_memory: bool | None = None, **kwargs: Any) -> None:
        own_options = {option: kwargs.pop(option) for option in self.options if option in kwargs}
        base_options = inspect.signature(evaluate.EvaluationModule.__init__).parameters
        choices = [*self.options, *(name for name in base_options if name not in ("self", "kwargs"))]
        self._refuse_unknown(kwargs, choices)
        self.defaults = {**self.options, **own_options}
        self.check_options(**self.defaults)
        needs_no_files = kwargs.get("cache_dir") is None and kwargs.get("num_process", 1) == 1
        in_memory = needs_no_files if keep_in_memory is None else keep_in_memory
        super().__init__(config_name, keep_in_memory=in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        description = inspect.cleandoc(type(self).__doc__ or self.name)
        return evaluate.MetricInfo(
            description=description,
            citation=self.citation,
            inputs_description=f"\n\n{description}\nInputs: {', '.join(self.inputs)}. Options: {self.options}.",
            features=self.inputs,
        )

    def add_batch(self, **inputs: Any) -> None:
        """Store a batch of examples."""
        super().add_batch(**self._checked(inputs))

    def add(self, *, prediction: Any = None, reference: Any = None, **inputs: Any) -> None:
        """Store one example."""
        example = {"predictions": prediction, "references": reference, **inputs}
        self.add_batch(**{name: [value] for name, value in example.items() if value is not None})

    def compute(self, **kwargs: Any) -> dict[str, Any] | None:
        """Score the stored examples and those in `kwargs`, which are stored first; None in all processes but the first.
        Raises ValueError if there are none, and for an unknown or impossible option."""
        inputs = {name: kwargs.pop(name) for name in (*self.inputs, "predictions", "references") if name in kwargs}
        inputs = {name: values for name, values in inputs.items() if values is not None}
        self._refuse_unknown(kwargs, list(self.options))
        options = {**self.defaults, **kwargs}
        self.check_options(**options)
        if inputs:
            self.add_batch(**inputs)
        elif self.writer is None:
            raise ValueError(f"{self.name} has nothing to score: give {_names(self.inputs)} to add_batch or compute")
        return super().compute(**options)

    def check_options(self, **options: Any) -> None:
        """Raise ValueError for an option with an impossible value."""

    def check_inputs(self, **columns: list) -> dict[str, list]:
        """Raise ValueError for values that cannot be scored; return the columns to store."""
        return columns

    def _checked(self, inputs: dict[str, Any]) -> dict[str, list]:
        self._refuse_unknown(inputs, list(self.inputs))
        missing = [name for name in self.inputs if inputs.get(name) is None]
        if missing:
            raise ValueError(f"{self.name} needs {_names(self.inputs)}; missing: {_names(missing)}")
        columns = {name: self._as_list(name, inputs[name]) for name in self.inputs}
        first, *others = columns
        if not columns[first]:
            raise ValueError(f"{self.name} got no {first}: the batch is empty")
        for other in others:
            if len(columns[first]) != len(columns[other]):
                raise ValueError(
                    f"{self.name} got {len(columns[first])} {first} but {len(columns[other])} {other}; "
                    "their numbers must be equal"
                )
        return self.check_inputs(**columns)

    def _as_list(self, name: str, values: Any) -> list:
        """A list of plain Python values from a list, tuple, column, array or tensor (or one number)."""
        if hasattr(values, "tolist"):
            values = values.tolist()
            return values if isinstance(values, list) else [values]
        if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
            if isinstance(values, int | float):
                return [values]
            raise ValueError(f"{name} of {self.name} must be a list, not {type(values).__name__}: {values!r}")
        return [value.tolist() if hasattr(value, "tolist") else value for value in values]

    def _refuse_unknown(self, names: Iterable[str], choices: list[str]) -> None:
        unknown = [name for name in names if name not in choices]
        if unknown:
            raise ValueError(f"{self.name} does not take {_names(unknown)}; choose from {choices}")


def _names(names: Iterable[str]) -> str:
    return " and ".join(names)
