"""What a recipe may say: its fields, by task, and whether their values can be."""

import copy
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

from hf_freeze.architectures.base import TRAINED
from hf_freeze.experiments.perceptron import PerceptronConfig
from hf_freeze.experiments.rows import (
    OF_A_ROW,
    ROW_FIELDS,
    check_from_scratch,
    check_heads,
    check_pretrained,
    check_start,
    check_teacher,
)
from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import METHODS, method_from_dict
from hf_freeze.training.precision import AUTO

TASKS = {  # name in a recipe -> module of this package that defines TASK, imported when it is used: they import much
    "translation": "translation",
    "language-modelling": "language_modelling",
    "image-classification": "image_classification",
    "masked-lm": "masked_lm",
    "sequence-classification": "sequence_classification",
}


SPLITS = ("train", "dev", "test")


_FIELDS = {
    "name": str,
    "task": str,
    "data": dict,
    "tokenizer": dict,
    "presets": dict,
    "preset": str,
    "backbone": dict,
    "training": dict,
    "decoding": dict,
    "start": str,  # the folder of another grid, where each row starts from the run of the same row and seed
    "axis": str,  # a setting of a method, such as factorized_embedding.rank, that the report draws the score against
    "rows": dict,
    "only": list,
    "seeds": list,
    "smoke": dict,
}


def _precision(value: Any) -> Any:
    if not isinstance(value, bool) and value != AUTO:
        raise ValueError
    return value


# YAML reads 1e-3 as text: numbers are converted, not only checked.
_TRAINING: dict[str, Callable[[Any], Any]] = {
    "epochs": float,
    "max_tokens": int,
    "learning_rate": float,
    "learning_rates": lambda rates: {component: float(rate) for component, rate in rates.items()},
    "warmup_steps": int,
    "schedule": str,
    "adam_betas": lambda betas: [float(beta) for beta in betas],
    "adam_epsilon": float,
    "weight_decay": float,
    "max_grad_norm": float,
    "label_smoothing": float,
    "bf16": _precision,
    "accumulation": int,
    "patience": int,
    "block_size": int,
    "evaluations": int,
    "masking": float,
}


_SECTIONS = {
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
        "unit",
        "holdout",
        "limit",
    },
    "tokenizer": {"kind", "vocab_size"},
    "backbone": {"model_type", "init", "config", "pretrained"},
    "training": set(_TRAINING),
    "decoding": {"num_beams", "max_tokens"},
}


def _whole(number: Any) -> int:
    if float(number) != int(number):
        raise ValueError
    return int(number)


def _lr_steps(steps: Any) -> dict[str, Any]:
    if set(steps) != {"gamma", "at"}:
        raise ValueError
    return {"gamma": float(steps["gamma"]), "at": [_whole(epoch) for epoch in steps["at"]]}


@dataclass(frozen=True)
class _Language:
    """What the recipes of a task may say: the fields of each section, how settings of `training` are read, and which of them
    are needed; `files`: what the two files of a split are, None where it is a list of any number; `tokenizers`: of what kind;
    `counts_pieces`: its score is that of a piece, so that rows of other tokenizers cannot be compared in it."""

    sections: dict[str, set[str]]
    training: dict[str, Callable[[Any], Any]]
    needed: tuple[str, ...]
    files: str | None
    tokenizers: tuple[str, ...] = ("bpe", "unigram")
    counts_pieces: bool = False


_IMAGE_TRAINING: dict[str, Callable[[Any], Any]] = {
    "epochs": _whole,
    "batch_size": _whole,
    "learning_rate": float,
    "lr_steps": _lr_steps,  # the rate is multiplied by `gamma` before each of the epochs `at`, counted from 0
    "weight_decay": float,
}


_TEXT = ("epochs", "max_tokens", "learning_rate", "warmup_steps")


_ENCODERS = {name: fields for name, fields in _SECTIONS.items() if name != "decoding"}


