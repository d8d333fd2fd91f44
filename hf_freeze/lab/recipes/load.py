"""Read a recipe: a YAML file that says which data, backbone, rows and seeds to run. All of it is plain data."""

import copy
from pathlib import Path
from typing import Any

import yaml

from hf_freeze.lab.recipes.explain import check_top
from hf_freeze.lab.recipes.find import find_recipe
from hf_freeze.lab.recipes.merge import merge
from hf_freeze.lab.recipes.recipe import Recipe


def load_recipe(path: str | Path, settings: list[str] | None = None, *, smoke: bool = False) -> Recipe:
    """Read a recipe, a file or one that comes with hf_freeze (`find_recipe`). `extends: other.yaml` starts from another; the
    chosen preset fills what the recipe leaves open; `smoke` applies the recipe's `smoke` section; `settings`
    (`"training.epochs=3"`) come last.

    Raises FileNotFoundError for an unknown recipe; ValueError for unknown fields, wrong types, unknown presets, rows or methods.
    """
    from hf_freeze.lab.recipes.check import check  # here: `hf-freeze recipes` need not wait for its imports

    return check(read_recipe(path, settings, smoke=smoke), path)


def read_recipe(path: str | Path, settings: list[str] | None = None, *, smoke: bool = False) -> dict[str, Any]:
    """The plain data of a recipe, in which what it leaves to the user, such as a pretrained model, may be missing."""
    recipe = _read(find_recipe(path))
    # The preset may itself be chosen by --smoke or --set, so these are applied first. They win: the preset is merged below them.
    overrides = copy.deepcopy(recipe.get("smoke", {})) if smoke else {}
    for setting in settings or []:
        overrides = merge(overrides, _parse_setting(setting))
    recipe = merge(recipe, overrides)
    check_top(Recipe, recipe, path)
    preset = recipe.get("preset")
    presets = recipe.get("presets", {})
    if preset is None and not presets:
        return recipe
    if preset not in presets:
        raise ValueError(f"{path}: unknown preset {preset!r}; choose from {sorted(presets)}")
    ordered = list(recipe.get("rows", ()))  # as the recipe names them, whatever the preset adds to some
    recipe = merge(presets[preset], recipe)
    if "rows" in recipe:
        recipe["rows"] = {name: recipe["rows"][name] for name in dict.fromkeys([*ordered, *recipe["rows"]])}
    return recipe


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # with libyaml, several times as fast


class _Loader(_SafeLoader):
    """YAML lets a later key replace an equal one without a word: two rows of one name would be one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ValueError(f"{path}: 'extends' refers to itself")
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: a recipe is a mapping, not {type(recipe).__name__}")
    base = recipe.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ValueError(f"{path}: 'extends' names another recipe, not {base!r}")
    check_top(Recipe, recipe, path)
    if base is None:
        return recipe
    extended = path.parent / base
    return merge(_read(extended if extended.is_file() else find_recipe(base), (*seen, path.resolve())), recipe)


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
