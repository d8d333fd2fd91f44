"""Whether a recipe has all required fields, and only fields that exist."""

import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from hf_freeze.data.files import kind_of
from hf_freeze.lab.data.tables import TABLES
from hf_freeze.lab.recipes.fields import DATA_FIELDS, SECTIONS, TAKES, TASK_FIELDS, TRACKERS, check_types
from hf_freeze.lab.recipes.merge import merge
from hf_freeze.lab.recipes.rows import (
    OF_A_ROW,
    ROW_FIELDS,
    check_calibration,
    check_from_scratch,
    check_heads,
    check_layers,
    check_pictures,
    check_pretrained,
    check_start,
    check_teacher,
    method_of,
)
from hf_freeze.lab.recipes.space import search_settings, space_of
from hf_freeze.lab.tasks.data_forms import SPLITS, data_form
from hf_freeze.lab.tasks.perceptron import PerceptronConfig
from hf_freeze.lab.tasks.registry import TASK_MODULES
from hf_freeze.lab.training.precision import AUTO
from hf_freeze.methods.registry import METHODS
from hf_freeze.training.schedules import RATED


def check(recipe: dict[str, Any], path: Any) -> None:
    """Check a whole recipe, read numbers and fill in defaults. `path`: the file, for the ValueError of anything that is wrong."""
    check_types(recipe, path)
    _check_present(recipe, ("name", "task"), path)
    task: str = recipe["task"]
    if task not in TASK_MODULES:
        raise ValueError(f"{path}: unknown task {task!r}; choose from {list(TASK_MODULES)}")
    if "metric" in recipe and recipe["metric"] not in (metrics := TASK_FIELDS[task].metrics):
        choices = f"choose from {list(metrics)}" if metrics else "it has one metric"
        raise ValueError(f"{path}: task {task!r} has no metric {recipe['metric']!r}; {choices}")
    pretrained = "pretrained" in recipe.get("backbone", ())  # with its own tokenizer
    own: tuple[str, ...] = ("backbone",) if pretrained else ("backbone", "tokenizer")
    own = () if "start" in recipe else own  # another grid has them, where a run starts from one
    sections = [key for key in ("data", *own, "training") if key in TASK_FIELDS[task].sections]
    if "space" in recipe:  # the rows beside a space are there for comparison
        recipe.setdefault("rows", {})
    _check_present(recipe, (*sections, "rows", "seeds"), path)
    _check_sections(recipe, task, path)
    for key in TASK_FIELDS[task].needed:
        if key not in recipe["training"]:
            raise ValueError(f"{path}: training.{key} is missing")
    _check_training(recipe["training"], task, path)
    _check_data(recipe["data"], task, path)
    if task in ("language-modelling", "masked-lm"):
        recipe["training"].setdefault("block_size", 128)
    if "bf16" in TASK_FIELDS[task].sections["training"]:
        recipe["training"].setdefault("bf16", AUTO)
    if "axis" in recipe:
        _check_axis(recipe["axis"], path)
    if (tracker := recipe.get("report_to", TRACKERS[0])) not in TRACKERS:
        raise ValueError(f"{path}: unknown tracker report_to={tracker!r}; choose from {list(TRACKERS)}")
    if "report_to" in recipe and task == "image-classification":
        raise ValueError(f"{path}: report_to is for tasks that the Trainer trains, not for {task!r}")
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
        _check_row(name, row, recipe, path)
    if "start" in recipe:
        _check_other_grid(recipe, path)
    if "search" in recipe and "space" not in recipe:
        raise ValueError(f"{path}: 'search' needs a 'space' to search")
    if "space" in recipe:
        space_of(recipe, path)
        search_settings(recipe, path)


def check_data(recipe: dict[str, Any], path: Any) -> None:
    """Check the data of a recipe alone, of which the rest may be missing or wrong."""
    _check_present(recipe, ("task", "data"), path)
    _check_sections({"data": recipe["data"]}, recipe["task"], path)
    _check_data(recipe["data"], recipe["task"], path)


def _check_row(name: Any, row: Any, recipe: dict[str, Any], path: Any) -> None:
    task = recipe["task"]
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
    if merged.get("tokenizer") != recipe.get("tokenizer") and TASK_FIELDS[task].is_per_token:
        raise ValueError(f"{where}: perplexity is per token, so all rows of task {task!r} must use the same tokenizer")
    check_start(name, recipe["rows"], where)
    check_teacher(row, task, where)
    check_heads(row, recipe["rows"], task, "start" in recipe, where)
    check_layers(row, task, "start" in recipe, where)
    check_pictures(row, task, where)
    backbone = merged.get("backbone", {})
    check_pretrained(backbone, where, has_tokenizer="tokenizer" in merged)
    trained = "start" in recipe or "start" in row or "pretrained" in backbone
    check_calibration(row, task, trained, where)
    check_from_scratch(row, trained, where)


def _check_other_grid(recipe: dict[str, Any], path: Any) -> None:
    """A run that starts from another grid's takes its backbone and tokenizer from there."""
    owners = [(recipe, f"{path}"), *((row, f"{path}: row {name!r}") for name, row in recipe["rows"].items())]
    for section in ("backbone", "tokenizer"):
        for owner, where in owners:
            if section in owner:
                raise ValueError(
                    f"{where} has both 'start' and {section!r}: it takes the {section} of the grid {recipe['start']}"
                )


