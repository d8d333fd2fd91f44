"""Pushes models to the Hub: weights, tokenizer, results and card in one commit."""

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
from hf_freeze.model.build import VariantMixin
from hf_freeze.model.loading import empty_model
from hf_freeze.model.native_code import write_remote_code
from hf_freeze.model.remote_code import has_remote_code
from hf_freeze.publish.cards import UNNAMED, TrainedModel, model_card, published_record, read_trained_model

_HTTPError: Any = HfHubHTTPError.__bases__[0]  # HTTPError of httpx, or of httpx2 from huggingface_hub 2 on
_NOT_PUBLISHED = (
    "checkpoint-*",
    "*.part",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state*",
    "training_args.bin",
    ".*",
)


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    message: str | None = None,
    **card_options: Any,
) -> CommitInfo:
    """Push the model in `folder`, which is the folder of a model or of a finished run, to the Hub repository `repo_id`.

    A missing repository is created. All files are published in one commit; after a failed push nothing is published, and the
    push can be repeated. A README.md beside the model becomes the card; otherwise a card is written from the record of the run.
    `private` applies to a new repository. `revision`: a branch, created if it is missing. `card_options` go to `model_card`.

    Raises ValueError if the folder has no complete model or `card_options` meet a card, and OSError if the Hub cannot be
    reached or refuses the push.
    """
    with _staged(folder, repo_id, card_options) as (source, stage):
        return _upload(stage, repo_id, private, revision, token, message or f"Push {source.model.parent.name}")


def files_to_push(folder: Path, repo_id: str, **card_options: Any) -> dict[str, int]:
    """What `push` would publish, file -> its bytes, found without the Hub. Arguments and errors as there."""
    with _staged(folder, repo_id, card_options) as (_, stage):
        files = sorted(path for path in stage.rglob("*") if path.is_file())
        return {path.relative_to(stage).as_posix(): path.stat().st_size for path in files}


@contextmanager
def _staged(folder: Path, repo_id: str, card_options: dict[str, Any]) -> Iterator[tuple[TrainedModel, Path]]:
    """The model, after a save of it that was interrupted is completed, and a folder with all files of the commit."""
    source = read_trained_model(Path(folder))
    finish_model(source.model)
    with tempfile.TemporaryDirectory() as stage:
        assemble(source, Path(stage), repo_id, **card_options)
        yield source, Path(stage)


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
    remote_code: bool | None = None,
    **options: Any,
) -> CommitInfo:
    """`PreTrainedModel.push_to_hub` for variants: adds a card of methods and sizes if the repository has no card yet.
    `remote_code`: as that of `save_pretrained`."""
    with tempfile.TemporaryDirectory() as stage:
        folder = Path(stage)
        model.save_pretrained(folder, max_shard_size=max_shard_size, remote_code=remote_code)
        with _short_hub_errors():
            has_card = HfApi(token=token).file_exists(repo_id, "README.md")
        any_token: Any = token
        card = (
            ModelCard.load(repo_id, token=any_token)
            if has_card
            else model_card(read_trained_model(folder), repo_id, model=model)
        )
        data: Any = card.data
        data.tags = list(dict.fromkeys([*(data.tags or []), *(tags or [])])) or None
        card.save(folder / "README.md")
        return _upload(folder, repo_id, private, revision, token, commit_message or "Upload model", **options)


def assemble(
    source: TrainedModel, target: Path, repo_id: str | None = None, *, remote_code: bool = False, **card_options: Any
) -> None:
    """Write all files of the repository to `target`.

    `remote_code`: with the code that loads a variant with `trust_remote_code`, which a folder that has it keeps in any case.
    Raises ValueError if the model is incomplete, and for options of a card if there is one already.
    """
    model = empty_model(source.model)
    check_whole(source.model, model)
    given = [name for name, value in card_options.items() if value]
    if given and (source.model / "README.md").exists():
        card, names = source.model / "README.md", ", ".join(given)
        raise ValueError(f"{card} is published as it is, and {names} would not change it: edit the file, or delete it")
    shutil.copytree(source.model, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_NOT_PUBLISHED))
    write_record(source, target)
    remote_code = isinstance(model, VariantMixin) and (remote_code or has_remote_code(model.config))
    readme = target / "README.md"
    if not readme.exists():
        model_card(source, repo_id, model=model, remote_code=remote_code, **card_options).save(readme)
    elif repo_id is not None:  # `hf-freeze card` without --repo-id leaves the name open
        readme.write_text(readme.read_text(encoding="utf-8").replace(UNNAMED, repo_id), encoding="utf-8")
    if remote_code:
        write_remote_code(target, model)


def write_record(source: TrainedModel, target: Path) -> None:
    """Write the files that a card refers to, results.json and pictures, to `target`."""
    if (record := published_record(source)) is not None:
        (target / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for picture in source.pictures:
        shutil.copy(picture, target)


def check_whole(folder: Path, model: Any) -> None:
    """Raise ValueError if a tensor that `model`, perhaps on `meta`, needs from `folder` is missing or has another shape.

    Reads only the headers of the weight files.
    """
    stored_shapes: dict[str, list[int]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights: no *.safetensors is there")
    for path in files:
        try:
            with safe_open(path, "pt") as weights:
                stored_shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or damaged: {error}") from error
    not_stored = keys_to_ignore(model)[0]
    for name, parameter in canonical_parameters(model):
        names = {name, *(tied for tied, source in model.all_tied_weights_keys.items() if source == name)}
        if names & not_stored:
            continue
        shapes = [stored_shapes[alias] for alias in names if alias in stored_shapes]
        if list(parameter.shape) not in shapes:
            fault = f"has the shape {shapes[0]}, not {list(parameter.shape)}" if shapes else "is not there"
            raise ValueError(f"{folder} holds no complete {type(model).__name__}: {name!r} {fault}")


def _upload(
    folder: Path, repo_id: str, private: bool | None, revision: str | None, token: Any, message: str, **options: Any
) -> CommitInfo:
    api = HfApi(token=token)
    with _short_hub_errors():
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message, **options
        )


@contextmanager
def _short_hub_errors() -> Iterator[None]:
    """Turns errors of the Hub, or of an unreachable server, into an OSError that starts with a hint for the user."""
    try:
        yield
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = {401: "log in with `hf auth login`, or set HF_TOKEN", 403: "the token may not write there"}.get(
            status or 0, "push again: nothing was published" if (status or 0) >= 500 else ""
        )
        raise OSError(f"{hint}: {error}" if hint else str(error)) from error
    except RuntimeError as error:  # huggingface_hub raises it for an interrupted upload
        if not isinstance(error.__cause__, _HTTPError):
            raise
        raise ConnectionError(f"{error} ({error.__cause__}) Nothing was published: push again") from error
    except _HTTPError as error:
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error}): nothing was published") from error
