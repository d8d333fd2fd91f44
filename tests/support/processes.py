"""Children of the tests: one new process that prints JSON, or a group of two that train together."""

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_freeze.experiments.runs.launcher import leave_processes
from hf_freeze.experiments.runs.processes import Processes
from hf_freeze.seeded.tensor import digest
from support import TESTS


def run_child(name: str, *arguments: Any) -> Any:
    """The JSON in the last line that the module `support.children.NAME` prints.

    A new process imports for seconds, so give one child all the work of a test.
    """
    command = [sys.executable, "-m", f"support.children.{name}", *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=TESTS)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


def ranks_disagree(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Of the two processes of a group: the problem that their tensors are not bit-equal, if they are not."""
    digests: list[Any] = [None, None]
    dist.all_gather_object(digests, {name: digest(tensor) for name, tensor in tensors.items()})
    return ["the ranks disagree"] if digests[0] != digests[1] else []


def left_processes() -> list[str]:
    """Leave the group of processes, at the end of a child of `two_processes`; what of the group is left."""
    leave_processes()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    return [f"after the end there is a thread {name}" for name in names if "gloo" in name]


def two_processes(name: str, folder: Path) -> list[Any]:
    """Run `support.children.NAME RESULT RANK` as a group of two processes on the CPU; the JSON that each wrote to RESULT.

    They are forks of the server that grids start their runs from, so only its first use waits for imports.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    context = Processes(jobs=2, resume_anyway=False).context
    children, logs = [], [folder / f"log-{rank}" for rank in range(2)]
    for rank, log in enumerate(logs):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
        arguments = [name, str(folder / f"result-{rank}"), str(rank)]
        children.append(context.Process(target=_child, args=(arguments, environment, log)))
        children[-1].start()
    deadline = time.monotonic() + 300
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        if any(child.exitcode for child in children):
            break
        time.sleep(0.05)
    codes = [child.exitcode for child in children]
    for child in children:  # where one failed, the other waits for it
        child.kill()
        child.join()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(2)]


def _child(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """`python -m support.children.NAME ...`, in a process that has imported already; all that it prints goes to `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    torch.set_num_threads(1)
    sys.argv = arguments
    runpy.run_module(f"support.children.{arguments[0]}", run_name="__main__")