_LANGUAGES = {
    "translation": _Language(_SECTIONS, _TRAINING, _TEXT, files="[source, target]"),
    "language-modelling": _Language(_SECTIONS, _TRAINING, _TEXT, files=None, counts_pieces=True),
    "masked-lm": _Language(_ENCODERS, _TRAINING, _TEXT, files=None, tokenizers=("wordpiece",), counts_pieces=True),
    "sequence-classification": _Language(_ENCODERS, _TRAINING, _TEXT, files=None, tokenizers=("wordpiece",)),
    "image-classification": _Language(
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


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins. Mappings are merged, except where they exclude each other: `data` of another form, and a pretrained instead of
    a fresh `backbone` or the reverse, replace what was there. A pretrained backbone brings its tokenizer, so it removes the
    `tokenizer` of `base` too."""
    merged = dict(base)
    if _is_pretrained(over.get("backbone")) and not _is_pretrained(base.get("backbone")):
        merged.pop("tokenizer", None)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and not _replaces(key, old, value):
            merged[key] = merge(old, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _replaces(section: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    if section == "data":
        return _is_other_form(old, new)
    if section == "backbone":
        return _is_pretrained(new) != _is_pretrained(old) and bool({"pretrained", "model_type"} & set(new))
    return False


def _is_pretrained(backbone: Any) -> bool:
    return isinstance(backbone, dict) and "pretrained" in backbone


def _is_other_form(old: dict[str, Any], new: dict[str, Any]) -> bool:
    before, after = data_form(old), data_form(new)
    only_splits = before == "hub" and after == "files" and "root" not in new  # another split of the same data set
    return None not in (before, after) and before != after and not only_splits


def data_form(data: dict[str, Any]) -> str | None:
    """The forms of `data`, which exclude each other: the built-in corpus, a data set of the Hub, or files."""
    return next(
        (form for form, mark in (("builtin", "builtin"), ("hub", "hub"), ("files", "train")) if mark in data), None
    )


def check_types(recipe: dict[str, Any], path: Any) -> None:
    for key, value in recipe.items():
        if key not in _FIELDS:
            raise ValueError(f"{path}: unknown field {key!r}; choose from {sorted(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise ValueError(f"{path}: {key} must be a {_FIELDS[key].__name__}, not {value!r}")


def _check_present(recipe: dict[str, Any], keys: Collection[str], path: Any) -> None:
    for key in keys:
        if key not in recipe:
            raise ValueError(f"{path}: {key!r} is missing")


def _check_sections(recipe: dict[str, Any], task: str, path: Any) -> None:
    sections = _LANGUAGES[task].sections
    for key in (key for key in _SECTIONS if key in recipe):
        if key not in sections:
            raise ValueError(f"{path}: task {task!r} takes no {key}")
        for unknown in sorted(set(recipe[key]) - set(sections[key])):
            raise ValueError(f"{path}: unknown field {key}.{unknown}; choose from {sorted(sections[key])}")
    kind, kinds = recipe.get("tokenizer", {}).get("kind"), _LANGUAGES[task].tokenizers
    if kind is not None and kind not in kinds:
        raise ValueError(f"{path}: tokenizer.kind={kind!r} does not fit task {task!r}; choose from {list(kinds)}")
    if task == "image-classification" and "backbone" in recipe:
        if "sizes" not in recipe["backbone"]:
            raise ValueError(f"{path}: backbone.sizes is missing")
        try:
            PerceptronConfig(recipe["backbone"]["sizes"])
        except ValueError as error:
            raise ValueError(f"{path}: backbone.{error}") from None


def check(recipe: dict[str, Any], path: Any) -> None:
    check_types(recipe, path)
    _check_present(recipe, ("name", "task"), path)
    task: str = recipe["task"]
    if task not in TASKS:
        raise ValueError(f"{path}: unknown task {task!r}; choose from {list(TASKS)}")
    pretrained = "pretrained" in recipe.get("backbone", ())  # with its own tokenizer
    own: tuple[str, ...] = ("backbone",) if pretrained else ("backbone", "tokenizer")
    own = () if "start" in recipe else own  # another grid has them, where a run starts from one
    sections = [key for key in ("data", *own, "training") if key in _LANGUAGES[task].sections]
    _check_present(recipe, (*sections, "rows", "seeds"), path)
    _check_sections(recipe, task, path)
    for key in _LANGUAGES[task].needed:
        if key not in recipe["training"]:
            raise ValueError(f"{path}: training.{key} is missing")
    _check_training(recipe["training"], task, path)
    _check_data(recipe["data"], task, path)
    if task in ("language-modelling", "masked-lm"):
        recipe["training"].setdefault("block_size", 128)
    if "bf16" in _LANGUAGES[task].sections["training"]:
        recipe["training"].setdefault("bf16", AUTO)
    if "axis" in recipe:
        _check_axis(recipe["axis"], path)
    seeds = recipe["seeds"]
    if not seeds or any(type(seed) is not int or not 0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"{path}: seeds must be integers, not {seeds!r}; each in 0..2^32-1")
    only = [str(row) for row in recipe.get("only", ())]
    for key, values in (("seeds", seeds), ("only", only)):
        if len(set(values)) < len(values):
            raise ValueError(f"{path}: {key} names one twice: {recipe[key]!r}")
    for row in only:
        if row not in recipe["rows"]:
            raise ValueError(f"{path}: no row {row!r}; choose from {list(recipe['rows'])}")
    for name, row in recipe["rows"].items():
        if not isinstance(name, str) or not isinstance(row, dict) or not {"label", "methods"} <= set(row):
            raise ValueError(f"{path}: row {name!r} must be a quoted name with 'label' and 'methods'")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"{path}: row {name!r} names a folder: letters, digits, '.', '_' and '-' only")
        if not isinstance(row["methods"], list):
            raise ValueError(f"{path}: the methods of row {name!r} must be a list, not {row['methods']!r}")
        for method in row["methods"]:
            method_of(method)
        for unknown in sorted(set(row) - set(ROW_FIELDS)):
            raise ValueError(f"{path}: unknown field {unknown!r} of row {name!r}; choose from {list(ROW_FIELDS)}")
        where = f"{path}: row {name!r}"
        changed = {key: row[key] for key in OF_A_ROW if key in row}
        check_types(changed, where)
        _check_sections(changed, task, where)
        _check_training(row.get("training", {}), task, where)
        merged = merge({key: recipe[key] for key in OF_A_ROW if key in recipe}, changed)
        if merged.get("tokenizer") != recipe.get("tokenizer") and _LANGUAGES[task].counts_pieces:
            raise ValueError(
                f"{where}: perplexity is per token, so all rows of task {task!r} must use the same tokenizer"
            )
        check_start(name, recipe["rows"], where)
        check_teacher(row, task, where)
        check_heads(row, recipe["rows"], task, "start" in recipe, where)
        backbone = merged.get("backbone", {})
        check_pretrained(backbone, where, has_tokenizer="tokenizer" in merged)
        check_from_scratch(row, "start" in recipe or "start" in row or "pretrained" in backbone, where)
    if "start" in recipe:
        for section in ("backbone", "tokenizer"):
            for owner, where in (
                (recipe, path),
                *((row, f"{path}: row {name!r}") for name, row in recipe["rows"].items()),
            ):
                if section in owner:
                    raise ValueError(
                        f"{where} has both 'start' and {section!r}: it takes the {section} of the grid {recipe['start']}"
                    )


def _check_axis(axis: str, path: Any) -> None:
    if axis == "heads.fraction":
        return
    method, _, setting = axis.partition(".")
    if method not in METHODS:
        raise ValueError(f"{path}: axis={axis!r} names no method; choose from {sorted(METHODS)}, such as low_rank.rank")
    settings = [field.name for field in fields(METHODS[method])]
    if setting not in settings:
        raise ValueError(f"{path}: axis={axis!r} is no setting; choose from {settings} of {method!r}")


def _check_training(training: dict[str, Any], task: str, path: Any) -> None:
    for key, value in training.items():
        try:
            training[key] = _LANGUAGES[task].training[key](value)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"{path}: training.{key}={value!r} is not a value that it takes") from None
    for component in training.get("learning_rates", ()):
        if component not in TRAINED:
            raise ValueError(
                f"{path}: unknown component training.learning_rates.{component}; choose from {list(TRAINED)}"
            )
    if "masking" in training and task != "masked-lm":
        raise ValueError(f"{path}: training.masking is of task 'masked-lm', not of {task!r}")
    if not 0 < training.get("masking", 1) <= 1:
        raise ValueError(f"{path}: training.masking={training['masking']} must be above 0 and at most 1")
    for key, least in (("block_size", 1), ("evaluations", 1), ("batch_size", 1), ("epochs", 0)):
        if training.get(key, least) < least:
            raise ValueError(f"{path}: training.{key}={training[key]} must be at least {least}")


_TEXTS = {"language-modelling", "masked-lm"}


# Fields of `data` that mean something to some tasks and forms only. (`source` and `target` may lie unused in a recipe whose data
# of the Hub is replaced by the user's files.)
_DATA_OF: dict[str, tuple[set[str], set[str]]] = {
    "name": (set(_LANGUAGES), {"hub"}),
    "column": (_TEXTS, {"hub"}),
    "unit": (_TEXTS, {"files"}),
    "columns": ({"sequence-classification"}, {"hub", "files"}),
    "label": ({"sequence-classification"}, {"hub", "files"}),
}


def _check_data(data: dict[str, Any], task: str, path: Any) -> None:
    form, parallel, files = data_form(data), task == "translation", _LANGUAGES[task].files
    without_dev = "holdout" in data or (task == "image-classification" and "dev" not in data)
    splits = [split for split in SPLITS if split != "dev" or not without_dev]
    needed = {"builtin": [], "hub": [*(["source", "target"] if parallel else []), *splits]}.get(form or "", splits)
    for key in needed:
        if key not in data:
            raise ValueError(f"{path}: data.{key} is missing")
    if form != "files" and "root" in data:
        raise ValueError(f"{path}: data.root says where files are, but the data is of the form {form!r}")
    for split in splits if form == "files" else ():
        named = data[split]
        if not isinstance(named, list) or not named or (files is not None and len(named) != 2):
            wanted = "a list of files" if files is None else f"two files, {files}"
            raise ValueError(f"{path}: data.{split} must be {wanted}, not {named!r}")
    if "holdout" in data and (type(data["holdout"]) is not int or data["holdout"] < 1 or "dev" in data):
        raise ValueError(
            f"{path}: data.holdout={data['holdout']!r} must be a number of training items, and takes the place of data.dev"
        )
    columns = data.get("columns", ["sentence"])
    if (
        not isinstance(columns, list)
        or len(columns) not in (1, 2)
        or not all(isinstance(name, str) for name in columns)
    ):
        raise ValueError(f"{path}: data.columns must be a list of one or two names of columns, not {columns!r}")
    if data.get("unit", "lines") not in ("lines", "documents"):
        raise ValueError(f"{path}: unknown data.unit {data['unit']!r}; choose from ['lines', 'documents']")
    for field, (tasks, forms) in _DATA_OF.items():
        if field in data and task not in tasks:
            raise ValueError(f"{path}: data.{field} is of the tasks {sorted(tasks)}, not of {task!r}")
        if field in data and form is not None and form not in forms:
            raise ValueError(f"{path}: data.{field} is of data of the form {sorted(forms)}, not {form!r}")


def method_of(data: Any, tokenizer: Any = None) -> Method:
    """The method of a row. Where it says `continuations: tokenizer`, they are those of the run's, if there is one yet."""
    if isinstance(data, dict) and data.get("continuations") == "tokenizer":
        from hf_freeze.analysis import word_continuations  # here: it imports much

        data = data | {"continuations": [] if tokenizer is None else word_continuations(tokenizer)}
    return method_from_dict(data)
