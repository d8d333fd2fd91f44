"""`hf-freeze merge`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal


def merge(
    source: Annotated[Path, typer.Argument(help="Folder with a variant, in safetensors.")],
    out: Annotated[Path, typer.Argument(help="Folder for the native model; it must not exist.")],
    max_shard_size: Annotated[
        str, typer.Option(help="Size of the files that are written; about as much is in memory.")
    ] = "1GB",
) -> None:
    """Make a native model of a variant that is larger than the memory. Loading it needs no hf_freeze.

    If a merge is interrupted, run it again.

    Example: hf-freeze merge llama-7b-low-rank llama-7b-dense
    """
    from hf_freeze.io import bytes_of
    from hf_freeze.model.convert import merge as merge_model

    with terminal.one_line_errors():
        folder = merge_model(source, out, max_shard_size=max_shard_size, say=terminal.say)
        terminal.say(f"Written: {folder} ({bytes_of(folder) / 1e6:.2f} MB)")
