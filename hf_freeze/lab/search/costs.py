"""What a trial costs, counted on `meta` before it is trained, and whether that is within the bounds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_freeze import make_variant
from hf_freeze.analysis.accounting import count_parameters, forward_multiply_adds, stored_bytes
from hf_freeze.lab.recipes.recipe import Recipe, Run
from hf_freeze.lab.recipes.rows import method_of
from hf_freeze.lab.runs.backbones import backbone_config
from hf_freeze.lab.runs.text_training import new_tokenizer
from hf_freeze.lab.tasks.base import Task
from hf_freeze.lab.tasks.registry import task_of


@dataclass(frozen=True, kw_only=True)
class Costs:
    """`stored_bytes`: tensors of the checkpoint, without tokenizer and header; `multiply_adds`: of a token at length 32."""

    parameters: int
    stored_bytes: int
    multiply_adds: int

    def violation(self, bounds: Mapping[Any, float]) -> tuple[float, str]:
        """By how much of a bound the worst cost is above it, and that in words; at most 0 within all bounds."""
        costs = asdict(self)
        excess = {cost: costs[cost] / bound - 1 for cost, bound in bounds.items()}
        if not excess:
            return 0.0, ""
        worst = max(excess, key=lambda cost: excess[cost])
        return excess[worst], f"{worst} {costs[worst]:,} is above {bounds[worst]:,.0f}"


class Counter:
    """Counts the models of a recipe's runs. All of them have one tokenizer, which is trained once on the training split."""

    def __init__(self, recipe: Recipe) -> None:
        task = task_of(recipe.task)
        assert isinstance(task, Task)  # a space of another task is refused when it is read
        self._task = task
        train = task.load(recipe.data)["train"]
        self._fields = task.config(train)
        assert recipe.tokenizer is not None  # trials train from fresh weights
        self._tokenizer = new_tokenizer(task, recipe.tokenizer, train)

    def count(self, run: Run) -> Costs:
        """Raises ValueError where the methods do not fit the model or each other."""
        with torch.device("meta"):
            assert run.backbone is not None
            config = backbone_config(run.backbone, self._tokenizer, **self._fields)
            methods = [method_of(method, self._tokenizer) for method in run.methods]
            init = run.backbone.init  # Marian's trains one tensor more
            model = make_variant(config, methods, task=self._task.head, init=init, seed=run.seed)
        return Costs(
            parameters=count_parameters(model).total,
            stored_bytes=stored_bytes(model),
            multiply_adds=forward_multiply_adds(model),
        )


def costs_of(record: dict[str, Any]) -> Costs:
    """Those of a finished run, some of whose methods may have removed weights while it was trained."""
    return Costs(
        parameters=record["parameters"]["total"],
        stored_bytes=record["parameters"]["stored_bytes"],
        multiply_adds=record["multiply_adds"],
    )
