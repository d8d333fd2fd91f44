"""The CPU seconds, user and system, of every test and of all its processes."""

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_seconds() -> float:
    """Of this process, of its children that have ended, and of all that descend from it and still run."""
    of_self, of_ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(map(_ticks, _descendants(os.getpid())))
    return of_self.ru_utime + of_self.ru_stime + of_ended.ru_utime + of_ended.ru_stime + running / _TICK


def _descendants(pid: int) -> Iterator[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return
    for child in children:
        yield child
        yield from _descendants(child)


def _ticks(pid: int) -> int:
    """Of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


def shared_fixture(fixture: Any) -> str | None:
    """The name of a fixture that several tests share, or None of one that each test makes for itself."""
    return None if fixture.scope == "function" else f"{fixture.baseid}::{fixture.argname}"


class Recorder:
    """A plugin that writes a line of JSON for every test: its name; its CPU seconds; those of each shared fixture that was made
    for it, which are not in the first; the commands of hf-freeze that it ran in this process, to their end or "refused"."""

    def __init__(self, file: Path) -> None:
        self.is_worker = "PYTEST_XDIST_WORKER" in os.environ
        self.file = None if self.is_worker else file.open("w")
        self.begun, self.fixtures, self.commands = 0.0, {}, set()
        invoke = TyperCommand.invoke

        def noted(command: Any, context: Any) -> Any:
            refused = f"{context.command.name}, refused"
            self.commands.add(refused)
            result = invoke(command, context)
            self.commands ^= {refused, context.command.name}
            return result

        TyperCommand.invoke = noted

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.begun, self.fixtures, self.commands = cpu_seconds(), {}, set()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        name, begun, inner = shared_fixture(fixturedef), cpu_seconds(), sum(self.fixtures.values())
        try:
            return (yield)
        finally:
            if name is not None:
                self.fixtures[name] = cpu_seconds() - begun - (sum(self.fixtures.values()) - inner)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Any:
        report = yield
        if report.when == "teardown":
            # Less than nothing where a server that an earlier test started has ended, and its time with it.
            seconds = max(0.0, cpu_seconds() - self.begun - sum(self.fixtures.values()))
            report.user_properties.append(("cpu", [seconds, self.fixtures, sorted(self.commands)]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.file is not None and "cpu" in dict(report.user_properties):
            json.dump([report.nodeid, *dict(report.user_properties)["cpu"]], self.file)
            print(file=self.file, flush=True)
