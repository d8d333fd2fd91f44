"""Train the models of the cases: single steps by hand, and by the Trainer."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Trainer, TrainingArguments

from hf_freeze import VariantCallback
from hf_freeze.architectures.registry import ARCHITECTURES
from support.cases import Case, plain
from support.models import is_scheduled, native, snapshot

BATCH_ROWS = 4


def with_teacher(model: Any) -> Any:
    """The model, with a copy of itself that was trained differently as its teacher, where it needs one and has none."""
    if getattr(model, "needs_teacher", False) and model.get_teacher() is None:
        teacher = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
        model.set_teacher(teacher)
    return model


def begin_training(model: Any, step: int = 0, total_steps: int = 1) -> Any:
    """The model in training mode, at a step of what it schedules; what it draws there is the same at every call."""
    with_teacher(model)
    if is_scheduled(model):
        model.advance(step, total_steps)
    torch.manual_seed(6)
    return model.train()


@contextlib.contextmanager
def without_noise(case: Case) -> Iterator[None]:
    """For equalities over different batches: in training mode, what a stochastic method draws by `torch.randn_like` is zero.

    What it adds to the loss is not.
    """
    if not case.stochastic:
        yield
        return
    with mock.patch.object(torch, "randn_like", torch.zeros_like):
        yield


def objective(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's loss; of a model without one, a fixed weighting of its outputs (a plain sum of a norm's is constant)."""
    result = model(**batch)
    if result.get("loss") is not None:
        return result["loss"]
    values = [value for value in result.values() if torch.is_tensor(value) and value.requires_grad]
    return torch.stack([(v.flatten() * torch.linspace(-1, 1, v.numel())).mean() for v in values]).sum()


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in training mode; the model has none afterwards."""
    loss = objective(begin_training(model), batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def training_step(model: Any, batch: dict[str, torch.Tensor], step: int = 0, total_steps: int = 1) -> None:
    """One step of AdamW with weight decay on all of `parameters()`, as a hand-written loop does it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    objective(begin_training(model, step, total_steps), batch).backward()
    optimizer.step()
    model.eval()


def training_rows(case: Case) -> list[dict[str, torch.Tensor]]:
    """BATCH_ROWS rows with different numbers of labels: the tiny batch, then it again with its first tokens reversed."""
    batch = case.batch()
    again = {name: value.clone() for name, value in batch.items()}
    tokens = (
        again[name].flatten(0, -2) for name in ("input_ids", "attention_mask")
    )  # views of each sentence, or choice
    for ids, mask in zip(*tokens, strict=True):
        first = int(mask.sum()) - 1
        ids[:first] = ids[:first].flip(0)
    rows = [{name: value[i] for name, value in half.items()} for half in (batch, again) for i in range(2)]
    assert len(rows) == BATCH_ROWS
    return rows


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sgd_step_of_trainer(
    model: Any,
    rows: list[dict[str, torch.Tensor]],
    folder: Path,
    *,
    batch_size: int,
    accumulate: int,
    max_steps: int = 1,
    compute_loss_func: Any = None,
    **arguments: Any,
) -> Trainer:
    """One optimiser step by the Trainer whose update is the gradient: SGD, learning rate 1, no clipping."""
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        max_steps=max_steps,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    callbacks = [VariantCallback()] if is_scheduled(model) else []
    trainer = Trainer(
        model=with_teacher(model),
        args=settings,
        train_dataset=rows,
        callbacks=callbacks,
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    return trainer


def plain_update(model: Any, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters after the same step without a Trainer, on all rows at once: the native mean over their labels."""
    before = snapshot(model)
    _, grads = gradients(model, stack(rows))
    return {name: before[name] - grads[name] if name in grads else before[name] for name, _ in model.named_parameters()}


def changed_though_frozen(model: Any, before: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"{name} is frozen but changed"
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and (parameter != before[name]).any()
    ]


def inputs_only(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch without labels; a decoder that labels would feed gets its tokens all the same."""
    inputs = {
        name: value
        for name, value in batch.items()
        if name == "input_ids" or "mask" in name or "_ids" in name or name.startswith("encoder_")
    }
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return inputs


@functools.cache
def _unreached(model_type: str, config: str, task: str) -> frozenset[str]:
    case = plain(ARCHITECTURES[model_type], config=config, task=task)
    model = native(case)
    objective(model, case.batch()).backward()
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)


def unreached_natively(case: Case) -> frozenset[str]:
    """Trainable parameters of the native model that its loss does not use, such as an output bias beside that of the matrix."""
    return _unreached(case.architecture.model_type, case.config, case.task)
