"""`hf-freeze push`."""

from typing import Annotated, Any

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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list the files of the commit, and push nothing.")
    ] = False,
) -> None:
    """Push a model to the Hub in one commit: weights, tokenizer, results and card.

    Example: hf-freeze push runs/freeze-ablation/row-3-seed-1 me/frozen-ffn --private
    """
    from hf_freeze.publish import hub

    card: dict[str, Any] = {"remote_code": remote_code, "license": license, "base_model": base_model}
    card |= {"datasets": datasets or (), "language": language or ()}
    with terminal.one_line_errors():
        if dry_run:
            files = hub.files_to_push(folder, repo_id, **card)
            for name, size in files.items():
                terminal.say(f"{size:>14,}  {name}")
            terminal.say(f"{sum(files.values()):>14,}  bytes in all, for {repo_id}; nothing was pushed")
            return
        commit = hub.push(folder, repo_id, private=private, revision=revision, **card)
    terminal.say(f"Pushed: {commit.repo_url}, commit {commit.oid[:8]}")
