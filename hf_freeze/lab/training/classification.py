"""A Trainer for sequence classification."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from hf_freeze import scores
from hf_freeze.lab.training.trainer import TokenBatchTrainer


class ClassificationTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer with one class per example as `labels`. `max_tokens` limits the padded input tokens of a batch.

    `evaluate` returns loss and accuracy; of two classes also F1 of the second one and Matthews correlation.
    """

    length_columns = ("input_ids", "input_ids")
    score_columns = 7

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 7): negative log-likelihood in nats, 1, and 1 or 0 for: the model ranks the true class first; it rightly ranks
        class 1 first, wrongly, wrongly another, rightly another."""
        logits = model(**batch).logits.float()
        nll = functional.cross_entropy(logits, labels, reduction="none")
        chosen = logits.argmax(-1)
        said, true = chosen == 1, labels == 1
        answers = [chosen == labels, said & true, said & ~true, ~said & true, ~said & ~true]
        return torch.stack([nll, torch.ones_like(nll), *(answer.to(nll) for answer in answers)], dim=1)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        metrics = {"loss": sums[0] / sums[1], "accuracy": sums[2] / sums[1]}
        if self.accelerator.unwrap_model(self.model).config.num_labels == 2:
            metrics |= {"f1": float(scores.f1(sums[3:])), "matthews": float(scores.matthews(sums[3:]))}
        return metrics
