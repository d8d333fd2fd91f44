"""Data, tokenizer, variant, training and test scores of a transformer of text, which the Trainer trains."""

import importlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import EarlyStoppingCallback, Seq2SeqTrainingArguments, TrainerCallback

from hf_freeze import make_variant
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.recipes.rows import method_of
from hf_freeze.lab.runs import chosen_layers, measured_heads, measured_maps
from hf_freeze.lab.runs.calibrated import calibration
from hf_freeze.lab.runs.resume import check_data
from hf_freeze.lab.tasks import translation
from hf_freeze.lab.tasks.base import Outcome, ProgressCallback, Task, Trained
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.lab.training.precision import AUTO, uses_bf16
from hf_freeze.run_folder import NOTHING, teacher_folder
from hf_freeze.training import VariantCallback, parameter_groups

_ADAM: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-9}


def backbone_config(settings: dict[str, Any], tokenizer: Any, **fields: Any) -> transformers.PreTrainedConfig:
    """The config of a fresh backbone whose vocabulary and special tokens are the tokenizer's. `fields`: what else is known."""
    vocabulary, pad, eos = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = {"vocab_size": vocabulary, "pad_token_id": pad, "eos_token_id": eos}
    if settings["model_type"] == "marian":
        ids |= {"decoder_vocab_size": vocabulary, "decoder_start_token_id": pad, "forced_eos_token_id": eos}
    else:
        ids |= {"bos_token_id": eos}
    return transformers.AutoConfig.for_model(settings["model_type"], **ids, **fields, **settings["config"])


class Paused(Exception):
    """A training stopped at the checkpoint where it was to wait; it goes on from there."""


def new_tokenizer(task: Task, run: dict[str, Any], split: Any) -> Any:
    """The tokenizer of a fresh model, trained on the training `split`."""
    vocabulary, kind = run["tokenizer"]["vocab_size"], run["tokenizer"].get("kind", task.tokenizer)
    return hf_data.tokenizer_for(task.texts(split), vocabulary, kind, eos=task.eos)


