"""Where a recipe is: a file of the user's, or one of those that come with hf_freeze, such as `theseus/multi30k`."""

import difflib
from pathlib import Path

import hf_freeze

_NO_RECIPES = "accelerate"  # the folder of configs of accelerate, which are YAML too


def packaged_folder() -> Path:
    """The recipes that come with hf_freeze: a wheel holds them within the package, a clone beside it."""
    package = Path(hf_freeze.__file__).parent
    return next((folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir()), package)


def packaged_recipes() -> dict[str, Path]:
    """Name -> file. `theseus/recipe.yaml` is `theseus`, and `theseus/rte.yaml` is `theseus/rte`."""
    folder, recipes = packaged_folder(), {}
    for path in sorted(folder.rglob("*.yaml")):
        relative = path.relative_to(folder).with_suffix("")
        if relative.parts[0] != _NO_RECIPES:
            recipes[(relative.parent if relative.name == "recipe" else relative).as_posix()] = path
    return dict(sorted(recipes.items()))


def find_recipe(name: str | Path) -> Path:
    """The file that `name` means: a path; the name of a packaged recipe; or its path in a clone, as the pages write it,
    such as `recipes/theseus/rte.yaml`. Raises FileNotFoundError, with the closest names, where there is none."""
    if Path(name).is_file():
        return Path(name)
    packaged, wanted = packaged_recipes(), Path(name).as_posix()
    if wanted in packaged:
        return packaged[wanted]
    in_clone = packaged_folder() / wanted.removeprefix("recipes/")
    if wanted.startswith("recipes/") and in_clone in packaged.values():
        return in_clone
    short = wanted.removeprefix("recipes/").removesuffix(".yaml").removesuffix("/recipe")
    closest = [other for other in packaged if other.startswith(f"{short}/")]
    closest += [other for other in difflib.get_close_matches(short, packaged, n=3) if other not in closest]
    hint = f"; the closest names are {', '.join(closest)}" if closest else ""
    raise FileNotFoundError(
        f"no recipe {wanted!r}: there is no such file, and none of that name in `hf-freeze recipes`{hint}"
    )
