"""One translation run: data, tokenizer, variant, training, test scores."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, Seq2SeqTrainingArguments, TrainerCallback

from hf_freeze import data as hf_data
from hf_freeze import make_variant
from hf_freeze.accounting import count_parameters, stored_bytes
from hf_freeze.data.tokenization import check_ids
from hf_freeze.experiments.environment import environment, peak_memory, write_whole
from hf_freeze.experiments.recipe import SPLITS, data_form
from hf_freeze.experiments.statistics import bleu_items
from hf_freeze.metrics import load as load_metric
from hf_freeze.registry import method_from_dict
from hf_freeze.training import TokenBatchTrainer, label_smoothed_loss

Report = Callable[[dict[str, Any]], None]  # receives {"step":, "steps":, "loss": ...} while the run goes on


def load_data(settings: dict[str, Any]) -> dict[str, datasets.Dataset]:
    """Splits train, dev and test with columns `source` and `target`, as the recipe's `data` section says."""
    form = data_form(settings)
    if form == "builtin":
        corpus = hf_data.builtin_corpus(**settings["builtin"])
        splits = {name: corpus[name] for name in SPLITS}
    elif form == "hub":
        columns = {"source": settings["source"], "target": settings["target"]}
        splits = {name: hf_data.load_hub_parallel(settings["hub"], settings[name], **columns) for name in SPLITS}
    else:
        root = Path(settings.get("root", "."))
        splits = {name: hf_data.read_parallel(*(root / file for file in settings[name])) for name in SPLITS}
    limit = settings.get("limit")
    return {name: split.select(range(min(limit or len(split), len(split)))) for name, split in splits.items()}


def backbone_config(settings: dict[str, Any], tokenizer: Any) -> transformers.PreTrainedConfig:
    """The config of a fresh backbone whose vocabulary and special tokens are the tokenizer's."""
    vocabulary = len(tokenizer)
    return transformers.AutoConfig.for_model(
        settings["model_type"],
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        **settings["config"],
    )


