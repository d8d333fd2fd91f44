"""One run of a grid: train, test, and write the record."""

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
from hf_freeze.lab.recipes.recipe import Origin, Run
from hf_freeze.lab.runs.environment import environment, peak_memory
from hf_freeze.lab.runs.launcher import is_first_process
from hf_freeze.lab.runs.resume import agreed_precision, check_checkpoint
from hf_freeze.lab.runs.text_training import execute_text
from hf_freeze.lab.runs.tracking import tracked
from hf_freeze.lab.tasks.base import Job, OwnTask, ProgressCallback, Trained
from hf_freeze.lab.tasks.items import digest_of_test_set
from hf_freeze.lab.tasks.registry import task_of
from hf_freeze.training.resume import last_whole_checkpoint


def execute(
    run: Run,
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
    of the dev split.
    """
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = last_whole_checkpoint(folder / "checkpoints")
    start = _finished(run.start, folder, "starts")
    teacher = _finished(run.teacher, folder, "learns")
    precision = agreed_precision(folder.parent, run, resume_anyway)
    run = run.with_bf16(precision == "bf16")
    check_checkpoint(folder, checkpoint if not resume_anyway else None, precision, start=start, teacher=teacher)
    transformers.set_seed(run.seed)
    task = task_of(run.task)
    with tracked(run, folder) as trackers:
        job = Job(run, folder, report, checkpoint, start, teacher, until, trackers)
        trained = task.execute(job) if isinstance(task, OwnTask) else execute_text(task, job)
    record = _record(run, trained, precision, whole=not isinstance(task, OwnTask))
    record["seconds"]["all"] = time.perf_counter() - started
    if is_first_process():
        np.save(folder / "items.npy", trained.outcome.items)
        write_whole(folder / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in trained.log))
        # Written last: a run with metrics.json is a finished one.
        write_whole(folder / "metrics.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if distributed.is_initialized():
        distributed.barrier()
    return record


def _finished(origin: Origin | None, folder: Path, verb: str) -> Path | None:
    """The folder of a run that the one in `folder` needs. Raises ValueError where that is not finished."""
    if origin is None:
        return None
    needed = origin.folder(folder.parent)
    if not (needed / "metrics.json").exists():
        raise ValueError(f"{folder} {verb} from {needed}, which is not finished: run row {origin.row} first")
    return needed


def _record(run: Run, trained: Trained, precision: str, *, whole: bool) -> dict[str, Any]:
    """What a report reads of a run. `whole`: the model is one of transformers, whose work and memory are counted."""
    parameters = count_parameters(trained.model)
    record = {
        "recipe": run.name,
        "task": run.task,
        "row": run.row,
        "label": run.label,
        "seed": run.seed,
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
        "multiply_adds": forward_multiply_adds(trained.model) if whole else None,
        "memory": memory_of(trained.model) if whole else None,
        "seconds": {"train": trained.train_seconds, "test": trained.test_seconds},
        "resumed": trained.resumed,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "precision": precision,
        "peak_memory_bytes": peak_memory(),
        "environment": environment(),
        # What rows must have in common to be compared, so that a record says it without its folder.
        "data": {key: value for key, value in run.data.given().items() if key != "root"},
        "tokenizer": run.tokenizer.given() if run.tokenizer is not None else run.pretrained,
        "test_set": digest_of_test_set(trained.outcome.items),
    }
    record |= {key: value for key, value in run.given().items() if key in ("metric", "scored_on")}
    if run.calibration is not None:
        record["calibration"] = trained.model.config.calibration
    if run.start is not None and run.start.grid is None:
        record["start"] = run.start.row
    return record


def memory_of(model: Any) -> dict[str, int]:
    """Bytes in memory at inference and bytes that a decoding step reads, with seeded parts generated where they are used."""
    memory = inference_memory(model, "streamed")
    return {"resident": memory.resident - memory.scratch, "read": memory.read}
