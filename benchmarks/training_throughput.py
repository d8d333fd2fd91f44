"""Our training path (Trainer, token batches, eager attention on a CPU) against a plain loop on the same batches.

    python benchmarks/training_throughput.py --source train.de.gz --target train.en.gz

Claim: a step costs at most 1.3 times that of a plain PyTorch loop over the native class. Method: all train the tiny preset
of the freeze ablation on the same batches, in turns of `--steps` steps, `--rounds` turns each, in one process; the first step
of a turn is not counted; the figure is the median over turns, and the ratio of the medians. Beside it stands the arithmetic:
multiply-adds of the step, forward and backward, over the time.
"""

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import DataCollatorForSeq2Seq, MarianMTModel, TrainerCallback
from transformers.utils import logging

from hf_freeze import data, make_variant, multiply_adds
from hf_freeze.experiments import run as run_module
from hf_freeze.experiments import translation
from hf_freeze.experiments.environment import environment
from hf_freeze.experiments.recipe import expand, load_recipe
from hf_freeze.training import TokenBatchTrainer, label_smoothed_loss

RECIPE = Path(__file__).parents[1] / "recipes" / "freeze_ablation" / "recipe.yaml"


class Clock(TrainerCallback):
    """Times of the ends of steps."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def trainer_turn(model: Any, run: dict[str, Any], dataset: Any, collator: Any, steps: int) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = run_module.training_arguments(run, Path(folder))
        arguments.max_steps, arguments.save_strategy, arguments.eval_strategy = steps, "no", "no"
        arguments.load_best_model_at_end = False
        trainer = TokenBatchTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            data_collator=collator,
            compute_loss_func=label_smoothed_loss(run["training"]["label_smoothing"]),
            max_tokens=run["training"]["max_tokens"],
            callbacks=[clock],
        )
        trainer.train()
    return (clock.ends[-1] - clock.ends[0]) / (steps - 1)


def plain_turn(model: Any, run: dict[str, Any], dataset: Any, collator: Any, steps: int) -> float:
    settings = run["training"]
    sampler = data.TokenBatchSampler(
        *([len(ids) for ids in dataset[column]] for column in ("input_ids", "labels")),
        settings["max_tokens"],
        seed=run["seed"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), settings["learning_rate"], betas=(0.9, 0.98), weight_decay=0.0)
    device, ends = model.device.type, []
    for _, indices in zip(range(steps), sampler, strict=False):
        batch = collator(dataset.__getitems__(indices)).to(device)
        labels = batch.pop("labels")
        with torch.autocast(device, torch.bfloat16, enabled=settings["bf16"]):
            logits = model(**batch).logits.float()
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=settings["label_smoothing"]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return (ends[-1] - ends[0]) / (steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="source side of parallel text; without it the built-in corpus")
    parser.add_argument("--target")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.set_verbosity_error()
    run = expand(load_recipe(RECIPE, [f"preset={options.preset}"]))[0]
    run["training"].setdefault("max_grad_norm", 1.0)
    text = data.read_parallel(options.source, options.target) if options.source else data.builtin_corpus()["train"]
    vocabulary = run["tokenizer"]["vocab_size"] if options.source else 800
    tokenizer = data.train_tokenizer([*text["source"], *text["target"]], vocabulary)
    config = run_module.backbone_config(run["backbone"], tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    dataset = translation.encode(text, tokenizer)
    ours = make_variant(config, [], task="seq2seq-lm", init="marian")
    run_module.choose_attention(ours)
    plain = MarianMTModel(config).to(ours.device).train()
    collator = DataCollatorForSeq2Seq(tokenizer, model=ours)
    same_attention = copy.deepcopy(plain)
    run_module.choose_attention(same_attention)
    times: dict[str, list[float]] = {"Trainer path": [], "plain loop": [], "same with our attention": []}
    for _ in range(options.rounds):
        times["Trainer path"].append(trainer_turn(ours, run, dataset, collator, options.steps))
        plain.to(ours.device)
        times["plain loop"].append(plain_turn(plain, run, dataset, collator, options.steps))
        times["same with our attention"].append(
            plain_turn(same_attention.to(ours.device), run, dataset, collator, options.steps)
        )
    length = int(statistics.fmean(len(ids) for ids in dataset["labels"]))
    macs = multiply_adds(ours, length=length)
    tokens = min(run["training"]["max_tokens"], sum(len(ids) for ids in dataset["labels"]))
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rate = (macs.forward + macs.backward) * tokens / median / 1e9
        print(f"{name:<23} {1e3 * median:7.1f} ms a step (of {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}), "
              f"at most {rate:.0f} billion multiply-adds a second")  # fmt: skip
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours_seconds = medians.pop("Trainer path")
    ratios = ", ".join(f"{ours_seconds / seconds:.2f} to the {name}" for name, seconds in medians.items())
    print(f"ratio {ratios} (claim: at most 1.3 to the plain loop); {environment()}")


if __name__ == "__main__":
    main()
