"""How many threads a solver computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, PyTorch computes with one thread: where a loop goes through columns, operations take microseconds. Threads that
    wait for each other gain nothing there, and on a machine with other work GPTQ took 40 times as long with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
