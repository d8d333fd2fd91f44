"""`hf-freeze push`."""

from typing import Annotated

import typer

from hf_freeze import terminal
from hf_freeze.cli.options import BaseModel, Datasets, Folder, Languages, License, RemoteCode


def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Hub repository, such as me/my-small-translator.")],
    private: Annotated[bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, created if it does not exist.")] = None,
    remote_code: RemoteCode = False,
    datasets: Datasets = None,
    language: Languages = None,
    license: License = None,
    base_model: BaseModel = None,
) -> None:
    """Push a model to the Hub in one commit: weights, tokenizer, results and card.

    Example: hf-freeze push runs/freeze-ablation/row-3-seed-1 me/frozen-ffn --private
    """
    from hf_freeze.publish import hub

    with terminal.one_line_errors():
        commit = hub.push(
            folder,
            repo_id,
            private=private,
            revision=revision,
            remote_code=remote_code,
            datasets=datasets or (),
            language=language or (),
            license=license,
            base_model=base_model,
        )
    terminal.say(f"Pushed: {commit.repo_url}, commit {commit.oid[:8]}")
