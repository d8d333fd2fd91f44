"""METHODS, the decorator that registers a method there, and the conversion of methods to plain data and back."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hf_freeze.methods.base import Facts, Method

METHODS: dict[str, type[Method]] = {}

M = TypeVar("M", bound=type[Method])


def register_method(
    name: str,
    *,
    example: dict[str, Any],
    facts: Facts = Facts(),  # noqa: B008 (frozen)
    modes: Mapping[str, dict[str, Any]] = {},
) -> Callable[[M], M]:
    """Class decorator: register a method under `name`.

    `example`: a tiny setting, which the contract tests apply to every architecture that the method supports. `modes`: further
    ones that differ from it in kind, by a name for each, such as a setting that is trained in another way. `facts`: what others
    must know of every setting; `Method.facts` gives what depends on it.
    """

    def register(cls: M) -> M:
        if name in METHODS:
            raise ValueError(f"method {name!r} is registered already, by {METHODS[name].__qualname__}")
        cls.name, cls.registered = name, facts
        for attribute, value in [
            ("example", cls(**example)),
            ("modes", {mode: cls(**of) for mode, of in modes.items()}),
        ]:
            setattr(cls, attribute, value)  # a subclass where Method is declared
        METHODS[name] = cls
        return cls

    return register


def method_to_dict(method: Method) -> dict[str, Any]:
    """Plain JSON data: the registered name under `method`, then every field."""
    return {"method": method.name} | {
        name: copy.deepcopy(getattr(method, name)) for name in stored_fields(type(method))
    }


def stored_fields(method: type[Method]) -> list[str]:
    """Names of the fields of a method that its config holds: all except runtime objects, such as a teacher."""
    return [field.name for field in fields(method) if not field.metadata.get("runtime")]


def changed_settings(method: Method) -> dict[str, Any]:
    """The settings of `method_to_dict` that differ from their defaults."""
    defaults = {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(method)
    }
    settings = {name: value for name, value in method_to_dict(method).items() if name in defaults}
    return {name: value for name, value in settings.items() if value != defaults[name]}


def written(method: Method, shown: Callable[[Any], str] = repr) -> str:
    """As a user writes it, without defaults: `LowRank(rank=8, components=["attention"])`. `shown` may shorten values."""
    settings = {name: shown(value) for name, value in changed_settings(method).items()}
    quoted = {name: text if '"' in text else text.replace("'", '"') for name, text in settings.items()}
    return f"{type(method).__name__}({', '.join(f'{name}={text}' for name, text in quoted.items())})"


def method_from_dict(data: Any) -> Method:
    """The method that `method_to_dict` wrote. Raises ValueError for anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("method"), str):
        raise ValueError(f"a method is a dict with its name under 'method', not {data!r}")
    arguments = dict(data)
    name = arguments.pop("method")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose from {sorted(METHODS)} (or update hf_freeze)")
    known = stored_fields(METHODS[name])
    if unknown := sorted(set(arguments) - set(known)):
        raise ValueError(f"unknown field {unknown[0]!r} of method {name!r}; choose from {known} (or update hf_freeze)")
    try:
        return METHODS[name](**arguments)
    except TypeError as error:  # a required field is missing
        raise ValueError(f"method {name!r}: {error}") from error


def methods_from_file(path: Path) -> tuple[list[Method], Any]:
    """The methods of a YAML or JSON file with a list of them, each with its name under `method`, as in a recipe, and None; or the
    list under `methods`, and the `budget` that methods with `share: auto` share.

    Raises FileNotFoundError if there is no such file, ValueError for what is no list of methods.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file with methods")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    budget = None
    if isinstance(data, dict) and data.keys() == {"budget", "methods"}:
        budget, data = data["budget"], data["methods"]
    if not isinstance(data, list) or not data:
        raise ValueError(
            f"{path} must hold a list of methods, such as `- {{method: low_rank, rank: 64}}`, or budget and methods"
        )
    return [method_from_dict(item) for item in data], budget


def shortened(value: Any) -> Any:
    """A list of more than 20 entries, such as the ids of a vocabulary, as a string with its first and last values, also in dicts
    and lists; other values are unchanged."""
    if isinstance(value, dict):
        return {name: shortened(inner) for name, inner in value.items()}
    if isinstance(value, list) and len(value) > 20:
        return f"{value[:3]} ... {value[-1:]} ({len(value)} in all)".replace("] ... [", ", ..., ")
    return [shortened(inner) for inner in value] if isinstance(value, list) else value