def run_translation(run: dict[str, Any], folder: Path, report: Report = lambda _: None) -> dict[str, Any]:
    """Train and test one row; writes model, metrics and log into `folder`, which may hold a killed run to resume.

    Returns the record that goes to results.jsonl.
    """
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    transformers.set_seed(run["seed"])
    splits = load_data(run["data"])
    texts = [*splits["train"]["source"], *splits["train"]["target"]]
    tokenizer = hf_data.train_tokenizer(texts, run["tokenizer"]["vocab_size"], run["tokenizer"].get("kind", "bpe"))
    config = backbone_config(run["backbone"], tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    model = make_variant(
        config,
        [method_from_dict(method) for method in run["methods"]],
        task="seq2seq-lm",
        init=run["backbone"].get("init", "backbone"),
        seed=run["seed"],
    )
    choose_attention(model)
    encoded = {name: encode(splits[name], tokenizer) for name in ("train", "dev")}
    progress = _Progress(report)
    trainer = TokenBatchTrainer(
        model=model,
        args=training_arguments(run, folder),
        train_dataset=encoded["train"],
        eval_dataset=encoded["dev"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_loss_func=label_smoothed_loss(run["training"].get("label_smoothing", 0.0)),
        max_tokens=run["training"]["max_tokens"],
        callbacks=[progress, EarlyStoppingCallback(run["training"].get("patience", 10))],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trained = time.perf_counter()
    trainer.train(resume_from_checkpoint=_last_whole_checkpoint(folder / "checkpoints"))
    train_seconds = time.perf_counter() - trained
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.config.use_cache = True  # the Trainer saves it switched off
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    report({"stage": "testing"})
    tested = time.perf_counter()
    sentences, references = list(splits["test"]["source"]), list(splits["test"]["target"])
    translations = translate(model, tokenizer, sentences, bf16=trainer.args.bf16, **run["decoding"])
    (folder / "translations.txt").write_text("\n".join(translations) + "\n", encoding="utf-8")
    np.save(folder / "items.npy", bleu_items(translations, references))
    scores: dict[str, Any] = {
        name: load_metric(name).compute(predictions=translations, references=references)
        for name in ("sacrebleu", "chrf")
    }
    dev = trainer.evaluate()
    epochs = [entry for entry in trainer.state.log_history if "eval_loss" in entry][:-1]
    parameters = count_parameters(model)
    record = {
        "recipe": run["name"],
        "task": run["task"],
        "row": run["row"],
        "label": run["label"],
        "seed": run["seed"],
        "metrics": {
            "test_bleu": scores["sacrebleu"]["score"],
            "test_chrf": scores["chrf"]["score"],
            "dev_loss": dev["eval_loss"],
            "dev_perplexity": dev["eval_perplexity"],
        },
        "signatures": {"test_bleu": scores["sacrebleu"]["signature"], "test_chrf": scores["chrf"]["signature"]},
        "epochs_trained": round(trainer.state.epoch or 0, 3),
        "epochs_to_convergence": round(min(epochs, key=lambda e: e["eval_loss"])["epoch"], 3),
        "steps": trainer.state.global_step,
        "parameters": {
            "total": parameters.total,
            "trainable": parameters.trainable,
            "stored": parameters.stored,
            "stored_bytes": stored_bytes(model),
            "trainable_share": parameters.trainable / parameters.total,
            "by_component": {
                name: {"total": part.total, "trainable": part.trainable, "stored": part.stored}
                for name, part in parameters.by_component.items()
            },
        },
        "seconds": {
            "train": train_seconds,
            "test": time.perf_counter() - tested,
            "all": time.perf_counter() - started,
        },
        "resumed": progress.resumed,
        "peak_memory_bytes": peak_memory(),
        "environment": environment(),
    }
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in trainer.state.log_history))
    # Written last: a run with metrics.json is a finished one.
    write_whole(folder / "metrics.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def encode(split: datasets.Dataset, tokenizer: Any) -> datasets.Dataset:
    """Columns `input_ids` and `labels` from `source` and `target`."""

    def ids(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "input_ids": tokenizer(batch["source"], truncation=True)["input_ids"],
            "labels": tokenizer(batch["target"], truncation=True)["input_ids"],
        }

    return split.map(ids, batched=True, remove_columns=split.column_names, keep_in_memory=True)


def training_arguments(run: dict[str, Any], folder: Path) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments for the recipe's `training` section."""
    settings = run["training"]
    betas = settings.get("adam_betas", [0.9, 0.98])
    return Seq2SeqTrainingArguments(
        output_dir=str(folder / "checkpoints"),
        num_train_epochs=settings["epochs"],
        learning_rate=settings["learning_rate"],
        warmup_steps=settings["warmup_steps"],
        lr_scheduler_type=settings.get("schedule", "linear"),
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=settings.get("adam_epsilon", 1e-9),
        weight_decay=settings.get("weight_decay", 0.0),
        max_grad_norm=settings.get("max_grad_norm", 1.0),
        gradient_accumulation_steps=settings.get("accumulation", 1),
        bf16=settings.get("bf16", True),
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        restore_callback_states_from_checkpoint=True,  # or a resumed run would forget how long it has been patient
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
        logging_steps=20,
        seed=run["seed"],
        accelerator_config={"even_batches": False},
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _last_whole_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: the Trainer writes trainer_state.json last."""
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]), reverse=True):
        if (checkpoint / "trainer_state.json").exists():
            return str(checkpoint)
    return None


def choose_attention(model: Any) -> None:
    """Plain matrix products on a CPU: torch's fused attention with a padding mask in bf16 took 60 % of a step there."""
    if not torch.cuda.is_available():
        model.set_attn_implementation("eager")


@torch.inference_mode()
def translate(
    model: Any,
    tokenizer: Any,
    sentences: list[str],
    *,
    num_beams: int = 1,
    max_tokens: int = 4096,
    bf16: bool = False,
) -> list[str]:
    """Translate, in the given order; batches of similar length hold at most `max_tokens` padded source tokens."""
    model.eval()
    ids = tokenizer(sentences, truncation=True)["input_ids"]
    check_ids(ids, model.config.vocab_size)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    translations = [""] * len(ids)
    while order:
        longest = len(ids[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, max_tokens // longest)))]
        inputs = tokenizer.pad({"input_ids": [ids[i] for i in batch]}, return_tensors="pt").to(model.device)
        limit = min(2 * longest + 10, model.config.max_position_embeddings - 1)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            outputs = model.generate(**inputs, num_beams=num_beams, do_sample=False, max_new_tokens=limit)
        for i, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            translations[i] = text
    return translations


class _Progress(TrainerCallback):
    """Tells the grid how far the run is."""

    def __init__(self, report: Report) -> None:
        self.report, self.resumed = report, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.resumed = state.global_step > 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        shown = {key: value for key, value in (logs or {}).items() if key in ("loss", "eval_perplexity")}
        self.report({"step": state.global_step, "steps": state.max_steps, "epoch": state.epoch, **shown})
