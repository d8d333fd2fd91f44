"""`hf-freeze compress`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_freeze.cli import options, terminal

_MOST = 200_000  # texts that are taken of the files


def compress(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a trained model, with its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for the smaller model and the runs that lead to it.")],
    data: Annotated[
        Path | None,
        typer.Option(help="With labels: a recipe, a file or a name; its task, data, training and decoding are used."),
    ] = None,
    texts: options.CalibrationTexts = None,
    column: options.Column = "text",
    samples: options.Samples = 512,
    heal: Annotated[
        str,
        typer.Option(
            help="With --texts: short training by the outputs of the original: 0 for none, 10min, 1epoch; by default a tenth of "
            "the time of an epoch, at least a minute."
        ),
    ] = "default",
    native: Annotated[
        bool, typer.Option("--native", help="With --texts: equal widths in all layers, and no code of hf_freeze.")
    ] = False,
    keep_vocabulary: Annotated[bool, typer.Option("--keep-vocabulary", help="With --texts: all tokens stay.")] = False,
    min_fidelity: Annotated[
        float | None, typer.Option(min=0, max=1, help="With --texts: the fidelity that the result must reach.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            help="With --texts: points of fidelity, in %, that may be lost; bytes are then as few as possible."
        ),
    ] = None,
    front: Annotated[
        int | None,
        typer.Option(min=1, help="With --texts, without limits: so many sizes at once, as a table and a picture."),
    ] = None,
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
        str | None,
        typer.Option(
            help="What serves the model: ctranslate2 or onnx, in int8; or torch. By default one for the task."
        ),
    ] = None,
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

    From texts alone (--texts): finds what layers, heads, neurons, tokens and bits are worth, cuts with calibration, heals for a
    short time, exports, and compares with the original.

    With labels (--data): chooses what to keep by short trainings, and trains it with distillation from the model. The test split
    is used once, at the end. The same command resumes a stopped one.

    Example: hf-freeze compress sentence-transformers/all-MiniLM-L6-v2 --texts passages.txt --max-bytes 30% --out small
    """
    with terminal.one_line_errors():
        if (data is None) == (texts is None):
            raise ValueError("give --texts, or --data with labels")
        of_texts = {
            "--max-loss": max_loss,
            "--front": front,
            "--min-fidelity": min_fidelity,
            "--native": native or None,
        }
        of_labels = {"--min-score": min_score, "--hours": hours, "--epochs": epochs, "--set": settings}
        for name, value in (of_labels if data is None else of_texts).items():
            if value is not None:
                raise ValueError(f"{name} is for {'--data' if data is None else '--texts'}: leave it out")
        from hf_freeze.compression.budget import Budget

        settings_of_texts: dict[str, Any] = {
            "engine": engine,
            "samples": samples,
            "heal": 0 if heal == "0" else heal,
            "native": native,
            "keep_vocabulary": keep_vocabulary,
            "min_fidelity": min_fidelity,
            "seed": seed,
        }
        if texts is not None and front is not None:
            if (max_bytes, max_ms, max_loss) != (None, None, None):
                raise ValueError("--front chooses the sizes itself: leave --max-bytes, --max-ms and --max-loss out")
            _from_texts(model, options.sampled_texts(texts, column, _MOST), front, None, out, settings_of_texts)
            return
        budget = Budget(max_bytes=max_bytes, max_ms=max_ms, min_score=min_score, max_loss=max_loss)
        if texts is not None:
            _from_texts(model, options.sampled_texts(texts, column, _MOST), None, budget, out, settings_of_texts)
            return
        from hf_freeze.search import compress as compress_model

        compress_model(
            model,
            data=data,  # type: ignore[arg-type]
            budget=budget,
            out=out,
            hours=hours,
            engine=engine or "ctranslate2",
            epochs=epochs,
            seed=seed,
            targets=targets,
            settings=[*(settings or ()), *([f"report_to={report_to}"] if report_to else [])],
            smoke=smoke,
            jobs=jobs,
            console=terminal.console,
        )


def _from_texts(
    model: str, lines: list[str], front: int | None, budget: Any, out: Path, settings: dict[str, Any]
) -> None:
    from hf_freeze.compression import run

    command = " ".join(["hf-freeze", *map(shlex.quote, sys.argv[1:])])
    settings |= {"texts": lines, "out": out, "command": command, "console": terminal.console}
    if front is not None:
        run.front(model, count=front, **settings)
    else:
        run.compress(model, budget=budget, **settings)
