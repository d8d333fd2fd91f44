"""The Trainer of sequence classification."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.training.trainer import TokenBatchTrainer


class ClassificationTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer whose `labels` are one class an example; `max_tokens`: padded input tokens of a batch."""

    measured = ("input_ids", "input_ids")
    scores = 3

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 3): negative log-likelihood in nats, 1, and whether the class is the one that the model ranks first."""
        with self.compute_loss_context_manager():
            logits = model(**batch).logits.float()
        nll = functional.cross_entropy(logits, labels, reduction="none")
        return torch.stack([nll, torch.ones_like(nll), (logits.argmax(-1) == labels).to(nll)], dim=1)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"loss": sums[0] / sums[1], "accuracy": sums[2] / sums[1]}
