"""The tasks by the names that recipes use."""

import importlib

from hf_freeze.lab.tasks.base import OwnTask, Task


def task_of(name: str) -> Task | OwnTask:
    """The task of that name in a recipe. Its file is imported when it is used: it imports much."""
    return importlib.import_module(f"hf_freeze.lab.tasks.{name.replace('-', '_')}").TASK
