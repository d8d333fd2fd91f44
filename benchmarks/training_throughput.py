"""Throughput of our training (Trainer, token batches, eager attention on a CPU) against a plain loop and the Trainer's defaults.

    python benchmarks/training_throughput.py --source train.de.gz --target train.en.gz

Claim: a step costs at most 1.15 times as much as in a plain PyTorch loop on the same batches, measured in target tokens per
second without padding. All paths train the same native class, or a variant of it, with fresh weights, in one process. A turn has
`--steps` steps, of which the first is not counted. The order of the paths is reversed from round to round. A ratio is the median
of the ratios of the rounds. The paths:

- ours: `TokenBatchTrainer`, batches with about the same number of padded tokens and similar lengths, our attention and loss;
- plain loop: PyTorch alone, the same batches and loss values, transformers' default attention; and again with our attention;
- Trainer's defaults: `Seq2SeqTrainer`, sentences in random order, as many per batch as ours has on average (so as many real
  tokens), padded to the longest; its own label smoothing; default attention; and again with our attention.

Where time is lost: padding is reported as a share of the computed positions; the effect of attention shows in the same path with
both kinds; the overhead of the Trainer is ours minus the plain loop with our attention, in ms per step. The rest of the
difference between the last path and ours comes from random order and the Trainer's loss. Limit: the multiply-adds of a step
(without padding) at the rate of bare products, see freeze_step.py.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _shared
import torch
from freeze_step import product_rate
from torch.nn import functional
from transformers import DataCollatorForSeq2Seq, MarianMTModel, PrinterCallback, Seq2SeqTrainer, TrainerCallback
from transformers.utils import logging

from hf_freeze import make_variant, multiply_adds
from hf_freeze.lab import data
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.text_training import backbone_config, choose_attention, training_arguments
from hf_freeze.lab.tasks import translation
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.training import label_smoothed_loss


class Meter(TrainerCallback):
    """A collator that counts tokens, and a callback that records when steps end. Batches are collated in the order of steps."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.ends: list[float] = []
        self.batches: list[tuple[int, int, int]] = []  # target tokens; all tokens; positions, on both sides

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        targets, sources = int((batch["labels"] != -100).sum()), int(batch["attention_mask"].sum())
        positions = batch["labels"].numel() + batch["input_ids"].numel()
        self.batches.append((targets, targets + sources, positions))
        return batch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _shared.synchronize()
        self.ends.append(time.perf_counter())

    def result(self) -> tuple[float, float, float]:
        """(seconds per step, target tokens per second, share of padding), without the first step."""
        steps, elapsed = len(self.ends) - 1, self.ends[-1] - self.ends[0]
        targets, tokens, positions = (sum(counts) for counts in zip(*self.batches[1 : steps + 1], strict=True))
        return elapsed / steps, targets / elapsed, 1 - tokens / positions


def trainer_turn(model: Any, run: Run, dataset: Any, meter: Meter, steps: int, sentences: int | None) -> None:
    """Train with the Trainer's defaults and `sentences` sentences per batch, or if None with our trainer."""
    settings = run.training
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(run, Path(folder))
        arguments.max_steps, arguments.save_strategy, arguments.eval_strategy = steps, "no", "no"
        arguments.load_best_model_at_end = False
        shared = {"model": model, "args": arguments, "train_dataset": dataset, "data_collator": meter}
        if sentences is None:
            loss = label_smoothed_loss(settings.label_smoothing)
            trainer: Any = TokenBatchTrainer(**shared, compute_loss_func=loss, max_tokens=settings.max_tokens)
        else:
            arguments.per_device_train_batch_size = sentences
            arguments.label_smoothing_factor = settings.label_smoothing
            trainer = Seq2SeqTrainer(**shared)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(meter)
        trainer.train()


def sampler(run: Run, dataset: Any) -> data.TokenBatchSampler:
    sources, targets = ([len(ids) for ids in dataset[column]] for column in ("input_ids", "labels"))
    return data.TokenBatchSampler(sources, targets, run.training.max_tokens, seed=run.seed)


