"""The end of a search: its front, tested once, and the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_freeze.lab.recipes.recipe import Recipe
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.write import write_reports
from hf_freeze.lab.runs.grid import run_grid
from hf_freeze.lab.search.search import Found, Search


def score_front(search: Search, found: Found) -> bool:
    """Train the rows of the front, and the recipe's own, with the other seeds of the recipe, and score them on the test split: a
    grid in `front`, whose runs start from those of the search and train no further. What is scored already is not again.
    Returns False where another process is at it."""
    if not search.locks.take("front"):
        return False
    try:
        _score_front(search, found)
    finally:
        search.locks.give("front")
    return True


def _score_front(search: Search, found: Found) -> None:
    recipe = search.recipe
    own = [run.row for run in search.hand_made if search.is_finished(run)]
    names = list(dict.fromkeys([*own, *sorted(found.front, key=lambda name: found.front[name])]))
    if recipe.seeds[1:]:
        search.train_other_seeds(names)
    shared = {"name", "task", "preset", "data", "training", "decoding", "seeds"}
    grid = Recipe.model_validate(
        recipe.model_dump(exclude_unset=True, include=shared)
        | {
            "start": str(search.grid),
            "rows": {name: {"label": search.row(name).label, "methods": []} for name in names},
        }
    )
    grid.training.epochs = 0
    jobs = (search.jobs or 1) if search.ray is None else 1  # Ray has as many at a time as it has room for
    run_grid(grid, search.out / "front", jobs=jobs, console=search.console, command=search.command, ray=search.ray)


def write_search_report(out: Path, found: Found, sampler: str, say: Callable[[str], Any]) -> list[Report]:
    """`report.html`, `.md` and `.png` in `out`: the front on the test split, then all trained trials on the dev split."""
    return write_reports(out / "front", out / "trials", out=out, say=say, notes=[summary(found, sampler)])


def summary(found: Found, sampler: str) -> str:
    """How many trials there were and how they ended, in a sentence."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.counts.items()))
    return (
        f"{sum(found.counts.values())} points drawn by {sampler} ({counts}). Goals: {', '.join(found.goals)}, on the dev split. "
        f"On the front: {', '.join(found.front)}. Only these, and the recipe's own rows, were scored on the test split."
    )
