"""Start processes that need not wait for the imports of other packages.

`start()` forks a server from a process that has not imported hf_freeze yet. The server has imported torch, transformers and what
these import; its children import hf_freeze themselves, as a new process does. It reads one request a line, a JSON object (see
`processes.new_process`), and answers each with the exit code of its child.
"""

import gc
import json
import os
import runpy
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import datasets  # noqa: F401 (imported for the children, as are all below)
import torch
import transformers.pipelines
import transformers.trainer
import transformers.trainer_seq2seq  # noqa: F401


@dataclass
class Server:
    pid: int
    requests: TextIO
    answers: TextIO


_STARTED: list[Server] = []


def started() -> Server:
    assert _STARTED, "the server must be started before hf_freeze is imported, as tests/conftest.py does"
    return _STARTED[0]


def start() -> None:
    """Fork the server, once. It ends with this process, which closes the pipe that it reads."""
    if _STARTED:
        return
    requests, requests_end = os.pipe()
    answers_end, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(requests_end)
        os.close(answers_end)
        forget_pytest()
        serve(os.fdopen(requests), os.fdopen(answers, "w"))
    os.close(requests)
    os.close(answers)
    _STARTED.append(Server(pid, os.fdopen(requests_end, "w"), os.fdopen(answers_end)))


def forget_pytest() -> None:
    """Its capturing of output, its import hook and its warnings are not those of a new process."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.meta_path[:] = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(request: dict[str, Any]) -> NoReturn:
    """The work of a child."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        os.environ |= request["environment"]
        os.chdir(request["folder"])
        torch.set_num_threads(1)
        sys.argv = [request["module"] or "-c", *request["arguments"]]
        if request["module"]:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            exec(compile(request["code"], "<code>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(requests: TextIO, answers: TextIO) -> NoReturn:
    assert not [name for name in sys.modules if name.split(".")[0] == "hf_freeze"]
    gc.freeze()  # children collect their own garbage: to look through a million objects takes .3 s, and copies their pages
    for line in requests:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
    os._exit(0)
