"""What recipes may say, for editors (a JSON schema) and for people (the tables of the documentation), from the typed models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import hf_freeze
from hf_freeze.lab.recipes.explain import facts_of, model_in
from hf_freeze.lab.recipes.recipe import Recipe
from hf_freeze.lab.recipes.settings import TASKS, TEXT

_OURS = ("forms", "needed", "takes", "tasks")  # what only our own checks read


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe. No field is required: what a file leaves out may be in the one that it extends, or in a
    preset."""
    schema = _without_ours(Recipe.model_json_schema())
    properties = schema["properties"]
    properties["extends"] = {"type": "string", "description": "A recipe to start from: a file or a name."}
    properties["smoke"] |= {"$ref": "#"}
    properties["presets"] |= {"additionalProperties": {"$ref": "#"}}
    # From the facts in the package: the methods themselves import torch.
    facts = json.loads((Path(hf_freeze.__file__).parent / "cli" / "facts.json").read_text(encoding="utf-8"))
    methods = [_method(name, of_method) for name, of_method in facts["methods"].items()]
    schema["$defs"]["Row"]["properties"]["methods"]["items"] = {"anyOf": methods}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "A recipe of hf_freeze"}


def fields_as_markdown() -> str:
    """A table of the fields of a recipe, and one for each of its sections."""
    lines: list[str] = []
    for model, title in _sections(Recipe).items():
        lines += [f"## {title or 'The recipe'}", "", " ".join((model.__doc__ or "").split()), ""]
        lines += ["| field | what it is | values | default | tasks |", "| --- | --- | --- | --- | --- |"]
        schemas = model.model_json_schema()["properties"]
        for name, info in model.model_fields.items():
            values = facts_of(info).get("takes") or _values(schemas[name])
            cells = (f"`{name}`", info.description, values, _default(info), _tasks(facts_of(info)))
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _without_ours(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_ours(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    is_field = "takes" in schema and not isinstance(schema["takes"], dict)
    left_out = ("required", *_OURS) if is_field else ("required",)
    kept = {key: value for key, value in schema.items() if key not in left_out and (key, value) != ("default", None)}
    return {key: _without_ours(value) for key, value in kept.items()}


def _method(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    named = {"method": {"const": name, "description": facts["source"].split(" (")[0]}}
    settings = {
        setting: {"description": f"{kind}; {'' if default == 'required' else 'default '}{default}"}
        for setting, (kind, default) in facts["settings"].items()
    }
    return {"title": name, "properties": named | settings, "required": ["method"], "additionalProperties": False}


def _sections(model: type[BaseModel], title: str = "") -> dict[type[BaseModel], str]:
    """A model and those in its fields, each once, with the way to it."""
    sections = {model: title}
    for field, info in model.model_fields.items():
        inner, within = model_in(info.annotation)
        if inner is not None:
            for part, way in _sections(inner, f"{title}.{field}".lstrip(".") + ".NAME" * within).items():
                sections.setdefault(part, way)
    return sections


_WORDS = {
    "string": "text",
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
    "object": "a mapping",
}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _values(schema: dict[str, Any]) -> str:
    """The values of a field, in words, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_values(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"a list: {_values(schema['items'])}"
    if "$ref" in schema or "type" not in schema:
        return "a section"
    limits = [f"{word} {schema[key]:g}" for key, word in _LIMITS.items() if key in schema]
    return ", ".join([_WORDS[schema["type"]], *limits])


def _default(info: Any) -> str:
    if info.is_required() or facts_of(info).get("needed"):
        return "needed"
    plain = isinstance(info.default, str | int | float | list | tuple) and info.default not in ("", [])
    return str(list(info.default) if isinstance(info.default, tuple) else info.default) if plain else ""


def _tasks(facts: Mapping[str, Any]) -> str:
    tasks = tuple(facts.get("tasks", TASKS))
    but = [task for task in TEXT if task not in tasks]
    words = "all" if tasks == tuple(TASKS) else "all of text" if tasks == TEXT else ", ".join(tasks)
    words = f"all of text but {but[0]}" if len(but) == 1 else words
    return words + (f"; data: {', '.join(facts['forms'])}" if facts.get("forms") else "")
