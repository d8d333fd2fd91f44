"""How good saved and exported models of one task are on the same texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_freeze.experiments.compress.scores import Scoring
from hf_freeze.experiments.compress.serving import ENGINES
from hf_freeze.experiments.compress.trainings import TASKS
from hf_freeze.experiments.tasks.registry import task_of
from hf_freeze.io import bytes_of
from hf_freeze.model.loading import check_exists
from hf_freeze.publish.export.folders import mark_of

SPLITS = ("test", "dev")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """`score`: BLEU, or accuracy in %. `to_first`: its difference from the first folder, and the ends of its 95 % interval
    by a paired bootstrap over the texts; None for the first."""

    folder: Path
    bytes: int
    score: float
    to_first: tuple[float, float, float] | None


def score_folders(
    folders: Sequence[Path],
    recipe: Mapping[str, Any],
    *,
    split: str = "test",
    say: Callable[[str], Any] = lambda line: None,
) -> tuple[str, int, list[Scored]]:
    """(what the score is called, number of texts, one `Scored` for each folder), on a split of the data of `recipe`, whose
    decoding they all use. Saved models answer in PyTorch, exported ones in their engine.

    Raises ValueError for an unknown split, a task other than translation and sequence classification, and a folder that is not
    there.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: choose from {list(SPLITS)}")
    if recipe["task"] not in TASKS:
        raise ValueError(f"task {recipe['task']!r}: hf-freeze score is for {list(TASKS)}")
    for folder in folders:
        check_exists(str(folder))
    scoring = Scoring(recipe["task"], recipe.get("decoding", {}))
    task: Any = task_of(recipe["task"])
    texts = task.load(recipe["data"])[split]
    measured, results = [], []
    for folder in folders:
        say(f"{folder}: {len(texts):,} {scoring.item}")
        measured.append(scoring.measure(folder, ENGINES[_engine_of(folder)], texts))
        results.append(
            Scored(
                folder=folder,
                bytes=bytes_of(folder),
                score=scoring.score(measured[-1], texts),
                to_first=scoring.difference(measured[0], measured[-1], texts) if len(measured) > 1 else None,
            )
        )
    return scoring.name, len(texts), results


def _engine_of(folder: Path) -> str:
    return (
        "ctranslate2" if mark_of(folder).get("format") == "ctranslate2" else "torch"
    )  # which opens the other formats too
