"""`hf-freeze methods`: all methods in a table, or one of them explained."""

import difflib
import json
from typing import Annotated, Any

import typer
from rich import box

from hf_freeze import terminal
from hf_freeze.cli import facts


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to explain, such as low_rank; all are listed if not given.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table of methods and architectures in Markdown.")
    ] = False,
) -> None:
    """List the methods, or explain one: what it does, its settings with their defaults, and an example.

    Example: hf-freeze methods

    Example: hf-freeze methods low_rank
    """
    known = facts.read()["methods"]
    with terminal.one_line_errors():
        if name is not None and markdown:
            raise ValueError(f"--markdown lists all methods: leave {name!r} out")
        if name is not None:
            registered = _method_called(name)
            _explain(registered, known[registered])
            return
    if markdown:
        typer.echo(methods_by_architectures())
        return
    rows = [
        (
            registered,
            ", ".join(method["settings"]),
            ", ".join(method["by_hand"] + method["listed"] + ["derived"] * method["on_derived"]),
        )
        for registered, method in known.items()
    ]
    terminal.show_table(("method", "settings", "families"), rows)
    terminal.say("hf-freeze methods NAME explains one of them. Derived families: hf-freeze describe TYPE tells.")


def methods_by_architectures() -> str:
    """The Markdown table of which method works on which architecture, and which formats of export keep its savings."""
    known = facts.read()
    architectures, formats = list(known["architectures"]), known["formats"]
    lines = ["| method | " + " | ".join(architectures) + " | survives export to |"]
    lines.append("| --- |" + " :-: |" * len(architectures) + " --- |")
    for method in known["methods"].values():
        marks = ["✓" if name in method["by_hand"] else "–" for name in architectures]
        marks.append("all" if method["formats"] == formats else ", ".join(method["formats"]) or "–")
        lines.append(f"| `methods.{method['class']}` | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def _method_called(name: str) -> str:
    """By its registered name or that of its class: low_rank, low-rank, LowRank and methods.LowRank are the same method."""

    def plain(text: str) -> str:
        return text.removeprefix("methods.").replace("_", "").replace("-", "").lower()

    known = {plain(registered): registered for registered in facts.read()["methods"]}
    known |= {plain(method["class"]): registered for registered, method in facts.read()["methods"].items()}
    if plain(name) in known:
        return known[plain(name)]
    near = difflib.get_close_matches(plain(name), known, n=1)
    hint = f"; did you mean {known[near[0]]!r}?" if near else "."
    raise ValueError(f"unknown method {name!r}{hint} Choose from {sorted(facts.read()['methods'])}")


def _beyond(method: dict[str, Any]) -> str:
    """The families that are not described by hand, in words."""
    if method["listed"]:
        return "; on no other family, because it was proved on these alone"
    if not method["on_derived"]:
        return "; on no other family, because it puts in blocks of its own, which need a description by hand"
    where = f"where {' and '.join(method['needs'])}" if method["needs"] else "that is understood"
    return f", and any other family {where} (`hf-freeze describe TYPE` tells; docs/families.md lists all)"


def _explain(name: str, method: dict[str, Any]) -> None:
    terminal.say(f"methods.{method['class']}, {name!r} in a recipe\n{method['source']}\n")
    terminal.say(method["doc"])
    rows = [(setting, *described) for setting, described in method["settings"].items()]
    terminal.show_table(("setting", "type", "default"), rows, box=box.SIMPLE_HEAD)
    terminal.say(f"Works on: {', '.join(method['by_hand'] + method['listed'])}{_beyond(method)}")
    terminal.say("A small example:")
    terminal.say_code(f"  Python: methods.{method['python']}")
    # JSON on one line is YAML too.
    terminal.say_code(f"  Recipe: {json.dumps(method['recipe'])}")
