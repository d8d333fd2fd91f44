"""`hf-freeze recipes`."""

from typing import Any

from hf_freeze import terminal


def recipes() -> None:
    """List the recipes that come with hf_freeze: task, number of rows, what each is for, and what it needs.

    `run`, `search` and `compress --data` take their names, and so does `extends:` in a recipe of your own.

    Example: hf-freeze recipes

    Example: hf-freeze run freeze_ablation --jobs 2
    """
    from hf_freeze.lab.recipes.find import packaged_folder, packaged_recipes
    from hf_freeze.lab.recipes.load import read_recipe

    by_purpose: dict[str, list[str]] = {}
    width = max(map(len, packaged_recipes())) + 2
    for name, path in packaged_recipes().items():
        recipe = read_recipe(path)
        if "name" not in recipe:  # others extend it
            continue
        rows = "search" if "space" in recipe else f"{len(recipe.get('only', recipe['rows']))} rows"
        line = f"  {name:<{width}}{recipe['task']:<24}{rows:>7}  {_needs(recipe)}"
        by_purpose.setdefault(recipe["about"], []).append(line)
    for about, lines in by_purpose.items():
        terminal.say("\n".join([about, *lines, ""]))
    terminal.say(f"The files are in {packaged_folder()}. --set data.root=FOLDER says where a folder of data is.")


def _needs(recipe: dict[str, Any]) -> str:
    """In words: the data, and what else must be there."""
    data = recipe["data"]
    needs = ["built-in data" if "builtin" in data else data.get("hub") or f"folder {data['root']}"]
    if "start" in recipe:
        needs.append(f"finished {recipe['start']}")
    elif "backbone" not in recipe:
        needs.append("--set backbone.pretrained=MODEL")
    return ", ".join(needs)
