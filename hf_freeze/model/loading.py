"""Open a saved model, native or a variant, by the class that it was saved from."""

import difflib
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_freeze.model.classes  # noqa: F401 (registers the variants)
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.tasks import native_class
from hf_freeze.model.tokenizers import load_tokenizer as load_tokenizer


def check_exists(name: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError if `name` is not a folder and cannot be a Hub id, such as `./missing` or `a/b/c`, or is the folder
    of a grid or of a run, which has models below."""
    if (folder := Path(name)).exists():
        below = sorted({*folder.glob("*/config.json"), *folder.glob("*/model/config.json")})
        if below and not (folder / "config.json").exists():
            raise FileNotFoundError(f"{name} has no config.json; name the folder of a model, such as {below[0].parent}")
        return
    try:
        validate_repo_id(os.fspath(name))
    except HFValidationError:
        message = (
            f"{name} does not exist: neither a folder here nor a Hub id such as 'bert-base-uncased' or 'user/model'"
        )
        raise FileNotFoundError(message) from None


def empty_model(name: str | os.PathLike[str]) -> Any:
    """The model of a directory or Hub id on `meta`, of the class that it was saved from: its structure without its weights.

    Raises ValueError for an architecture that is not registered, FileNotFoundError for a missing directory.
    """
    config, model_class = _saved_class(name)
    with torch.device("meta"):
        model = model_class(config)
    return model.to(config.dtype or torch.float32)


def config_of_type_or_model(name: str) -> Any:
    """The config of a directory or Hub id, or the default config of a model type of transformers, such as "roberta"
    (completed as in published checkpoints where transformers cannot build it).

    Raises ValueError if it is neither.
    """
    if name in CONFIG_MAPPING and not Path(name).exists():
        return default_config(name)
    if not Path(name).exists() and "/" not in name:
        near = difflib.get_close_matches(name, CONFIG_MAPPING.keys(), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"{name!r} is no model type of transformers {transformers.__version__} and no directory{hint}")
    check_exists(name)
    return AutoConfig.from_pretrained(name)


def load_model(name: str | os.PathLike[str], **options: Any) -> Any:
    """The model of a directory or Hub id, of the class that it was saved from. `options` go to its `from_pretrained`.

    Raises ValueError if that class is not supported, FileNotFoundError for a missing directory.
    """
    config, model_class = _saved_class(name)
    if model_class.__name__ not in (config.architectures or ()):
        raise ValueError(
            f"{name} holds {config.architectures or 'no class of model'}; choose from {list(_classes(config))}"
        )
    return model_class.from_pretrained(name, **options)


def _saved_class(name: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The config of a saved model and the class that wrote it; if the config names none, the class of the first task."""
    check_exists(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        if Path(name).exists():
            raise
        raise FileNotFoundError(f"{name} is no folder here, and the Hub gave no such model: {error}") from error
    classes = _classes(config)
    written_by = [model_class for name, model_class in classes.items() if name in (config.architectures or ())]
    return config, (written_by or list(classes.values()))[0]


def _classes(config: Any) -> dict[str, Any]:
    classes = (native_class(task, type(config)) for task in architecture_of(config).tasks)
    return {model_class.__name__: model_class for model_class in classes}
