"""A run of a transformer of text: its data, model, teacher, trainer, training and testing, one step after the other."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import EarlyStoppingCallback, Seq2SeqTrainingArguments, TrainerCallback

from hf_freeze import make_variant
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.lab import data as hf_data
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.rows import method_of
from hf_freeze.lab.recipes.settings import Tokenizer, Training
from hf_freeze.lab.runs import measured_heads, measured_maps
from hf_freeze.lab.runs.backbones import backbone_config
from hf_freeze.lab.runs.calibrated import calibration
from hf_freeze.lab.runs.chosen_layers import selection
from hf_freeze.lab.runs.resume import check_data
from hf_freeze.lab.tasks import translation
from hf_freeze.lab.tasks.base import Job, Outcome, ProgressCallback, Task, Trained
from hf_freeze.lab.training import TokenBatchTrainer
from hf_freeze.lab.training.precision import uses_bf16
from hf_freeze.training import VariantCallback, parameter_groups


def execute_text(task: Task, job: Job) -> Trained:
    """Train and test a transformer of text, and write its model."""
    return TextRun(task, job).execute()


class TextRun:
    """One run of a transformer of text, in six steps."""

    def __init__(self, task: Task, job: Job) -> None:
        self.task, self.job, self.run = task, job, job.run
        self.progress = _ReportProgress(job.report)
        self.splits: dict[str, Any] = {}
        self.encoded: dict[str, Any] = {}  # the splits that are needed, as the model reads them
        self.config_fields: dict[str, Any] = {}  # that the data decide
        self.tokenizer: Any = None
        self.model: Any = None

    def execute(self) -> Trained:
        self.load_data()
        self.make_model()
        self.set_teacher()
        trainer = self.make_trainer()
        seconds = self.train(trainer)
        return self.test(trainer, seconds)

    # -- 1. data -------------------------------------------------------------------------------------------------------------

    def load_data(self) -> None:
        self.splits = self.task.load(self.run.data)
        self.config_fields = self.task.config(self.splits["train"])

    def encode(self, name: str) -> Any:
        """A split as the model reads it, once there is a tokenizer."""
        if name not in self.encoded:
            progress = partial(_tokenising, self.job.report, name)
            self.encoded[name] = self.task.encode(self.splits[name], self.tokenizer, self.run, progress)
        return self.encoded[name]

    # -- 2. model ------------------------------------------------------------------------------------------------------------

    def make_model(self) -> None:
        """The variant: of the weights of a finished run or of a pretrained model, or with fresh ones."""
        weights = self.job.start / "model" if self.job.start is not None else self.run.pretrained
        if weights is None:
            self._make_fresh()
        else:
            self._make_from(weights)

    def _make_fresh(self) -> None:
        run, backbone = self.run, self.run.backbone
        assert run.tokenizer is not None  # a recipe of fresh weights has both
        assert backbone is not None
        self.tokenizer = new_tokenizer(self.task, run.tokenizer, self.splits["train"])
        config = backbone_config(backbone, self.tokenizer, **self.config_fields)
        self.tokenizer.model_max_length = config.max_position_embeddings
        self.model = make_variant(config, self._methods(), task=self.task.head, init=backbone.init, seed=run.seed)

    def _make_from(self, weights: str | Path) -> None:
        run, start = self.run, self.job.start
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        self.model = self._load_pretrained(weights)
        most = self.tokenizer.model_max_length
        self.tokenizer.model_max_length = min(most, getattr(self.model.config, "max_position_embeddings", most))
        methods = self._methods()
        if start is not None and run.heads is not None:
            methods.append(measured_heads.pruning(run.heads, start, self.model, run.seed))
        if start is not None and run.layers is not None:
            self.job.report({"stage": "choosing layers"})
            methods.insert(0, selection(run.layers, self.model, self._batches(self.encode("dev"))))
        if run.calibration is not None:
            self.job.report({"stage": "calibrating"})
        self.model = make_variant(
            self.model,
            methods,
            seed=run.seed,
            calibration=calibration(run, lambda: self.encode("train"), self._batches),
            tokenizer=self.tokenizer,
            budget=run.calibration.budget if run.calibration is not None else None,
        )

    def _methods(self) -> list[Any]:
        return [method_of(method, self.tokenizer) for method in self.run.methods]

    def _load_pretrained(self, weights: str | Path) -> Any:
        """A model of a finished run or of another's training, perhaps of another task: then with a head of this one, drawn from
        the seed of the run."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(self.run.seed)
            return AUTO_CLASSES[self.task.head].from_pretrained(weights, **self.config_fields)

    # -- 3. teacher ----------------------------------------------------------------------------------------------------------

    def set_teacher(self) -> None:
        """What distillation learns from: the outputs of the teacher, or its translations as targets."""
        if (teacher := self.job.teacher) is None:
            return
        if self.model.needs_teacher:
            self.model.set_teacher(self._load_pretrained(teacher / "model"))
        if self.run.targets is not None:
            self.job.report({"stage": "translating by the teacher"})
            self.splits["train"] = translation.taught(self.splits["train"], teacher, self.run)

    # -- 4. trainer ----------------------------------------------------------------------------------------------------------

    def make_trainer(self) -> TokenBatchTrainer:
        run, model = self.run, self.model
        choose_attention(model)
        for name in self._used_splits():
            self.encode(name)
        check_data(self.job.folder, self.job.checkpoint, self.encoded)
        callbacks = [self.progress, VariantCallback(), *self.job.trackers]
        if not model.finalizable:
            callbacks.append(EarlyStoppingCallback(run.training.patience))
        if self.job.until is not None:
            callbacks.append(_PauseAt(self.job.until))
        trainer = self._trainer(
            best=not model.finalizable,
            train_dataset=self.encoded.get("train"),
            eval_dataset=self.encoded["dev"],
            compute_loss_func=self.task.loss(run.training, model),
            callbacks=callbacks,
            optimizers=(optimizer(model, run.training) if self._trains else None, None),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    @property
    def _trains(self) -> bool:
        return self.run.training.epochs > 0

    def _used_splits(self) -> list[str]:
        trained = self._trains or bool(self.run.head_scores or self.run.pictures)
        return ["train"] * trained + [name for name in self.splits if name in ("dev", self.run.scored_on)]

    def _trainer(self, *, best: bool, **more: Any) -> TokenBatchTrainer:
        return self.task.trainer(
            model=self.model,
            args=training_arguments(self.run, self.job.folder, best=best),
            data_collator=self.task.collator(self.tokenizer, self.model),
            processing_class=self.tokenizer,
            max_tokens=self.run.training.max_tokens,
            **self.task.arguments(self.run.training),
            **more,
        )

    def _batches(self, encoded: Any) -> list[Any]:
        """The batches of an encoded split, on the device that the model is trained on."""
        return list(self._trainer(best=False, eval_dataset=encoded).batches(encoded))

    # -- 5. training ---------------------------------------------------------------------------------------------------------

    def train(self, trainer: TokenBatchTrainer) -> float:
        """Train and finalize the model; returns the seconds of training."""
        began = time.perf_counter()
        if self._trains:
            trainer.train(resume_from_checkpoint=self.job.checkpoint)
        else:
            trainer.state.epoch, self.progress.ended = 0.0, True
        seconds = time.perf_counter() - began
        for tracker in self.job.trackers:  # what is evaluated from here on is the best checkpoint, not the last step
            trainer.remove_callback(tracker)
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        if self.model.finalizable:
            self.model.finalize()
        self.model.config.use_cache = True  # the Trainer saves it switched off
        return seconds

    # -- 6. testing ----------------------------------------------------------------------------------------------------------

    def test(self, trainer: TokenBatchTrainer, train_seconds: float) -> Trained:
        """Score the model, measure what the row asks for, and write it with its tokenizer."""
        self.job.report({"stage": "testing"})
        tested = time.perf_counter()
        outcome = self._score(trainer, self.run.scored_on, self.job.folder)
        dev = trainer.evaluate()
        self._measure(trainer)
        test_seconds = time.perf_counter() - tested
        if trainer.is_world_process_zero():
            self.model.save_pretrained(self.job.folder / "model")
            self.tokenizer.save_pretrained(self.job.folder / "model")
        for tracker in self.job.trackers:
            tracker.on_log(trainer.args, trainer.state, trainer.control, logs=dict(outcome.metrics), model=self.model)
        on_dev = {name.replace("eval_", "dev_"): value for name, value in dev.items() if name.startswith("eval_")}
        state = trainer.state
        epochs = [entry for entry in state.log_history if "eval_loss" in entry][:-1]
        return Trained(
            model=self.model,
            outcome=replace(outcome, metrics=outcome.metrics | on_dev),
            log=state.log_history,
            epochs=state.epoch or 0,
            best_epoch=min(epochs, key=lambda entry: entry["eval_loss"])["epoch"] if epochs else 0.0,
            steps=state.global_step,
            train_seconds=train_seconds,
            test_seconds=test_seconds,
            resumed=self.progress.resumed,
        )

    def _score(self, trainer: TokenBatchTrainer, split: str, folder: Path) -> Outcome:
        encoded = self.encoded[split]
        return self.task.test(self.run, folder, trainer, self.tokenizer, self.splits[split], encoded)

    def _measure(self, trainer: TokenBatchTrainer) -> None:
        """What the row wants to know of its heads, and the numbers of its pictures."""
        run, folder = self.run, self.job.folder
        if run.head_scores:
            self.job.report({"stage": "measuring heads"})
            on_dev: Callable[[Path], Outcome] = partial(self._score, trainer, "dev")
            measured_heads.measure(run, folder, trainer, self.encoded["train"], on_dev)
        if run.pictures and trainer.is_world_process_zero():
            self.job.report({"stage": "mapping attention and embeddings"})
            batches = trainer.get_eval_dataloader(self.encoded["dev"])
            measured_maps.measure(run.pictures, folder, self.model, self.tokenizer, self.encoded["train"], batches)


class Paused(Exception):
    """A training stopped at the checkpoint where it was to wait; it goes on from there."""


def new_tokenizer(task: Task, settings: Tokenizer, split: Any) -> Any:
    """The tokenizer of a fresh model, trained on the training `split`."""
    kind = settings.kind or task.tokenizer
    return hf_data.tokenizer_for(task.texts(split), settings.vocab_size, kind, eos=task.eos)


def _tokenising(report: ProgressCallback, name: str, done: int, rows: int) -> None:
    report({"stage": f"tokenising {name}: {done:,} of {rows:,}"})


def training_arguments(run: Run, folder: Path, *, best: bool = True) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments for the recipe's `training` section. `best`: end with the checkpoint of the lowest dev loss; what
    is pruned while it is trained is best before it is pruned, and must end with the last one."""
    settings = run.training
    # More than one evaluation an epoch is one every so many steps, which the Trainer takes as a share of all steps.
    step: Any = 1 / settings.epochs / settings.evaluations if settings.epochs else 1
    by_epoch = settings.evaluations == 1 or step >= 1
    interval, share = ("epoch", {}) if by_epoch else ("steps", {"eval_steps": step, "save_steps": step})
    return Seq2SeqTrainingArguments(
        output_dir=str(folder / "checkpoints"),
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type=settings.schedule,
        adam_beta1=settings.adam_betas[0],
        adam_beta2=settings.adam_betas[1],
        adam_epsilon=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        gradient_accumulation_steps=settings.accumulation,
        bf16=uses_bf16(settings.bf16),
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
        seed=run.seed,
        accelerator_config={"even_batches": False},
        report_to="none",  # the callbacks of tracking.py
        run_name=folder.name,
        project=run.name,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def optimizer(model: Any, settings: Training) -> torch.optim.Optimizer | None:
    """AdamW with a rate of its own for some components, where the recipe names any; None is the Trainer's choice."""
    if not settings.learning_rates:
        return None
    rate, decay = settings.learning_rate, settings.weight_decay
    groups = parameter_groups(model, settings.learning_rates, lr=rate, weight_decay=decay)
    return torch.optim.AdamW(groups, betas=settings.adam_betas, eps=settings.adam_epsilon)


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
