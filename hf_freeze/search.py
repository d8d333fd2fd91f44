"""Make a trained model small enough for a budget, from Python: what `hf-freeze compress` does, with a callback, and with a loss
and a metric of your own."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console
from transformers.utils import logging

from hf_freeze.compression.budget import Budget as Budget
from hf_freeze.experiments.compress.compress import Compressed as Compressed
from hf_freeze.experiments.compress.compress import Compression
from hf_freeze.experiments.compress.page import write_page
from hf_freeze.experiments.compress.progress import Step as Step
from hf_freeze.experiments.compress.progress import Stopped as Stopped
from hf_freeze.experiments.compress.result import write_result
from hf_freeze.experiments.recipes.check import check
from hf_freeze.experiments.recipes.load import read_recipe
from hf_freeze.training import TokenBatchTrainer


def compress(
    model: str | PathLike[str],
    *,
    data: str | PathLike[str],
    budget: Budget,
    out: str | PathLike[str],
    hours: float | None = None,
    engine: str = "ctranslate2",
    epochs: float | None = None,
    seed: int = 1,
    settings: Sequence[str] = (),
    smoke: bool = False,
    jobs: int = 1,
    targets: str = "data",
    callback: Callable[[Step], Any] | None = None,
    metric: Callable[[Sequence[Any], Sequence[Any]], float] | None = None,
    trainer_class: type[TokenBatchTrainer] | None = None,
    console: Console | None = None,
) -> Compressed:
    """Make the trained model of a directory or Hub id small enough for `budget`; returns what came of it. The arguments mean what
    they mean to `hf-freeze compress`.

    `data`: a recipe, and `settings` changes to it, such as "training.max_tokens=2000". `out`: the folder for the model and all
    that leads to it. Called again with the same arguments, a stopped compression goes on, and a finished one returns its result.

    `targets`: "model" trains translators on the model's own translations of the training texts, which are made first, in the
    engine (sequence-level distillation); "data" on those of the data.

    `callback`: called with a `Step` after each phase that is not kept from before, and while models are trained. Where it returns
    True, `Stopped` is raised; an exception of its own stops the compression too.

    `metric(predictions, references)`: a score of your own, larger for better, in place of BLEU or accuracy: of translations, or
    of the numbers of classes. It scores what the engine answers, chooses among the candidates, and is what `min_score` limits.

    `trainer_class`: a subclass of `hf_freeze.training.TokenBatchTrainer` (of `ClassificationTrainer` for classification) with a
    `compute_loss` of your own. Trainings are processes, which import it by its name.

    `console`: where it prints; `Console(quiet=True)` is silent.

    Raises ValueError for settings that are wrong, a budget that is met already or cannot be met, and a result that misses it;
    FileNotFoundError for data that is not there; FailedRuns where a training failed.
    """
    folder, console = Path(out), console or Console()
    recipe = _used(read_recipe(Path(data), list(settings), smoke=smoke), fspath(model), data)
    command = _command(fspath(model), data, budget, hours, engine, epochs, seed, targets, settings, smoke)
    with _no_bars():
        compression = Compression(
            *(fspath(model), recipe, budget, folder),
            hours=hours,
            engine=engine,
            epochs=epochs,
            seed=seed,
            jobs=jobs,
            targets=targets,
            console=console,
            command=command,
            metric=metric,
            trainer_class=trainer_class,
            callback=callback,
            watch=write_page,
        )
        try:
            result = compression.run()
        except Exception as error:
            write_page(compression, stopped=str(error))
            raise
        write_page(compression, result)  # before the card, which has its picture
        for line in write_result(compression, result):
            compression.say(line)
    return result


def _used(recipe: dict[str, Any], model: str, path: Any) -> dict[str, Any]:
    """What is used of a recipe, checked; the rest, such as the backbone of its rows, may be missing or wrong."""
    used = {key: recipe[key] for key in ("task", "data", "training", "decoding", "report_to") if key in recipe}
    used |= {"name": "compress", "seeds": [1], "backbone": {"pretrained": model}, "rows": {}}
    check(used, path)
    return used


def _command(
    model: str,
    data: Any,
    budget: Budget,
    hours: float | None,
    engine: str,
    epochs: float | None,
    seed: int,
    targets: str,
    settings: Sequence[str],
    smoke: bool,
) -> str:
    """The command line that does the same, for the records. Where the data lies is left out."""
    words = ["hf-freeze compress", shlex.quote(model), f"--data {shlex.quote(fspath(data))}", f"--engine {engine}"]
    limits = {name.replace("_", "-"): value for name, value in budget.to_dict().items()}
    limits |= {"hours": hours, "epochs": epochs, "seed": seed}
    words += [f"--{name} {value}" for name, value in limits.items() if value is not None]
    words += ["--targets model"] if targets == "model" else []
    words += [f"--set {shlex.quote(one)}" for one in settings if not one.startswith(("data.root=", "report_to="))]
    return " ".join([*words, *["--smoke"] * smoke])


@contextmanager
def _no_bars() -> Iterator[None]:
    """A bar for each of the many small models would hide what is said."""
    models, data = logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if models:
            logging.enable_progress_bar()
        if data:
            datasets.enable_progress_bars()
