"""What a compression has tried: the model itself and every smaller one that is trained, as far as their trainings are."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_freeze.training.resume import last_whole_checkpoint

MODEL, TAUGHT, PART = "the model", "everything kept, trained as long", "half of one kind of part"
CANDIDATE, FINAL = "candidate", "compressed"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`kind`: MODEL, TAUGHT, PART, CANDIDATE or FINAL. `words`: what is kept. `bytes`, `ms`: of the folder for the engine, where
    `estimated` from the prices of parts. `share_of_labels`: by which losses of different vocabularies become comparable.

    `epochs`: trained so far. `loss`: in nats a label on the dev split, and `score` on the dev split: in the engine where it was
    measured there, else in PyTorch; None before that. `curve`: (epoch, loss) of each evaluation.
    """

    name: str
    kind: str
    words: str
    bytes: float
    ms: float | None = None
    estimated: bool = False
    share_of_labels: float = 1.0
    epochs: float = 0.0
    loss: float | None = None
    score: float | None = None
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def label(self) -> str:
        """Of its point: "candidate 2"."""
        return self.name.replace("-", " ") if self.kind == CANDIDATE else self.kind

    def trained(self, run: Path) -> "Trial":
        """With what the folder of its run says by now."""
        if (run / "metrics.json").exists():
            record = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
            log = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
            loss = record["metrics"]["dev_loss"] * self.share_of_labels
            return replace(self, epochs=record["epochs_trained"], loss=loss, curve=self._curve(log))
        checkpoint = last_whole_checkpoint(run / "checkpoints")
        if checkpoint is None:
            return self
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
        return replace(self, epochs=state["epoch"], curve=self._curve(state["log_history"]))

    def _curve(self, log: list[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
        # The last evaluation of an epoch may be of the best model, after training; the first is of that epoch.
        losses = {one["epoch"]: one["eval_loss"] * self.share_of_labels for one in reversed(log) if "eval_loss" in one}
        return tuple(sorted(losses.items()))


def best_of(trials: list[Trial]) -> Trial | None:
    """The compressed model, where it is trained; else the candidate of the lowest loss; None before that."""
    for kind in (FINAL, CANDIDATE):
        trained = [trial for trial in trials if trial.kind == kind and trial.loss is not None]
        if trained:
            return min(trained, key=lambda trial: trial.loss or 0.0)
    return None
