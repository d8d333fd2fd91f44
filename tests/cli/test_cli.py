"""The command line as such: quick help, the version, methods explained."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
import yaml
from support.recipes import cli, plain
from typer.testing import CliRunner

import hf_freeze
from hf_freeze import methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.methods.registry import METHODS, method_from_dict
from hf_freeze.terminal import one_line_errors

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
SLOW = {"torch", "transformers", "numpy", "matplotlib", "datasets", "evaluate"}


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == code, (result.output, result.exception)
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


# -- imports ---------------------------------------------------------------------------------------------------------------------


def printed_without_imports(*arguments, program=(sys.executable, "-m", "hf_freeze")):
    """What a command prints in a new process, which must import nothing slow: torch and transformers take seconds."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1", "COLUMNS": "100"}
    done = subprocess.run([*program, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "typer" in lines, "imports were not listed"
    assert not {line.split(".")[0] for line in lines} & SLOW
    return done.stdout


TELLING = [
    "methods",
    "methods low_rank",
    "methods --markdown",
    "recipes",
    "recipes --schema",
    "recipes --markdown",
    "architectures",
    "describe roberta",
    "--version",
]


# In one process, whose imports add up: what asks for help, and what only tells. The first with a slow import is named.
ASKS = f"""
import sys
from typer.testing import CliRunner
from hf_freeze.cli import app
for arguments in sys.argv[1:]:
    result = CliRunner().invoke(app, arguments.split())
    found = {SLOW} & sys.modules.keys()
    assert not found, f"{{arguments}} imports {{found}}"
    assert result.exit_code == 0 and result.output.strip(), (arguments, result.output)
    assert "--help" not in arguments or "Usage: " in result.output, result.output
"""


def test_help_and_what_only_tells_import_nothing_slow():
    asked = ["--help", *(f"{name} --help" for name in COMMANDS), *TELLING]
    printed_without_imports(*asked, program=(sys.executable, "-c", ASKS))


def test_the_module_runs():
    assert printed_without_imports("methods").strip()


def test_the_installed_program_is_as_quick():
    program = Path(sys.executable).parent / "hf-freeze"
    if not program.exists():
        pytest.skip("hf-freeze is not installed beside this Python")
    assert "inspect" in printed_without_imports("--help", program=[program])
    printed_without_imports("--version", program=[program])


def test_public_names_are_listed_and_found():
    for name in ("make_variant", "count_parameters", "VariantCallback", "methods", "analysis"):
        assert name in dir(hf_freeze)
        assert getattr(hf_freeze, name) is not None
    with pytest.raises(AttributeError, match="module 'hf_freeze' has no attribute 'make_varaint'"):
        _ = hf_freeze.make_varaint  # type: ignore[attr-defined]


def test_the_version():
    assert invoke("--version") == f"hf-freeze {hf_freeze.__version__}\n"


# -- methods ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_explained(name):
    printed = invoke("methods", name)
    method = METHODS[name]
    assert f"methods.{method.__name__}" in printed
    for field in fields(method):
        assert re.search(rf"^\W*{field.name}\b", printed, re.MULTILINE), field.name
    python = re.search(r"^ *Python: (.*)$", printed, re.MULTILINE)
    recipe = re.search(r"^ *Recipe: (.*)$", printed, re.MULTILINE)
    assert eval(python[1], {"methods": methods}) == method.example, "the Python example is code that runs"
    assert method_from_dict(yaml.safe_load(recipe[1])) == method.example, "the recipe example loads"


def test_a_method_is_explained_with_defaults_and_architectures():
    printed = " ".join(invoke("methods", "freeze").split())
    assert re.search(r"seed\W+int\W+0\b", printed)
    assert re.search(r"ffn\W+str\W+'trainable'", printed)
    assert "https://arxiv.org/abs/2010.11859" in printed
    assert "Works on: bert, gpt2, llama, marian" in printed
    assert "ones on the main diagonal" in printed
    assert re.search(r"rank\W+int\b.*required", invoke("methods", "factorized_embedding"))


def works_on(name):
    (line,) = [line for line in invoke("methods", name).splitlines() if line.startswith("Works on: ")]
    return line.removeprefix("Works on: ")


def test_a_method_is_explained_with_the_families_that_are_derived():
    four = "bert, gpt2, llama, marian"
    assert works_on("freeze").startswith(f"{four}, and any other family that is understood (`hf-freeze describe TYPE`")
    assert works_on("head_pruning").startswith(f"{four}, and any other family where heads can be exchanged")
    assert works_on("delight").startswith("gpt2, marian; on no other family, because it puts in blocks of its own")
    assert works_on("define").startswith(f"{four}; on no other family")
    assert "phi3, qwen2, qwen3, smollm3; on no other family, because it was proved on" in works_on("recurrent_decoder")
    rows = re.split(r"^│ (?=\w)", invoke("methods"), flags=re.MULTILINE)  # a row may be wrapped
    listed = {row.split()[0]: "derived" in row for row in rows}
    assert listed["freeze"]
    assert not listed["define"]


@pytest.mark.parametrize("name", ["low_rank", "LowRank", "low-rank", "methods.LowRank"])
def test_a_method_has_the_names_that_users_know(name):
    assert "methods.LowRank" in invoke("methods", name)


def test_an_unknown_method_is_one_line():
    result = CliRunner().invoke(app, ["methods", "lowrnk"])
    assert result.exit_code == 2
    assert "Error: unknown method 'lowrnk'; did you mean 'low_rank'? Choose from ['adaptive_embedding'" in result.stderr
    result = CliRunner().invoke(app, ["methods", "freeze", "--markdown"])
    assert result.exit_code == 2
    assert "--markdown lists all methods: leave 'freeze' out" in result.stderr


def test_an_error_of_the_system_is_a_line_in_words(tmp_path, capsys):
    with pytest.raises(typer.Exit), one_line_errors():
        (tmp_path / "missing.txt").read_text()
    printed = " ".join(capsys.readouterr().err.split())
    assert printed == f"Error: {tmp_path / 'missing.txt'}: no such file or directory"


# -- lists and help -------------------------------------------------------------------------------------------------------------


def test_methods_and_architectures_are_listed():
    listed, table = cli("methods").output, cli("methods", "--markdown").output
    for name, method in METHODS.items():
        assert name in listed
        assert f"`methods.{method.__name__}`" in table
    listed = cli("architectures").output
    for name, architecture in ARCHITECTURES.items():
        assert name in listed
        assert name in table
        assert all(task in listed for task in architecture.tasks)


@pytest.mark.parametrize("command", [command.name or command.callback.__name__ for command in app.registered_commands])
def test_every_help_has_an_example(command):
    assert f"Example: hf-freeze {command}" in plain(cli(command, "--help").output)
