"""Recipes: YAML files that say which data, backbone, rows and seeds to run. All of it is plain data, checked here."""

import copy
from pathlib import Path
from typing import Any

import yaml

from hf_freeze.experiments.fields import check, check_types, merge
from hf_freeze.experiments.rows import (
    OF_A_ROW,
    needed_rows,
)
from hf_freeze.methods.registry import METHODS


def load_recipe(path: str | Path, settings: list[str] | None = None, *, smoke: bool = False) -> dict[str, Any]:
    """Read a recipe. `extends: other.yaml` starts from another; the chosen preset fills what the recipe leaves open;
    `smoke` applies the recipe's `smoke` section; `settings` (`"training.epochs=3"`) come last.

    Raises ValueError for unknown fields, wrong types, unknown presets, rows or methods.
    """
    recipe = _read(Path(path))
    # The preset may itself be chosen by --smoke or --set, so these are applied first to find it and again at the end.
    overrides = copy.deepcopy(recipe.get("smoke", {})) if smoke else {}
    for setting in settings or []:
        overrides = merge(overrides, _parse_setting(setting))
    recipe = merge(recipe, overrides)
    check_types(recipe, path)
    preset = recipe.get("preset")
    presets = recipe.get("presets", {})
    if preset not in presets:
        raise ValueError(f"{path}: unknown preset {preset!r}; choose from {sorted(presets)}")
    ordered = list(recipe.get("rows", ()))  # as the recipe names them, whatever the preset adds to some
    recipe = merge(presets[preset], recipe)
    if "rows" in recipe:
        recipe["rows"] = {name: recipe["rows"][name] for name in dict.fromkeys([*ordered, *recipe["rows"]])}
    check(recipe, path)
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
    check_types(recipe, path)
    return recipe if base is None else merge(_read(path.parent / base, (*seen, path.resolve())), recipe)


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


_OF_A_START = (
    "row",
    "seed",
    "training",
    "methods",
    "heads",
    "start",
    "teacher",
    "targets",
)  # what else a run holds is equal in all rows


def expand(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """One plain dict a run, seed by seed, so that a first full table appears early. A random method without a seed of its
    own takes the run's. Rows come in the order of the recipe, whatever that of `only`: reports compare with the first. A row
    that another one starts from comes before it, wanted or not."""
    named = ("name", "task", "preset", "axis", "data", "tokenizer", "backbone", "training")
    shared = {key: recipe[key] for key in named if key in recipe}
    shared["decoding"] = recipe.get("decoding", {})
    rows = recipe["rows"]

    def way_to(name: str) -> list[str]:
        return [*(each for needed in needed_rows(rows[name]).values() for each in way_to(needed)), name]

    needed = {each for wanted in recipe.get("only", rows) for each in way_to(str(wanted))}
    order = dict.fromkeys(each for name in rows if name in needed for each in way_to(name))
    runs = []
    for seed in recipe["seeds"]:
        made: dict[str, dict[str, Any]] = {}
        for name in order:
            row = rows[name]
            run = copy.deepcopy(shared) | {"row": name, "label": row["label"], "seed": seed}
            run["methods"] = [_seeded(method, seed) for method in row["methods"]]
            run = merge(run, {key: row[key] for key in OF_A_ROW if key in row})
            run |= {key: copy.deepcopy(row[key]) for key in ("targets", "heads", "head_scores") if key in row}
            if "start" in recipe:
                run["start"] = {"grid": recipe["start"], "row": name, "seed": seed}
            if "start" in row:
                # With its settings: what they change is another model to start from, and so another run.
                start = copy.deepcopy(made[row["start"]])
                run |= {key: start[key] for key in ("backbone", "tokenizer") if key in start}
                run["start"] = {key: start[key] for key in _OF_A_START if key in start}
            if "teacher" in row:
                teacher = copy.deepcopy(made[row["teacher"]])
                run["teacher"] = {key: teacher[key] for key in _OF_A_START if key in teacher}
            made[name] = run
        runs += made.values()
    return runs


def _seeded(method: dict[str, Any], seed: int) -> dict[str, Any]:
    takes_seed = "seed" in METHODS[method["method"]].__dataclass_fields__ and "seed" not in method
    return method | {"seed": seed} if takes_seed else method
