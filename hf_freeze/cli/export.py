"""`hf-freeze export`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze.cli import options as shared
from hf_freeze.cli import terminal


def export(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a variant or a native model.")],
    format: Annotated[
        str,
        typer.Option(
            help="onnx, torch (.pt2 files), aotinductor, executorch, ctranslate2, or dense (without hf_freeze)."
        ),
    ],
    quantization: Annotated[
        str | None, typer.Option(help="Number format of the weights, such as int8; fp32 if not given.")
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with texts to calibrate --quantization int8-static with: a text per line, or a table (CSV); repeatable."
        ),
    ] = None,
    column: shared.Column = "text",
    out: Annotated[Path | None, typer.Option(help="Folder; MODEL-FORMAT-QUANTIZATION if not given.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the folder even if it holds no earlier export.")
    ] = False,
) -> None:
    """Write a model for another engine, with its tokenizer, and compare it with PyTorch. Says which savings it keeps.

    Example: hf-freeze export runs/small-translator/row-tt-seed-1/model --format onnx --quantization int8
    """
    from hf_freeze.data import read_text
    from hf_freeze.io import bytes_of
    from hf_freeze.publish.export import export_model

    with terminal.one_line_errors():
        lines = read_text(texts, column=column)["text"] if texts else None
        options = {"quantization": quantization, "out": out, "force": force, "texts": lines, "say": terminal.say}
        folder = export_model(model, format, **options)
        terminal.say(f"Written: {folder} ({bytes_of(folder) / 1e6:.2f} MB)")
