"""Heal a compressed model: a short training that learns the outputs of the original on unlabelled inputs (Hinton et al., 2015,
https://arxiv.org/abs/1503.02531). They are computed once and stored, so that a step costs what one of a plain training costs.

Shapes: B rows, T tokens, D hidden size, V classes or tokens, K of them that are stored.
"""

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_freeze.architectures.base import hidden_size
from hf_freeze.compat.transformers import set_checkpointing
from hf_freeze.io import bytes_of, write_whole
from hf_freeze.model.paging import Paged
from hf_freeze.model.running import in_eval_mode, without_cache
from hf_freeze.model.samples import Samples
from hf_freeze.seeded.tensor import fingerprint
from hf_freeze.training import adapters
from hf_freeze.training.healing_targets import Objective, Texts, texts_of
from hf_freeze.training.resume import last_whole_checkpoint

T = TypeVar("T")
HealLimit = int | str  # 0, "10min", "90s", "2h", "1epoch", "0.5epochs" or DEFAULT
DEFAULT = "default"
_SHARE, _LEAST = 0.1, 60.0  # the default: this share of the time of an epoch, but at least so many seconds
_UNITS = {"s": 1, "min": 60, "h": 3600}
_PROBES, _SLOW = 6, 2  # steps that are timed before; the first ones are slower and do not count
_PLANNED = 0.9  # share of the time to plan steps for; the rest is for steps that are slower than the timed ones
_SAVED = 60.0  # seconds between two checkpoints
_RATE, _FASTEST, _LORA_RATE = 3e-4, 3e-3, 1e-3
_WIDTH = 384  # from which on the rate is `_RATE`; narrower models learn faster by the square, up to `_FASTEST`
_LORA_FROM = 500_000_000  # parameters
_EQUAL = 1e-4  # held-out loss below which there is nothing to learn: rounding to 8 bits costs ten times that at least

Report = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Healed:
    """`loss_before`, `loss_after`: on the same held-out texts; unless `better`, the model has been left as it was. `steps`:
    none where it gave the outputs of the original already. `tokens`: of training, counted again in each epoch. `seconds`: of the
    whole call. `bytes_per_token`: of the stored outputs."""

    epochs: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    seconds_per_step: float = 0.0
    loss_before: float | None = None
    loss_after: float | None = None
    better: bool = False
    bytes_per_token: float = 0.0


