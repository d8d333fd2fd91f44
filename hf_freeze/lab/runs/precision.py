"""In which precision the runs of a grid train: the same for all rows."""

from pathlib import Path
from typing import Any

from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.training.precision import AUTO, uses_bf16
from hf_freeze.run_folder import PRECISION


def resolve_precision(settings: dict[str, Any], auto: bool) -> None:
    """Replace `auto` by what it means in this grid. A run.json of earlier releases may lack the setting: its default was true."""
    for part in (settings, settings.get("start"), settings.get("teacher")):
        if part is not None and "training" in part:
            setting = part["training"].get("bf16", True)
            part["training"]["bf16"] = auto if setting == AUTO else setting


def setting_of(run: Run) -> bool | str:
    """What the recipe says of bf16; a task without the setting trains in fp32."""
    return run.training.bf16 if "bf16" in run.training.model_fields_set else False


def noted_precision(out: Path) -> str | None:
    """What `auto` means in the grid in `out`; None where no run has used it yet."""
    path = out / PRECISION
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def auto_is_bf16(out: Path) -> bool:
    """What `auto` means in the grid in `out`; where no run has used it yet, on this machine."""
    noted = noted_precision(out)
    return uses_bf16(AUTO) if noted is None else noted == "bf16"


def precision_of(out: Path, run: Run, *, resume_anyway: bool = False) -> str:
    """`"bf16"` or `"fp32"`, in which `run` of the grid in `out` is trained on this machine.

    Raises ValueError where `auto` meant the other one in earlier runs of this grid, unless `resume_anyway`.
    """
    setting = setting_of(run)
    name = "bf16" if uses_bf16(setting) else "fp32"
    noted = noted_precision(out) if setting == AUTO else None
    if noted not in (None, name) and not resume_anyway:
        raise ValueError(
            f"the runs in {out} use {noted}, but this machine would use {name}, and rows must differ in their methods only: add "
            f"--set training.bf16={str(noted == 'bf16').lower()}, choose another --out, or add --resume-anyway"
        )
    return name


def note_precision(out: Path, run: Run, name: str) -> None:
    """Keep what `auto` means for the other runs of the grid in `out`, unless an earlier run did."""
    if setting_of(run) == AUTO and noted_precision(out) is None:
        write_whole(out / PRECISION, name + "\n")
