"""Where variants are meant to differ from their backbones in transformers' model tests, and why."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """The tests whose whole name matches `tests` do not pass for the variants that `applies` is true of."""

    tests: str
    applies: Callable[[Any], bool]  # of a variant on meta
    why: str


def meant(test: str, model: Any) -> list[Difference]:
    return [known for known in DIFFERENCES if re.fullmatch(known.tests, test) and known.applies(model)]


DIFFERENCES = [
    Difference(
        tests="test_model_weights_reload_no_missing_tied_weights",
        applies=lambda model: True,
        why="The test loads a file without any of the weights. For a variant that is an error, not a new draw.",
    ),
]

# These cost as much as all the others together. Each runs in one cell, with HF_FREEZE_TESTS=all in every one.
SLOW = {"test_bc_torch_dtype"}  # loads each class in seven precisions, twice
