"""The runs of a grid as processes of this machine."""

import contextlib
import gc
import multiprocessing.connection
import os
import shutil
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_freeze.lab.recipes.recipe import Run

# A run in its own process has a peak memory of its own, and its crash stops no other. The fork server imports torch and
# transformers once; forking from the parent itself would copy its threads' locks.
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# Memory of a step that goes back to the system comes back page by page, zeroed: a sixth of the time of a small model's step.
# glibc reads these when a process starts; others ignore them.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """`threads`: of the run. `resume_anyway`, `until`: as `execute` takes them. `begin_again`: start from the beginning, unless
    `resume_anyway`, where other code or another kind of machine left the checkpoint to resume, which is else an error."""

    threads: int
    resume_anyway: bool
    begin_again: bool = False
    until: float | None = None


@dataclass
class _Running:
    process: Any
    messages: Any  # the end of a pipe that it writes into, as no other does: one that is killed leaves no lock behind


class Processes:
    """Runs at most `jobs` at a time. `begin_again`: see `WorkOptions`."""

    def __init__(self, jobs: int, resume_anyway: bool, *, begin_again: bool = False) -> None:
        for name, value in KEEP_MEMORY.items():
            os.environ.setdefault(name, value)
        self.context: Any = multiprocessing.get_context(_METHOD)
        if _METHOD == "forkserver":
            self.context.set_forkserver_preload(["hf_freeze.lab.runs.execute"])
        # More threads than cores make a step many times slower, so who says OMP_NUM_THREADS is heard.
        threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // jobs))
        self._options = WorkOptions(threads=threads, resume_anyway=resume_anyway, begin_again=begin_again)
        self._jobs = jobs
        self._started: deque[Path] = deque()
        self._running: dict[Path, _Running] = {}

    def has_room(self) -> bool:
        return len(self._running) < self._jobs

    def start(self, run: Run, folder: Path, until: float | None = None) -> None:
        """`until`: as `execute` takes it; a run that pauses there leaves no figures and no error."""
        reader, writer = self.context.Pipe(duplex=False)
        arguments = (run, folder, replace(self._options, until=until), writer)
        process = self.context.Process(target=_child, args=arguments)
        process.start()
        writer.close()
        self._running[folder] = _Running(process, reader)
        self._started.append(folder)

    def message(self) -> tuple[Path, dict[str, Any]] | None:
        """The next word of a run, by its folder; None where none came within half a second, or one has ended before that."""
        if self._started:
            return self._started.popleft(), {"stage": "starting"}
        pipes = {running.messages: folder for folder, running in self._running.items() if not running.messages.closed}
        ends = [running.process.sentinel for running in self._running.values()]
        found: list[Any] = multiprocessing.connection.wait([*pipes, *ends], timeout=0.5)
        for ready in found:
            if ready not in pipes:
                continue
            try:
                return pipes[ready], ready.recv()
            except (EOFError, OSError):  # it has ended, perhaps within a word
                ready.close()
        return None

    def ended(self) -> list[tuple[Path, str]]:
        """The folders of the runs that ended since the last call, each with what to say where it left no figures and no error."""
        gone = {folder: running for folder, running in self._running.items() if not running.process.is_alive()}
        for folder, running in gone.items():
            del self._running[folder]
            running.messages.close()
        return [(folder, f"the process ended with exit code {gone[folder].process.exitcode}") for folder in gone]

    def close(self) -> None:
        for running in self._running.values():
            running.process.terminate()


def work(run: Run, folder: Path, options: WorkOptions, report: Callable[[dict[str, Any]], None]) -> None:
    """One run, in a process of its own. An error is raised again, and its traceback is left in the folder."""
    import datasets
    import torch
    import transformers

    from hf_freeze.lab.runs.claim import training_in
    from hf_freeze.lab.runs.execute import execute
    from hf_freeze.lab.runs.resume import forget_other_machines
    from hf_freeze.lab.runs.text_training import Paused

    # What is imported stays. The Trainer collects garbage at the end of training, a third of a second among a million objects.
    gc.freeze()
    torch.set_num_threads(options.threads)
    # The grid shows its own progress, and the Trainer warns of every tensor that a seed regenerates when it reloads the best.
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    (folder / "error.log").unlink(missing_ok=True)
    try:
        if options.begin_again and not options.resume_anyway:
            forget_other_machines(folder)
        with training_in(folder):
            execute(run, folder, report, resume_anyway=options.resume_anyway, until=options.until)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    except Paused:
        return
    except BaseException:
        (folder / "error.log").write_text(traceback.format_exc(), encoding="utf-8")
        raise


def _child(run: Run, folder: Path, options: WorkOptions, messages: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(message: dict[str, Any]) -> None:
        # Progress is no reason to stop. Without a parent, that thread ends this process.
        with contextlib.suppress(OSError):
            messages.send(message)

    try:
        work(run, folder, options, report)
    except BaseException:
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """A killed grid must not leave runs behind that nobody watches."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
