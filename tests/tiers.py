"""The two tiers of the tests, and the durations that the line between them is drawn from.

    python tests/tiers.py record    # runs every test, and writes tests/durations.json: CPU seconds, commands
    python tests/tiers.py table     # what each tier holds, for CONTRIBUTING.md; runs nothing

`make test` runs the short tier, `pytest --tier short`; `make test-full` runs all. The line is drawn whenever tests are collected
(`short`), from the recorded durations and from what each test protects (`protected_by`): a new method, architecture or test
function is in the short tier at once. `record` is for when durations have changed, or much is new: a test that is not in the file
is taken to last as long as the others of its function, or `UNKNOWN` seconds.

After what must be in the short tier, tests that protect most for their time fill it up to `BUDGET`.
"""

import argparse
import contextlib
import heapq
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median_low
from typing import Any

TESTS = Path(__file__).resolve().parent
RECORD = TESTS / "durations.json"
# CPU seconds of the tests in the short tier, by the record; what starts them comes on top. A CPU without AVX-512 has taken 1.8
# times as long, and may take 480 for all.
BUDGET = 215.0
UNKNOWN = 0.3
ALIKE = 0.1  # seconds by which the durations of a function's tests may differ and still be recorded as one number

Fact = tuple[Any, ...]


@dataclass(frozen=True)
class Candidate:
    """`facts`: what it protects, with the weight of each. `required`: those of them that the short tier must hold.

    `fixtures`: the shared ones that it uses.
    """

    id: str
    seconds: float
    facts: dict[Fact, float]
    required: frozenset[Fact]
    fixtures: frozenset[str]


# -- the record --------------------------------------------------------------------------------------------------------------


class Record:
    """The durations of a run, as tests/durations.json holds them.

    `tests`: file -> function -> seconds of each of its tests, or {"": seconds, parameters: seconds} where some differ.
    `fixtures`: seconds of the fixtures that tests share. `commands`: command -> the tests that run it in their own process.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.tests, self.fixtures = content["tests"], content["fixtures"]
        self.commands: dict[str, list[str]] = defaultdict(list)
        for command, tests in content["commands"].items():
            for test in tests:
                self.commands[test].append(command)

    def seconds(self, test: str) -> float:
        function, _, parameters = test.removeprefix("tests/").partition("[")
        file, _, name = function.partition("::")
        known = self.tests.get(file, {}).get(name, UNKNOWN)
        return known.get(parameters.removesuffix("]"), known[""]) if isinstance(known, dict) else known


def read() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def compact(lines: Iterable[list[Any]], cpu: str) -> dict[str, Any]:
    """What `support.durations.Recorder` has written, as tests/durations.json holds it."""
    of_function: dict[str, dict[str, float]] = defaultdict(dict)
    fixtures: dict[str, float] = {}
    commands: dict[str, list[str]] = defaultdict(list)
    for test, seconds, made, ran in lines:
        function, _, parameters = test.removeprefix("tests/").partition("[")
        of_function[function][parameters.removesuffix("]")] = seconds
        for name, of_fixture in made.items():
            fixtures[name] = max(round(of_fixture, 2), fixtures.get(name, 0))
        for command in ran:
            if test not in commands[command]:
                commands[command].append(test)
    tests: dict[str, dict[str, Any]] = defaultdict(dict)
    for function, each in sorted(of_function.items()):
        file, _, name = function.partition("::")
        middle = median_low(each.values())
        others = {parameters: round(s, 2) for parameters, s in each.items() if abs(s - middle) > max(ALIKE, middle / 2)}
        alike = round(mean(s for parameters, s in each.items() if parameters not in others), 2)
        tests[file][name] = {"": alike, **others} if others else alike
    fixtures = {name: seconds for name, seconds in sorted(fixtures.items()) if seconds >= ALIKE}
    return {"cpu": cpu, "tests": tests, "fixtures": fixtures, "commands": dict(sorted(commands.items()))}


# -- what a test protects ----------------------------------------------------------------------------------------------------

# Folders of the invariants of CONTRIBUTING.md. The short tier holds some test of each test function there, and of every method,
# architecture and tiny config that it is for.
INVARIANTS = ("contract", "pairs", "fuzz", "regression", "transformers_suite")
OF_A_FUNCTION, OF_A_VALUE = 4.0, 0.25


def protected_by(item: Any, commands: Sequence[str]) -> tuple[dict[Fact, float], frozenset[Fact]]:
    """The facts of a test that pytest has collected: its function, each value of each parameter, and of a `Case` the methods, the
    architecture, the config, the task and the source."""
    from support.cases import Case

    function = item.nodeid.partition("[")[0]
    is_invariant = function.removeprefix("tests/").partition("/")[0] in INVARIANTS
    facts: dict[Fact, float] = {(function,): OF_A_FUNCTION}
    required: set[Fact] = {("command", command) for command in commands} | ({(function,)} if is_invariant else set())
    spec = getattr(item, "callspec", None)
    for name, value in spec.params.items() if spec else ():
        if not isinstance(value, Case):
            facts[function, name, spec.indices[name]] = OF_A_VALUE
            continue
        values = {("architecture", value.architecture.model_type)}
        values |= {(f"method {number}", name) for number, name in enumerate(value.names)}
        values.add(("config", value.architecture.model_type, value.config))
        if is_invariant:
            required |= {(function, *fact) for fact in values}
        values |= {("task", value.task), ("source", value.source)}
        facts |= {(function, *fact): OF_A_VALUE for fact in values}
    return facts | dict.fromkeys(required, OF_A_FUNCTION), frozenset(required)


def tests_of(items: Sequence[Any], record: Record) -> list[Candidate]:
    from support.durations import shared_fixture

    tests = []
    for item in items:
        facts, required = protected_by(item, record.commands.get(item.nodeid, ()))
        used = (fixture for each in item._fixtureinfo.name2fixturedefs.values() for fixture in each)
        fixtures = frozenset(filter(None, map(shared_fixture, used))) & record.fixtures.keys()
        tests.append(Candidate(item.nodeid, record.seconds(item.nodeid), facts, required, fixtures))
    return tests


# -- the line ----------------------------------------------------------------------------------------------------------------


def short(tests: Sequence[Candidate], fixtures: dict[str, float], budget: float = BUDGET) -> set[str]:
    """The tests of the short tier: the cheapest that hold all required facts, whatever they cost; then those that protect most of
    what no chosen one does, for their time, while they fit into `budget` CPU seconds."""
    chosen: set[str] = set()
    held: set[Fact] = set()
    made: set[str] = set()
    spent = 0.0

    def cost(test: Candidate) -> float:
        return 0.002 + test.seconds + sum(fixtures[name] for name in test.fixtures - made)

    def draw(worth: Any) -> None:
        """Greedily; what a test is worth only falls, so that one which is still the best after a new look is the best."""
        nonlocal spent
        queue = [(-worth(test) / cost(test), number) for number, test in enumerate(tests) if test.id not in chosen]
        heapq.heapify(queue)
        while queue:
            _, number = heapq.heappop(queue)
            test = tests[number]
            value = -worth(test) / cost(test)
            if value == 0 or (worth is optional and spent + cost(test) > budget):
                continue
            if queue and value > queue[0][0]:
                heapq.heappush(queue, (value, number))
                continue
            spent += cost(test)
            chosen.add(test.id)
            held.update(test.facts)
            made.update(test.fixtures)

    def needed(test: Candidate) -> float:
        return len(test.required - held)

    def optional(test: Candidate) -> float:
        return sum(weight for fact, weight in test.facts.items() if fact not in held)

    draw(needed)
    draw(optional)
    return chosen


def deselect(config: Any, items: list[Any]) -> None:
    """Of the collected tests, leave those of the short tier."""
    record = Record(read())
    chosen = short(tests_of(items, record), record.fixtures)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


# -- the commands ------------------------------------------------------------------------------------------------------------


def cpu() -> str:
    """The name of this machine's CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "durations"
        command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "worksteal"]
        done = subprocess.run([*command, f"--record-durations={file}"], cwd=TESTS.parent)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    RECORD.write_text(json.dumps(compact(lines, cpu()), indent=0) + "\n")
    print(f"{len(lines)} tests, {sum(line[1] + sum(line[2].values()) for line in lines):.0f} CPU seconds: {RECORD}")
    sys.exit(done.returncode)


