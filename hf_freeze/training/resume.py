"""Checkpoints of the Trainer."""

import json
from pathlib import Path


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: the Trainer writes trainer_state.json last."""
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]), reverse=True):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut off by a full disk
            continue
        return str(checkpoint)
    return None
