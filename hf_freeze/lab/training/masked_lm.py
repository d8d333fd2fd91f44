"""A Trainer for masked language models."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.data.batching import TokenBatchSampler
from hf_freeze.lab.data.masking import Masking
from hf_freeze.lab.training.trainer import TokenBatchTrainer

TEST_KEY = (0,)  # the masking key of evaluation: the same masks for every model, seed and batch size


class MaskedTokenTrainer(TokenBatchTrainer):
    """A TokenBatchTrainer that masks blocks of text (see `masked_blocks`).

    Training draws new masks in each epoch, as a function of the seed, the epoch and the block alone, so a resumed run continues
    exactly. `evaluate` and `score` use fixed masks.

    The output matrix is applied to the masked positions only; with 15 % masked, this saves most of its time.
    `compute_loss_func` gets logits (M, V) and labels (M,) of the M masked tokens of the batch.

    `masking`: the share of tokens masked in training; short trainings learn more with 0.4 (Wettig et al., 2023,
    https://arxiv.org/abs/2202.08005). Evaluation always masks 0.15.
    """

    score_columns = 3

    def __init__(self, *args: Any, masking: float = 0.15, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masking = masking

    def _collator(self, sampler: TokenBatchSampler) -> Any:
        masking = Masking(self.processing_class, self.masking) if sampler.shuffle else Masking(self.processing_class)
        return functools.partial(self._masked, masking, sampler)

    def _masked(self, masking: Masking, sampler: TokenBatchSampler, examples: list[dict[str, Any]]) -> Any:
        key = (sampler.seed, sampler.epoch) if sampler.shuffle else TEST_KEY
        return self.data_collator([masking(example["input_ids"], key) for example in examples])

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        masked = inputs["labels"] != -100
        with output_at(self.accelerator.unwrap_model(model), masked):
            return super().compute_loss(model, {**inputs, "labels": inputs["labels"][masked]}, *args, **kwargs)

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, 3): summed negative log-likelihood in nats, number of masked tokens, number of them that the model ranks first."""
        masked = labels != -100
        with output_at(model, masked):
            logits = model(**batch).logits.float()
        true = labels[masked]
        nll = functional.cross_entropy(logits, true, reduction="none")
        token_scores = torch.stack([nll, torch.ones_like(nll), (logits.argmax(-1) == true).to(nll)], dim=1)
        return nll.new_zeros(len(labels), 3).index_add_(0, masked.nonzero()[:, 0], token_scores)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return super().metrics(sums) | {"accuracy": sums[2] / sums[1]}


@contextmanager
def output_at(model: Any, positions: torch.Tensor) -> Iterator[None]:
    """Inside this context, the output matrix of `model` is applied only to the M True entries of `positions`, bool (B, T): the
    logits are (M, V)."""
    output = model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda module, args: (args[0][positions], *args[1:]))
    try:
        yield
    finally:
        hook.remove()