def table() -> None:
    """For each folder of tests: how many of its tests each tier holds, and their CPU seconds."""
    import pytest

    collected: list[Any] = []

    class Collector:
        def pytest_collection_finish(self, session: Any) -> None:
            collected.extend(session.items)

    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", str(TESTS)], plugins=[Collector()])
    print(table_of(tests_of(collected, Record(read()))))


def table_of(tests: Sequence[Candidate]) -> str:
    content = read()
    fixtures = content["fixtures"]
    chosen = short(tests, fixtures)
    tiers = {"make test": [test for test in tests if test.id in chosen], "make test-full": tests}
    counts = {name: Counter(folder_of(test.id) for test in of_tier) for name, of_tier in tiers.items()}
    seconds: dict[str, Counter[str]] = {name: Counter() for name in tiers}
    for name, of_tier in tiers.items():
        for test in of_tier:
            seconds[name][folder_of(test.id)] += test.seconds
        for fixture in {fixture for test in of_tier for fixture in test.fixtures}:
            seconds[name][folder_of(fixture)] += fixtures[fixture]
    lines = [
        f"CPU seconds of the tests on {content['cpu']}; each of the two processes that run them starts for about 20 more."
    ]
    lines += [
        "",
        f"| tests/ | {' | '.join(f'`{name}` | seconds' for name in tiers)} |",
        f"| --- {'| ---: ' * 2 * len(tiers)}|",
    ]
    for folder in sorted(counts["make test-full"]):
        lines.append(f"| {folder} | {' | '.join(f'{counts[n][folder]:,} | {seconds[n][folder]:.0f}' for n in tiers)} |")
    totals = (f"{sum(counts[n].values()):,} | {sum(seconds[n].values()):.0f}" for n in tiers)
    return "\n".join([*lines, f"| all | {' | '.join(totals)} |"])


def folder_of(test: str) -> str:
    return test.removeprefix("tests/").partition("/")[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "table"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    globals()[parser.parse_args().command]()
