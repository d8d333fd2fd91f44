"""Options that `run` and `search` share: how a recipe is read."""

from typing import Annotated

import typer

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