def plain_turn(model: Any, run: Run, dataset: Any, meter: Meter, steps: int) -> None:
    settings = run.training
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    device = model.device.type
    model.train()
    for _, indices in zip(range(steps), sampler(run, dataset), strict=False):
        batch = meter(dataset.__getitems__(indices)).to(device)
        labels = batch.pop("labels")
        with torch.autocast(device, torch.bfloat16, enabled=settings.bf16):
            logits = model(**batch).logits.float()
        smoothing = settings.label_smoothing
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        meter.on_step_end()


def main() -> None:
    parser = _shared.parser(__doc__)
    parser.add_argument("--source", help="source side of parallel text; default: the built-in corpus")
    parser.add_argument("--target")
    parser.add_argument("--steps", type=int, default=15, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    logging.set_verbosity_error()
    run = _shared.rows(options)["0"]
    text = data.read_parallel(options.source, options.target) if options.source else data.builtin_corpus()["train"]
    vocabulary = run.tokenizer.vocab_size if options.source else 800
    tokenizer = data.train_tokenizer([*text["source"], *text["target"]], vocabulary)
    config = backbone_config(run.backbone, tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    dataset = translation.encode(text, tokenizer)
    batches = len(sampler(run, dataset))
    if not 2 <= options.steps <= batches:
        raise SystemExit(f"--steps {options.steps} is outside 2..{batches}, the batches of an epoch")
    sentences = round(len(dataset) / batches)
    ours = make_variant(config, [], task="seq2seq-lm", init="marian").to(_shared.DEVICE)
    choose_attention(ours)
    natives = [MarianMTModel(copy.deepcopy(config)).to(_shared.DEVICE) for _ in range(4)]
    for model in natives[1::2]:
        choose_attention(model)
    paths: dict[str, Callable[[Meter], None]] = {
        "ours": lambda meter: trainer_turn(ours, run, dataset, meter, options.steps, None),
        "plain loop": lambda meter: plain_turn(natives[0], run, dataset, meter, options.steps),
        "plain loop, our attention": lambda meter: plain_turn(natives[1], run, dataset, meter, options.steps),
        "Trainer's defaults": lambda meter: trainer_turn(natives[2], run, dataset, meter, options.steps, sentences),
        "Trainer's, our attention": lambda meter: trainer_turn(
            natives[3], run, dataset, meter, options.steps, sentences
        ),
    }
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in paths}
    collator = DataCollatorForSeq2Seq(tokenizer, model=ours)
    for number in range(options.rounds):
        for name in list(paths)[:: -1 if number % 2 else 1]:
            meter = Meter(collator)
            paths[name](meter)
            results[name].append(meter.result())
    ratios = {
        name: [mine[1] / theirs[1] for mine, theirs in zip(results["ours"], rounds, strict=True)]
        for name, rounds in results.items()
    }
    length = round(statistics.fmean(len(ids) for ids in dataset["labels"]))
    macs = multiply_adds(ours, length=length)
    rate = product_rate(ours, run.training.max_tokens, run.training.bf16)
    lines = []
    for name, rounds in results.items():
        step, speed, padding = (statistics.median(values) for values in zip(*rounds, strict=True))
        spread = _shared.quartiles([result[1] for result in rounds], 0)
        ratio = f"{statistics.median(ratios[name]):.3f} ({_shared.quartiles(ratios[name])})"
        lines.append([name, f"{1e3 * step:.1f}", f"{speed:,.0f} ({spread})", f"{100 * padding:.1f} %", ratio])
    header = ["path", "ms a step", "target tokens a second", "padding", "ours to it"]
    paired = zip(results["ours"], results["plain loop, our attention"], strict=True)
    overhead = statistics.median(mine[0] - theirs[0] for mine, theirs in paired)
    summary = (
        f"cost of a token, ours to the plain loop: ratio {1 / statistics.median(ratios['plain loop']):.3f} (claim: at most "
        f"1.15), with our attention {1 / statistics.median(ratios['plain loop, our attention']):.3f}; the Trainer adds "
        f"{1e3 * overhead:.1f} ms a step; {sentences} sentences a batch in the Trainer's defaults; at {rate / 1e9:.0f} billion "
        f"multiply-adds a second the products allow {rate / (macs.forward + macs.backward):,.0f} tokens a second; "
        f"{options.preset}, {len(tokenizer)} types"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
