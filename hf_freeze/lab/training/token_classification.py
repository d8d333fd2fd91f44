"""A Trainer for named entities: a tag for each word."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from hf_freeze import scores
from hf_freeze.data.entities import entities
from hf_freeze.lab.training.trainer import TokenBatchTrainer


class EntityTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer whose `labels` are tags, such as B-PER (`config.id2label`), and -100 for all tokens of a word but the
    first. `max_tokens` limits the padded input tokens of a batch.

    `evaluate` returns the loss, the accuracy of tags, and precision, recall and F1 of entities (`hf_freeze.data.entities`).
    """

    length_columns = ("input_ids", "input_ids")
    score_columns = 6

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # The Trainer keeps the labels from the model, whose Distillation counts only the outputs that have one.
        with_labels: Any = functools.partial(model, labels=inputs["labels"])
        return super().compute_loss(with_labels, inputs, *args, **kwargs)

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 6): summed negative log-likelihood in nats; numbers of words, of right tags, and of correct, found and true
        entities."""
        logits = model(**batch).logits.float()
        nll = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        words, chosen = labels != -100, logits.argmax(-1)
        sums = [nll.sum(1), words.sum(1), ((chosen == labels) & words).sum(1)]
        names, counts = model.config.id2label, []
        for said, true, kept in zip(chosen.cpu(), labels.cpu(), words.cpu(), strict=True):
            found, gold = (entities([names[tag] for tag in tags[kept].tolist()]) for tags in (said, true))
            counts.append([len(found & gold), len(found), len(gold)])
        return torch.cat([torch.stack(sums, dim=1), torch.tensor(counts).to(nll)], dim=1)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        correct, found, true = sums[3:]
        return {
            "loss": sums[0] / sums[1],
            "accuracy": sums[2] / sums[1],
            "f1": float(scores.of_spans(sums[3:])),
            "precision": correct / (found or 1),
            "recall": correct / (true or 1),
        }
