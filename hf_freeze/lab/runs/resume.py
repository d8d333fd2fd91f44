"""Checkpoints, and whether to resume from one gives the results of an uninterrupted run."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from hf_freeze.io import write_whole
from hf_freeze.lab.data import TokenDataset
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import AUTO
from hf_freeze.lab.runs.environment import environment
from hf_freeze.lab.runs.launcher import is_first_process, is_launched
from hf_freeze.lab.runs.precision import note_precision, precision_of, setting_of


def forget_other_machines(folder: Path) -> None:
    """Remove the checkpoints in `folder` if other code or another kind of machine wrote them: the run then begins again, rather
    than end with other figures."""
    path = folder / "environment.json"
    then = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(then.get(key) != value for key, value in environment().items()):
        for checkpoint in (folder / "checkpoints").glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


def agreed_precision(out: Path, run: Run, resume_anyway: bool) -> str:
    """As `precision_of`, and noted for the other runs of the grid; several processes take what the first one measured."""
    if setting_of(run) != AUTO:
        return precision_of(out, run, resume_anyway=resume_anyway)
    precision: list[Any] = [None]
    if is_first_process():
        precision = [precision_of(out, run, resume_anyway=resume_anyway)]
        note_precision(out, run, precision[0])
    if is_launched():
        PartialState(cpu=not torch.cuda.is_available())
        broadcast_object_list(precision)
    return precision[0]


def check_checkpoint(folder: Path, checkpoint: str | None, precision: str, **origins: Path | None) -> None:
    """Raise ValueError where a resumed run would not end with the results of an uninterrupted one; else note who runs it."""
    path = folder / "environment.json"
    now = environment() | {"processes": int(os.environ.get("WORLD_SIZE", "1")), "precision": precision}
    for name, origin in origins.items():
        if origin is not None:  # the weights: run again under other code, the same row has others
            files = (origin / "model").glob("*.safetensors")
            now[name] = " ".join(sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files))
    if checkpoint is not None and path.exists():
        then = json.loads(path.read_text(encoding="utf-8"))
        if differs := [f"{key} {then.get(key)!r}, now {now[key]!r}" for key in now if then.get(key) != now[key]]:
            raise ValueError(
                f"{checkpoint} was made with {'; '.join(differs)}: going on would not give the results of one uninterrupted run. "
                f"Run it as it was, remove {folder}, or add --resume-anyway"
            )
    if is_first_process():
        write_whole(path, json.dumps(now, indent=1) + "\n")


def check_data(folder: Path, checkpoint: str | None, encoded: dict[str, Any]) -> None:
    """Raise ValueError where the tokens on the disk are not those that the checkpoint was trained on; else note their digests."""
    path = folder / "data.json"
    now = {name: data.digest for name, data in encoded.items() if isinstance(data, TokenDataset)}
    if checkpoint is not None and path.exists():
        then = json.loads(path.read_text(encoding="utf-8"))
        for name in now:
            if then.get(name, now[name]) != now[name]:
                raise ValueError(
                    f"{checkpoint} was made with other data: the {name} split has changed since. Put it back, or remove {folder}"
                )
    if now and is_first_process():
        write_whole(path, json.dumps(now, indent=1) + "\n")
