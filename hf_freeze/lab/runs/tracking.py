"""The learning curves of a grid in a tracker: one run there for each run of the grid, under the name of its folder, in a project
(and, of Weights & Biases, a group) with the name of the recipe."""

import importlib
import importlib.util
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.launcher import is_first_process

_PACKAGES = {  # of each tracker of `report_to` (`lab/recipes/recipe.py`); any of them will do
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def check_tracker(name: str | None) -> None:
    """Raise ValueError where the package of the tracker is not installed."""
    if name is not None and not any(importlib.util.find_spec(package) for package in _PACKAGES[name]):
        raise ValueError(f"--report-to {name} needs the package {name}: pip install {name}")


@contextmanager
def tracked(run: Run, folder: Path) -> Iterator[list[Any]]:
    """Yields the Trainer's callbacks for the tracker that `run` names, or none, and ends the run there.

    TensorBoard's event file lies in the folder of the run. The others write where their own settings in the environment say
    (WANDB_MODE, WANDB_PROJECT, TRACKIO_DIR, ...). A run of the grid that resumes continues its run in the tracker.
    """
    name = run.report_to
    if name is None:
        yield []
        return
    check_tracker(name)
    integrations: Any = importlib.import_module("transformers.integrations")  # here: it looks for every tracker

    if name == "tensorboard":
        callback = integrations.TensorBoardCallback()
        callback.logging_dir = str(folder)
        # Else it opens a second file for the test scores, which has the name of the first in the same second.
        callback.on_train_end = lambda *args, **kwargs: None
        yield [callback]
        if callback.tb_writer is not None:
            callback.tb_writer.close()
    elif name == "trackio":  # the callback takes both names from the Trainer's arguments
        import trackio  # pyright: ignore[reportMissingImports]

        try:
            yield [integrations.TrackioCallback()]
        finally:
            if is_first_process():
                trackio.finish()
    else:
        import wandb  # pyright: ignore[reportMissingImports]

        if not is_first_process():
            yield []
            return
        project = os.environ.get("WANDB_PROJECT", run.name)
        identity = _identity(folder / "checkpoints" / "wandb-id")
        with wandb.init(project=project, group=run.name, name=folder.name, id=identity, resume="allow"):
            yield [integrations.WandbCallback()]  # it takes the run that is there


def _identity(path: Path) -> str:
    """Of a run in the tracker, kept with its checkpoints until it is finished."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:16])
    return path.read_text()
