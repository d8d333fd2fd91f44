"""`hf-freeze compress`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hf_freeze.cli import options, terminal


def compress(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a trained model, with its tokenizer.")],
    data: Annotated[
        Path,
        typer.Option(help="A recipe, a file or a name: its task, data, training and decoding are used; not its rows."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the smaller model, and all that leads to it.")],
    max_bytes: Annotated[
        str | None, typer.Option(help="Of the folder that is served, tokenizer included, such as 2MB or 500kB.")
    ] = None,
    max_ms: Annotated[float | None, typer.Option(help="Milliseconds of one text alone, on one thread.")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="BLEU or accuracy on the dev split that the result must have in the engine.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Time for all of it; trainings become shorter, if need be.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="What serves the model: ctranslate2 or onnx, in int8; or torch.")
    ] = "ctranslate2",
    epochs: Annotated[
        float | None, typer.Option(help="Of all trainings together; four times the recipe's if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the trainings.")] = 1,
    settings: options.Settings = None,
    smoke: options.Smoke = False,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time, each in its own process.")] = 1,
) -> None:
    """Make a trained model small enough for a budget of bytes and milliseconds, and say what that costs.

    Measures what layers, heads, neurons, tokens and ranks are worth, chooses what to keep, trains it with distillation from the
    model, exports it, and measures again. A stopped one goes on where it was. The test split is used once, at the end.

    Example: hf-freeze compress runs/served/row-0-seed-1/model --data served --max-bytes 400kB --out small
    """
    with terminal.one_line_errors():
        import datasets
        from transformers.utils import logging

        from hf_freeze.experiments.compress.budget import Budget, read_bytes
        from hf_freeze.experiments.compress.compress import Compression
        from hf_freeze.experiments.compress.result import write_result
        from hf_freeze.experiments.recipes.load import load_recipe

        logging.disable_progress_bar()  # a bar for each of the many small models would hide what is said
        datasets.disable_progress_bars()
        size = None if max_bytes is None else read_bytes(max_bytes)
        budget = Budget(max_bytes=size, max_ms=max_ms, min_score=min_score, hours=hours)
        recipe = load_recipe(data, settings or [], smoke=smoke)
        words = ["hf-freeze compress", shlex.quote(model), f"--data {data}", f"--engine {engine}", f"--seed {seed}"]
        limits = {"max-bytes": max_bytes, "max-ms": max_ms, "min-score": min_score, "hours": hours, "epochs": epochs}
        words += [f"--{name} {value}" for name, value in limits.items() if value is not None]
        words += [f"--set {shlex.quote(one)}" for one in settings or [] if not one.startswith("data.root=")]
        command = " ".join(words)
        one = Compression(
            *(model, recipe, budget, out),
            engine=engine,
            epochs=epochs,
            seed=seed,
            jobs=jobs,
            console=terminal.console,
            command=command,
        )
        result = one.run()
        for line in write_result(one, result, command):
            terminal.say(line)
