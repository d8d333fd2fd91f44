"""What hf_freeze/cli/facts.json holds: methods and architectures as the registries have them."""

import inspect
import re
import sys
from dataclasses import MISSING, Field, fields
from typing import Any

from survival import surviving_formats

from hf_freeze.architectures.families import CAPABILITIES
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import METHODS, changed_settings, written
from hf_freeze.publish.export.convert import FORMATS


def from_registries() -> dict[str, Any]:
    """What `hf_freeze.cli.facts.read` gives, computed."""
    return {
        "methods": {name: _of_method(method) for name, method in METHODS.items()},
        "architectures": {
            name: {"tasks": list(architecture.tasks), "stacks": list(architecture.stacks)}
            for name, architecture in ARCHITECTURES.items()
        },
        "formats": list(FORMATS),
    }


def named_families(method: type[Method]) -> tuple[list[str], list[str]]:
    """The families that a method works on: those that are described by hand, and further ones that it names."""
    by_hand = [name for name, architecture in sorted(ARCHITECTURES.items()) if method.refusal(architecture) is None]
    return by_hand, sorted({*(method.registered.architectures or ())} - ARCHITECTURES.keys())


def _of_method(method: type[Method]) -> dict[str, Any]:
    by_hand, listed = named_families(method)
    return {
        "class": method.__name__,
        "source": " ".join((sys.modules[method.__module__].__doc__ or "").split("\n\n")[0].split()),
        # Each paragraph and each item of a list on one line; code, which four spaces indent, stays.
        "doc": re.sub(r"(?<!\n)\n(?: {2})?(?=[^\s-])", " ", inspect.getdoc(method) or ""),
        "settings": {field.name: [_type_of(field), _default_of(field)] for field in fields(method)},
        "by_hand": by_hand,
        "listed": listed,
        # Whether it works on families that are not described by hand, where this is proved.
        "on_derived": method.registered.architectures is None and "blocks" not in method.registered.needs,
        "needs": [CAPABILITIES[need] for need in sorted(method.registered.needs & CAPABILITIES.keys())],
        "python": written(method.example),
        "recipe": {"method": method.name} | changed_settings(method.example),
        "formats": surviving_formats(method),  # which keep what it saves
    }


def _type_of(field: Field) -> str:
    return field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)


def _default_of(field: Field) -> str:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return "required" if default is MISSING else repr(default)