def execute_text(
    task: Task,
    run: dict[str, Any],
    folder: Path,
    report: ProgressCallback,
    *,
    checkpoint: str | None,
    start: Path | None,
    until: float | None = None,
    trackers: Sequence[TrainerCallback] = (),
) -> Trained:
    """The transformers of text, which the Trainer trains; `until`, `scored_on`: as `execute` says. `trackers`: what sees the
    curves of the training, and the test scores."""
    scored_on = run.get("scored_on", "test")
    splits = task.load(run["data"])
    fields = task.config(splits["train"])
    encoded: dict[str, Any] = {}

    def encode(name: str) -> Any:
        if name not in encoded:
            encoded[name] = task.encode(splits[name], tokenizer, run, _tokenising(report, name))
        return encoded[name]

    if start is not None or "pretrained" in run["backbone"]:
        weights = start / "model" if start is not None else run["backbone"]["pretrained"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        model = _load_pretrained(weights, task, fields, run["seed"])
        tokenizer.model_max_length = min(
            tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
        )
        methods = [method_of(method, tokenizer) for method in run["methods"]]
        if start is not None and "heads" in run:
            methods.append(measured_heads.pruning(run["heads"], start, model, run["seed"]))
        if start is not None and "layers" in run:
            report({"stage": "choosing layers"})
            batches = _batches(task, run, folder, model, tokenizer, encode("dev"))
            methods.insert(0, chosen_layers.selection(run["layers"], model, batches))
        if "calibration" in run:
            report({"stage": "calibrating"})
        seen = calibration(
            run, lambda: encode("train"), lambda rows: _batches(task, run, folder, model, tokenizer, rows)
        )
        budget = run.get("calibration", {}).get("budget")
        model = make_variant(model, methods, seed=run["seed"], calibration=seen, tokenizer=tokenizer, budget=budget)
    else:
        tokenizer = new_tokenizer(task, run, splits["train"])
        config = backbone_config(run["backbone"], tokenizer, **fields)
        tokenizer.model_max_length = config.max_position_embeddings
        init = run["backbone"].get("init", "backbone")
        methods = [method_of(method, tokenizer) for method in run["methods"]]
        model = make_variant(config, methods, task=task.head, init=init, seed=run["seed"])
    if (teacher := teacher_folder(folder.parent, run)) is not None:
        if model.needs_teacher:
            model.set_teacher(_load_pretrained(teacher / "model", task, fields, run["seed"]))
        if "targets" in run:
            report({"stage": "translating by the teacher"})
            splits["train"] = translation.taught(splits["train"], teacher, run)
    choose_attention(model)
    trains = run["training"]["epochs"] > 0
    used = ["train"] if trains or "head_scores" in run or "pictures" in run else []
    used += [name for name in splits if name in ("dev", scored_on)]
    for name in used:
        encode(name)
    check_data(folder, checkpoint, encoded)
    progress = _ReportProgress(report)
    callbacks = [progress, VariantCallback(), *trackers]
    if not model.finalizable:
        callbacks.append(EarlyStoppingCallback(run["training"].get("patience", 10)))
    if until is not None:
        callbacks.append(_PauseAt(until))
    trainer = _trainer_class(task, run)(
        model=model,
        args=training_arguments(run, folder, best=not model.finalizable),
        train_dataset=encoded.get("train"),
        eval_dataset=encoded["dev"],
        data_collator=task.collator(tokenizer, model),
        processing_class=tokenizer,
        compute_loss_func=task.loss(run["training"], model),
        max_tokens=run["training"]["max_tokens"],
        callbacks=callbacks,
        **task.arguments(run["training"]),
        optimizers=(optimizer(model, run["training"]) if trains else None, None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    began = time.perf_counter()
    if trains:
        trainer.train(resume_from_checkpoint=checkpoint)
    else:
        trainer.state.epoch, progress.ended = 0.0, True
    train_seconds = time.perf_counter() - began
    for tracker in trackers:  # what is evaluated from here on is the best checkpoint, not the last step
        trainer.remove_callback(tracker)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if model.finalizable:
        model.finalize()
    model.config.use_cache = True  # the Trainer saves it switched off
    report({"stage": "testing"})
    tested = time.perf_counter()
    outcome = Outcome(metrics={}, items=np.zeros((0, 1)))
    if scored_on != NOTHING:
        outcome = task.test(run, folder, trainer, tokenizer, splits[scored_on], encoded[scored_on])
    dev = trainer.evaluate()
    if "head_scores" in run:
        report({"stage": "measuring measured_heads"})
        measured_heads.measure(run["head_scores"], task, run, folder, trainer, tokenizer, splits, encoded)
    if "pictures" in run and trainer.is_world_process_zero():
        report({"stage": "mapping attention and embeddings"})
        dev_batches = trainer.get_eval_dataloader(encoded["dev"])
        measured_maps.measure(run["pictures"], folder, model, tokenizer, encoded["train"], dev_batches)
    test_seconds = time.perf_counter() - tested
    epochs = [entry for entry in trainer.state.log_history if "eval_loss" in entry][:-1]
    if trainer.is_world_process_zero():
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    on_dev = {name.replace("eval_", "dev_"): value for name, value in dev.items() if name.startswith("eval_")}
    metrics = outcome.metrics | on_dev
    for tracker in trackers:
        tracker.on_log(trainer.args, trainer.state, trainer.control, logs=dict(outcome.metrics), model=model)
    return Trained(
        model=model,
        outcome=replace(outcome, metrics=metrics),
        log=trainer.state.log_history,
        epochs=trainer.state.epoch or 0,
        best_epoch=min(epochs, key=lambda entry: entry["eval_loss"])["epoch"] if epochs else 0.0,
        steps=trainer.state.global_step,
        train_seconds=train_seconds,
        test_seconds=test_seconds,
        resumed=progress.resumed,
    )


def _trainer_class(task: Task, run: dict[str, Any]) -> type[TokenBatchTrainer]:
    """The task's, or the one that Python named (`run_grid`); recipes name none."""
    if "trainer" not in run:
        return task.trainer
    module, _, name = run["trainer"].partition(":")
    return getattr(importlib.import_module(module), name)


def _batches(task: Task, run: dict[str, Any], folder: Path, model: Any, tokenizer: Any, encoded: Any) -> list[Any]:
    """The batches of an encoded split, on the device that the model is trained on."""
    trainer = _trainer_class(task, run)(
        model=model,
        args=training_arguments(run, folder, best=False),
        eval_dataset=encoded,
        data_collator=task.collator(tokenizer, model),
        processing_class=tokenizer,
        max_tokens=run["training"]["max_tokens"],
        **task.arguments(run["training"]),
    )
    return list(trainer.batches(encoded))


def _tokenising(report: ProgressCallback, name: str) -> hf_data.Progress:
    return lambda done, rows: report({"stage": f"tokenising {name}: {done:,} of {rows:,}"})


def _load_pretrained(weights: str | Path, task: Task, fields: dict[str, Any], seed: int) -> Any:
    """A model of a finished run or of another's training, perhaps of another task: then with a head of this one, drawn from
    `seed`. `fields`: of the config, which the data decide."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return AUTO_CLASSES[task.head].from_pretrained(weights, **fields)


def training_arguments(run: dict[str, Any], folder: Path, *, best: bool = True) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments for the recipe's `training` section. `best`: end with the checkpoint of the lowest dev loss; what
    is pruned while it is trained is best before it is pruned, and must end with the last one."""
    settings = run["training"]
    betas = settings.get("adam_betas", _ADAM["betas"])
    # More than one evaluation an epoch is one every so many steps, which the Trainer takes as a share of all steps.
    evaluations = settings.get("evaluations", 1)
    step: Any = 1 / settings["epochs"] / evaluations if settings["epochs"] else 1
    interval, share = (
        ("epoch", {}) if evaluations == 1 or step >= 1 else ("steps", {"eval_steps": step, "save_steps": step})
    )
    return Seq2SeqTrainingArguments(
        output_dir=str(folder / "checkpoints"),
        num_train_epochs=settings["epochs"],
        learning_rate=settings["learning_rate"],
        warmup_steps=settings["warmup_steps"],
        lr_scheduler_type=settings.get("schedule", "linear"),
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=settings.get("adam_epsilon", _ADAM["eps"]),
        weight_decay=settings.get("weight_decay", 0.0),
        max_grad_norm=settings.get("max_grad_norm", 1.0),
        gradient_accumulation_steps=settings.get("accumulation", 1),
        bf16=uses_bf16(settings.get("bf16", AUTO)),
        use_cpu=not torch.cuda.is_available(),
        eval_strategy=interval,
        save_strategy=interval,
        **share,
        save_total_limit=1,
        restore_callback_states_from_checkpoint=True,  # or a resumed run would forget how long it has been patient
        load_best_model_at_end=best,
        metric_for_best_model="loss",
        greater_is_better=False,
        logging_steps=20,
        seed=run["seed"],
        accelerator_config={"even_batches": False},
        report_to="none",  # the callbacks of tracking.py
        run_name=folder.name,
        project=run["name"],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def optimizer(model: Any, settings: dict[str, Any]) -> torch.optim.Optimizer | None:
    """AdamW with a rate of its own for some components, where the recipe names any; None is the Trainer's choice."""
    if "learning_rates" not in settings:
        return None
    groups = parameter_groups(
        model,
        settings["learning_rates"],
        lr=settings["learning_rate"],
        weight_decay=settings.get("weight_decay", 0.0),
    )
    return torch.optim.AdamW(
        groups, betas=settings.get("adam_betas", _ADAM["betas"]), eps=settings.get("adam_epsilon", _ADAM["eps"])
    )


def choose_attention(model: Any) -> None:
    """Plain matrix products on a CPU: torch's fused attention with a padding mask in bf16 took 60 % of a step there."""
    if not torch.cuda.is_available():
        model.set_attn_implementation("eager")


class _PauseAt(TrainerCallback):
    """Leaves the training, as a kill would, at the first checkpoint of `epochs` or more. An ordinary stop of the Trainer would
    reload the best checkpoint and remove the last one, from which the run is to go on."""

    def __init__(self, epochs: float) -> None:
        self.epochs = epochs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.epoch or 0) >= self.epochs - 1e-6 and state.global_step < state.max_steps:
            raise Paused


class _ReportProgress(TrainerCallback):
    """Tells the grid how far the run is."""

    def __init__(self, report: ProgressCallback) -> None:
        self.report, self.resumed, self.ended = report, False, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.resumed = state.global_step > 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = True  # the evaluation of the best checkpoint is no progress

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.ended:
            return
        shown = {
            key: value for key, value in (logs or {}).items() if key in ("loss", "eval_perplexity", "eval_accuracy")
        }
        self.report({"step": state.global_step, "steps": state.max_steps, "epoch": state.epoch, **shown})
