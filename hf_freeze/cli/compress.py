"""`hf-freeze compress`."""

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
    out: Annotated[Path, typer.Option(help="Folder for the smaller model and the runs that lead to it.")],
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the folder that is served, tokenizer included, such as 2MB or 500kB; or a share of the model's, "
            "such as 33%."
        ),
    ] = None,
    max_ms: Annotated[
        str | None,
        typer.Option(help="Milliseconds of one text alone, on one thread; or a share of the model's, such as 50%."),
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="BLEU or accuracy on the dev split that the result must have in the engine.")
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Time limit; trainings become shorter if needed.")] = None,
    engine: Annotated[
        str, typer.Option(help="What serves the model: ctranslate2 or onnx, in int8; or torch.")
    ] = "ctranslate2",
    epochs: Annotated[
        float | None, typer.Option(help="Epochs of all trainings together; four times the recipe's if not given.")
    ] = None,
    targets: Annotated[
        str,
        typer.Option(help="What translators learn from: data; or model, its own translations of the training texts."),
    ] = "data",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the trainings.")] = 1,
    settings: options.Settings = None,
    smoke: options.Smoke = False,
    report_to: options.ReportTo = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time, each in its own process.")] = 1,
) -> None:
    """Make a trained model small enough for a budget of bytes and milliseconds, and say what that costs.

    Measures what layers, heads, neurons, tokens and ranks are worth, chooses what to keep, trains it with distillation from the
    model, exports it, and measures again. The same command resumes a stopped one. The test split is used once, at the end.

    Example: hf-freeze compress runs/served/row-0-seed-1/model --data served --max-bytes 400kB --out small
    """
    with terminal.one_line_errors():
        from hf_freeze.search import Budget
        from hf_freeze.search import compress as compress_model

        compress_model(
            model,
            data=data,
            budget=Budget(max_bytes=max_bytes, max_ms=max_ms, min_score=min_score),
            out=out,
            hours=hours,
            engine=engine,
            epochs=epochs,
            seed=seed,
            targets=targets,
            settings=[*(settings or ()), *([f"report_to={report_to}"] if report_to else [])],
            smoke=smoke,
            jobs=jobs,
            console=terminal.console,
        )
