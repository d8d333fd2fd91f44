"""From a recipe to its runs: one for each row and seed."""

import copy
from typing import Any

from hf_freeze.lab.recipes.merge import merge
from hf_freeze.lab.recipes.recipe import Origin, Recipe, Run
from hf_freeze.lab.recipes.rows import OF_A_ROW
from hf_freeze.methods.registry import METHODS

_SHARED = ("name", "task", "metric", "preset", "axis", "report_to", "data", *OF_A_ROW)
_AS_IN_ROW = ("label", "targets", "heads", "head_scores", "layers", "calibration", "pictures")


def expand(recipe: Recipe) -> list[Run]:
    """The runs, seed by seed, so that a first full table appears early. A random method without a seed of its
    own takes the run's. Rows come in the order of the recipe, whatever that of `only`: reports compare with the first. A row
    that another one starts from comes before it, wanted or not."""
    rows = recipe.rows

    def way_to(name: str) -> list[str]:
        return [*(earlier for needed in rows[name].needs.values() for earlier in way_to(needed)), name]

    needed = {earlier for wanted in (rows if recipe.only is None else recipe.only) for earlier in way_to(wanted)}
    order = dict.fromkeys(earlier for name in rows if name in needed for earlier in way_to(name))
    runs: list[Run] = []
    for seed in recipe.seeds:
        of_seed: dict[str, dict[str, Any]] = {}
        for name in order:
            of_seed[name] = _run(recipe, name, seed, of_seed)
        runs += map(Run.model_validate, of_seed.values())
    return runs


def _run(recipe: Recipe, name: str, seed: int, earlier: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A run as plain data. `earlier`: those of the same seed that it may start from, by their rows."""
    whole, row = recipe.given(), recipe.rows[name].given()
    run = {key: whole[key] for key in _SHARED if key in whole} | {"decoding": whole.get("decoding", {})}
    run = merge(run, {key: row[key] for key in OF_A_ROW if key in row})
    run |= {key: row[key] for key in _AS_IN_ROW if key in row}
    run |= {"row": name, "seed": seed, "methods": [_seeded(method, seed) for method in row["methods"]]}
    if recipe.start is not None:
        run["start"] = {"grid": recipe.start, "row": name, "seed": seed}
    if "start" in row:
        start = earlier[row["start"]]
        run |= {key: start[key] for key in ("backbone", "tokenizer") if key in start}
        run["start"] = _origin(start)
    if "teacher" in row:
        run["teacher"] = _origin(earlier[row["teacher"]])
    return copy.deepcopy(run)


def _origin(run: dict[str, Any]) -> dict[str, Any]:
    """With its settings: what they change is another model to start from, and so another run. What else a run holds is equal in
    all rows."""
    return {key: run[key] for key in Origin.model_fields if key in run}


def _seeded(method: dict[str, Any], seed: int) -> dict[str, Any]:
    takes_seed = "seed" in METHODS[method["method"]].__dataclass_fields__ and "seed" not in method
    return method | {"seed": seed} if takes_seed else method
