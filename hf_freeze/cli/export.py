"""`hf-freeze export`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze.cli import terminal


def export(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a variant or a native model.")],
    format: Annotated[str, typer.Option(help="ctranslate2, onnx or dense (native, without hf_freeze).")],
    quantization: Annotated[
        str | None, typer.Option(help="Number format of the weights, such as int8; fp32 if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; MODEL-FORMAT-QUANTIZATION if not given.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the folder even if it holds no earlier export.")
    ] = False,
) -> None:
    """Write a model for another engine, with its tokenizer: merged, converted and compared with PyTorch.

    Example: hf-freeze export runs/small-translator/row-tt-seed-1/model --format ctranslate2 --quantization int8
    """
    from hf_freeze.publish.export import export_model

    with terminal.one_line_errors():
        folder = export_model(model, format, quantization=quantization, out=out, force=force, say=terminal.say)
        size = sum(file.stat().st_size for file in folder.iterdir())
        terminal.say(f"Written: {folder} ({size / 1e6:.2f} MB)")
