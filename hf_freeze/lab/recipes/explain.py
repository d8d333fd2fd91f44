"""Validate plain data by a model. What is wrong is one line: the file, the field, its value, and what it may be."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

M = TypeVar("M", bound=BaseModel)

_TYPES = {"dict_type": "a dict", "model_type": "a dict", "list_type": "a list", "string_type": "a str"}
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def validated(model: type[M], data: Any, path: str | Path) -> M:
    """`data` as a `model`. `path`: the file, for the ValueError of what is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError(_Finding(error.errors(include_url=False)[0], model, data).line(path)) from None


def check_top(model: type[BaseModel], data: Any, path: str | Path) -> None:
    """As `validated`, but look only at the names and types of the fields of `model` itself, of which some may be missing."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            if len(found["loc"]) == 1 and found["type"] != "missing":
                raise ValueError(_Finding(found, model, data).line(path)) from None


def facts_of(info: FieldInfo | None) -> dict[str, Any]:
    """What `setting` says of a field besides its type and limits."""
    facts = info.json_schema_extra if info is not None else None
    return facts if isinstance(facts, dict) else {}


def choose(names: Iterable[str], wrong: Any) -> str:
    """The end of a message about a wrong name."""
    names = list(names)
    nearest = difflib.get_close_matches(str(wrong), names, n=1)
    return f"choose from {names}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def fields_for(model: type[BaseModel], task: str | None) -> list[str]:
    """The fields of a section that a task takes."""
    infos = model.model_fields.items()
    return [name for name, info in infos if task is None or task in facts_of(info).get("tasks", [task])]


def model_in(annotation: Any) -> tuple[type[BaseModel] | None, int]:
    """The model in the type of a field, if any, and the number of dicts and lists around it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, 0
    for part in get_args(annotation):
        model, depth = model_in(part)
        if model is not None:
            return model, depth + (get_origin(annotation) in (dict, list))
    return None, 0


class _Finding:
    """One error of pydantic's: the names of the way to the field, the field, its value, and the model that has it."""

    def __init__(self, found: Any, model: type[BaseModel], data: Any) -> None:
        self.kind, self.context, self.message = found["type"], found.get("ctx", {}), found["msg"]
        self.task = data.get("task") if isinstance(data, dict) else None
        self.names: list[Any] = []
        self.info: FieldInfo | None = None
        self.owner: type[BaseModel] | None = model
        self.value: Any = data
        self.is_key = False
        self.is_below = False  # is the error in a part of what a field `takes`?
        within = 0  # dicts and lists to pass before the fields of `owner`
        for part in found["loc"]:
            if part == "[key]":
                self.is_key = True
                break
            if self.owner is not None and not within and part in self.owner.model_fields:
                self.info = self.owner.model_fields[part]
                self.owner, within = model_in(self.info.annotation)
            elif within:
                within -= 1
            elif not _holds(self.value, part):
                break  # the branch of a union
            self.names.append(part)
            self.value = self.value[part] if _holds(self.value, part) else None
            if facts_of(self.info).get("takes"):
                self.is_below = len(found["loc"]) > len(self.names)
                break

    def line(self, path: str | Path) -> str:
        where, names = f"{path}", self.names
        if names[:1] == ["rows"] and len(names) > 1:
            where, names = f"{path}: row {names[1]!r}", names[2:]
        if self.is_key:
            return self._about_key(where, names)
        name = ".".join(map(str, names))
        quoted = name if "." in name else repr(name)
        takes = facts_of(self.info).get("takes") or self._number()
        wrong = f"{where}: {name}={self.value!r} is not a value that it takes: {takes}"
        if self.is_below:
            return wrong
        if self.kind == "extra_forbidden":
            known = fields_for(self.owner, self.task) if self.owner is not None else []
            return f"{where}: unknown field {quoted}; {choose(sorted(known), names[-1])}"
        if self.kind == "missing":
            return f"{where}: {quoted} is missing"
        if self.kind == "value_error":
            return f"{where}: {self.context['error']}"
        if self.kind == "literal_error":
            choices = re.findall(r"'([^']*)'", self.context["expected"])
            return f"{where}: unknown {name}={self.value!r}; {choose(choices, self.value)}"
        if limits := self._limits():
            return f"{where}: {name}={self.value!r} must be {limits}"
        if takes:
            return wrong
        if self.kind in _TYPES:
            return f"{where}{': ' * bool(name)}{name} must be {_TYPES[self.kind]}, not {self.value!r}"
        return f"{where}: {name}={self.value!r}: {self.message}"

    def _about_key(self, where: str, names: list[Any]) -> str:
        if not names:  # of a row
            if self.kind == "string_type":
                return f"{where.replace(repr(self.names[1]), str(self.names[1]))} must be a quoted name"
            return f"{where} names a folder: letters, digits, '.', '_' and '-' only"
        choices = re.findall(r"'([^']*)'", self.context.get("expected", ""))
        *parents, key = names
        return f"{where}: unknown {'.'.join(parents)} {key!r}; {choose(choices, key)}"

    def _number(self) -> str:
        if self.kind.startswith("float"):
            return "a number"
        return "an integer" if self.kind.startswith("int") or self.kind == "finite_number" else ""

    def _limits(self) -> str:
        limits = {key: value for key, value in self.context.items() if key in _LIMITS}
        if not limits:
            return ""
        for part in self.info.metadata if self.info is not None else ():
            limits |= {key: getattr(part, key) for key in _LIMITS if hasattr(part, key)}
        return " and ".join(f"{_LIMITS[key]} {limits[key]:g}" for key in _LIMITS if key in limits)


def _holds(value: Any, part: Any) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value
