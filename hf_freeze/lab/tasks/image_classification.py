"""Classification of small images by a perceptron, trained in a plain loop; scored by accuracy."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hf_freeze.io import write_whole
from hf_freeze.lab.data import read_images
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.recipes.settings import SPLITS, Data
from hf_freeze.lab.tasks.base import Job, Outcome, OwnTask, ProgressCallback, Trained
from hf_freeze.lab.tasks.perceptron import Perceptron, make_perceptron
from hf_freeze.lab.tasks.splits import held_out, paths_of, read_all
from hf_freeze.methods.registry import method_from_dict

_EVALUATED = 1000  # images of a batch that only tests


class Images(NamedTuple):
    """Images (N, height * width), uint8, and their classes (N,), int64, on the device."""

    pixels: torch.Tensor
    classes: torch.Tensor

    def batch(self, which: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels in 0..1 (B, height * width) and classes (B,)."""
        return self.pixels[which].float() / 255, self.classes[which]

    def select(self, which: Any) -> "Images":
        return Images(self.pixels[which], self.classes[which])


def load_data(data: Data, sizes: list[int], device: torch.device) -> dict[str, Images]:
    """Splits train, test and, where the recipe names or holds out one, dev.

    Raises ValueError where the images do not fit the perceptron of these sizes, or nothing is left to train on.
    """
    splits = {}
    for name, files in read_all(data, lambda named: paths_of(data, named), SPLITS).items():
        pixels, classes = read_images(*files)
        if (inputs := math.prod(pixels.shape[1:])) != sizes[0]:
            raise ValueError(
                f"{files[0]}: images of {inputs} pixels, but backbone.sizes={sizes} begins with {sizes[0]}"
            )
        if (highest := int(classes.max())) >= sizes[-1]:
            raise ValueError(f"{files[1]}: class {highest}, but backbone.sizes={sizes} ends with {sizes[-1]} classes")
        splits[name] = Images(torch.tensor(pixels.reshape(-1, inputs)), torch.tensor(classes, dtype=torch.int64))
    train = splits["train"]
    splits |= {name: train.select(which) for name, which in held_out(len(train.classes), data).items()}
    return {name: Images(*(tensor[: data.limit].to(device) for tensor in split)) for name, split in splits.items()}


