"""Runs are forks of a server that has imported what they need."""

import os
import subprocess
import sys

CODE = """
import os, signal
import torch
import hf_freeze.lab.runs.execute
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends it
    torch.ones(1000, 1000).exp().sum()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_of_the_server_computes_with_threads():
    """It would wait for ever for the threads of the server, had that computed with any."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, check=True
    )
    assert done.stdout == b"0\n"
