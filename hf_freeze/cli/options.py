"""Options that several commands share: of `card` and `push`, the folder and what the metadata of a card says; of commands that
read texts, which of a file they take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_freeze.cli import laboratory

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a model or of a finished run.")]
Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", help="Hub id of a data set it was trained on; may be repeated.")
]
Languages = Annotated[list[str] | None, typer.Option("--language", help="ISO 639 code of a language; may be repeated.")]
License = Annotated[str | None, typer.Option(help="License, such as apache-2.0.")]
BaseModel = Annotated[str | None, typer.Option(help="Hub id of the model that it was made from.")]
RemoteCode = Annotated[
    bool,
    typer.Option(
        "--remote-code", help="Add code: trust_remote_code=True then loads a variant without import hf_freeze."
    ),
]

Column = Annotated[
    str, typer.Option("--column", "--columns", help="Column of the texts in CSV, TSV, JSON, Parquet and Arrow files.")
]

CalibrationTexts = Annotated[
    list[Path] | None,
    typer.Option(
        help="File with unlabelled texts: a text per line, or a table, such as CSV; plain or compressed; repeatable."
    ),
]
Samples = Annotated[
    int, typer.Option(min=1, help="How many of the texts to take: drawn at random, the same ones each time.")
]


def sampled_texts(files: list[Path], column: str, samples: int) -> list[str]:
    """The texts for a calibration or a comparison."""
    from hf_freeze.data.sampling import sample

    return sample(texts_in(files, "filled lines", column), samples)


def texts_in(files: list[Path], unit: str, column: str) -> Sequence[str]:
    """The texts in files, folders of them and patterns: each of the `lines`, `filled lines` or `documents` of plain text; of
    tables, such as CSV, the column `column`.

    Raises the errors of `read_lines`, and MissingExtra for tables where the laboratory, which reads them, is not installed.
    """
    from hf_freeze.data.files import kind_of, matching_files
    from hf_freeze.data.lines import UNITS

    files = matching_files(files)
    if any(kind_of(file) != "lines" for file in files):
        return laboratory.texts_of_tables(files, unit, column)
    return [text for file in files for text in UNITS[unit](file)]


def tokenizer_for_texts(model: Any) -> Any:
    """The tokenizer beside a model. Raises ValueError if it has none."""
    from hf_freeze.model.loading import load_tokenizer

    if (tokenizer := load_tokenizer(model)) is None:
        raise ValueError(f"{model} has no tokenizer, which --texts needs: save the model's own there")
    return tokenizer
