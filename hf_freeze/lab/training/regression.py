"""A Trainer for regression: a number for each sequence."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_freeze import scores
from hf_freeze.lab.training.trainer import TokenBatchTrainer


class RegressionTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer with one number per example as `labels`, for models with one label. `max_tokens` limits the padded
    input tokens of a batch. `evaluate` returns the mean squared difference as the loss, and Pearson correlation."""

    length_columns = ("input_ids", "input_ids")
    score_columns = 7

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 7): squared difference, and of the prediction x and the label y: 1, x, x², x y, y², y."""
        x = model(**batch).logits.squeeze(-1).double()
        y = labels.double()
        return torch.stack([(x - y) ** 2, torch.ones_like(x), x, x * x, x * y, y * y, y], dim=1)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"loss": sums[0] / sums[1], "pearson": float(scores.pearson(sums[1:]))}
