"""One run of a grid: train, test, and write the record."""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch import distributed

from hf_freeze.analysis.accounting import count_parameters, forward_multiply_adds, stored_bytes
from hf_freeze.analysis.memory import inference_memory
from hf_freeze.io import write_whole
from hf_freeze.lab.runs.environment import environment, peak_memory
from hf_freeze.lab.runs.launcher import is_first_process
from hf_freeze.lab.runs.resume import agreed_precision, check_origin
from hf_freeze.lab.runs.text_training import execute_text
from hf_freeze.lab.runs.tracking import tracked
from hf_freeze.lab.tasks.base import OwnTask, ProgressCallback
from hf_freeze.lab.tasks.items import digest_of_test_set
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.run_folder import start_folder, teacher_folder
from hf_freeze.training.resume import last_whole_checkpoint


def execute(
    run: dict[str, Any],
    folder: Path,
    report: ProgressCallback = lambda _: None,
    *,
    resume_anyway: bool = False,
    until: float | None = None,
) -> dict[str, Any]:
    """Train and test one row; writes model, metrics and log into `folder`, which may hold a killed run to resume. What the
    run starts from is the finished run in its folder beside this one, or in that of another grid.

    Under a launcher (torchrun, accelerate launch) every process calls it; the first one writes. Returns the record that goes
    to results.jsonl. Raises FloatingPointError where the loss is no number, and the checkpoint before it is kept; ValueError
    where the checkpoint to resume was made by other code or in another way, unless `resume_anyway`, or what the run starts
    from is not finished.

    `until`: raise Paused at the first checkpoint of that many epochs or more; called again, the run goes on from it and ends with
    the figures of one that never paused. A run with `scored_on: dev` never sees the test split: what its record calls test is
    of the dev split. One that is scored on nothing has a dev loss alone.
    """
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = last_whole_checkpoint(folder / "checkpoints")
    start = start_folder(folder.parent, run)
    if start is not None and not (start / "metrics.json").exists():
        raise ValueError(f"{folder} starts from {start}, which is not finished: run row {run['start']['row']} first")
    teacher = teacher_folder(folder.parent, run)
    if teacher is not None and not (teacher / "metrics.json").exists():
        raise ValueError(
            f"{folder} learns from {teacher}, which is not finished: run row {run['teacher']['row']} first"
        )
    precision = agreed_precision(folder.parent, run, resume_anyway)
    run = run | {"training": run["training"] | {"bf16": precision == "bf16"}}
    check_origin(folder, checkpoint if not resume_anyway else None, precision, start=start, teacher=teacher)
    transformers.set_seed(run["seed"])
    task = task_of(run["task"])
    with tracked(run, folder) as trackers:
        if isinstance(task, OwnTask):
            train = task.execute
        else:
            train = functools.partial(execute_text, task, until=until, trackers=trackers)
        trained = train(run, folder, report, checkpoint=checkpoint, start=start)
    parameters = count_parameters(trained.model)
    record = {
        "recipe": run["name"],
        "task": run["task"],
        "row": run["row"],
        "label": run["label"],
        "seed": run["seed"],
        "metrics": trained.outcome.metrics,
        "signatures": trained.outcome.signatures,
        "epochs_trained": round(trained.epochs, 3),
        "epochs_to_convergence": round(trained.best_epoch, 3),
        "steps": trained.steps,
        "parameters": {
            "total": parameters.total,
            "trainable": parameters.trainable,
            "stored": parameters.stored,
            "stored_bytes": stored_bytes(trained.model),
            "trainable_share": parameters.trainable / parameters.total,
            "by_component": {
                name: {"total": part.total, "trainable": part.trainable, "stored": part.stored}
                for name, part in parameters.by_component.items()
            },
        },
        "multiply_adds": None if isinstance(task, OwnTask) else forward_multiply_adds(trained.model),
        "memory": None if isinstance(task, OwnTask) else memory_of(trained.model),
        "seconds": {
            "train": trained.train_seconds,
            "test": trained.test_seconds,
            "all": time.perf_counter() - started,
        },
        "resumed": trained.resumed,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "precision": precision,
        "peak_memory_bytes": peak_memory(),
        "environment": environment(),
        # What rows must have in common to be compared, so that a record says it without its folder.
        "data": {key: value for key, value in run["data"].items() if key != "root"},
        "tokenizer": run.get("tokenizer") or run.get("backbone", {}).get("pretrained"),
        "test_set": digest_of_test_set(trained.outcome.items),
    }
    record |= {key: run[key] for key in ("metric", "scored_on") if key in run}
    if "calibration" in run:
        record["calibration"] = trained.model.config.calibration
    if "start" in run and "grid" not in run["start"]:
        record["start"] = run["start"]["row"]
    if is_first_process():
        np.save(folder / "items.npy", trained.outcome.items)
        write_whole(folder / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in trained.log))
        # Written last: a run with metrics.json is a finished one.
        write_whole(folder / "metrics.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if distributed.is_initialized():
        distributed.barrier()
    return record


def memory_of(model: Any) -> dict[str, int]:
    """Bytes in memory at inference and bytes that a decoding step reads, with seeded parts generated where they are used."""
    memory = inference_memory(model, "streamed")
    return {"resident": memory.resident - memory.scratch, "read": memory.read}
