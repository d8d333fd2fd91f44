"""What lm-eval measures of language models and their variants, with the differences between them on the same samples."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hf_freeze.analysis.significance import compare
from hf_freeze.install import require
from hf_freeze.io import bytes_of
from hf_freeze.lab.scored import device, language_model_config

# How lm-eval sums samples up, by the name in lm_eval.api.metrics: from (..., 2) sums of values and of their weights.
_SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda sums: sums[..., 0] / sums[..., 1],
    "perplexity": lambda sums: np.exp(-sums[..., 0] / sums[..., 1]),
    "weighted_perplexity": lambda sums: np.exp(-sums[..., 0] / sums[..., 1]),
    "bits_per_byte": lambda sums: -sums[..., 0] / sums[..., 1] / np.log(2),
}


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """`value`, `error`: of lm-eval, with its standard error, None where it gives none. `metric`: with the filter, if it has one,
    as "exact_match,strict". `to_first`: the difference from the first folder, and the ends of its 95 % interval by a paired
    bootstrap over the samples; None for the first. The ends are None for groups of tasks, and for metrics that are not sums over
    samples, such as BLEU."""

    folder: Path
    bytes: int
    task: str
    metric: str
    samples: int
    value: float
    error: float | None
    to_first: tuple[float, float | None, float | None] | None


def score_tasks(
    folders: Sequence[Path],
    tasks: str,
    *,
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    say: Callable[[str], Any] = lambda line: None,
) -> list[TaskScore]:
    """A `TaskScore` for each metric of each task and each folder, in this order, by `lm_eval.simple_evaluate`.

    `tasks`: names or patterns of lm-eval, or paths of task files (.yaml), with commas between them. lm-eval looks for tasks in
    `include` and in the folders of the files; for its own, which take it seconds, only where a name is given. `limit`: the first
    samples of each task alone. Paths of data in a task file are relative to the working directory, as for the lm_eval command.

    Raises MissingExtra without lm-eval; FileNotFoundError; ValueError for an exported folder, one that is no language model, an
    unknown task, and one that cannot be loaded.
    """
    require("other-tools", "`hf-freeze score --harness`", "lm_eval")
    for folder in folders:
        language_model_config(folder, ("causal-lm", "seq2seq-lm"))
    names, manager = _tasks(tasks, include)
    try:
        loaded = manager.load(names)["tasks"]
    except Exception as error:  # a task file, its code and its data raise errors of any kind
        raise ValueError(f"{tasks}: cannot be loaded by lm-eval: {error}") from error
    lm_eval: Any = import_module("lm_eval")
    measured = []
    for folder in folders:
        say(f"{folder}: {', '.join(loaded)}")
        options = {"tasks": names, "task_manager": manager, "limit": limit, "batch_size": batch_size}
        arguments = {"pretrained": str(folder)}
        measured.append(lm_eval.simple_evaluate("hf", arguments, device=device(), **options))
    return [
        _score(folder, task, key, loaded.get(task), measured[0], result)
        for task, metrics in measured[0]["results"].items()
        for key in metrics
        if "," in key and "_stderr," not in key
        for folder, result in zip(folders, measured, strict=True)
    ]


def _tasks(tasks: str, include: Path | None) -> tuple[list[str], Any]:
    """Names and files, and the TaskManager that knows them."""
    if include is not None and not include.is_dir():
        raise FileNotFoundError(f"{include}: no such folder")
    words = [word for word in map(str.strip, tasks.split(",")) if word]
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such task file")
    folders = [*([include] if include else []), *(Path(file).parent for file in files)]
    manager = import_module("lm_eval.tasks").TaskManager(include_path=folders, include_defaults=len(files) < len(words))
    names = []
    for word in words:
        found = [_named(word, manager)] if word in files else manager.match_tasks([word])
        if not found:
            near = difflib.get_close_matches(word, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"lm-eval has no task {word!r}: give a name of its own or the path of a .yaml file{hint}")
        names += found
    if not names:
        raise ValueError(f"no task in {tasks!r}: give names of lm-eval or paths of .yaml files")
    return names, manager


def _named(file: str, manager: Any) -> str:
    """The name of the task or group in a file, as lm-eval opens no group by its path; the path where another has that name."""
    known = ((name, entry.yaml_path) for name, entry in manager.task_index.items())
    return next((name for name, path in known if path and path.resolve() == Path(file).resolve()), file)


def _score(folder: Path, task: str, key: str, loaded: Any, first: Mapping, result: Mapping) -> TaskScore:
    """`key`: "metric,filter". `loaded`: the task, None for a group."""
    metric, _, chosen = key.partition(",")
    values, error = result["results"][task], result["results"][task].get(f"{metric}_stderr,{chosen}")
    to_first = None
    if result is not first:
        low, high = _interval(task, metric, chosen, loaded, first, result)
        to_first = (float(values[key] - first["results"][task][key]), low, high)
    return TaskScore(
        folder=folder,
        bytes=bytes_of(folder),
        task=task,
        metric=metric if chosen == "none" else key,
        samples=values["sample_len"],
        value=float(values[key]),
        error=None if error in (None, "N/A") else float(error),
        to_first=to_first,
    )


def _interval(
    task: str, metric: str, chosen: str, loaded: Any, first: Mapping, result: Mapping
) -> tuple[float | None, float | None]:
    """The 95 % interval of the difference, by samples that both models answered; (None, None) where there is none."""
    metrics = import_module("lm_eval.api.metrics")
    aggregation = loaded and loaded.aggregation().get(metric, metrics.mean)
    score = next((_SCORES[name] for name in _SCORES if getattr(metrics, name) is aggregation), None)
    if score is None:
        return None, None
    one, other = (
        {
            sample["doc_id"]: sample[metric]
            for sample in each["samples"][task]
            if sample["filter"] == chosen and metric in sample
        }
        for each in (first, result)
    )
    if not one or one.keys() != other.keys():
        return None, None
    values = [[each[number] for number in one] for each in (one, other)]
    items = [np.array([value if isinstance(value, tuple) else (value, 1) for value in each], float) for each in values]
    found = compare({"first": [items[0]], "this": [items[1]]}, score)[0]
    return found.low, found.high
