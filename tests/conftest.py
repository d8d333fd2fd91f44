"""For every test: one thread (two beside another job made a step 20 times slower), no progress bars, a fixed global seed."""

import atexit
import contextlib
import copy
import functools
import gc
import logging
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; children inherit it
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="hf_freeze-tests-")  # text and tokens are cached there
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers' bars too

import pytest
import tiers
from support import durations

# The process that hands tests to workers runs none.
_OPTIONS = dict(zip(sys.argv, sys.argv[1:], strict=False))
RUNS_TESTS = "PYTEST_XDIST_WORKER" in os.environ or _OPTIONS.get("-n", _OPTIONS.get("--numprocesses", "0")) == "0"
HAS_FORK = hasattr(os, "fork")

if RUNS_TESTS:
    gc.disable()  # until all is imported and collected, which makes millions of objects and little garbage

    import accelerate.utils.memory
    import accelerate.utils.modeling
    import torch
    from support import fork_server
    from transformers import PreTrainedConfig

    torch.set_num_threads(1)
    if HAS_FORK:
        fork_server.start()

    # For a kind of device that is absent, torch keeps each seed all the same, with the stack of who set it: a millisecond a test.
    for _kind in (torch.cuda, torch.xpu, torch.mtia):
        if not _kind.is_available():
            _kind.manual_seed_all = lambda seed: None

    # The Trainer collects garbage at every end of training, and accelerate when it has put a model on its devices, which takes as
    # long as the training of a tiny model.
    accelerate.utils.memory.gc = accelerate.utils.modeling.gc = SimpleNamespace(collect=lambda: 0)
    # A tiny model has thousands of objects; at 700 new ones, one second in 25 looks for garbage.
    gc.set_threshold(10_000)

    # What follows is for this process alone: the new processes that tests start do all of it as for a user.
    from support import faster

    faster.install()
    os.fsync = lambda descriptor: None  # no test cuts the power, and each save waits for the disk eight times
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # starting threads takes longer than reading a tiny tensor
    # Loading compiles the patterns of transformers' renamings, of which there are more than Python keeps.
    re._MAXCACHE = 1 << 14
    # transformers writes every config that it makes of a dict into a line of its log, which nothing prints.
    PreTrainedConfig.__repr__ = object.__repr__
    # Each export to ONNX has the exporter read its 500 translations anew, a quarter of the time of a small model.
    _export = torch.onnx.export

    @functools.cache
    def _translations(make: Any, cls: Any, **version: Any) -> Any:
        return make(cls, **version)

    def _export_by_known_translations(*arguments: Any, **options: Any) -> Any:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        make = ONNXRegistry.from_torchlib.__func__

        def copied(cls: Any, **version: Any) -> Any:  # an export adds its own
            registry = copy.copy(_translations(make, cls, **version))
            registry.functions = {name: list(each) for name, each in registry.functions.items()}
            return registry

        with mock.patch.object(ONNXRegistry, "from_torchlib", classmethod(copied)):
            return _export(*arguments, **options)

    torch.onnx.export = _export_by_known_translations

    @pytest.fixture(autouse=True)
    def _same_state():
        torch.manual_seed(0)
        torch.set_num_threads(1)  # a test whose trainings are in this process may have changed it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=("short", "full"), default="full", help="run the tests of this tier (tests/tiers.py)"
    )
    parser.addoption(
        "--record-durations", metavar="FILE", help="write the CPU seconds of every test there, as lines of JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--record-durations"):
        config.pluginmanager.register(durations.Recorder(Path(file)))
    for worker in config.pluginmanager.get_plugins():
        if "PYTEST_XDIST_WORKER" in os.environ and hasattr(worker, "sendevent"):
            worker.sendevent = functools.partial(_send, worker.sendevent)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Say how a worker has ended that ended before its tests did; pytest-xdist only says that it did."""
    if error:
        code = node.gateway._io.popen.wait(timeout=10)
        print(f"\n{node.gateway.id} ended with {f'code {code}' if code >= 0 else f'signal {-code}'}", file=sys.stderr)


def _send(sendevent: Any, name: str, **event: Any) -> None:
    """Send what pytest-xdist's worker has to say, except that a test is beginning, and that it was set up and torn down: what is
    sent of a test takes twice as long as running it, if it is a short one."""
    report = event.get("data", {})
    told = report.get("when") == "call" or report.get("outcome") != "passed" or report.get("user_properties")
    if name not in ("logstart", "testreport") or (name == "testreport" and told):
        sendevent(name, **event)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tier") == "short":
        tiers.deselect(config, items)


@atexit.register
def _remove_cache(cache=os.environ["HF_DATASETS_CACHE"], owner=os.getpid()):  # noqa: B008  # not a forked child
    if os.getpid() == owner:
        shutil.rmtree(cache, ignore_errors=True)


def pytest_collection_finish() -> None:
    """What is imported by now stays, so garbage need not be looked for in it, and the server that grids fork their runs from need
    not import it again."""
    if not RUNS_TESTS:
        return
    gc.collect()
    gc.freeze()
    gc.enable()
    # Six times a test, pytest hands its handlers to each logger that passes nothing on, of which torch has 80.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if HAS_FORK and "hf_freeze.lab.runs.execute" in sys.modules:
        multiprocessing.resource_tracker.ensure_running()
        with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork):
            multiprocessing.forkserver.ensure_running()


def _fork(path: Any, arguments: list[Any], passed: list[int]) -> int:
    """A fork of this process, in place of `python -c COMMAND`."""
    pid = os.fork()
    if pid == 0:
        # Of the pipe whose end tells that this process has ended, the fork must not hold the end that this process keeps open.
        pipes = {os.fstat(number).st_ino for number in passed}
        for number in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):
                if number not in passed and os.fstat(number).st_ino in pipes:
                    os.close(number)
        multiprocessing.forkserver._forkserver.__init__()  # as in a new process; it was forked with its lock held
        fork_server.forget_pytest()
        try:
            exec(arguments[-1], {"__name__": "__main__"})
        finally:
            os._exit(0)  # which it would do by an exception, and that is not for pytest
    return pid
