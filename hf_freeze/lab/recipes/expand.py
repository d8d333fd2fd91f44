"""From a recipe to the settings of each of its runs."""

import copy
from typing import Any

from hf_freeze.lab.recipes.merge import merge
from hf_freeze.lab.recipes.rows import OF_A_ROW, needed_rows
from hf_freeze.methods.registry import METHODS

_OF_A_START = (
    "row",
    "seed",
    "training",
    "methods",
    "heads",
    "layers",
    "calibration",
    "start",
    "teacher",
    "targets",
)  # what else a run holds is equal in all rows


def expand(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """One plain dict a run, seed by seed, so that a first full table appears early. A random method without a seed of its
    own takes the run's. Rows come in the order of the recipe, whatever that of `only`: reports compare with the first. A row
    that another one starts from comes before it, wanted or not."""
    named = ("name", "task", "metric", "preset", "axis", "report_to", "data", "tokenizer", "backbone", "training")
    shared = {key: recipe[key] for key in named if key in recipe}
    shared["decoding"] = recipe.get("decoding", {})
    rows = recipe["rows"]

    def way_to(name: str) -> list[str]:
        return [*(row_name for needed in needed_rows(rows[name]).values() for row_name in way_to(needed)), name]

    needed = {row_name for wanted in recipe.get("only", rows) for row_name in way_to(str(wanted))}
    order = dict.fromkeys(row_name for name in rows if name in needed for row_name in way_to(name))
    runs = []
    for seed in recipe["seeds"]:
        runs_by_row: dict[str, dict[str, Any]] = {}
        for name in order:
            row = rows[name]
            run = copy.deepcopy(shared) | {"row": name, "label": row["label"], "seed": seed}
            run["methods"] = [_seeded(method, seed) for method in row["methods"]]
            run = merge(run, {key: row[key] for key in OF_A_ROW if key in row})
            run |= {
                key: copy.deepcopy(row[key])
                for key in ("targets", "heads", "head_scores", "layers", "calibration", "pictures")
                if key in row
            }
            if "start" in recipe:
                run["start"] = {"grid": recipe["start"], "row": name, "seed": seed}
            if "start" in row:
                # With its settings: what they change is another model to start from, and so another run.
                start = copy.deepcopy(runs_by_row[row["start"]])
                run |= {key: start[key] for key in ("backbone", "tokenizer") if key in start}
                run["start"] = {key: start[key] for key in _OF_A_START if key in start}
            if "teacher" in row:
                teacher = copy.deepcopy(runs_by_row[row["teacher"]])
                run["teacher"] = {key: teacher[key] for key in _OF_A_START if key in teacher}
            runs_by_row[name] = run
        runs += runs_by_row.values()
    return runs


def _seeded(method: dict[str, Any], seed: int) -> dict[str, Any]:
    takes_seed = "seed" in METHODS[method["method"]].__dataclass_fields__ and "seed" not in method
    return method | {"seed": seed} if takes_seed else method
