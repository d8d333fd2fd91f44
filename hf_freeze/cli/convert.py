"""`hf-freeze convert`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli import options as shared


def convert(
    source: Annotated[Path, typer.Argument(help="Folder with a native model or a variant, in safetensors.")],
    out: Annotated[Path, typer.Argument(help="Folder for the variant; it must not exist.")],
    methods: Annotated[
        Path,
        typer.Option(help="YAML or JSON file with a list of methods, as in a recipe; or with `budget` and `methods`."),
    ],
    texts: shared.CalibrationTexts = None,
    column: shared.Column = "text",
    samples: shared.Samples = 512,
    own_texts: Annotated[
        bool, typer.Option("--own-texts", help="Calibrate with texts that the model, a language model, writes itself.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(help="Size of the files that are written; about as much is in memory.")
    ] = "1GB",
) -> None:
    """Make a variant of a model that is larger than the memory. If interrupted, the same command resumes.

    With texts, methods cut what the model uses least on them, and refit what stays.

    Example: hf-freeze convert llama-7b llama-7b-low-rank --methods methods.yaml

    Example: hf-freeze convert llama-7b llama-7b-small --methods methods.yaml --texts passages.txt --samples 512
    """
    from hf_freeze.io import bytes_of
    from hf_freeze.methods.registry import methods_from_file
    from hf_freeze.model.convert import check_shards
    from hf_freeze.model.convert import convert as convert_model

    with terminal.one_line_errors():
        if texts and own_texts:
            raise ValueError("give --texts or --own-texts, not both")
        check_shards(source)  # before texts and its tokenizer are read
        calibration = shared.sampled_texts(texts, column, samples) if texts else "samples" if own_texts else None
        chosen, budget = methods_from_file(methods)
        folder = convert_model(
            source,
            out,
            chosen,
            max_shard_size=max_shard_size,
            calibration=calibration,
            tokenizer=shared.tokenizer_for_texts(source) if texts else None,
            budget=budget,
            say=terminal.say,
        )
        terminal.say(f"Written: {folder} ({bytes_of(folder) / 1e6:.2f} MB)")
