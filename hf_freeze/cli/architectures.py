"""`hf-freeze architectures`."""

from hf_freeze import terminal
from hf_freeze.cli import facts


def architectures() -> None:
    """List the model families that are described by hand, their tasks and their stacks of layers.

    All others are derived: `hf-freeze describe MODEL` shows the parts of one.

    Example: hf-freeze architectures
    """
    known = facts.read()["architectures"]
    rows = [(name, ", ".join(each["tasks"]), ", ".join(each["stacks"])) for name, each in known.items()]
    terminal.show_table(("architecture", "tasks", "stacks"), rows)
