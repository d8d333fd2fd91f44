"""Which runs of any folders may be compared: those that one metric scored on one test set, after training on the same data."""

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from hf_freeze.lab.report.finished_runs import Run, Source, read_folder, split_of
from hf_freeze.lab.tasks.items import digest_of_test_set
from hf_freeze.lab.tasks.scoring import SCORING, TaskScoring, scoring_of

_PERPLEXITY = "perplexity"  # in the name of a metric: it is of tokens, so the tokenizer is part of it


@dataclass(frozen=True)
class Basis:
    """What runs must have in common to be compared; empty where it is not known."""

    task: str
    metric: str  # its signature, as sacrebleu writes it
    data: str  # the settings, as JSON, but for where the data lies
    tokenizer: str  # as JSON, where the metric counts tokens
    test_set: str  # a digest of what its items have apart from any model


def groups_of(sources: Sequence[Source]) -> dict[Basis, list[Run]]:
    """What runs have in common -> those that may be compared, in the order of `sources`."""
    groups: dict[Basis, list[Run]] = {}
    for source in sources:
        for run, basis in zip(source.runs, _bases(source), strict=True):
            groups.setdefault(basis, []).append(replace(run, source=source.letter))
    return groups


def sources_of(folders: Sequence[Path], say: Callable[[str], Any] = print) -> list[Source]:
    """The grids in `folders`. A folder goes on with the grid of an earlier one where recipe and data are the same, and no row is
    in both with the same seed; else it is a grid of its own."""
    sources: list[Source] = []
    for folder in folders:
        source = Source([folder], read_folder(folder, say))
        keys = {run.key for run in source.runs}
        bases = [_basis(run) for run in source.runs]
        for other in sources:
            both = keys & {run.key for run in other.runs}
            if both and folder.resolve() in [path.resolve() for path in other.folders]:
                row, seed = min(both)
                raise ValueError(f"{folder} and {folder} both hold row {row!r} with seed {seed}")
            alike = any(_agree(one, two) for one in bases for two in map(_basis, other.runs))
            if not both and alike and source.recipes == other.recipes:
                other.folders.append(folder)
                other.runs.extend(source.runs)
                break
        else:
            sources.append(source)
    for number, source in enumerate(sources):
        source.letter = _letter(number) if len(sources) > 1 else ""
    return sources


def _basis(run: Run) -> Basis:
    if run.task not in SCORING:
        raise ValueError(f"{run.grid} holds runs of {run.task!r}; reports are made of {sorted(SCORING)}")
    quality = _place(scoring_of(run.task, run.metric))
    data = run.settings.get("data") or run.record.get("data")
    settings = run.settings or run.record
    counted = _PERPLEXITY in quality and (settings.get("tokenizer") or settings.get("backbone", {}).get("pretrained"))
    return Basis(
        task=f"{run.task} {run.metric}".strip(),
        metric=run.record.get("signatures", {}).get(quality, ""),
        data=_without_root(data) if data else "",
        tokenizer=json.dumps(counted, sort_keys=True) if counted else "",
        test_set=run.record.get("test_set", "") if run.items is None else digest_of_test_set(run.items),
    )


def _place(task: TaskScoring) -> str:
    return task.columns[task.quality][1][-1]  # such as test_bleu


def _without_root(data: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in data.items() if key != "root"}, sort_keys=True)


def _agree(one: Basis, other: Basis) -> bool:
    """Whether no known entry of both differs."""
    return all(a == b or not a or not b for a, b in zip(astuple(one), astuple(other), strict=True))


def _bases(source: Source) -> list[Basis]:
    """Of a grid's runs. Those that kept no test items are taken for others of the same grid, if all others are alike; else
    they can be compared with none but their own grid, for equal names of files are no equal files."""
    bases = [_basis(run) for run in source.runs]
    known = {basis for basis in bases if basis.test_set}
    completed = []
    for basis in bases:
        like = [other for other in known if _agree(basis, other)]
        if not basis.test_set:
            basis = like[0] if len(like) == 1 else replace(basis, test_set=f"not known, of {source.folders[0]}")
        completed.append(basis)
    return completed


def _letter(number: int) -> str:
    """A to Z, AA, AB ..."""
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def title_of(runs: Sequence[Run]) -> str:
    """Which task and score, and whose rows."""
    task = scoring_of(runs[0].task, runs[0].metric)
    on_dev = ", on its dev split" if split_of(runs) == "dev" else ""
    recipes = ", ".join(dict.fromkeys(run.recipe for run in runs))
    return f"{runs[0].task.replace('-', ' ').capitalize()} by {task.name}: {recipes}{on_dev}"


def tested_on(basis: Basis, runs: Sequence[Run]) -> str:
    """What the rows have in common, in a sentence."""
    known = basis.data and any(run.items is not None or "test_set" in run.record for run in runs)
    parts = [f"Data: {basis.data}." if basis.data else "Data: the settings were not kept."]
    parts += (
        [f"{split_of(runs).capitalize()} set: {basis.test_set}."] if known else ["Test set: its items were not kept."]
    )
    parts += [f"Tokenizer: {basis.tokenizer}."] if basis.tokenizer else []
    parts += [f"Metric: {basis.metric}."] if basis.metric else []
    return " ".join(parts) + ("" if known else " So these rows are compared with no other grid.")
