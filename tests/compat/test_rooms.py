"""Rooms import downwards only, by name too: import-linter (pyproject.toml) sees import statements, but no names in strings."""

import ast
import re
from pathlib import Path

import pytest

import hf_freeze

PACKAGE = Path(str(hf_freeze.__file__)).parent
SETTINGS = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
LAYERS = re.findall('"(.+)"', SETTINGS.partition("\nlayers = [")[2].partition("\n]")[0])  # from the highest down
LEVELS = {room: level for level, rooms in enumerate(reversed(LAYERS)) for room in rooms.split(" | ")}


def named_above(source, level):
    """The modules of rooms above `level` that a string of the code `source` names, as `importlib.import_module` gets them."""
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    names = [re.match(r"(?:hf_freeze|\.)\.+(\w+)[\w.]*$", string) for string in strings if isinstance(string, str)]
    return sorted(name[0] for name in names if name and LEVELS.get(name[1], -1) > level)


@pytest.mark.parametrize("room", LEVELS)
def test_no_room_imports_one_above_it_by_name(room):
    files = [*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")]
    assert files
    for file in files:
        assert not named_above(file.read_text(encoding="utf-8"), LEVELS[room]), file


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module('hf_freeze.publish.hub').push_model",
        "__import__('hf_freeze.publish')",
        "import_module(f'hf_freeze.publish.{name}')",
        "import_module('..publish.hub', __package__)",
    ],
)
def test_such_an_import_is_found(source):
    assert named_above(source, LEVELS["model"])
    assert not named_above(source, LEVELS["cli"])
