"""`hf-freeze score`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.lab.cli import options


def score(
    folders: Annotated[list[Path], typer.Argument(help="Saved models, variants and exported folders, of one task.")],
    data: Annotated[Path, typer.Option(help="A recipe, a file or a name: its task, data and decoding are used.")],
    split: Annotated[str, typer.Option(help="test, or dev to choose among models.")] = "test",
    settings: options.Settings = None,
) -> None:
    """Score folders on the same texts: BLEU of translators, accuracy of classifiers, and the differences from the first.

    Exported folders answer in their engine, so that the loss of an export is counted too. The 95 % interval of a difference
    covers the choice of texts, not that of another training.

    Example: hf-freeze score runs/served/row-0-seed-1/model small/served --data served
    """
    from transformers.utils import logging

    from hf_freeze.compression.budget import in_bytes
    from hf_freeze.lab.recipes.load import load_recipe
    from hf_freeze.lab.scored import score_folders

    logging.disable_progress_bar()
    with terminal.one_line_errors():
        name, count, results = score_folders(folders, load_recipe(data, settings), split=split, say=terminal.say)
        rows = []
        for one in results:
            difference = ["–", "–"]
            if one.to_first is not None:
                middle, low, high = (f"{value:+.1f}" for value in one.to_first)
                difference = [middle, f"{low} to {high}"]
            rows.append((one.folder, in_bytes(one.bytes), f"{one.score:.1f}", *difference))
        headings = ("folder", "size", name, "to the first", "95 % interval")
        title = f"On the {count:,} texts of the {split} split"
        terminal.show_table(headings, rows, title=title, numbers=headings[1:])