def heal(
    student: Any,
    original: Any,
    samples: Samples,
    out: Path,
    *,
    limit: HealLimit = DEFAULT,
    pooling: str = "mean",
    seed: int = 0,
    lora: bool | None = None,
    learning_rate: float | None = None,
    callback: Report | None = None,
    paged: Paged | None = None,
    int8: bool = False,
) -> Healed:
    """Train `student` in place, on its device, to give the outputs of `original`; leave it as it was if the held-out loss rises.

    `samples`: inputs of both, which have the same tokens. Without an `original`, models that write or predict tokens learn those
    of the samples: of a translator, the labels, which may be what its original wrote (Kim and Rush, 2016, sequence-level
    distillation, https://arxiv.org/abs/1606.07947), so that the student may have other tokens.

    The loss of next tokens, classes and spans is KL(original ‖ student), a mean over the real tokens or the texts: of the K most
    probable tokens and all others as one, at temperature 2 and times 4 (spans: at 1). Numbers and classes of
    which several may apply have the squared error. Models without a head: 1 - cosine of the sentence vectors, by `pooling`
    "mean", "cls" or "last", plus the squared distance of the directions of the token states, a mean over the text.

    `limit`: see `HealLimit`; by default a tenth of the time of one epoch, at least a minute. Times are of the whole call: steps
    are planned from the time of the first ones, and the learning rate falls faster if the machine becomes slower. `lora`: train
    adapters of low rank and merge them (PEFT); None: for more than 500 million parameters. `learning_rate`: by default by the
    width. Frozen parameters stay frozen. `paged`: for models larger than the memory, whose weights lie in files: adapters are
    trained, activations are computed again for the gradient, layer by layer, and merged weights go to its files. `int8`: train
    these adapters on weights that are rounded to 8 bits, a byte each, and merge them into those that were not. Linears of few
    bits have adapters too; merging rounds them to the nearest, and `loss_after` is measured after that. Other linears that are
    computed from several parameters, such as factors, have none.

    `out / "heal"` has the stored outputs and checkpoints. A killed call resumes there, if called with the same arguments.
    `callback` receives {"stage":, "step":, "steps":} and, in training, "loss" and "seconds_left".

    Raises ValueError for an unknown limit or pooling, a student without trainable parameters, or linears if adapters are
    trained, outputs of another shape, fewer than two texts, `int8` without `paged`, several processes of a launcher, and without
    an original, samples of a translator that have no labels.
    """
    began, report = time.monotonic(), callback or (lambda message: None)
    check_one_process()
    limits = parse_limit(limit)
    if 0 in limits:
        return Healed()
    learns = {name for name, p in student.named_parameters() if p.requires_grad}
    if not learns:
        raise ValueError(f"no parameter of the {type(student).__name__} is trainable: there is nothing to heal")
    objective = Objective(pooling)
    train, held_out = texts_of(student if original is None else original, samples, seed, labels=original is None)
    lora = _has_adapters(student, lora, paged, int8)
    rate = learning_rate or (_LORA_RATE if lora else _rate_of(student))
    models = [fingerprint(model) for model in (student, original) if model is not None]
    parts = (*models, repr((limit, seed, lora, int8, rate, objective)), train.digest, held_out.digest)
    key = hashlib.sha256("".join(parts).encode()).hexdigest()
    folder, plan = out / "heal", _plan_in(out / "heal", key)
    _, of_outputs = _timed(lambda: held_out.compute_targets(folder / "held_out", original, objective, report))
    loss_before, measuring = _timed(lambda: held_out.loss(student, objective))
    if loss_before < _EQUAL and not held_out.have_numbers:
        return Healed(seconds=time.monotonic() - began, loss_before=loss_before, loss_after=loss_before)
    model = adapters.with_adapters(student, seed) if lora else student
    linears = adapters.put_on_int8(model, paged) if int8 and paged is not None else {}
    if paged is not None:
        set_checkpointing(model, True)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if plan is None:  # how many steps there is time for, and so how many texts need outputs of the original
        probe = _Healer(model, held_out, objective, folder, _Run(_PROBES, rate, seed), report=None)
        probe.train()
        _restore(model, before)
        times = _Times(probe.clock.of_step, of_outputs / held_out.tokens, time.monotonic() - began)
        plan = _planned(train, limits, times, seed)
        write_whole(folder / "plan.json", json.dumps({"key": key, **plan}))
    texts = train.some(plan["texts"], seed)
    texts.compute_targets(folder / "outputs", original, objective, report)
    time_left = math.inf if plan["seconds"] is None else plan["seconds"] - (time.monotonic() - began) - measuring
    run = _Run(plan["steps"], rate, seed, time_left, plan["saved_every"])
    healer = _Healer(model, texts, objective, folder, run, report)
    healer.train(resume_from_checkpoint=last_whole_checkpoint(folder / "checkpoints"))
    adapters.leave_int8(linears)
    loss_after = held_out.loss(model, objective)
    if not (better := loss_after < loss_before):
        _restore(model, before)
    if lora and (unrounded := adapters.take_out(model, student, learns, merged=better, paged=paged)):
        loss_after = held_out.loss(student, objective)
        if not (better := loss_after < loss_before):
            adapters.put_back(unrounded)
    if paged is not None:
        set_checkpointing(student, False)
    steps = healer.state.global_step
    return Healed(
        epochs=steps / train.steps(seed),
        steps=steps,
        seconds=time.monotonic() - began,
        tokens=round(steps / texts.steps(seed) * texts.tokens),
        seconds_per_step=healer.clock.of_step or plan["seconds_per_step"],
        loss_before=loss_before,
        loss_after=loss_after,
        better=better,
        bytes_per_token=bytes_of(folder / "outputs") / texts.tokens if original is not None else 0.0,
    )


def check_one_process() -> None:
    """Raise ValueError in a process that a launcher has started with others: all would write the same files."""
    if (count := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"{count} processes were launched: healing and compressing run in one; start it without a launcher"
        )


def parse_limit(limit: HealLimit) -> tuple[float | None, float | None]:
    """(seconds, epochs), one of them None; both for the default. Raises ValueError for what is no limit."""
    if limit == DEFAULT:
        return None, None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|epochs?)|0", str(limit))
    if match is None:
        raise ValueError(
            f"heal={limit!r}: give 0, a time as '10min', '90s' or '2h', epochs as '1epoch' or '0.5epochs', or {DEFAULT!r}"
        )
    number, unit = float(match[1] or 0), match[2] or "s"
    return (None, number) if unit.startswith("epoch") else (number * _UNITS[unit], None)


def _has_adapters(student: Any, lora: bool | None, paged: Paged | None, int8: bool) -> bool:
    has = paged is not None or student.num_parameters() > _LORA_FROM if lora is None else lora
    if int8 and (paged is None or not has):
        raise ValueError(f"int8=True with lora={lora}: it is for adapters on weights in files; give paged= too")
    return has


