"""`hf-freeze trim`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli import options


def trim(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a native model or a variant, with a tokenizer.")],
    texts: Annotated[
        list[Path],
        typer.Option(
            help="File with the texts to keep the tokens of: a text per line, or a table, such as CSV; plain or compressed; "
            "repeatable."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the smaller model.")],
    column: options.Column = "text",
    coverage: Annotated[
        float, typer.Option(help="Share of the token occurrences in the texts that kept tokens must cover.")
    ] = 0.999,
    targets: Annotated[
        list[Path] | None,
        typer.Option(help="File with texts of the target language, for a translator. May be repeated."),
    ] = None,
    characters: Annotated[
        str,
        typer.Option(
            help="Single characters to keep: all, so that any text can still be encoded, or those occurring in the texts."
        ),
    ] = "all",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier result of this command.")] = False,
) -> None:
    """Remove the tokens that your texts do not need: a smaller model and tokenizer, the same vectors for covered text, a card.

    Example: hf-freeze trim MODEL --texts passages.txt --coverage 0.999 --out small
    """
    from hf_freeze.io import bytes_of
    from hf_freeze.publish.trimming import trim_model

    with terminal.one_line_errors():
        files = [*texts, *(targets or [])]
        folder = trim_model(
            model,
            options.texts_in(texts, "filled lines", column),
            out=out,
            coverage=coverage,
            targets=options.texts_in(targets, "filled lines", column) if targets else (),
            characters=characters,
            files=[file.name for file in files],
            force=force,
            say=terminal.say,
        )
        terminal.say(f"Written: {folder} ({bytes_of(folder) / 1e6:.2f} MB)")
