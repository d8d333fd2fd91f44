"""The fields that recipes have, by section and task, and how their values are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FIELDS = {
    "name": str,
    "about": str,  # what it is for, in a line, for `hf-freeze recipes`
    "task": str,
    "metric": str,  # by which rows are compared, where the task has several
    "data": dict,
    "tokenizer": dict,
    "presets": dict,
    "preset": str,
    "backbone": dict,
    "training": dict,
    "decoding": dict,
    "start": str,  # the folder of another grid, where each row starts from the run of the same row and seed
    "report_to": str,  # a tracker, which sees the runs as they train
    "axis": str,  # a setting of a method, such as factorized_embedding.rank, that the report draws the score against
    "rows": dict,
    "only": list,
    "seeds": list,
    "space": dict,  # what `hf-freeze search` draws rows from
    "search": dict,  # its goals, bounds and rungs
    "smoke": dict,
}


def check_types(recipe: dict[str, Any], path: Any) -> None:
    """Raise ValueError for an unknown field, or one that is not of its type."""
    for key, value in recipe.items():
        if key not in FIELDS:
            raise ValueError(f"{path}: unknown field {key!r}; choose from {sorted(FIELDS)}")
        if not isinstance(value, FIELDS[key]):
            raise ValueError(f"{path}: {key} must be a {FIELDS[key].__name__}, not {value!r}")


TRACKERS = ("tensorboard", "trackio", "wandb")


def _precision(value: Any) -> Any:
    from hf_freeze.lab.training.precision import (
        AUTO,  # here: it imports torch, which `hf-freeze recipes` need not wait for
    )

    if not isinstance(value, bool) and value != AUTO:
        raise ValueError
    return value


def _integer(number: Any) -> int:
    if float(number) != int(number):
        raise ValueError
    return int(number)


def _rates(rates: Any) -> dict[str, float]:
    return {component: float(rate) for component, rate in rates.items()}


def _betas(betas: Any) -> list[float]:
    return [float(beta) for beta in betas]


# YAML reads 1e-3 as text: numbers are converted, not only checked.
_TRAINING: dict[str, Callable[[Any], Any]] = {
    "epochs": float,
    "max_tokens": _integer,
    "learning_rate": float,
    "learning_rates": _rates,
    "warmup_steps": _integer,
    "schedule": str,
    "adam_betas": _betas,
    "adam_epsilon": float,
    "weight_decay": float,
    "max_grad_norm": float,
    "label_smoothing": float,
    "bf16": _precision,
    "accumulation": _integer,
    "patience": _integer,
    "block_size": _integer,
    "evaluations": _integer,
    "masking": float,
}

SECTIONS = {
    "data": {
        "builtin",
        "root",
        "train",
        "dev",
        "test",
        "hub",
        "name",
        "source",
        "target",
        "column",
        "columns",
        "label",
        "header",
        "mismatched",
        "unit",
        "holdout",
        "holdout_test",
        "limit",
    },
    "tokenizer": {"kind", "vocab_size"},
    "backbone": {"model_type", "init", "config", "pretrained"},
    "training": set(_TRAINING),
    "decoding": {"num_beams", "max_tokens"},
}


def _lr_steps(steps: Any) -> dict[str, Any]:
    if set(steps) != {"gamma", "at"}:
        raise ValueError
    return {"gamma": float(steps["gamma"]), "at": [_integer(epoch) for epoch in steps["at"]]}


# What each reader of a setting takes, in words.
TAKES = {
    float: "a number",
    str: "a word",
    _integer: "an integer",
    _precision: "true, false or 'auto'",
    _rates: "a number for each component, such as {'embeddings': 0.001}",
    _betas: "two numbers",
    _lr_steps: "{'gamma': a number, 'at': [epochs]}",
}

_IMAGE_TRAINING: dict[str, Callable[[Any], Any]] = {
    "epochs": _integer,
    "batch_size": _integer,
    "learning_rate": float,
    "lr_steps": _lr_steps,  # the rate is multiplied by `gamma` before each of the epochs `at`, counted from 0
    "weight_decay": float,
}


@dataclass(frozen=True)
class TaskFields:
    """The fields that the recipes of a task have.

    `sections`: the names in each section. `training`: how each setting of that section is read. `needed`: the required ones.
    `files`: what the two files of a split are; None where a split is a list of any number of files. `tables`: it may also be a
    list of tables. `tokenizers`: the kinds that fit. `is_per_token`: the score is per token, so rows with
    different tokenizers cannot be compared. `metrics`: by which rows may be compared, where there is a choice; the first is the
    default. `builtin`: whether there are built-in data.
    """

    sections: dict[str, set[str]]
    training: dict[str, Callable[[Any], Any]]
    needed: tuple[str, ...]
    files: str | None
    tables: bool = False
    tokenizers: tuple[str, ...] = ("bpe", "unigram")
    is_per_token: bool = False
    metrics: tuple[str, ...] = ()
    builtin: bool = True


_NEEDED_IN_TRAINING = ("epochs", "max_tokens", "learning_rate", "warmup_steps")
_ENCODER_SECTIONS = {name: names for name, names in SECTIONS.items() if name != "decoding"}

TASK_FIELDS = {
    "translation": TaskFields(SECTIONS, _TRAINING, _NEEDED_IN_TRAINING, files="[source, target]", tables=True),
    "language-modelling": TaskFields(SECTIONS, _TRAINING, _NEEDED_IN_TRAINING, files=None, is_per_token=True),
    "masked-lm": TaskFields(
        _ENCODER_SECTIONS, _TRAINING, _NEEDED_IN_TRAINING, files=None, tokenizers=("wordpiece",), is_per_token=True
    ),
    "sequence-classification": TaskFields(
        _ENCODER_SECTIONS,
        _TRAINING,
        _NEEDED_IN_TRAINING,
        files=None,
        tokenizers=("wordpiece",),
        metrics=("accuracy", "f1", "matthews"),
    ),
    "regression": TaskFields(
        _ENCODER_SECTIONS | {"training": set(_TRAINING) - {"label_smoothing"}},
        _TRAINING,
        _NEEDED_IN_TRAINING,
        files=None,
        tokenizers=("wordpiece",),
        builtin=False,
    ),
    **dict.fromkeys(
        ("token-classification", "question-answering", "multiple-choice"),
        TaskFields(
            _ENCODER_SECTIONS,
            _TRAINING,
            _NEEDED_IN_TRAINING,
            files=None,
            tokenizers=("wordpiece",),
            builtin=False,
        ),
    ),
    "image-classification": TaskFields(
        {
            "data": {"root", "train", "dev", "test", "holdout", "limit"},
            "backbone": {"sizes"},
            "training": set(_IMAGE_TRAINING),
        },
        _IMAGE_TRAINING,
        ("epochs", "batch_size", "learning_rate"),
        files="[images, labels]",
    ),
}

_TEXT_TASKS = {"language-modelling", "masked-lm"}
_LABELLED = {"sequence-classification", "regression"}
# Fields of `data` that mean something to some tasks and forms only. (`source` and `target` may lie unused in a recipe whose data
# of the Hub is replaced by the user's files.)
DATA_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "name": (set(TASK_FIELDS), {"hub"}),
    "column": (_TEXT_TASKS | {"token-classification"}, {"hub", "files"}),
    "unit": (_TEXT_TASKS, {"files"}),
    "columns": (_LABELLED, {"hub", "files"}),
    "label": (_LABELLED | {"token-classification"}, {"hub", "files"}),
    "header": (_LABELLED, {"files"}),
    "mismatched": ({"sequence-classification"}, {"hub", "files"}),
}
