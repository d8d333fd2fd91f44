"""What commands that only tell know of methods and architectures, from `facts.json`: so they import no torch and no transformers.

`python docs/tooling/method_guides.py` writes the file from the registries.
"""

import functools
import inspect
import json
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_freeze.methods.base import Method

FILE = Path(__file__).with_name("facts.json")


@functools.cache
def read() -> dict[str, Any]:
    """ "methods": name -> what `_of_method` gives; "architectures": name -> its tasks and stacks; "formats": those of export."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def from_registries() -> dict[str, Any]:
    """What `read` gives, computed."""
    from hf_freeze.architectures.registry import ARCHITECTURES
    from hf_freeze.methods.registry import METHODS
    from hf_freeze.publish.export.convert import FORMATS

    return {
        "methods": {name: _of_method(method) for name, method in METHODS.items()},
        "architectures": {
            name: {"tasks": list(architecture.tasks), "stacks": list(architecture.stacks)}
            for name, architecture in ARCHITECTURES.items()
        },
        "formats": list(FORMATS),
    }


def write() -> None:
    """Write `facts.json`."""
    FILE.write_text(json.dumps(from_registries(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_method(method: type["Method"]) -> dict[str, Any]:
    from hf_freeze.architectures.families import CAPABILITIES
    from hf_freeze.architectures.registry import ARCHITECTURES
    from hf_freeze.methods.registry import changed_settings, written
    from hf_freeze.publish.export.survival import surviving_formats

    facts = method.registered
    return {
        "class": method.__name__,
        "source": " ".join((sys.modules[method.__module__].__doc__ or "").split("\n\n")[0].split()),
        # Each paragraph and each item of a list on one line; code, which four spaces indent, stays.
        "doc": re.sub(r"(?<!\n)\n(?: {2})?(?=[^\s-])", " ", inspect.getdoc(method) or ""),
        "settings": {field.name: [_type_of(field), _default_of(field)] for field in fields(method)},
        "by_hand": sorted(name for name, architecture in ARCHITECTURES.items() if method.refusal(architecture) is None),
        # Whether it works on families that are not described by hand, where this is proved.
        "on_derived": facts.architectures is None and "blocks" not in facts.needs,
        "needs": [CAPABILITIES[need] for need in sorted(facts.needs & CAPABILITIES.keys())],
        "python": written(method.example),
        "recipe": {"method": method.name} | changed_settings(method.example),
        "formats": surviving_formats(method),  # which keep what it saves
    }


def _type_of(field: Field) -> str:
    return field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)


def _default_of(field: Field) -> str:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return "required" if default is MISSING else repr(default)
