"""Children of the tests: one new process, or a group of two that train together."""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_freeze.lab.runs.launcher import leave_processes
from hf_freeze.lab.runs.processes import Processes
from hf_freeze.seeded.tensor import digest
from support import TESTS, fork_server


def new_process(
    code: str = "", *arguments: Any, module: str = "", folder: Path = TESTS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `code`, or a module, in a process that has imported torch and transformers already, but not hf_freeze.

    Importing those two takes seconds. They have read their environment variables by then, so HF_ENDPOINT, for example, has no
    effect in `environment`.
    """
    server = fork_server.started()
    with tempfile.TemporaryDirectory() as streams:
        files = {name: Path(streams) / name for name in ("stdout", "stderr")}
        request = {"code": code, "module": module, "arguments": list(map(str, arguments)), "environment": environment}
        request |= {name: str(path) for name, path in files.items()} | {"folder": str(folder)}
        print(json.dumps(request), file=server.requests, flush=True)
        ready, _, _ = select.select([server.answers], [], [], 600)
        if not ready:
            os.kill(server.pid, signal.SIGKILL)
            raise TimeoutError(f"{module or code} did not end within 600 s")
        exit_code = int(server.answers.readline())
        printed = {name: path.read_text() if path.exists() else "" for name, path in files.items()}
    return subprocess.CompletedProcess([module or code, *arguments], exit_code, **printed)


def printed_by(code: str, *arguments: Any, **options: Any) -> str:
    """What `code` prints in a `new_process`, which must not fail."""
    done = new_process(code, *arguments, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_child(name: str, *arguments: Any) -> Any:
    """The JSON in the last line that the module `support.children.NAME` prints in a `new_process`."""
    return json.loads(printed_by("", *arguments, module=f"support.children.{name}").splitlines()[-1])


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


def start_child(name: str, *arguments: Any, log: Path, **environment: str) -> Any:
    """`python -m support.children.NAME ...` as a fork of the server that grids start their runs from; its Process."""
    words = [name, *map(str, arguments)]
    child = Processes(jobs=2, resume_anyway=False).context.Process(target=_child, args=(words, environment, log))
    child.start()
    return child


def two_processes(name: str, folder: Path, count: int = 2) -> list[Any]:
    """Run `support.children.NAME RESULT RANK` as a group of `count` processes on the CPU; the JSON that each wrote to RESULT.

    They are forks of the server that grids start their runs from, so only its first use waits for imports.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    children, logs = [], [folder / f"log-{rank}" for rank in range(count)]
    for rank, log in enumerate(logs):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
        children.append(start_child(name, folder / f"result-{rank}", rank, log=log, **environment))
    deadline = time.monotonic() + 300
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        if any(child.exitcode for child in children):
            break
        time.sleep(0.05)
    codes = [child.exitcode for child in children]
    for child in children:  # where one failed, the other waits for it
        child.kill()
        child.join()
    assert codes == [0] * count, "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(count)]


def _child(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """`python -m support.children.NAME ...`, in a process that has imported already; all that it prints goes to `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    gc.freeze()  # what is imported stays
    torch.set_num_threads(1)
    sys.argv = arguments
    runpy.run_module(f"support.children.{arguments[0]}", run_name="__main__")
