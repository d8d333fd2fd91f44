"""Run all rows and seeds of a recipe, each in a process and a folder of its own; finished runs are skipped, killed ones
resume from their last checkpoint."""

import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_freeze.experiments.fields import SPLITS, data_form
from hf_freeze.experiments.on_ray import RayOptions, RayTasks
from hf_freeze.experiments.processes import Processes
from hf_freeze.experiments.recipe import expand
from hf_freeze.io import write_whole
from hf_freeze.model.make import check_exists
from hf_freeze.training.precision import AUTO, uses_bf16

COMMANDS = "command.txt"  # in the folder of a grid, a line each
PRECISION = "precision.txt"  # in the folder of a grid: what `training.bf16: auto` means in all of its runs
LATENCY = "latency.json"  # in the folder of a run: how long its model decodes, as benchmarks/run_latency.py leaves it


class FailedRuns(Exception):
    """Some runs of a grid failed; the others are finished."""


def run_folder(out: Path, run: dict[str, Any]) -> Path:
    return out / f"row-{run['row']}-seed-{run['seed']}"


def start_folder(out: Path, run: dict[str, Any]) -> Path | None:
    """The folder of the run that `run` starts from, in `out` or another grid; None where it starts from fresh weights."""
    return run_folder(Path(run["start"].get("grid", out)), run["start"]) if "start" in run else None


def commands_of(out: Path) -> list[str]:
    """The commands that the runs of a grid were made by."""
    file = out / COMMANDS
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def teacher_folder(out: Path, run: dict[str, Any]) -> Path | None:
    """The folder of the run whose model `run` learns from; None where it learns from none."""
    return run_folder(out, run["teacher"]) if "teacher" in run else None


def _origins(out: Path, run: dict[str, Any]) -> list[Path]:
    """The folders of the runs that must be finished before `run`."""
    return [folder for folder in (start_folder(out, run), teacher_folder(out, run)) if folder is not None]


def run_grid(
    recipe: dict[str, Any],
    out: Path,
    *,
    jobs: int = 1,
    console: Console | None = None,
    command: str | None = None,
    resume_anyway: bool = False,
    ray: RayOptions | None = None,
) -> list[dict[str, Any]]:
    """Execute every run of `recipe` that `out` does not hold yet, `jobs` at a time; returns the records in grid order.
    A run that starts from another one waits until that one is finished, and fails with it.

    `ray`: the runs are tasks of Ray, as many at a time as its nodes have room for; `out` is on storage that all nodes see.
    Under a launcher (torchrun, accelerate launch) all processes work on one run after the other. `resume_anyway`: go on with
    a checkpoint that another version, commit, device or number of threads or processes left.

    Writes `out/results.jsonl`, of all finished runs there, and `command` for the report. Raises ValueError where `out` holds
    runs of another recipe, and FailedRuns at the end where runs failed; their tracebacks are in their folders.
    """
    launched = is_launched()
    if launched and jobs > 1:
        raise ValueError(f"jobs={jobs}: under a launcher all processes work on one run at a time; leave --jobs out")
    if launched and ray is not None:
        raise ValueError("under a launcher all processes work on one run at a time; leave --on ray out")
    if ray is not None and jobs > 1:
        raise ValueError(f"jobs={jobs}: Ray has as many runs at a time as it has room for; leave --jobs out")
    if launched and not is_first_process():
        console = Console(quiet=True)
    console = console or Console()
    runs = expand(recipe)
    every = expand({key: value for key, value in recipe.items() if key != "only"})  # the order of a report
    _check_files(recipe["data"])
    for name in {run["backbone"].get("pretrained") for run in runs if "backbone" in run} - {None}:
        check_exists(name)
    for run in runs:
        _check_folder(run_folder(out, run), run)
        _check_other_grid(out, run)
    if ray is None:  # else the nodes decide, not this machine
        for run in runs:
            if not (run_folder(out, run) / "metrics.json").exists():
                precision_of(out, run, resume_anyway=resume_anyway)
    if launched:
        return _execute_launched(runs, every, out, console, command, resume_anyway)
    waiting = _claim_all(runs, out, command)
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already; skipped")
    failed: list[Path] = []
    if waiting:
        if ray is None:
            workers = Processes(jobs, resume_anyway)
        else:
            workers = RayTasks(ray, resume_anyway, lambda text: console.print(escape(text), soft_wrap=True))
        failed = _execute(waiting, out, workers, console, lambda: write_results(out, every))
    records = write_results(out, every)
    if failed:
        raise FailedRuns(f"{len(failed)} of {len(runs)} runs failed; see {failed[0] / 'error.log'}")
    return records


