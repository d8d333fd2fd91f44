"""Which tests `make test` runs."""

import pytest
import tiers
from support.cases import ARCHITECTURES, METHODS, Case
from tiers import Candidate, Record, compact, short
from typer.main import get_command

from hf_freeze.cli import app


def a_test(name, seconds, required=(), fixtures=(), **facts):
    return Candidate(name, seconds, facts | dict.fromkeys(required, 4.0), frozenset(required), frozenset(fixtures))


def test_what_must_be_protected_is_so_at_the_least_cost_and_the_rest_by_its_worth():
    tests = [
        a_test("dear", 9, ["x"]),
        a_test("cheap", 2, ["x"]),
        a_test("the only one", 7, ["y"]),
        a_test("the same again", 1, x=4.0),
        a_test("worth it", 1, a=4.0),
        a_test("less so", 1, b=2.0),
        a_test("over the budget", 50, c=4.0),
        a_test("with a fixture", 0.1, fixtures=["slow"], d=4.0),
    ]
    assert short(tests, {"slow": 60.0}, budget=0) == {"cheap", "the only one"}
    assert short(tests, {"slow": 60.0}, budget=10.5) == {"cheap", "the only one", "worth it"}
    assert short(tests, {"slow": 60.0}, budget=20) == {"cheap", "the only one", "worth it", "less so"}
    assert "with a fixture" in short(tests, {"slow": 0.5}, budget=20)


def test_a_record_gives_the_seconds_that_were_measured_and_the_typical_ones_of_a_new_test():
    fixture = "tests/a/test_b.py::grid"
    lines = [[f"tests/a/test_b.py::test_c[{n}]", 0.1 + n / 1000, {}, []] for n in range(9)]
    lines += [
        ["tests/a/test_b.py::test_c[slow]", 3.0, {fixture: 7.0}, ["run"]],
        ["tests/a/test_b.py::test_d", 2.0, {}, []],
    ]
    content = compact(lines, "a CPU")
    record = Record(content)
    assert content["tests"]["a/test_b.py"] == {"test_c": {"": 0.1, "slow": 3.0}, "test_d": 2.0}
    seconds = {name: record.seconds(f"tests/a/test_b.py::{name}") for name in ("test_c[3]", "test_c[slow]", "test_d")}
    assert seconds == {"test_c[3]": 0.1, "test_c[slow]": 3.0, "test_d": 2.0}
    assert record.seconds("tests/a/test_b.py::test_c[new]") == 0.1
    assert record.seconds("tests/a/test_b.py::test_new") == tiers.UNKNOWN
    assert record.fixtures == {fixture: 7.0}
    assert record.commands == {"tests/a/test_b.py::test_c[slow]": ["run"]}


def test_the_short_tier_holds_every_method_architecture_and_command(request):
    items = request.session.items  # of either tier
    if len({item.path.parent for item in items}) < 20:
        pytest.skip("needs the tests of all folders to draw from")
    record = Record(tiers.read())
    tests = tiers.tests_of(items, record)
    chosen = short(tests, record.fixtures)
    assert sum(test.seconds for test in tests if test.id in chosen) < tiers.BUDGET
    cases = [
        item.callspec.params["case"]
        for item in items
        if item.nodeid in chosen
        and isinstance(getattr(item, "callspec", None) and item.callspec.params.get("case"), Case)
    ]
    assert {method.name for case in cases for method in case.methods} == set(METHODS)
    assert {case.architecture.model_type for case in cases} == set(ARCHITECTURES)
    run = {command for test in chosen for command in record.commands[test]}
    missing = get_command(app).commands.keys() - run  # type: ignore[attr-defined]
    assert {command for command in missing if f"{command}, refused" not in run} == set()
