"""`hf-freeze architectures`."""

from rich.table import Table

from hf_freeze.cli import terminal


def architectures() -> None:
    """List the model families that are described by hand, their tasks and their stacks of layers.

    All others are derived: `hf-freeze describe MODEL` shows the parts of one.

    Example: hf-freeze architectures
    """
    from hf_freeze.architectures.registry import ARCHITECTURES

    table = Table("architecture", "tasks", "stacks")
    for name, architecture in ARCHITECTURES.items():
        table.add_row(name, ", ".join(architecture.tasks), ", ".join(architecture.stacks))
    terminal.console.print(table)
