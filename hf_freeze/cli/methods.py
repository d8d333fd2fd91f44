"""`hf-freeze methods`: all methods in a table, or one of them explained."""

import difflib
import inspect
import json
import sys
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from hf_freeze.cli import terminal

if TYPE_CHECKING:
    from hf_freeze.methods.base import Method


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to explain, such as low_rank; all are listed if not given.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of methods and architectures as the README shows it.")
    ] = False,
) -> None:
    """List the methods, or explain one: what it does, its settings with their defaults, and an example.

    Example: hf-freeze methods

    Example: hf-freeze methods low_rank
    """
    from hf_freeze.methods.registry import METHODS

    with terminal.one_line_errors():
        if name is not None and markdown:
            raise ValueError(f"--markdown lists all methods: leave {name!r} out")
        if name is not None:
            _explain(_method_called(name))
            return
    if markdown:
        typer.echo(methods_by_architectures())
        return
    table = Table("method", "settings", "architectures")
    for registered, method in METHODS.items():
        table.add_row(
            registered,
            ", ".join(field.name for field in fields(method)),
            ", ".join(_by_hand(method) + ["derived families"] * _on_derived(method)),
        )
    terminal.console.print(table)
    terminal.say("hf-freeze methods NAME explains one of them.")


def methods_by_architectures() -> str:
    """The Markdown table of which method works on which architecture, from the registries, and which formats keep its savings."""
    from hf_freeze.architectures.registry import ARCHITECTURES
    from hf_freeze.methods.registry import METHODS
    from hf_freeze.publish.export.convert import FORMATS
    from hf_freeze.publish.export.survival import surviving_formats

    lines = ["| method | " + " | ".join(ARCHITECTURES) + " | survives export to |"]
    lines.append("| --- |" + " :-: |" * len(ARCHITECTURES) + " --- |")
    for method in METHODS.values():
        marks = ["✓" if method.supports(architecture) else "–" for architecture in ARCHITECTURES.values()]
        formats = surviving_formats(method)
        marks.append("all" if len(formats) == len(FORMATS) else ", ".join(formats) or "–")
        lines.append(f"| `methods.{method.__name__}` | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def _method_called(name: str) -> type["Method"]:
    """By its registered name or that of its class: low_rank, low-rank, LowRank and methods.LowRank are the same method."""
    from hf_freeze.methods.registry import METHODS

    def plain(text: str) -> str:
        return text.removeprefix("methods.").replace("_", "").replace("-", "").lower()

    known = {plain(registered): registered for registered in METHODS}
    known |= {plain(method.__name__): registered for registered, method in METHODS.items()}
    if plain(name) in known:
        return METHODS[known[plain(name)]]
    near = difflib.get_close_matches(plain(name), known, n=1)
    hint = f"; did you mean {known[near[0]]!r}?" if near else "."
    raise ValueError(f"unknown method {name!r}{hint} Choose from {sorted(METHODS)}")


def _on_derived(method: type["Method"]) -> bool:
    """Whether it works on families that are not described by hand, where what it needs is proved."""
    return method.architectures is None and "blocks" not in method.needs


def _by_hand(method: type["Method"]) -> list[str]:
    from hf_freeze.architectures.registry import ARCHITECTURES

    return sorted(name for name, architecture in ARCHITECTURES.items() if method.supports(architecture))


def _beyond(method: type["Method"]) -> str:
    """The families that are not described by hand, in words."""
    from hf_freeze.architectures.families import CAPABILITIES

    if not _on_derived(method):
        return "; on no other family, because it puts in blocks of its own, which need a description by hand"
    where = " and ".join(CAPABILITIES[need] for need in sorted(method.needs))
    where = f"where {where}" if where else "that is understood"
    return f", and any other family {where} (`hf-freeze describe TYPE` tells; docs/families.md lists all)"


def _explain(method: type["Method"]) -> None:
    from hf_freeze.methods.registry import method_to_dict, stored_fields

    source = " ".join((sys.modules[method.__module__].__doc__ or "").split("\n\n")[0].split())
    terminal.say(f"methods.{method.__name__}, {method.name!r} in a recipe\n{source}\n")
    terminal.say(inspect.getdoc(method) or "")
    table = Table("setting", "type", "default", box=box.SIMPLE_HEAD)
    for field in fields(method):
        table.add_row(field.name, _type_of(field), _default_of(field))
    terminal.console.print(table)
    terminal.say(f"Works on: {', '.join(_by_hand(method))}{_beyond(method)}")
    stored = {key: value for key, value in method_to_dict(method.example).items() if key in stored_fields(method)}
    defaults = {field.name: _default(field) for field in fields(method)}
    changed = {key: value for key, value in stored.items() if value != defaults[key]}
    arguments = ", ".join(f"{key}={value!r}" for key, value in changed.items())
    terminal.say("A small example:")
    terminal.say(f"  Python: methods.{method.__name__}({arguments})")
    # JSON on one line is YAML too.
    terminal.say(f"  Recipe: {json.dumps({'method': method.name} | changed)}")


def _type_of(field: Field) -> str:
    return field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _default_of(field: Field) -> str:
    default = _default(field)
    return "required" if default is MISSING else repr(default)
