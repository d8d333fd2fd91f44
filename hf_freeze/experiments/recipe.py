"""Recipes: YAML files that say which data, backbone, rows and seeds to run. All of it is plain data, checked here."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hf_freeze.architectures.base import TRAINED
from hf_freeze.experiments.tasks import SPLITS, TASKS
from hf_freeze.registry import METHODS, method_from_dict

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
    "rows": dict,
    "only": list,
    "seeds": list,
    "smoke": dict,
}
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
    "bf16": bool,
    "accumulation": int,
    "patience": int,
    "block_size": int,
    "evaluations": int,
}
_SECTIONS = {
    "data": {
        "builtin",
        "root",
        "train",
        "dev",
        "test",
        "hub",
        "source",
        "target",
        "column",
        "unit",
        "holdout",
        "limit",
    },
    "tokenizer": {"kind", "vocab_size"},
    "backbone": {"model_type", "init", "config"},
    "training": set(_TRAINING),
    "decoding": {"num_beams", "max_tokens"},
}
_ROW = ("label", "methods", "start", "training", "backbone")  # the first two are needed


def load_recipe(path: str | Path, settings: list[str] | None = None, *, smoke: bool = False) -> dict[str, Any]:
    """Read a recipe. `extends: other.yaml` starts from another; the chosen preset fills what the recipe leaves open;
    `smoke` applies the recipe's `smoke` section; `settings` (`"training.epochs=3"`) come last.

    Raises ValueError for unknown fields, wrong types, unknown presets, rows or methods.
    """
    recipe = _read(Path(path))
    # The preset may itself be chosen by --smoke or --set, so these are applied first to find it and again at the end.
    overrides = copy.deepcopy(recipe.get("smoke", {})) if smoke else {}
    for setting in settings or []:
        overrides = _merge(overrides, _parse_setting(setting))
    recipe = _merge(recipe, overrides)
    _check_types(recipe, path)
    preset = recipe.get("preset")
    presets = recipe.get("presets", {})
    if preset not in presets:
        raise ValueError(f"{path}: unknown preset {preset!r}; choose from {sorted(presets)}")
    ordered = list(recipe.get("rows", ()))  # as the recipe names them, whatever the preset adds to some
    recipe = _merge(presets[preset], recipe)
    if "rows" in recipe:
        recipe["rows"] = {name: recipe["rows"][name] for name in dict.fromkeys([*ordered, *recipe["rows"]])}
    _check(recipe, path)
    return recipe


class _Loader(yaml.SafeLoader):
    """YAML lets a later key replace an equal one without a word: two rows of one name would be one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ValueError(f"{path}: 'extends' goes in a circle")
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: a recipe is a mapping, not {type(recipe).__name__}")
    base = recipe.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path}: 'extends' names another recipe, not {base!r}")
    _check_types(recipe, path)
    return recipe if base is None else _merge(_read(path.parent / base, (*seen, path.resolve())), recipe)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins; mappings are merged, except `data` of another form, which replaces what was there."""
    merged = dict(base)
    for key, value in over.items():
        mappings = isinstance(value, dict) and isinstance(merged.get(key), dict)
        replaces = mappings and key == "data" and _is_other_form(merged[key], value)
        merged[key] = _merge(merged[key], value) if mappings and not replaces else copy.deepcopy(value)
    return merged


def _is_other_form(old: dict[str, Any], new: dict[str, Any]) -> bool:
    before, after = data_form(old), data_form(new)
    only_splits = before == "hub" and after == "files" and "root" not in new  # another split of the same data set
    return None not in (before, after) and before != after and not only_splits


def data_form(data: dict[str, Any]) -> str | None:
    """The forms of `data`, which exclude each other: the built-in corpus, a data set of the Hub, or files."""
    return next(
        (form for form, mark in (("builtin", "builtin"), ("hub", "hub"), ("files", "train")) if mark in data), None
    )


def _parse_setting(setting: str) -> dict[str, Any]:
    key, equals, value = setting.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {setting!r}: write KEY=VALUE, such as training.epochs=3")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {setting!r}: not YAML: {' '.join(str(error).split())}") from error
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _check_types(recipe: dict[str, Any], path: Any) -> None:
    for key, value in recipe.items():
        if key not in _FIELDS:
            raise ValueError(f"{path}: unknown field {key!r}; choose from {sorted(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise ValueError(f"{path}: {key} must be a {_FIELDS[key].__name__}, not {value!r}")
        for unknown in sorted(set(value) - _SECTIONS[key]) if key in _SECTIONS else ():
            raise ValueError(f"{path}: unknown field {key}.{unknown}; choose from {sorted(_SECTIONS[key])}")


def _check(recipe: dict[str, Any], path: Any) -> None:
    _check_types(recipe, path)
    for key in ("name", "task", "data", "tokenizer", "backbone", "training", "rows", "seeds"):
        if key not in recipe:
            raise ValueError(f"{path}: {key!r} is missing")
    if recipe["task"] not in TASKS:
        raise ValueError(f"{path}: unknown task {recipe['task']!r}; choose from {list(TASKS)}")
    _check_training(recipe["training"], path)
    _check_data(recipe["data"], recipe["task"], path)
    if recipe["task"] == "language-modelling":
        recipe["training"].setdefault("block_size", 128)
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
            method_from_dict(method)
        for unknown in sorted(set(row) - set(_ROW)):
            raise ValueError(f"{path}: unknown field {unknown!r} of row {name!r}; choose from {list(_ROW)}")
        where = f"{path}: row {name!r}"
        _check_types({key: row[key] for key in ("training", "backbone") if key in row}, where)
        _check_training(row.get("training", {}), where)
        _check_start(name, recipe["rows"], where)


def _check_training(training: dict[str, Any], path: Any) -> None:
    for key, value in training.items():
        try:
            training[key] = _TRAINING[key](value)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"{path}: training.{key}={value!r} is not a value that it takes") from None
    for component in training.get("learning_rates", ()):
        if component not in TRAINED:
            raise ValueError(
                f"{path}: unknown component training.learning_rates.{component}; choose from {list(TRAINED)}"
            )
    for key, least in (("block_size", 1), ("evaluations", 1), ("epochs", 0)):
        if training.get(key, least) < least:
            raise ValueError(f"{path}: training.{key}={training[key]} must be at least {least}")


def _check_start(name: str, rows: dict[str, Any], path: Any) -> None:
    if "start" in rows[name] and "backbone" in rows[name]:
        raise ValueError(
            f"{path} has both 'start' and 'backbone': it takes the backbone of the row that it starts from"
        )
    way = [name]
    while isinstance(row := rows[way[-1]], dict) and "start" in row:
        start = row["start"]
        if not isinstance(start, str) or start not in rows:
            raise ValueError(f"{path}: start={start!r} is no row; choose from {list(rows)}")
        if start in way:
            raise ValueError(f"{path}: 'start' goes in a circle: {' <- '.join([*way, start])}")
        way.append(start)


def _check_data(data: dict[str, Any], task: str, path: Any) -> None:
    form, parallel = data_form(data), task == "translation"
    splits = [split for split in SPLITS if split != "dev" or "holdout" not in data]
    needed = {"builtin": [], "hub": [*(["source", "target"] if parallel else []), *splits]}.get(form or "", splits)
    for key in needed:
        if key not in data:
            raise ValueError(f"{path}: data.{key} is missing")
    if form != "files" and "root" in data:
        raise ValueError(f"{path}: data.root says where files are, but the data is of the form {form!r}")
    for split in splits if form == "files" else ():
        files = data[split]
        if not isinstance(files, list) or not files or (parallel and len(files) != 2):
            wanted = "two files, [source, target]" if parallel else "a list of files"
            raise ValueError(f"{path}: data.{split} must be {wanted}, not {files!r}")
    if "holdout" in data and (type(data["holdout"]) is not int or data["holdout"] < 1 or "dev" in data):
        raise ValueError(
            f"{path}: data.holdout={data['holdout']!r} must be a number of training items, and takes the place of data.dev"
        )
    if data.get("unit", "lines") not in ("lines", "documents"):
        raise ValueError(f"{path}: unknown data.unit {data['unit']!r}; choose from ['lines', 'documents']")


_OF_A_START = ("row", "seed", "training", "methods", "start")  # what else a run holds is equal in all rows


def expand(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """One plain dict a run, seed by seed, so that a first full table appears early. A random method without a seed of its
    own takes the run's. A row that another one starts from comes before it, wanted or not."""
    shared = {key: recipe[key] for key in ("name", "task", "preset", "data", "tokenizer", "backbone", "training")}
    shared["decoding"] = recipe.get("decoding", {})
    order: dict[str, None] = {}
    for wanted in recipe.get("only", recipe["rows"]):
        way = [str(wanted)]
        while "start" in (row := recipe["rows"][way[-1]]):
            way.append(row["start"])
        order |= dict.fromkeys(reversed(way))
    runs = []
    for seed in recipe["seeds"]:
        made: dict[str, dict[str, Any]] = {}
        for name in order:
            row = recipe["rows"][name]
            run = copy.deepcopy(shared) | {"row": name, "label": row["label"], "seed": seed}
            run["methods"] = [_seeded(method, seed) for method in row["methods"]]
            run["training"] = _merge(run["training"], row.get("training", {}))
            run["backbone"] = _merge(run["backbone"], row.get("backbone", {}))
            if "start" in row:
                # With its settings: what they change is another model to start from, and so another run.
                start = copy.deepcopy(made[row["start"]])
                run["backbone"] = start["backbone"]
                run["start"] = {key: start[key] for key in _OF_A_START if key in start}
            made[name] = run
        runs += made.values()
    return runs


def _seeded(method: dict[str, Any], seed: int) -> dict[str, Any]:
    takes_seed = "seed" in METHODS[method["method"]].__dataclass_fields__ and "seed" not in method
    return method | {"seed": seed} if takes_seed else method
