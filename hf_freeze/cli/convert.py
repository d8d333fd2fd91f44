"""`hf-freeze convert`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze.cli import terminal


def convert(
    source: Annotated[Path, typer.Argument(help="Folder with a native model or a variant, in safetensors.")],
    out: Annotated[Path, typer.Argument(help="Folder for the variant; it must not exist.")],
    methods: Annotated[
        Path, typer.Option(help="YAML or JSON file with a list of methods, as under `methods` in a recipe.")
    ],
    max_shard_size: Annotated[
        str, typer.Option(help="Size of the files that are written; about as much is in memory.")
    ] = "1GB",
) -> None:
    """Make a variant of a model that is larger than the memory. If interrupted, the same command resumes.

    Example: hf-freeze convert llama-7b llama-7b-low-rank --methods methods.yaml
    """
    from hf_freeze.methods.registry import methods_from_file
    from hf_freeze.model.convert import convert as convert_model

    with terminal.one_line_errors():
        folder = convert_model(source, out, methods_from_file(methods), max_shard_size=max_shard_size, say=terminal.say)
        size = sum(file.stat().st_size for file in folder.iterdir())
        terminal.say(f"Written: {folder} ({size / 1e6:.2f} MB)")
