"""A Trainer for questions whose answers are parts of a text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.lab.training.trainer import TokenBatchTrainer

MOST_TOKENS = 30  # of an answer


class SpanTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer whose `labels` are the first and the last token of the answer (0 and 0 where there is none), and whose
    batches hold `context`, bool (B, T): the tokens that an answer may consist of. `max_tokens` limits the padded input tokens of
    a batch. `evaluate` returns the loss, and the share of examples whose best span, or none, is right."""

    length_columns = ("input_ids", "input_ids")
    score_columns = 7

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {k: v for k, v in inputs.items() if k != "context"}, *args, **kwargs)

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 7): summed negative log-likelihood of both ends in nats, 2, 1 if the better of span and none is right else 0; the
        first and the last token of the best span, its score, and that of none."""
        context = batch.pop("context")
        outputs = model(**batch)
        first, last = outputs.start_logits.float(), outputs.end_logits.float()
        nll = sum(
            functional.cross_entropy(logits, ends, reduction="none")
            for logits, ends in zip((first, last), labels.unbind(1), strict=True)
        )
        none = first[:, 0] + last[:, 0]
        allowed = torch.ones(first.shape[1], first.shape[1], dtype=torch.bool, device=first.device)
        allowed = allowed.triu() & ~allowed.triu(MOST_TOKENS)
        spans = first[:, :, None] + last[:, None, :]  # (B, T, T)
        spans = spans.masked_fill(~(allowed & context[:, :, None] & context[:, None, :]), -torch.inf)
        best, place = spans.flatten(1).max(1)
        ends = torch.stack([place // spans.shape[1], place % spans.shape[1]], dim=1)
        said = torch.where((none >= best)[:, None], torch.zeros_like(ends), ends)
        columns = [nll, torch.full_like(best, 2), (said == labels).all(1), ends[:, 0], ends[:, 1], best, none]
        return torch.stack([column.to(best) for column in columns], dim=1)  # type: ignore[union-attr]

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"loss": sums[0] / sums[1], "accuracy": 2 * sums[2] / sums[1]}