def _rate_of(student: Any) -> float:
    """The learning rate by the width, if all parameters train."""
    return min(max(_RATE * (_WIDTH / hidden_size(student.config)) ** 2, _RATE), _FASTEST)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call()` gives, and its seconds."""
    started = time.monotonic()
    return call(), time.monotonic() - started


def _plan_in(folder: Path, key: str) -> dict[str, Any] | None:
    """The plan of a call with this key that was killed. What another call has stored is removed."""
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = {}
    if plan.get("key") == key:
        return plan
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return None


@dataclass(frozen=True)
class _Times:
    """Seconds of a step of training, of the outputs of the original for a token, and of all that was done so far."""

    of_step: float
    of_token: float
    spent: float


def _planned(train: Texts, limits: tuple[float | None, float | None], times: _Times, seed: int) -> dict[str, Any]:
    """The steps, and the number of texts, that `limits` (seconds, epochs) allow."""
    seconds, epochs = limits
    in_epoch, of_original = train.steps(seed), times.of_token * train.tokens
    if epochs is not None:
        steps = epochs * in_epoch
    else:
        seconds = seconds or max(_SHARE * (in_epoch * times.of_step + of_original), _LEAST)
        time_left = _PLANNED * (seconds - times.spent)
        steps = time_left / (times.of_step + of_original / in_epoch)
        if steps > in_epoch:  # all texts have their outputs after one epoch
            steps = (time_left - of_original) / times.of_step
    steps = max(math.ceil(steps), 1)
    return {
        "steps": steps,
        "texts": min(math.ceil(len(train) * steps / in_epoch), len(train)),
        "seconds": seconds,
        "seconds_per_step": times.of_step,
        "saved_every": max(round(_SAVED / times.of_step), 1),
    }


@torch.no_grad()
def _restore(model: Any, values: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if name in values:
            p.copy_(values[name])


class _Clock(TrainerCallback):
    """Times the steps, tells how far training is, and ends it when the time is over."""

    def __init__(self, time_left: float, report: Report | None) -> None:
        self._time_left, self._report = max(time_left, 1e-9), report
        self._began, self._resumed, self._ends = time.monotonic(), 0.0, [time.monotonic()]

    @property
    def of_step(self) -> float:
        """Seconds, the median; 0 for too few steps."""
        times = np.diff(self._ends)[_SLOW:]
        return float(np.median(times)) if len(times) else 0.0

    @property
    def share(self) -> float:
        """Of the time, how much is over."""
        return self._resumed + (time.monotonic() - self._began) / self._time_left

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._resumed = time.monotonic(), state.global_step / state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends.append(time.monotonic())
        if self.share >= 1:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._report is not None and "loss" in (logs or {}):
            left = (state.max_steps - state.global_step) * self.of_step
            progress = {"step": state.global_step, "steps": state.max_steps, "seconds_left": left}
            self._report({"stage": "healing", **progress, "loss": logs["loss"]})


@dataclass(frozen=True)
class _Run:
    """A training of so many steps. `time_left`: seconds that it may take; `saved_every`: steps between checkpoints, 0: none."""

    steps: int
    rate: float
    seed: int
    time_left: float = math.inf
    saved_every: int = 0


class _Healer(Trainer):
    """AdamW, with a linear warm-up and a linear fall of the learning rate. In eval mode: the student should give the outputs that
    the original has without dropout."""

    def __init__(
        self, model: Any, texts: Texts, objective: Objective, folder: Path, run: _Run, report: Report | None
    ) -> None:
        self.texts, self.objective, self.clock = texts, objective, _Clock(run.time_left, report)
        device = model.device.type
        arguments = TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            max_steps=run.steps,
            learning_rate=run.rate,
            weight_decay=0.0,
            seed=run.seed,
            bf16=device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
            use_cpu=device == "cpu",
            save_strategy="steps" if run.saved_every else "no",
            save_steps=run.saved_every or 1,
            save_total_limit=1,
            logging_steps=min(max(run.steps // 50, 1), 20),
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=device == "cuda",
            accelerator_config={"even_batches": False},
        )
        super().__init__(model=model, args=arguments, train_dataset=texts, callbacks=[self.clock])
        self.remove_callback(PrinterCallback)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model
        with in_eval_mode(model), without_cache(model):  # the first restores the modes afterwards
            return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.texts.loader(self.args.seed))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        warmup = min(math.ceil(0.1 * num_training_steps), 100)

        def factor(step: int) -> float:
            return max(min((step + 1) / warmup, 1 - max(step / num_training_steps, self.clock.share)), 0.0)

        chosen: Any = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, factor)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        model.eval()
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = layer.gradient_checkpointing  # which is only looked at in training
        return self.objective.losses(model, inputs).mean()
