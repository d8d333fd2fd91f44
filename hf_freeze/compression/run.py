"""Make a trained model small enough for a budget, from Python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging

from hf_freeze.compression.budget import Budget
from hf_freeze.compression.compression import Compression
from hf_freeze.compression.labels import Labels
from hf_freeze.compression.progress import Callback
from hf_freeze.compression.report import write_front, write_report
from hf_freeze.compression.results import Compressed
from hf_freeze.compression.settings import Settings
from hf_freeze.training.healing import DEFAULT, HealLimit


def compress(
    model: str | PathLike[str],
    *,
    texts: Sequence[Any],
    budget: Budget,
    out: str | PathLike[str],
    labels: Labels | None = None,
    engine: str | None = None,
    samples: int = 512,
    heal: HealLimit = DEFAULT,
    native: bool = False,
    keep_vocabulary: bool = False,
    min_fidelity: float | None = None,
    seed: int = 1,
    command: str = "",
    callback: Callback | None = None,
    console: Console | None = None,
) -> Compressed:
    """Make the trained model of a directory or Hub id small enough for `budget`; returns what came of it.

    `texts`: what the model reads, of any task: see `publish.export.served.answers`. A fifth of them, at most 256, decides among
    shapes, and as many are only compared on at the end; `samples` of the others tell what parts are worth, and all others choose
    the tokens and heal. `labels`: inputs with labels, which decide and are compared on instead, and give a score. `out`: the
    folder for the model and all that leads to it. Called again with the same arguments, a stopped compression goes on.

    `engine`: onnx, openvino, ctranslate2, gguf or torch; None: CTranslate2 for translators that it knows, or ONNX. `heal`: a
    short training by the outputs of the original: 0, "10min", "1epoch", or by default a tenth of the time of an epoch, at least a
    minute. `native`: equal widths in all layers, in multiples of 64, and no code of hf_freeze in the folder. `keep_vocabulary`:
    all tokens stay. `min_fidelity`: from 0 to 1, what the result must reach. `callback`: gets a `Step` and stops by returning
    True.

    If the whole model is within the budget in the engine, that is the answer.

    Raises ValueError for wrong settings, too few texts, labels of another task, a budget that is out of reach and a result that
    misses it.
    """
    options: dict[str, Any] = {"labels": labels, "engine": engine, "samples": samples, "heal": heal, "native": native}
    options |= {"keep_vocabulary": keep_vocabulary, "min_fidelity": min_fidelity, "seed": seed, "command": command}
    options |= {"callback": callback, "console": console}
    with _reported(model, texts, budget, out, options) as compression:
        result = compression.run()
        for line in write_report(compression, result):
            compression.say(line)
        return result


def front(
    model: str | PathLike[str], *, texts: Sequence[Any], count: int = 8, out: str | PathLike[str], **options: Any
) -> list[Compressed]:
    """The whole model in the engine and `count` smaller ones, down to the smallest, each as `compress` makes it, from one set of
    statistics; with a table, a picture and a page in `out`. `options`: of `compress`.

    Raises ValueError as `compress`, and for a count below 1.
    """
    if count < 1:
        raise ValueError(f"front={count}: must be at least 1")
    with _reported(model, texts, Budget(max_loss=100), out, options) as compression:
        results = compression.front(count)
        for line in write_front(compression, results):
            compression.say(line)
        return results


@contextmanager
def _reported(
    model: str | PathLike[str], texts: Sequence[Any], budget: Budget, out: str | PathLike[str], options: dict[str, Any]
) -> Iterator[Compression]:
    """A compression whose page says why it has stopped. Its many small models show no bars, which would hide what is said."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        names = {field.name for field in fields(Settings)}
        settings = Settings(**{name: value for name, value in options.items() if name in names})
        others = {name: value for name, value in options.items() if name not in names}
        compression = Compression(fspath(model), texts, budget, Path(out), settings, watch=write_report, **others)
        try:
            yield compression
        except Exception as error:
            write_report(compression, stopped=str(error))
            raise
    finally:
        if shown:
            logging.enable_progress_bar()
