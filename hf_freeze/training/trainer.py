"""The Seq2SeqTrainer with batches of equal token budget and a perplexity that is one."""

import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer

from hf_freeze.data.batching import TokenBatchSampler
from hf_freeze.data.tokenization import check_ids


class TokenBatchTrainer(Seq2SeqTrainer):
    """`max_tokens`: padded target tokens of a batch, for each process.

    Data sets have columns `input_ids` and `labels`. Pass `accelerator_config={"even_batches": False}` in the training
    arguments: the sampler gives every process equally many batches itself. `evaluate` returns the mean negative
    log-likelihood of a target token in nats, without label smoothing, every token counted once (the Trainer's own averages
    means of batches, and smooths), and its exponential.
    """

    def __init__(self, *args: Any, max_tokens: int, **kwargs: Any) -> None:
        if kwargs.get("compute_metrics") is not None:
            raise ValueError("TokenBatchTrainer evaluates perplexity only; score translations with a pipeline")
        super().__init__(*args, **kwargs)
        self.max_tokens = max_tokens

    def get_train_dataloader(self) -> DataLoader:
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        loader = self._token_loader(self.train_dataset, seed=seed, multiple_of=self.args.world_size)
        return self.accelerator.prepare(loader)

    def _token_loader(self, dataset: Any, **kwargs: Any) -> DataLoader:
        columns = [dataset[column] for column in ("input_ids", "labels")]
        for sentences in columns:
            check_ids(sentences, self.accelerator.unwrap_model(self.model).config.vocab_size)
        sources, targets = ([len(ids) for ids in sentences] for sentences in columns)
        return DataLoader(
            dataset,
            batch_sampler=TokenBatchSampler(sources, targets, self.max_tokens, **kwargs),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval", **_: Any
    ) -> dict[str, float]:
        """{prefix_loss: nats a token, prefix_perplexity}; every process takes its share of the batches."""
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        loader = self._token_loader(self.eval_dataset if eval_dataset is None else eval_dataset, shuffle=False)
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for number, batch in enumerate(loader):
            if number % self.args.world_size != self.args.process_index:
                continue
            batch = self._prepare_inputs(dict(batch))
            labels = batch.pop("labels")
            with self.compute_loss_context_manager():
                logits = model(**batch).logits
            nll = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            sums += torch.stack([nll.double(), (labels != -100).sum().double()])
        model.train(was_training)
        reduced: Any = self.accelerator.reduce(sums)
        nll, tokens = reduced.tolist()
        metrics = {
            f"{metric_key_prefix}_loss": nll / tokens,
            f"{metric_key_prefix}_perplexity": math.exp(min(nll / tokens, 700)),
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
