"""Writes docs/reference/commands.md from the help of the commands: `python docs/tooling/commands.py`."""

import inspect
import re
from pathlib import Path

from hf_freeze.cli import app

PAGE = Path(__file__).parents[1] / "reference" / "commands.md"
HEAD = """# Commands

What each command of `hf-freeze` does, with examples. `hf-freeze COMMAND --help` has all options.
"""


def section(function) -> str:
    """What a command does, and its examples as a block."""
    said, *examples = re.split(r"^Example: ", inspect.getdoc(function) or "", flags=re.MULTILINE)
    commands = [re.sub(r"\s+", " ", example).strip() for example in examples]
    block = "\n".join(part for line in commands for part in line.split("; ") if part.startswith("hf-freeze"))
    return f"## {function.__name__}\n\n{said.strip()}\n\n```bash\n{block}\n```\n"


def page() -> str:
    functions = [command.callback for command in app.registered_commands]
    return "\n".join([HEAD, *(section(function) for function in functions)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
