"""One build and at most one save for each case, which all of its tests share."""

import functools
import itertools
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import Case
from support.models import add_noise, build, snapshot
from support.training import training_step


@dataclass
class Saved:
    """A variant after one training step, and the folder that holds it once a test asks for it. Tests that change either make a
    copy.

    `before`: its parameters before the step. `reached`: names of those that had a gradient in it.
    """

    model: Any
    before: dict[str, torch.Tensor]
    reached: set[str]
    place: Path

    @functools.cached_property
    def folder(self) -> Path:
        self.model.save_pretrained(self.place)
        return self.place


_KEPT = 8  # saved variants; the tests of a case follow one another


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Case -> its `Saved`."""
    kept: OrderedDict[str, Saved] = OrderedDict()
    root, numbers = tmp_path_factory.mktemp("saved"), itertools.count()

    def save(case: Case) -> Saved:
        key = f"{case.id} {case.methods}"  # methods may have other settings than their examples
        if key not in kept:
            torch.manual_seed(0)
            # The gradient of some biases is zero but for rounding (a bias of all keys shifts a row of scores, which the
            # softmax cancels), and weight decay keeps a zero at zero. Values away from zero must move, whatever their gradient.
            model = add_noise(build(case), case.architecture)
            before = snapshot(model)
            training_step(model, case.batch())
            reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
            model.zero_grad()
            kept[key] = Saved(model, before, reached, root / str(next(numbers)))
        if len(kept) > _KEPT:
            shutil.rmtree(kept.popitem(last=False)[1].place, ignore_errors=True)
        return kept[key]

    return save


def pytest_collection_modifyitems(items):
    """All tests of a case follow one another, whatever their module: what one has built or saved is still there for the next."""
    places: dict[str, int] = {}

    def key(item):
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        return places.setdefault(case.id if isinstance(case, Case) else item.nodeid, len(places))

    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if ours:
        first, are_ours = items.index(ours[0]), set(ours)
        rest = [item for item in items if item not in are_ours]
        items[:] = [*rest[:first], *sorted(ours, key=key), *rest[first:]]
