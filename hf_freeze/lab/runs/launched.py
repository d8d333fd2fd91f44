"""A grid under a launcher: all processes work on one run after the other."""

import gc
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.markup import escape
from torch import distributed

from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.claim import claim_all
from hf_freeze.lab.runs.collect import write_results
from hf_freeze.lab.runs.execute import execute
from hf_freeze.lab.runs.progress import dev_score, summary_line


def execute_launched(
    runs: list[Run],
    every: list[Run],
    out: Path,
    console: Console,
    command: str | None,
    resume_anyway: bool,
) -> list[dict[str, Any]]:
    """Execute `runs` in all processes together; the first process writes. After an error in one, the launcher ends all."""
    if not distributed.is_initialized():  # else what wraps a model for the group must go before the group does
        gc.freeze()  # what is imported stays, as in a process of one run
    state = PartialState(cpu=not torch.cuda.is_available())
    waiting: list[Any] = [None]
    if state.is_main_process:
        waiting = [claim_all(runs, out, command)]
    (waiting,) = broadcast_object_list(waiting)
    for run in waiting:
        folder, started = run.folder(out), time.monotonic()
        console.print(f"row {run.row} seed {run.seed}, {state.num_processes} processes")

        def report(message: dict[str, Any], name: str = folder.name) -> None:
            if dev := dev_score(message):
                console.print(f"{name}: epoch {message['epoch']:.3g}, {dev}")

        record = execute(run, folder, report, resume_anyway=resume_anyway)
        if state.is_main_process:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            write_results(out, every)
        console.print(escape(summary_line(record, time.monotonic() - started)), soft_wrap=True)
    state.wait_for_everyone()
    return write_results(out, every) if state.is_main_process else []
