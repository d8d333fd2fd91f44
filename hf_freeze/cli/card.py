"""`hf-freeze card`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli.options import BaseModel, Datasets, Folder, Languages, License


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
) -> None:
    """Write a model card from the record of a run: methods, sizes, scores, settings, limits.

    The record and pictures are written beside the card. `push` uses this card, edited or not.

    Example: hf-freeze card runs/freeze-ablation/row-3-seed-1 --license mit
    """
    from hf_freeze.publish.cards import model_card, read_trained_model
    from hf_freeze.publish.hub import write_record

    with terminal.one_line_errors():
        source = read_trained_model(folder)
        path = out or source.model / "README.md"
        text = model_card(
            source, repo_id, datasets=datasets or (), language=language or (), license=license, base_model=base_model
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        text.save(path)
        write_record(source, path.parent)
    terminal.say(f"Written: {path}")
