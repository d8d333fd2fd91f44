"""Label-smoothed cross-entropy for the Trainer's `compute_loss_func`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def label_smoothed_loss(smoothing: float) -> Callable[..., torch.Tensor]:
    """loss(outputs, labels, num_items_in_batch=None): sum over target tokens / all target tokens of the optimiser step.

    (1 - smoothing) · nll + smoothing · mean over the vocabulary of -log p (Szegedy et al., 2016, section 7); labels of -100
    do not count. The same value as the Trainer's `label_smoothing_factor`, in one fused operation: on a CPU that halves the
    time of the loss, which at small model sizes is a third of the step.

    Raises ValueError for a smoothing outside 0..1.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label smoothing {smoothing} is outside 0..1")

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        logits = outputs["logits"].float().flatten(0, -2)  # (B·T, V)
        total = functional.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=smoothing)
        return total / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())

    return loss
