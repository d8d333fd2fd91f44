"""The trainings of a compression: runs of a grid, which are resumed where they were stopped, and never see the test split."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch.utils.data import DataLoader

from hf_freeze.analysis.head_importance import count_labels
from hf_freeze.analysis.vocabulary import count_tokens
from hf_freeze.experiments.recipes.check import check
from hf_freeze.experiments.runs.grid import run_grid
from hf_freeze.experiments.tasks.base import Task
from hf_freeze.experiments.tasks.registry import task_of
from hf_freeze.model.loading import check_exists, load_model, load_tokenizer
from hf_freeze.publish.trimming import trim_model
from hf_freeze.run_folder import run_folder
from hf_freeze.training import TokenBatchTrainer

TASKS = ("translation", "sequence-classification")
_SAMPLE = 256  # examples of the dev split by which parts are measured
_COMPARED = 1000  # training examples on which the tokenizer of a smaller vocabulary is compared with the original's
_BATCH = 32
_WARMUP = 100  # steps at most in short trainings
_DISTILLATION = {"method": "distillation", "temperature": 2.0, "alpha": 0.5}


@dataclass(frozen=True, kw_only=True)
class Student:
    """A model to train: `methods` as a recipe writes them, applied to the model of `vocabulary` tokens."""

    label: str
    vocabulary: int
    methods: list[dict[str, Any]]
    epochs: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """`loss`: in nats on the dev split, divided by its number of labels in the tokens of the original, so that models of
    different vocabularies can be compared. `folder`: of the model and its tokenizer. `seconds`: of the run."""

    folder: Path
    loss: float
    epochs: float
    seconds: float


class Trainings:
    """The model `source` on the task and data of a recipe; its rows, backbone and tokenizer do not matter.

    `trainer_class`: a subclass of the task's Trainer, which the processes of the trainings import by its name. `watch`: as
    `run_grid` takes it.

    Raises ValueError for another task than `TASKS`, a model without a tokenizer, and a `trainer_class` that is no such subclass
    or cannot be imported.
    """

    def __init__(
        self,
        source: str,
        recipe: Mapping[str, Any],
        out: Path,
        *,
        seed: int,
        jobs: int,
        console: Console,
        command: str,
        trainer_class: type[TokenBatchTrainer] | None = None,
        watch: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda run, message: None,
    ) -> None:
        if recipe["task"] not in TASKS:
            raise ValueError(f"task {recipe['task']!r}: hf-freeze compress is for {list(TASKS)}")
        self.source, self.out, self._watch = source, out, watch
        self._jobs, self._console, self._command = jobs, console, command
        check_exists(source)
        self.tokenizer: Any = load_tokenizer(source)
        if self.tokenizer is None and not Path(source).is_dir():
            raise ValueError(f"{source} is no folder here, and the Hub gave no tokenizer of that name")
        if self.tokenizer is None:
            raise ValueError(f"{source} holds no tokenizer; save it beside the model, since the budget counts it too")
        task = task_of(recipe["task"])
        assert isinstance(task, Task)
        self.task = task
        self.trainer = None if trainer_class is None else _importable(trainer_class, task.trainer)
        self.base = {key: recipe[key] for key in ("task", "data", "training", "decoding", "report_to") if key in recipe}
        self.base |= {"name": "compress", "seeds": [seed], "backbone": {"pretrained": source}}
        self._rows: dict[str, dict[str, Any]] = {}
        self.splits = task.load(recipe["data"])
        self.whole = len(self.tokenizer)
        self._prefix = "tokens"  # of the rows of untrained models, which name the data too
        self._labels: dict[int, int] = {}
        self._counts: np.ndarray | None = None  # of each token in the training texts

    def learn_from(self, data: dict[str, Any]) -> None:
        """Train on other data from now on, whose dev split is the same."""
        self.base["data"], self.splits, self._prefix = data, self.task.load(data), "taught"

    # -- the model and its vocabularies ----------------------------------------------------------------------------------------

    def folder_of(self, vocabulary: int) -> Path:
        """The model with only so many tokens, made at the first call. Raises ValueError for too few."""
        if vocabulary == self.whole:
            return Path(self.source)
        folder = self.out / "vocabularies" / str(vocabulary)
        if not folder.exists():
            train = self.splits["train"]
            if self._counts is None:  # once for all sizes: splitting all texts takes longer than all else here
                texts, targets = self._texts(train)
                self._counts = count_tokens(load_tokenizer(self.source), texts, targets=targets)
            some = np.random.default_rng(0).permutation(len(train))[:_COMPARED]
            texts, targets = self._texts(train.select(np.sort(some)))
            trim_model(
                *(self.source, texts),
                targets=targets,
                size=vocabulary,
                characters="occurring",
                counts=self._counts,
                out=folder,
            )
        return folder

    def _texts(self, split: Any) -> tuple[Any, Any]:
        if "target" in split.column_names:
            return split["source"], split["target"]
        return self.task.texts(split), ()

    def model(self, vocabulary: int) -> Any:
        return load_model(self.folder_of(vocabulary)).eval()

    def tokenizer_of(self, vocabulary: int) -> Any:
        return load_tokenizer(self.folder_of(vocabulary))

    def sample(self, vocabulary: int, model: Any) -> list[dict[str, Any]]:
        """Batches of some examples of the dev split, the same ones for every vocabulary, each of similar length."""
        split = self.splits["dev"]
        chosen = np.random.default_rng(0).permutation(len(split))[:_SAMPLE]
        return list(self._batches(split.select(np.sort(chosen)), vocabulary, model))

    def _batches(self, split: Any, vocabulary: int, model: Any) -> Any:
        tokenizer = self.tokenizer_of(vocabulary)
        encoded: Any = self.task.encode(split, tokenizer, self.base)
        order = np.argsort([len(ids) for ids in encoded["input_ids"]], kind="stable").tolist()
        collate = self.task.collator(tokenizer, model)
        return DataLoader(encoded, batch_size=_BATCH, sampler=order, collate_fn=collate)

    def labels(self, vocabulary: int) -> int:
        """The number of labels of the dev split."""
        if vocabulary not in self._labels:
            model = load_model(self.folder_of(vocabulary))
            batches = self._batches(self.splits["dev"], vocabulary, model)
            self._labels[vocabulary] = sum(count_labels(model, batch) for batch in batches)
        return self._labels[vocabulary]

    # -- training --------------------------------------------------------------------------------------------------------------

    def train(self, students: Mapping[str, Student]) -> dict[str, Trained]:
        """Train each of them, distilled from the whole model of its vocabulary, unless that is done already."""
        for name, student in students.items():
            teacher = self._teacher(student.vocabulary)
            training: dict[str, Any] = {"epochs": student.epochs}
            if student.epochs < self.base["training"]["epochs"]:
                training["warmup_steps"] = min(self.base["training"].get("warmup_steps", 0), _WARMUP)
            self._rows[name] = {
                "label": student.label,
                "start": teacher,
                "teacher": teacher,
                "methods": [*student.methods, _DISTILLATION],
                "training": training,
            }
        self._run(students)
        return {name: self._trained(name, student.vocabulary) for name, student in students.items()}

    def original(self, vocabulary: int) -> Trained:
        """The model itself, with fewer tokens, untrained."""
        name = self._teacher(vocabulary)
        self._run([name])
        return self._trained(name, vocabulary)

    def _teacher(self, vocabulary: int) -> str:
        name = f"{self._prefix}-{vocabulary}"
        backbone = {"pretrained": str(self.folder_of(vocabulary))}
        label = "the model" if vocabulary == self.whole else f"the model with {vocabulary:,} tokens"
        self._rows[name] = {"label": label, "methods": [], "backbone": backbone, "training": {"epochs": 0}}
        return name

    def _run(self, names: Sequence[str] | Mapping[str, Any]) -> None:
        recipe = json.loads(json.dumps(self.base | {"rows": self._rows, "only": list(names)}))
        check(recipe, "compress")
        run_grid(
            recipe,
            self.out / "trainings",
            jobs=self._jobs,
            console=self._console,
            command=self._command,
            scored_on="dev",
            unscored=[name for name, row in self._rows.items() if not row["training"]["epochs"]],
            trainer=self.trainer,
            watch=self._watch,
        )

    def _records(self) -> list[dict[str, Any]]:
        """Of all finished runs."""
        paths = (self.out / "trainings").glob("row-*/metrics.json")
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def seconds_untrained(self) -> float:
        """Of the runs that only load, evaluate and save."""
        return sum(record["seconds"]["all"] for record in self._records() if not record["epochs_trained"])

    def seconds_per_epoch(self) -> float:
        """Of the trainings so far."""
        trained = [record for record in self._records() if record["epochs_trained"]]
        return sum(r["seconds"]["train"] for r in trained) / sum(r["epochs_trained"] for r in trained)

    def folder(self, name: str) -> Path:
        """Of the run of a student."""
        return run_folder(self.out / "trainings", {"row": name, "seed": self.base["seeds"][0]})

    def _trained(self, name: str, vocabulary: int) -> Trained:
        record = json.loads((self.folder(name) / "metrics.json").read_text(encoding="utf-8"))
        loss = record["metrics"]["dev_loss"] * self.share_of_labels(vocabulary)
        epochs, seconds = record["epochs_trained"], record["seconds"]["all"]
        return Trained(folder=self.folder(name) / "model", loss=loss, epochs=epochs, seconds=seconds)

    def share_of_labels(self, vocabulary: int) -> float:
        """Labels of the dev split in the tokens of this vocabulary, divided by those of the original."""
        return self.labels(vocabulary) / self.labels(self.whole)


def _importable(trainer_class: Any, base: type[TokenBatchTrainer]) -> str:
    """ "module:class". Raises ValueError for no subclass of `base`, and for one that another process cannot import."""
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, base)):
        raise ValueError(
            f"trainer_class={trainer_class!r}: must be a subclass of hf_freeze.training.{base.__name__}, which trains this task"
        )
    module, name = trainer_class.__module__, trainer_class.__qualname__
    interactive = module == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    if interactive or getattr(sys.modules.get(module), name, None) is not trainer_class:
        raise ValueError(
            f"trainer_class={name}: trainings are processes of their own, which import it; define it at the top level of a file"
        )
    return f"{module}:{name}"