def _check_present(recipe: dict[str, Any], keys: Collection[str], path: Any) -> None:
    for key in keys:
        if key not in recipe:
            pretrained = key == "backbone" and "pretrained" in TASK_FIELDS[recipe["task"]].sections[key]
            hint = "; name a model with --set backbone.pretrained=FOLDER" if pretrained else ""
            raise ValueError(f"{path}: {key!r} is missing{hint}")


def _check_sections(recipe: dict[str, Any], task: str, path: Any) -> None:
    sections = TASK_FIELDS[task].sections
    for key in (key for key in SECTIONS if key in recipe):
        if key not in sections:
            raise ValueError(f"{path}: task {task!r} takes no {key}")
        for unknown in sorted(set(recipe[key]) - set(sections[key])):
            raise ValueError(f"{path}: unknown field {key}.{unknown}; choose from {sorted(sections[key])}")
    kind, kinds = recipe.get("tokenizer", {}).get("kind"), TASK_FIELDS[task].tokenizers
    if kind is not None and kind not in kinds:
        raise ValueError(f"{path}: tokenizer.kind={kind!r} does not fit task {task!r}; choose from {list(kinds)}")
    if task == "image-classification" and "backbone" in recipe:
        if "sizes" not in recipe["backbone"]:
            raise ValueError(f"{path}: backbone.sizes is missing")
        try:
            PerceptronConfig(recipe["backbone"]["sizes"])
        except ValueError as error:
            raise ValueError(f"{path}: backbone.{error}") from None


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
        reader = TASK_FIELDS[task].training[key]
        try:
            training[key] = reader(value)
        except (AttributeError, OverflowError, TypeError, ValueError):
            raise ValueError(
                f"{path}: training.{key}={value!r} is not a value that it takes: {TAKES[reader]}"
            ) from None
    for component in training.get("learning_rates", ()):
        if component not in RATED:
            raise ValueError(
                f"{path}: unknown component training.learning_rates.{component}; choose from {list(RATED)}"
            )
    if "masking" in training and task != "masked-lm":
        raise ValueError(f"{path}: training.masking is for task 'masked-lm', not for {task!r}")
    if not 0 < training.get("masking", 1) <= 1:
        raise ValueError(f"{path}: training.masking={training['masking']} must be above 0 and at most 1")
    for key, least in (("block_size", 1), ("evaluations", 1), ("batch_size", 1), ("epochs", 0)):
        if training.get(key, least) < least:
            raise ValueError(f"{path}: training.{key}={training[key]} must be at least {least}")


def _check_data(data: dict[str, Any], task: str, path: Any) -> None:
    form, parallel, files = data_form(data), task == "translation", TASK_FIELDS[task].files
    without_dev = "holdout" in data or (task == "image-classification" and "dev" not in data)
    drawn = {"dev": without_dev, "test": "holdout_test" in data}
    splits = [split for split in SPLITS if not drawn.get(split)]
    needed = {"builtin": [], "hub": [*(["source", "target"] if parallel else []), *splits]}.get(form or "", splits)
    for key in needed:
        if key not in data:
            raise ValueError(f"{path}: data.{key} is missing")
    if form != "files" and "root" in data:
        raise ValueError(f"{path}: data.root says where files are, but the data is of the form {form!r}")
    for split in splits if form == "files" else ():
        named = data[split]
        is_list = isinstance(named, list) and bool(named) and all(isinstance(file, str) for file in named)
        are_tables = is_list and TASK_FIELDS[task].tables and all(kind_of(file) != "lines" for file in named)
        if not is_list or not (files is None or len(named) == 2 or are_tables):
            wanted = "a list of files" if files is None else f"two files, {files}"
            others = f"; files that end in {TABLES} hold both" if TASK_FIELDS[task].tables else ""
            raise ValueError(f"{path}: data.{split} must be {wanted}, not {named!r}{others}")
    for key, split in (("holdout", "dev"), ("holdout_test", "test")):
        if key in data and (type(data[key]) is not int or data[key] < 1 or split in data):
            raise ValueError(
                f"{path}: data.{key}={data[key]!r} must be a number of training items; it replaces data.{split}"
            )
    if form == "builtin" and not TASK_FIELDS[task].builtin:
        raise ValueError(f"{path}: task {task!r} has no built-in data; name files or a data set of the Hub")
    for key, kind in (("header", list), ("mismatched", str if form == "hub" else list)):
        if not isinstance(data.get(key, kind()), kind):
            raise ValueError(f"{path}: data.{key} must be a {kind.__name__}, not {data[key]!r}")
    columns = data.get("columns", ["sentence"])
    if (
        not isinstance(columns, list)
        or len(columns) not in (1, 2)
        or not all(isinstance(name, str) for name in columns)
    ):
        raise ValueError(f"{path}: data.columns must be a list of one or two names of columns, not {columns!r}")
    if data.get("unit", "lines") not in ("lines", "documents"):
        raise ValueError(f"{path}: unknown data.unit {data['unit']!r}; choose from ['lines', 'documents']")
    for field, (tasks, forms) in DATA_FIELDS.items():
        if field in data and task not in tasks:
            raise ValueError(f"{path}: data.{field} is for the tasks {sorted(tasks)}, not for {task!r}")
        if field in data and form is not None and form not in forms:
            raise ValueError(f"{path}: data.{field} is for data of the form {sorted(forms)}, not {form!r}")
