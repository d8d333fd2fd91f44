"""Writes the generated parts of the method guides, and hf_freeze/cli/facts.json: `python docs/tooling/method_guides.py`.

A guide is docs/methods/<registered name>.md. Its facts and the first columns of its table of settings come from the registry; the
last column of that table, and all text, is written by hand and stays. A method without a guide gets a skeleton.
"""

import inspect
import json
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from registry_facts import from_registries, named_families
from survival import MODELS, surviving_formats

from hf_freeze.architectures.families import CAPABILITIES
from hf_freeze.cli.facts import FILE
from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import METHODS, changed_settings

FOLDER = Path(__file__).parents[1] / "methods"
INDEX = FOLDER / "index.md"
README = Path(__file__).parents[2] / "README.md"
SECTIONS = [
    "What it does",
    "When to use it",
    "Settings",
    "Example",
    "Formulas",
    "How it composes",
    "What export keeps",
]


def guide_of(method: type[Method]) -> Path:
    return FOLDER / f"{method.name}.md"


def source_of(method: type[Method]) -> str:
    """The first paragraph of the docstring of its module, which names the paper; addresses become links."""
    text = " ".join((sys.modules[method.__module__].__doc__ or "").split("\n\n")[0].split())
    return re.sub(r"https://[^\s,;)]+", lambda match: f"<{match[0]}>", text)


def facts(method: type[Method]) -> str:
    """The table at the top."""
    by_hand, listed = named_families(method)
    others = method.registered.architectures is None and "blocks" not in method.registered.needs
    needs = " and ".join(CAPABILITIES[need] for need in sorted(method.registered.needs & CAPABILITIES.keys()))
    beyond = f"; other [families](../families.md) where {needs or 'the parts are understood'}" if others else ""
    rows = {
        "Python": f"`methods.{method.__name__}`",
        "In a recipe": f"`{json.dumps({'method': method.name} | changed_settings(method.example))}`",
        "Source": source_of(method),
        "Works on": ", ".join([*by_hand, *listed]) + beyond,
        "Backbone": "a config: it trains from scratch"
        if method.registered.from_scratch
        else "a config or trained weights",
        "Smaller file": "yes" if method.registered.shrinks else "no",
        "Savings kept by": kept_by(method),
    }
    return "| fact | value |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def kept_by(method: type[Method]) -> str:
    """The formats of export that keep what the method saves."""
    formats = surviving_formats(method)
    return "all formats" if len(formats) == len(MODELS) else ", ".join(formats) or "no saving to keep"


def works_on(method: type[Method]) -> str:
    needs, architectures = method.registered.needs, method.registered.architectures
    if not needs and architectures is None:
        return "any family"
    by_hand, listed = named_families(method)
    if listed:
        return f"{', '.join(by_hand)} and {len(listed)} others"
    return ", ".join(by_hand) + ", others where proved" * ("blocks" not in needs and architectures is None)


def overview() -> str:
    """The table of all methods, with the first sentence of each guide."""
    lines = ["| method | what it does | works on | savings kept by |", "| --- | --- | --- | --- |"]
    for method in METHODS.values():
        text = guide_of(method).read_text(encoding="utf-8").partition("## What it does")[2]
        sentence = re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
        lines.append(f"| [{method.__name__}]({method.name}.md) | {sentence} | {works_on(method)} | {kept_by(method)} |")
    return "\n".join(lines)


def summary() -> str:
    """The table of README.md: methods that work on the same families and whose savings the same formats keep, in one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for method in METHODS.values():
        families = works_on(method)
        families = "all" if families == "any family" else families
        families = "all where proved" if families.endswith("others where proved") else families
        key = families, kept_by(method).replace("no saving to keep", "–")
        groups.setdefault(key, []).append(f"`{method.__name__}`")
    lines = ["| methods | families | survives export to |", "| --- | --- | --- |"]
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return "\n".join([*lines, *(f"| {', '.join(names)} | {' | '.join(key)} |" for key, names in ordered)])


def settings(method: type[Method], meanings: dict[str, str]) -> str:
    """The table of settings. `meanings`: setting -> its last column, by hand."""
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(method):
        kind = (
            inspect.formatannotation(field.type)
            .replace(" | ", " or ")
            .replace("typing.", "")
            .replace("collections.abc.", "")
        )
        default = default_of(field)
        shown = "required" if default is MISSING else f"`{default!r}`"
        lines.append(f"| `{field.name}` | {kind} | {shown} | {meanings.get(field.name, '')} |")
    return "\n".join(lines)


def default_of(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def meanings_of(text: str) -> dict[str, str]:
    """Setting -> what the guide says about it."""
    return {
        name: words.strip() for name, words in re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\|(.*)\|$", text, re.MULTILINE)
    }


def with_generated(text: str, method: type[Method]) -> str:
    """The guide with its generated parts as the registry has them now."""
    return replaced(replaced(text, "facts", facts(method)), "settings", settings(method, meanings_of(text)))


def replaced(text: str, name: str, table: str) -> str:
    """The page with this table in the place of that name."""
    pattern = rf"(<!-- {name}: generated -->\n\n).*?(\n\n<!-- end -->)"
    assert re.search(pattern, text, re.DOTALL), f"no place for {name} in {text[:80]!r}"
    return re.sub(pattern, lambda match: match[1] + table + match[2], text, flags=re.DOTALL)


def skeleton(method: type[Method]) -> str:
    marks = {"Settings": "<!-- settings: generated -->\n\n\n\n<!-- end -->\n\n"}
    sections = "".join(f"## {section}\n\n{marks.get(section, '')}" for section in SECTIONS)
    return f"# {method.__name__}\n\n<!-- facts: generated -->\n\n\n\n<!-- end -->\n\n{sections}"


def main() -> None:
    FILE.write_text(json.dumps(from_registries(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for method in METHODS.values():
        path = guide_of(method)
        text = path.read_text(encoding="utf-8") if path.exists() else skeleton(method)
        path.write_text(with_generated(text, method), encoding="utf-8")
    README.write_text(replaced(README.read_text(encoding="utf-8"), "methods", summary()), encoding="utf-8")
    INDEX.write_text(replaced(INDEX.read_text(encoding="utf-8"), "methods", overview()), encoding="utf-8")


if __name__ == "__main__":
    main()
