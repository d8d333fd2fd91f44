"""A Trainer for sequence classification."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.training.trainer import TokenBatchTrainer


class ClassificationTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer with one class per example as `labels`. `max_tokens` limits the padded input tokens of a batch."""

    length_columns = ("input_ids", "input_ids")
    score_columns = 3

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 3): negative log-likelihood in nats, 1, and 1 if the model ranks the true class first, else 0."""
        with self.compute_loss_context_manager():
            logits = model(**batch).logits.float()
        nll = functional.cross_entropy(logits, labels, reduction="none")
        return torch.stack([nll, torch.ones_like(nll), (logits.argmax(-1) == labels).to(nll)], dim=1)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"loss": sums[0] / sums[1], "accuracy": sums[2] / sums[1]}