def execute(job: Job) -> Trained:
    """Train, finalize and test one row in one process. No epoch is chosen: what the last one left is tested."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("image-classification runs in one process: leave the launcher out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = job.run
    methods = [method_from_dict(method) for method in run.methods]
    if job.start is not None:
        backbone = Perceptron.load(job.start / "model")
    else:
        assert run.backbone is not None  # a recipe without `start` has one
        backbone = run.backbone.sizes
    model = make_perceptron(backbone, methods).to(device)
    data = load_data(run.data, model.config.sizes, device)
    training = _Training(model, data, run, job.folder / "checkpoints")
    if job.checkpoint is not None:
        training.resume(Path(job.checkpoint))
    began = time.perf_counter()
    training.run(job.report)
    seconds = time.perf_counter() - began
    model.finalize()
    job.report({"stage": "testing"})
    tested = time.perf_counter()
    items, loss = classify(model, data["test"])
    metrics = {"test_accuracy": float(items[:, 0].mean()), "test_loss": loss}
    if "dev" in data:
        dev_items, loss = classify(model, data["dev"])
        metrics |= {"dev_accuracy": float(dev_items[:, 0].mean()), "dev_loss": loss}
    model.save(job.folder / "model")
    return Trained(
        model=model,
        outcome=Outcome(metrics=metrics, items=items),
        log=training.log,
        epochs=training.epochs,
        best_epoch=training.epochs,
        steps=training.total_steps,
        train_seconds=seconds,
        test_seconds=time.perf_counter() - tested,
        resumed=job.checkpoint is not None,
    )


@torch.no_grad()
def classify(model: nn.Module, images: Images) -> tuple[np.ndarray, float]:
    """int64 (N, 3), of each image: is it classified correctly, 1, its class; and the mean loss in nats.

    The last column says which test set it was: runs on different ones are not compared.
    """
    model.eval()
    right, losses = [], []
    for start in range(0, len(images.classes), _EVALUATED):
        pixels, classes = images.batch(slice(start, start + _EVALUATED))
        logits = model(pixels)
        losses.append(functional.cross_entropy(logits, classes, reduction="none"))
        right.append(logits.argmax(1) == classes)
    correct = torch.cat(right).long()
    items = torch.stack([correct, torch.ones_like(correct), images.classes], dim=1)
    return items.cpu().numpy(), float(torch.cat(losses).double().mean())


class _Training:
    """The loop. After each epoch it is in a checkpoint with all that decides how it goes on."""

    def __init__(self, model: Perceptron, data: dict[str, Images], run: Run, checkpoints: Path) -> None:
        settings = run.training
        self.model, self.data, self.checkpoints, self.seed = model, data, checkpoints, run.seed
        self.epochs, self.batch_size = int(settings.epochs), settings.batch_size
        self.learning_rate, self.lr_steps = settings.learning_rate, settings.lr_steps
        self.size = len(data["train"].classes)
        self.steps = math.ceil(self.size / self.batch_size)  # of an epoch
        self.total_steps = self.epochs * self.steps
        self.log: list[dict[str, Any]] = []
        self.epoch = 0
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters, lr=self.learning_rate, weight_decay=settings.weight_decay, fused=True
        )

    def run(self, report: ProgressCallback) -> None:
        """Train what is left of all epochs. Raises FloatingPointError where the loss is no number."""
        while self.epoch < self.epochs:
            entry = self._one_epoch(report)
            self.epoch += 1
            if "dev" in self.data:
                items, loss = classify(self.model, self.data["dev"])
                entry |= {"eval_loss": loss, "eval_accuracy": float(items[:, 0].mean())}
            self.log.append(entry)
            self._save()
            report({**entry, "steps": self.total_steps})

    def _one_epoch(self, report: ProgressCallback) -> dict[str, Any]:
        rate = self.learning_rate * self.lr_steps.gamma ** sum(self.epoch >= at for at in self.lr_steps.at)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        order = torch.from_numpy(np.random.default_rng([self.seed, self.epoch]).permutation(self.size))
        order = order.to(self.data["train"].classes.device)
        total = torch.zeros((), dtype=torch.float64, device=order.device)
        added = torch.zeros_like(total)
        for number, which in enumerate(order.split(self.batch_size)):
            step = self.epoch * self.steps + number
            if self.model.scheduled:
                self.model.advance(step, self.total_steps)
            pixels, classes = self.data["train"].batch(which)
            loss = functional.cross_entropy(self.model(pixels), classes)
            total += loss.detach() * len(which)
            if (auxiliary := self.model.auxiliary_loss()) is not None:
                loss = loss + auxiliary
                added += auxiliary.detach() * len(which)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if number % 100 == 0:
                report({"step": step, "steps": self.total_steps})
        means = {"loss": float(total) / self.size, "auxiliary_loss": float(added) / self.size}
        if not math.isfinite(sum(means.values())):
            raise FloatingPointError(
                f"the training loss is {means['loss']}, the auxiliary one {means['auxiliary_loss']} in epoch "
                f"{self.epoch + 1}; the checkpoint before it is kept. A lower learning rate may help"
            )
        return means | {"learning_rate": rate, "epoch": self.epoch + 1, "step": (self.epoch + 1) * self.steps}

    def resume(self, checkpoint: Path) -> None:
        """Go on from what `_save` wrote."""
        state = torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.log = state["epoch"], state["log"]
        torch.set_rng_state(state["random"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])

    def _save(self) -> None:
        """As the Trainer does it: trainer_state.json comes last, so that a kill leaves this checkpoint or the one before."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "log": self.log,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        earlier = list(self.checkpoints.glob("checkpoint-*"))
        checkpoint = self.checkpoints / f"checkpoint-{self.epoch * self.steps}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        try:
            torch.save(state, checkpoint / "state.pt")
            write_whole(checkpoint / "trainer_state.json", json.dumps({"epoch": self.epoch}) + "\n")
        except (OSError, RuntimeError) as error:  # torch's error for a full disk does not say so
            raise OSError(
                f"the checkpoint of epoch {self.epoch} could not be written (is the disk full?): {error}; "
                "the one before it is kept"
            ) from error
        for folder in earlier:
            if folder != checkpoint:
                shutil.rmtree(folder)


TASK = OwnTask(execute=execute)
