"""Options that several commands share: of `card` and `push`, the folder and what the metadata of a card says; of `run` and
`search`, how a recipe is read; of commands that read texts, which of a file they take."""

from pathlib import Path
from typing import Annotated, Any

import typer

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

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Use the quick version in the recipe, to see whether everything works.")
]
ReportTo = Annotated[
    str | None,
    typer.Option(help="Show the curves in a tracker: tensorboard, trackio or wandb; one run there for each run."),
]
ResumeAnyway = Annotated[
    bool,
    typer.Option(
        "--resume-anyway", help="Resume checkpoints of another version, device, precision or number of threads."
    ),
]


def sampled_texts(files: list[Path], column: str, samples: int) -> list[str]:
    """The texts for a calibration or a comparison."""
    from hf_freeze.data import read_text, sample

    return sample(read_text(files, unit="filled lines", column=column)["text"], samples)


def tokenizer_for_texts(model: Any) -> Any:
    """The tokenizer beside a model. Raises ValueError if it has none."""
    from hf_freeze.model.loading import load_tokenizer

    if (tokenizer := load_tokenizer(model)) is None:
        raise ValueError(f"{model} has no tokenizer, which --texts needs: save the model's own there")
    return tokenizer


def title_of(recipe: dict[str, Any]) -> str:
    return recipe["name"] + (f": preset {recipe['preset']}" if "preset" in recipe else "")
