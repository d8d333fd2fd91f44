"""python -m support.fork_server: start processes that need not wait for the imports of other packages.

They are forks of this process, which has imported torch, transformers and what these import, and nothing of hf_freeze: the
child imports that itself, as a new process does. Reads one request a line, a JSON object (see `processes.new_process`); answers
each with the exit code of its child.
"""

import gc
import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

import datasets  # noqa: F401 (imported for the children, as are all below)
import torch
import transformers.pipelines
import transformers.trainer
import transformers.trainer_seq2seq  # noqa: F401


def run(request: dict[str, Any]) -> NoReturn:
    """The work of a child."""
    code = 1
    try:
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


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # children must not read the requests
    assert not [name for name in sys.modules if name.split(".")[0] == "hf_freeze"]
    gc.freeze()  # children collect their own garbage: to look through a million objects takes .3 s, and copies their pages
    for line in requests:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    serve()
