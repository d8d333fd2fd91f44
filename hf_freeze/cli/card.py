"""`hf-freeze card`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli.options import (
    BaseModel,
    CalibrationTexts,
    Column,
    Datasets,
    Folder,
    Languages,
    License,
    Samples,
    sampled_texts,
)


def card(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option(help="The file; README.md in the folder of the model if not given.")
    ] = None,
    datasets: Datasets = None,
    language: Languages = None,
    license: License = None,
    base_model: BaseModel = None,
    repo_id: Annotated[str | None, typer.Option(help="The Hub repository that the card is for.")] = None,
    compared_with: Annotated[
        str | None, typer.Option(help="The original, whose answers to --texts are compared: directory or Hub id.")
    ] = None,
    texts: CalibrationTexts = None,
    column: Column = "text",
    samples: Samples = 512,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a card that was edited, or written with options.")
    ] = False,
) -> None:
    """Write a model card from the record of a run: methods, sizes, scores, settings, limits.

    The record and pictures are written beside the card. `push` uses this card, edited or not.

    Example: hf-freeze card runs/freeze-ablation/row-3-seed-1 --license mit

    Example: hf-freeze card small --compared-with MODEL --texts held-out.txt
    """
    from hf_freeze.analysis.accounting import stored_bytes
    from hf_freeze.model.loading import empty_model
    from hf_freeze.publish.cards import model_card, read_trained_model
    from hf_freeze.publish.hub import write_record

    with terminal.one_line_errors():
        if (compared_with is None) != (texts is None):
            raise ValueError(
                "--compared-with and --texts go together: the original, and texts that no calibration has seen"
            )
        source, compared = read_trained_model(folder), None
        path = out or source.model / "README.md"
        if not force and path.exists() and path.read_text(encoding="utf-8") != str(model_card(source)):
            raise ValueError(f"{path} is there, edited or written with options: --force replaces it")
        if compared_with is not None and texts is not None:
            from hf_freeze.publish.export.folders import MARK
            from hf_freeze.publish.export.served import served_fidelity

            found = served_fidelity(compared_with, source.model, sampled_texts(texts, column, samples))
            exported = (Path(compared_with) / MARK).exists()
            compared = compared_with, None if exported else stored_bytes(empty_model(compared_with)), found
        text = model_card(
            source,
            repo_id,
            datasets=datasets or (),
            language=language or (),
            license=license,
            base_model=base_model,
            compared=compared,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        text.save(path)
        write_record(source, path.parent)
    terminal.say(f"Written: {path}")
