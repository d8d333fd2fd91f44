"""How far the run of a trial is, read from its checkpoints."""

import json
from pathlib import Path

from hf_freeze.training.resume import last_whole_checkpoint


def dev_loss_at(folder: Path, epochs: float) -> float | None:
    """The lowest dev loss of the run in `folder` up to its first evaluation after that many epochs; None where it has not come so
    far, or has ended."""
    checkpoint = last_whole_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        return None
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    losses: list[float] = []
    for entry in state["log_history"]:
        if "eval_loss" in entry:
            losses.append(entry["eval_loss"])
            if entry["epoch"] >= epochs - 1e-6:
                return min(losses)
    return None
