"""A variant passes every model test of transformers that its backbone passes, except those in `differences.py`.

By default all tests on one task of every architecture without methods, and a twelfth of them on each of its other tasks; an
eighth on every method, on one architecture and one of its tasks; and a share on each of ten families whose description is
derived, with one of its tasks. With HF_FREEZE_TESTS=all in the environment, all tests on every method on every architecture and
task, and on the derived families.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import ALL
from transformers import testing_utils
from transformers_suite.differences import SLOW, differences_of
from transformers_suite.fetch import model_tests
from transformers_suite.model_suite import PASSED, Cell, in_turn, load_suite, names_of, run

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods.registry import METHODS

DERIVED = (
    "roberta",
    "distilbert",
    "electra",
    "deberta-v2",
    "modernbert",
    "bart",
    "t5",
    "opt",
    "gpt_neox",
    "qwen3",
)


def cells():
    for model_type in ARCHITECTURES:
        yield Cell(model_type, ())
    for turn, method in enumerate(METHODS.values()):
        supported = [a for model_type, a in ARCHITECTURES.items() if method.refusal(a) is None]
        for architecture in supported if ALL else [supported[turn % len(supported)]]:
            tasks = architecture.tasks
            if not ALL:
                tasks = (tasks[turn // len(supported) % len(tasks)],)
            yield Cell(architecture.model_type, (method.example,), tasks)


CELLS = list(cells())
SHARE = 8  # one in so many tests on each method
OTHERS = 12  # and on each further task without methods


@pytest.fixture(scope="session")
def suite(pytestconfig):
    try:
        file = model_tests()
    except OSError as error:
        pytest.skip(f"transformers' model tests are NOT run: {error}")
    for source in (file, Path(testing_utils.__file__)):
        for marker in re.findall(r"\bmark\.(\w+)", source.read_text(encoding="utf-8")):
            pytestconfig.addinivalue_line("markers", f"{marker}: used by transformers' tests")
    return load_suite(file)


def drawn(names, number):
    return in_turn(names, SLOW, number, len(CELLS), share=SHARE if CELLS[number].methods else 1)


@pytest.mark.parametrize("number", range(len(CELLS)), ids=[cell.id for cell in CELLS])
def test_a_variant_passes_what_its_backbone_passes(suite, number):
    names, cell = names_of(suite), CELLS[number]
    if ALL:
        check(cell, suite, names)
        return
    for place, task in enumerate(cell.tasks):
        # A task is a class, and each test goes through all classes that it is given.
        names_of_task = drawn(names, number) if place == 0 else drawn(names, number)[place::OTHERS]
        check(replace(cell, some_tasks=(task,)), suite, names_of_task)


@pytest.mark.parametrize("number", range(len(DERIVED)), ids=DERIVED)
def test_derived_families_too(suite, number):
    names = names_of(suite)
    drawn = [name for name in names[number :: len(DERIVED)] if name not in SLOW]
    cell = Cell(DERIVED[number], ())
    if not ALL:
        tasks = cell.tasks
        cell = replace(cell, some_tasks=(tasks[number % len(tasks)],))
    check(cell, suite, names if ALL else drawn)


def check(cell, suite, names):
    outcomes = run(cell, suite, names)
    failures = {name: outcome for name, outcome in outcomes.items() if outcome != PASSED}
    native = run(cell.backbone, suite, failures)
    lost = {name for name in failures if native[name] == PASSED}
    meant = differences_of(cell.models[0])
    unexpected = [name for name in sorted(lost) if not any(difference.covers(name) for difference in meant)]
    assert not unexpected, "\n\n".join(f"{name}\n{failures[name]}" for name in unexpected)
    if ALL and cell.methods:
        outdated = [difference.why for difference in meant if not any(map(difference.covers, lost))]
        assert not outdated, f"listed in differences.py, but not seen: {outdated}"
    assert len(failures) < len(outcomes), "no test passed"


def test_every_test_of_transformers_has_its_cells(suite):
    names = names_of(suite)
    turns = [drawn(names, number) for number in range(len(CELLS))]
    assert set().union(*turns) == set(names)
    assert set(SLOW) <= set(names)
    assert len(turns[0]) > 100
    # What every architecture has, one of any eight methods that follow one another has.
    methods = [turn for turn, cell in zip(turns, CELLS, strict=True) if cell.methods]
    assert len(methods) == len(METHODS)
    everywhere = set(turns[0]) & set(turns[1])
    assert all(everywhere <= set().union(*methods[n : n + SHARE]) for n in range(len(methods) - SHARE + 1))
