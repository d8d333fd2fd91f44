"""`hf-freeze recipes`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from hf_freeze import terminal

if TYPE_CHECKING:
    from hf_freeze.lab.recipes.recipe import Recipe


def recipes(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print a JSON schema, with which editors complete and check recipes.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print tables of all fields, as in the documentation.")
    ] = False,
) -> None:
    """List the recipes that come with hf_freeze: task, number of rows, what each is for, and what it needs.

    `run`, `search` and `compress --data` take their names, and so does `extends:` in a recipe of your own.

    Example: hf-freeze recipes

    Example: hf-freeze recipes --schema > recipe.schema.json

    Example: hf-freeze run freeze_ablation --jobs 2
    """
    if schema or markdown:
        from hf_freeze.lab.recipes.describe import fields_as_markdown, json_schema

        typer.echo(json.dumps(json_schema(), indent=1) if schema else fields_as_markdown())
    else:
        _list()


def _list() -> None:
    from hf_freeze.lab.recipes.explain import validated
    from hf_freeze.lab.recipes.find import packaged_folder, packaged_recipes
    from hf_freeze.lab.recipes.load import read_recipe
    from hf_freeze.lab.recipes.recipe import Recipe

    by_purpose: dict[str, list[str]] = {}
    width = max(map(len, packaged_recipes())) + 2
    for name, path in packaged_recipes().items():
        data = read_recipe(path)
        if "name" not in data:  # others extend it
            continue
        recipe = validated(Recipe, data, path)
        rows = "search" if recipe.space is not None else f"{len(recipe.only or recipe.rows)} rows"
        line = f"  {name:<{width}}{recipe.task:<24}{rows:>7}  {_needs(recipe)}"
        by_purpose.setdefault(recipe.about, []).append(line)
    for about, lines in by_purpose.items():
        terminal.say("\n".join([about, *lines, ""]))
    terminal.say(f"The files are in {packaged_folder()}. --set data.root=FOLDER says where a folder of data is.")


def _needs(recipe: "Recipe") -> str:
    """In words: the data, and what else must be there."""
    data = recipe.data
    needs = ["built-in data" if data.builtin is not None else data.hub or f"folder {data.root}"]
    if recipe.start is not None:
        needs.append(f"finished {recipe.start}")
    elif recipe.backbone is None:
        needs.append("--set backbone.pretrained=MODEL")
    return ", ".join(needs)
