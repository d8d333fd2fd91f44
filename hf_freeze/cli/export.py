"""`hf-freeze export`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli import options as shared


def export(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a variant or a native model.")],
    format: Annotated[
        str,
        typer.Option(
            help="onnx, openvino, torch (.pt2 files), aotinductor, executorch, ctranslate2, gguf (llama.cpp), "
            "compressed-tensors (vLLM), transformers-js (browsers), static (vectors of tokens), or dense (without hf_freeze)."
        ),
    ],
    quantization: Annotated[
        str | None, typer.Option(help="Number format of the weights, such as int8; fp32 if not given.")
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with texts for --quantization int8-static and --min-fidelity: a text per line, or a table; repeatable."
        ),
    ] = None,
    column: shared.Column = "text",
    min_fidelity: Annotated[
        float | None,
        typer.Option(
            help="Refuse an export that is less faithful to the model on the texts, from 0 to 1: a cosine of sentence vectors, a "
            "share of equal top choices, BLEU / 100 of translations."
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page", help="With transformers-js: a web page that runs the model, for any static host. Needs npm."
        ),
    ] = False,
    max_shard_size: Annotated[
        str,
        typer.Option(help="Largest file of dense and compressed-tensors, which keeps about as much in memory."),
    ] = "1GB",
    shortlist: Annotated[
        Path | None,
        typer.Option(help="With onnx: a file of analysis.shortlist, with which hf_freeze.runtime translates."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; MODEL-FORMAT-QUANTIZATION if not given.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the folder even if it holds no earlier export.")
    ] = False,
) -> None:
    """Write a model for another engine, with its tokenizer, and compare it with PyTorch. Says which savings it keeps.

    Example: hf-freeze export runs/small-translator/row-tt-seed-1/model --format onnx --quantization int8

    Example: hf-freeze export MODEL --format onnx --quantization int8 --texts held-out.txt --min-fidelity 0.98

    Example: hf-freeze export MODEL --format compressed-tensors --quantization int4

    Example: hf-freeze export MODEL --format transformers-js --page
    """
    from hf_freeze.io import bytes_of
    from hf_freeze.publish.export import export_model

    with terminal.one_line_errors():
        lines = shared.texts_in(texts, "lines", column) if texts else None
        options = {
            "quantization": quantization,
            "out": out,
            "force": force,
            "texts": lines,
            "say": terminal.say,
            "page": page,
            "max_shard_size": max_shard_size,
            "shortlist": shortlist,
        }
        folder = export_model(model, format, min_fidelity=min_fidelity, **options)
        terminal.say(f"Written: {folder} ({bytes_of(folder) / 1e6:.2f} MB)")
