"""A Seq2SeqTrainer with batches of a fixed token budget and an exact perplexity."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer

from hf_freeze.compat.transformers import on_device
from hf_freeze.data.batching import TokenBatchSampler
from hf_freeze.lab.data.tokens import lengths_of
from hf_freeze.training.loss import aligned


class TokenBatchTrainer(Seq2SeqTrainer):
    """`max_tokens`: the largest number of padded target tokens in a batch, for each process.

    Data sets have the columns `input_ids` and `labels`; of a `TokenDataset`, only the present batch is in memory. Pass
    `accelerator_config={"even_batches": False}` in the training arguments, because the sampler itself gives every process the
    same number of batches. `evaluate` returns the mean negative log-likelihood of a target token in nats, and its exponential.
    Every token counts once, and labels are not smoothed; the Trainer's own evaluation averages the means of batches and smooths
    labels.

    Raises ValueError for `compute_metrics`, and in training for what `TokenBatchSampler` refuses.
    """

    length_columns: tuple[str, str] = (
        "input_ids",
        "labels",
    )  # batches are sorted by their lengths; the second fills the budget
    score_columns: int = 2  # number of columns of `score`

    def __init__(self, *args: Any, max_tokens: int, **kwargs: Any) -> None:
        if kwargs.get("compute_metrics") is not None:
            raise ValueError("TokenBatchTrainer evaluates perplexity only; score translations with a pipeline")
        super().__init__(*args, **kwargs)
        self.max_tokens = max_tokens
        self._sum_of_losses: Any = 0.0

    def get_train_dataloader(self) -> DataLoader:
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        loader = self._token_loader(self.train_dataset, seed=seed, multiple_of=self.args.world_size)
        return self.accelerator.prepare(loader)

    def _token_loader(self, dataset: Any, **kwargs: Any) -> DataLoader:
        vocab_size = self.accelerator.unwrap_model(self.model).config.vocab_size
        sources, targets = lengths_of(dataset, self.length_columns, vocab_size)
        sampler = TokenBatchSampler(sources, targets, self.max_tokens, **kwargs)
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self._collator(sampler),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def _collator(self, sampler: TokenBatchSampler) -> Callable[[list[dict[str, Any]]], Any]:
        """The function that collates the examples chosen by `sampler` into a batch."""
        return self.data_collator

    def batches(self, dataset: Any) -> Iterator[dict[str, Any]]:
        """The batches that `score` goes through, with labels, on the device of the model."""
        for batch in self._token_loader(dataset, shuffle=False):
            yield on_device(self, dict(batch))

    @torch.no_grad()
    def score(self, dataset: Any) -> torch.Tensor:
        """(N, 2) float64: of every item, the summed negative log-likelihood in nats, without label smoothing, and the number of
        target tokens. Subclasses add columns.

        Processes share the batches, and all of them return the whole result.
        """
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        loader = self._token_loader(dataset, shuffle=False)
        items = torch.zeros(len(dataset), self.score_columns, dtype=torch.float64, device=self.args.device)
        batches: Any = zip(loader.batch_sampler or (), loader, strict=True)
        for number, (indices, batch) in enumerate(batches):
            if number % self.args.world_size != self.args.process_index:
                continue
            batch = on_device(self, dict(batch))
            labels = batch.pop("labels")
            with self.accelerator.autocast():  # a model that has not been trained does not bring it along
                items[indices] = self._score_batch(model, batch, labels).double()
        model.train(was_training)
        reduced: Any = self.accelerator.reduce(items)
        return reduced

    def _score_batch(self, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """(B, `score_columns`): the scores of the examples of a batch."""
        logits = model(**batch).logits
        logits, labels = aligned(logits, labels, shift=not model.config.is_encoder_decoder)
        nll = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return torch.stack([nll.view(labels.shape).sum(1), (labels != -100).sum(1)], dim=1)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """{name: value} from the summed columns of `score`: "loss" and further metrics."""
        nll, tokens = sums[:2]
        return {"loss": nll / tokens, "perplexity": math.exp(min(nll / tokens, 700))}

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval", **_: Any
    ) -> dict[str, float]:
        """{prefix_loss: nats a token, prefix_perplexity}."""
        sums = self.score(self.eval_dataset if eval_dataset is None else eval_dataset).sum(0).tolist()
        self._check_finite(sums[0], "the loss on the dev set")
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.metrics(sums).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # -- a loss that is not finite ---------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's; returns the loss, a scalar, and adds it to the sum that `log` checks."""
        loss = super().training_step(*args, **kwargs)
        # Summed without reading the value, which would wait for the GPU; `log` and `_save_checkpoint` check it.
        self._sum_of_losses = self._sum_of_losses + loss
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's. Raises FloatingPointError if the training loss is not finite."""
        self._check_finite(self._sum_of_losses, "the training loss")
        super().log(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_finite(self._sum_of_losses, "the training loss")
        try:
            super()._save_checkpoint(*args, **kwargs)
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # on a full disk, torch raises a RuntimeError without a reason
            raise OSError(
                f"the checkpoint of step {self.state.global_step} could not be written (is the disk full?): {error}; "
                "the checkpoints before it are kept"
            ) from error

    def _check_finite(self, value: Any, name: str) -> None:
        """Raise FloatingPointError before the last good checkpoint is overwritten."""
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {float(value)} at step {self.state.global_step}; the checkpoints before it are kept. "
                "A lower learning rate, a longer warm-up or gradient clipping may help"
            )