def write_results(out: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collect the finished runs of `out` into `results.jsonl`: `runs` in their order, then those of other seeds or recipes."""
    paths = [run_folder(out, run) / "metrics.json" for run in runs]
    paths += sorted(set(out.glob("row-*-seed-*/metrics.json")) - set(paths))
    records = [_record(path) for path in paths if path.exists()]
    write_whole(out / "results.jsonl", "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return records


def _record(path: Path) -> dict[str, Any]:
    """Of a finished run, with what was measured of its model since."""
    record, latency = json.loads(path.read_text(encoding="utf-8")), path.with_name(LATENCY)
    return record | ({"latency": json.loads(latency.read_text(encoding="utf-8"))} if latency.exists() else {})


def _check_files(data: dict[str, Any]) -> None:
    """Raise FileNotFoundError once, rather than in every run."""
    splits = SPLITS if data_form(data) == "files" else ()
    for path in (Path(data.get("root", ".")) / file for split in splits for file in data.get(split, ())):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; say where the files are: --set data.root=DIRECTORY")


def _check_folder(folder: Path, run: dict[str, Any]) -> None:
    """Raise ValueError where `folder` holds a run of other settings. Where the data lies may change, and what is drawn."""
    path = folder / "run.json"
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); remove {folder}") from error
    wanted = json.loads(json.dumps(run))
    noted = _noted_precision(folder.parent)
    auto = uses_bf16(AUTO) if noted is None else noted == "bf16"
    for settings in (found, wanted):
        settings["data"].pop("root", None)
        settings.pop("axis", None)  # of the report only
        if "bf16" in run["training"]:
            _resolve_precision(settings, auto)
    if difference := _first_difference(found, wanted):
        raise ValueError(f"{folder} holds a run of other settings ({difference}); choose another --out, or remove it")


def _check_other_grid(out: Path, run: dict[str, Any]) -> None:
    """Raise ValueError where `run` is to start from a run of another grid that is not there, or not finished."""
    start = start_folder(out, run)
    if start is None or "grid" not in run["start"] or (run_folder(out, run) / "metrics.json").exists():
        return
    if not (start / "metrics.json").exists():
        raise ValueError(
            f"{run['start']['grid']} holds no finished run of row {run['row']!r} with seed {run['seed']} to start from: run that "
            "grid first, or say where it is: --set start=FOLDER"
        )


def _claim_all(runs: list[dict[str, Any]], out: Path, command: str | None) -> list[dict[str, Any]]:
    """Enter the settings of every run, and the command; returns the runs that are not finished."""
    for run in runs:
        _claim(run_folder(out, run), run)
    if command is not None:
        command = " ".join(command.splitlines())
        others = {path.parent for path in out.glob("row-*/run.json")} - {run_folder(out, run) for run in runs}
        # One for all the runs stands alone; of a grid that grew by several, such as a job each, all are kept.
        before = [each for each in commands_of(out) if each != command] if others else []
        write_whole(out / COMMANDS, "\n".join([*before, command]) + "\n")
    return [run for run in runs if not (run_folder(out, run) / "metrics.json").exists()]


def _claim(folder: Path, run: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "run.json").exists():
        write_whole(folder / "run.json", json.dumps(run, indent=1, ensure_ascii=False) + "\n")


def _resolve_precision(settings: dict[str, Any], auto: bool) -> None:
    """Replace `auto` by what it means in this grid. A run.json of earlier releases may lack the setting: its default was true."""
    for part in (settings, settings.get("start"), settings.get("teacher")):
        if part is not None and "training" in part:
            setting = part["training"].get("bf16", True)
            part["training"]["bf16"] = auto if setting == AUTO else setting


def _noted_precision(out: Path) -> str | None:
    """What `auto` means in the grid in `out`; None where no run has used it yet."""
    path = out / PRECISION
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def precision_of(out: Path, run: dict[str, Any], *, resume_anyway: bool = False) -> str:
    """`"bf16"` or `"fp32"`, in which `run` of the grid in `out` is trained on this machine.

    Raises ValueError where `auto` meant the other one in earlier runs of this grid, unless `resume_anyway`.
    """
    setting = run["training"].get("bf16", False)  # a task without the setting trains in fp32
    name = "bf16" if uses_bf16(setting) else "fp32"
    noted = _noted_precision(out) if setting == AUTO else None
    if noted not in (None, name) and not resume_anyway:
        raise ValueError(
            f"the runs in {out} use {noted}, but this machine would use {name}, and rows must differ in their methods only: add "
            f"--set training.bf16={str(noted == 'bf16').lower()}, choose another --out, or add --resume-anyway"
        )
    return name


def note_precision(out: Path, run: dict[str, Any], name: str) -> None:
    """Keep what `auto` means for the other runs of the grid in `out`, unless an earlier run did."""
    if run["training"].get("bf16") == AUTO and _noted_precision(out) is None:
        write_whole(out / PRECISION, name + "\n")


def _first_difference(old: Any, new: Any, where: str = "") -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if found := _first_difference(old.get(key), new.get(key), f"{where}.{key}".lstrip(".")):
                return found
        return None
    return None if old == new else f"{where} was {old!r}, now {new!r}"


def is_launched() -> bool:
    """Whether this is one of several processes that torchrun or accelerate started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Whether this process is the one that writes files."""
    return os.environ.get("RANK", "0") == "0"


def leave_processes() -> None:
    """Leave the group that `is_launched` speaks of, as the last act of a program.

    What still wraps a model for the group goes first: were it the last to hold the group, it would wait for the group's threads
    with Python locked, and for ever where one of them has a tensor to free (https://github.com/pytorch/pytorch/issues/56297).
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _execute_launched(
    runs: list[dict[str, Any]],
    every: list[dict[str, Any]],
    out: Path,
    console: Console,
    command: str | None,
    resume_anyway: bool,
) -> list[dict[str, Any]]:
    """All processes together, one run after the other; the first one writes. An error ends them all: a launcher sees to that."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    from hf_freeze.experiments.run import execute

    state = PartialState(cpu=not torch.cuda.is_available())
    waiting: list[Any] = [None]
    if state.is_main_process:
        waiting = [_claim_all(runs, out, command)]
    (waiting,) = broadcast_object_list(waiting)
    for run in waiting:
        folder, started = run_folder(out, run), time.monotonic()
        console.print(f"row {run['row']} seed {run['seed']}, {state.num_processes} processes")

        def report(message: dict[str, Any], name: str = folder.name) -> None:
            if dev := _on_dev(message):
                console.print(f"{name}: epoch {message['epoch']:.3g}, {dev}")

        record = execute(run, folder, report, resume_anyway=resume_anyway)
        if state.is_main_process:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            write_results(out, every)
        console.print(escape(_one_line(record, time.monotonic() - started)), soft_wrap=True)
    state.wait_for_everyone()
    return write_results(out, every) if state.is_main_process else []


def _execute(
    waiting: list[dict[str, Any]],
    out: Path,
    workers: Processes | RayTasks,
    console: Console,
    finished: Callable[[], Any],
) -> list[Path]:
    """Run all of `waiting`, calling `finished` after each; returns the folders of those that failed."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bars = Progress(TextColumn("{task.description}"), *columns, console=console)
    waiting, failed = list(waiting), []
    running: dict[Path, dict[str, Any]] = {}
    tasks: dict[Path, tuple[Any, float]] = {}  # of those that have said something
    try:
        with bars:
            everything = bars.add_task("all runs", total=len(waiting), note="")
            while waiting or running:
                while workers.has_room() and (run := next((run for run in waiting if _is_ready(run, out)), None)):
                    waiting.remove(run)
                    running[run_folder(out, run)] = run
                    workers.start(run, run_folder(out, run))
                folder, message = workers.message() or (None, {})
                if folder in running:  # else the last words of a run that has ended
                    if folder not in tasks:
                        named = f"row {running[folder]['row']} seed {running[folder]['seed']}"
                        tasks[folder] = bars.add_task(named, total=None, note=""), time.monotonic()
                    _show(bars, tasks[folder][0], message, console, folder.name)
                for folder, reason in workers.ended():
                    del running[folder]
                    task, started = tasks.pop(folder, (None, time.monotonic()))
                    if task is not None:
                        bars.remove_task(task)
                    bars.advance(everything)
                    if not _succeeded(folder, reason, time.monotonic() - started, console):
                        failed.append(folder)
                        while run := next((run for run in waiting if set(_origins(out, run)) & set(failed)), None):
                            waiting.remove(run)
                            _give_up(out, run, failed, console)
                            failed.append(run_folder(out, run))
                            bars.advance(everything)
                    finished()
    finally:
        workers.close()
    return failed


def _is_ready(run: dict[str, Any], out: Path) -> bool:
    return all((folder / "metrics.json").exists() for folder in _origins(out, run))


def _give_up(out: Path, run: dict[str, Any], failed: list[Path], console: Console) -> None:
    folder, starts = run_folder(out, run), start_folder(out, run) in failed
    origin = run["start" if starts else "teacher"]
    reason = f"row {origin['row']} with seed {origin['seed']} failed, from which it {'starts' if starts else 'learns'}"
    (folder / "error.log").write_text(reason + "\n", encoding="utf-8")
    console.print(f"[red]{escape(str(folder))} failed[/red]: {escape(reason)}", soft_wrap=True)


def _succeeded(folder: Path, reason: str, seconds: float, console: Console) -> bool:
    if (folder / "metrics.json").exists():
        record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        console.print(escape(_one_line(record, seconds)), soft_wrap=True)
        return True
    log = folder / "error.log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if not lines:
        lines = [reason]
        log.write_text(lines[0] + "\n")
    console.print(f"[red]{escape(str(folder))} failed[/red]: {escape(lines[-1])}", soft_wrap=True)
    return False


def _show(bars: Progress, task: Any, message: dict[str, Any], console: Console, name: str) -> None:
    if "step" in message:
        shown = ("loss", "eval_perplexity", "eval_accuracy")
        note = " ".join(f"{key} {message[key]:.3g}" for key in shown if key in message)
        bars.update(task, completed=message["step"], total=message["steps"], note=note)
        if (dev := _on_dev(message)) and not console.is_terminal:
            console.print(f"{name}: epoch {message['epoch']:.3g}, {dev}")
    else:
        bars.update(task, note=message["stage"])


def _on_dev(message: dict[str, Any]) -> str | None:
    if "eval_perplexity" in message:
        return f"dev perplexity {message['eval_perplexity']:.2f}"
    return f"dev accuracy {message['eval_accuracy']:.2%}" if "eval_accuracy" in message else None


def _one_line(record: dict[str, Any], seconds: float) -> str:
    metrics, parameters = record["metrics"], record["parameters"]
    shown = (
        ("test_bleu", "BLEU", "5.1f"),
        ("test_perplexity", "test perplexity", "7.2f"),
        ("test_accuracy", "test accuracy", "6.2%"),
        ("dev_perplexity", "dev perplexity", "7.2f"),
        ("dev_accuracy", "dev accuracy", "6.2%"),
    )
    score = "  ".join(f"{heading} {metrics[key]:{form}}" for key, heading, form in shown if key in metrics)
    return (
        f"row {record['row']:<4} seed {record['seed']} {record['label']:<28} {score}  "
        f"trainable {parameters['trainable_share']:4.0%}  {seconds:4.0f} s"
    )
