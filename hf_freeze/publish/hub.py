"""Models on the Hub: weights, tokenizer, results and card of a folder, pushed in one commit."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from hf_freeze.architectures.base import canonical_parameters
from hf_freeze.compat.transformers import keys_to_ignore
from hf_freeze.model.atomic_save import finish_model
from hf_freeze.model.loading import empty_model
from hf_freeze.publish.cards import Made, model_card, published_record, read_made, task_of
from hf_freeze.publish.remote_code import write_loader

_HTTPError: Any = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 from huggingface_hub 2 on
_LEFT = (
    "checkpoint-*",
    "*.part",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state*",
    "training_args.bin",
    ".*",
)  # not published


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    message: str | None = None,
    **of_card: Any,
) -> CommitInfo:
    """Push the model in `folder`, that of a model or of a finished run, to the repository `repo_id` of the Hub, which is made
    if it is not there. All files appear in one commit, or none does; a push that broke off is simply done again.

    A README.md in the folder of the model is taken as the card; where there is none, one is written from the record of the run.
    `private`: of a new repository; `revision`: a branch, made if need be; `of_card`: as of `model_card`.

    Raises ValueError where the folder holds no whole model, and OSError where the Hub cannot be reached or refuses.
    """
    made = read_made(Path(folder))
    finish_model(made.model)
    with tempfile.TemporaryDirectory() as stage:
        assemble(made, Path(stage), repo_id, **of_card)
        return _upload(Path(stage), repo_id, private, revision, token, message or f"Push {made.model.parent.name}")


def push_model(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
    **options: Any,
) -> CommitInfo:
    """`PreTrainedModel.push_to_hub` of a variant: with a card of its methods and sizes, where the repository has none yet."""
    with tempfile.TemporaryDirectory() as stage:
        folder = Path(stage)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        with _one_line_of_the_hub():
            there = HfApi(token=token).file_exists(repo_id, "README.md")
        access: Any = token
        card = ModelCard.load(repo_id, token=access) if there else model_card(read_made(folder), repo_id, model=model)
        data: Any = card.data
        data.tags = list(dict.fromkeys([*(data.tags or []), *(tags or [])])) or None
        card.save(folder / "README.md")
        return _upload(folder, repo_id, private, revision, token, commit_message or "Upload model", **options)


def assemble(
    made: Made, target: Path, repo_id: str | None = None, *, remote_code: bool = False, **of_card: Any
) -> None:
    """Put into `target` what a repository holds. Raises ValueError where the model is not whole, or `remote_code` is asked of a
    model that the native class cannot hold."""
    model = empty_model(made.model)
    check_whole(made.model, model)
    shutil.copytree(made.model, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_LEFT))
    write_record(made, target)
    if not (target / "README.md").exists():
        model_card(made, repo_id, model=model, remote_code=remote_code, **of_card).save(target / "README.md")
    if remote_code:
        write_loader(target, model, task_of(model))


def write_record(made: Made, target: Path) -> None:
    """Put into `target` what a card refers to: results.json and pictures."""
    if (record := published_record(made)) is not None:
        (target / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for picture in made.pictures:
        shutil.copy(picture, target)


def check_whole(folder: Path, model: Any) -> None:
    """Raise ValueError where a tensor that `model`, perhaps on `meta`, needs from `folder` is not there in its shape. Reads the
    headers of the files alone."""
    found: dict[str, list[int]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights: no *.safetensors is there")
    for path in files:
        try:
            with safe_open(path, "pt") as weights:
                found |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or damaged: {error}") from error
    left_out = keys_to_ignore(model)[0]
    for name, parameter in canonical_parameters(model):
        names = {name, *(tied for tied, source in model.all_tied_weights_keys.items() if source == name)}
        if names & left_out:
            continue
        shapes = [found[each] for each in names if each in found]
        if list(parameter.shape) not in shapes:
            what = f"has the shape {shapes[0]}, not {list(parameter.shape)}" if shapes else "is not there"
            raise ValueError(f"{folder} holds no whole {type(model).__name__}: {name!r} {what}")


def _upload(
    folder: Path, repo_id: str, private: bool | None, revision: str | None, token: Any, message: str, **options: Any
) -> CommitInfo:
    api = HfApi(token=token)
    with _one_line_of_the_hub():
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message, **options
        )


@contextmanager
def _one_line_of_the_hub() -> Iterator[None]:
    """What a user can do about it, in front of what the Hub says; a server that is not there is an OSError too."""
    try:
        yield
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = {401: "log in with `hf auth login`, or set HF_TOKEN", 403: "the token may not write there"}.get(
            status or 0, "push again: nothing was published" if (status or 0) >= 500 else ""
        )
        raise OSError(f"{hint}: {error}" if hint else str(error)) from error
    except RuntimeError as error:  # what an upload that broke off becomes
        if not isinstance(error.__cause__, _HTTPError):
            raise
        raise ConnectionError(f"{error} ({error.__cause__}) Nothing was published: push again") from error
    except _HTTPError as error:
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error}): nothing was published") from error
