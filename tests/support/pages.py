"""The code blocks of the pages, and what each of them is held to.

Python runs, YAML loads as a recipe, and every command of a shell block is checked word by word; the cheap ones run.
"""

import io
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
import yaml

from hf_freeze.cli import app
from hf_freeze.lab.recipes.load import load_recipe
from hf_freeze.publish.cards import read_trained_model
from hf_freeze.publish.hub import assemble
from support import ROOT
from support.processes import new_process, printed_by
from support.recipes import cli

_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]+")  # MODEL, DIRECTORY: the reader puts in a name
_RUN_FOR_REAL = {
    "inspect",
    "diff",
    "card",
    "trim",
    "export",
    "score",
    "methods",
    "architectures",
    "--version",
}  # seconds at most


@dataclass(frozen=True)
class Block:
    """A code block, with what follows it up to the next one."""

    page: Path
    line: int  # of its first line of code, from 1
    language: str
    code: str
    text_after: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Every fenced block. An unclosed one, or one without a language, fails."""
    text = page.read_text(encoding="utf-8") if text is None else text
    pieces = re.split(r"^```(.*)\n", text + "\n", flags=re.MULTILINE)
    assert len(pieces) % 4 == 1, f"{page}: a block is not closed"
    blocks, line = [], 1
    for start in range(0, len(pieces) - 1, 4):
        before, language, code, closing, after = pieces[start : start + 5]
        assert language, f"{page}: a block names no language"
        assert not closing, f"{page}: {closing!r} after the end of a block"
        line += before.count("\n") + 1
        blocks.append(Block(page, line, language, code, after))
        line += code.count("\n") + 1
    return blocks


def is_worked_example(block: Block) -> bool:
    """Whether the block is a file for a registry, which would stay in it if the block ran with the page."""
    return re.search(r"^(@|\w+ = )register_", block.code, re.MULTILINE) is not None


def check_page(blocks: list[Block], folder: Path) -> None:
    """Check all blocks of a page in their order, in `folder`, which is the working directory. One namespace for its Python."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.language == "python":
            _run_python(block, namespace)
        elif block.language == "bash":
            _check_shell(block, folder)
        elif block.language == "yaml":
            _load_yaml(block, folder)
        elif block.language == "javascript":
            _check_javascript(block)
        else:
            raise AssertionError(f"{block.place}: no check for {block.language!r}")


def walk(blocks: list[Block], folder: Path, less: dict[str, str]) -> list[str]:
    """Run a tour in `folder`, the working directory, as a reader does: every block in its order, every command. What its commands
    print.

    `less`: what the blocks say -> what is run instead of it, so that a test takes seconds. Nothing is sent to a Hub: a push
    writes what it would publish to the folder of that name.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in blocks:
        code = block.code
        for said, run in less.items():
            code = code.replace(said, run)
        if block.language == "python":
            _run_python(replace(block, code=code), namespace)
            continue
        _check_shell(block, folder, run=False)  # as it stands: every option and name
        printed += [_run(words, folder) for line in code.splitlines() for words in _commands(line)]
    return printed


def _run(words: list[str], folder: Path) -> str:
    program, *arguments = [
        match for word in words for match in (sorted(map(str, folder.glob(word))) if "*" in word else [word])
    ]
    if [program, arguments[0]] == ["python", "-c"]:
        return printed_by(arguments[1], folder=folder)
    if [program, arguments[0]] == ["hf-freeze", "push"]:
        assemble(read_trained_model(folder / arguments[1]), folder / arguments[2], arguments[2])
    elif program == "hf-freeze":
        return cli(*arguments).output
    return ""


# -- Python ------------------------------------------------------------------------------------------------------------------


def _run_python(block: Block, namespace: dict[str, Any]) -> None:
    # Empty lines before it: a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, namespace)
    if promised := re.match(r"\s*This prints `(.+?)`", block.text_after):
        assert printed.getvalue().strip() == promised[1], block.place


# -- commands ----------------------------------------------------------------------------------------------------------------


def _check_shell(block: Block, folder: Path, run: bool = True) -> None:
    joined = block.code.replace("\\\n", " ")
    for line in joined.splitlines():
        for words in _commands(line):
            try:
                _check_command(words, folder, run)
            except Exception as error:
                raise AssertionError(f"{block.place}: {shlex.join(words)}: {error!r}") from error


def _check_javascript(block: Block) -> None:
    """Check its syntax, where Node.js is installed."""
    if node := shutil.which("node"):
        command = [node, "--input-type=module", "--check", "-"]
        done = subprocess.run(command, input=block.code, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


def _commands(line: str) -> list[list[str]]:
    """The commands of a line of shell, without comments, redirections and variables set for them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in (">", "<"):
            next(words)
        elif set(word) <= set(";&|"):
            commands.append([])
        elif commands[-1] or not re.match(r"\w+=", word):
            commands[-1].append(word)
    return [command for command in commands if command]


def _check_command(words: list[str], folder: Path, run: bool) -> None:
    program, *arguments = words
    assert program in _PROGRAMS, f"choose from {sorted(_PROGRAMS)}, or say here how to check {program!r}"
    if program == "hf-freeze" and not run:
        _check_ours(arguments, folder, run=False)
        return
    _PROGRAMS[program](arguments, folder)


def _check_ours(arguments: list[str], folder: Path, run: bool = True) -> None:
    name = arguments[0]
    if not name.startswith("--"):
        commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
        context = commands[name].make_context(name, arguments[1:])  # parses; runs nothing
        if name in ("run", "search"):
            _load_recipe_of_command(context.params)
    if "--harness" in arguments and find_spec("lm_eval") is None:
        return
    if run and name in _RUN_FOR_REAL and not any(map(_PLACEHOLDER.fullmatch, arguments)):
        cli(*arguments)


def _load_recipe_of_command(options: dict[str, Any]) -> None:
    if not _PLACEHOLDER.fullmatch(str(options["recipe"])):
        load_recipe(options["recipe"], options["settings"], smoke=options["smoke"])


def _check_launcher(arguments: list[str], folder: Path) -> None:
    """accelerate, torchrun: the files exist, and what follows `-m hf_freeze` is a command of ours."""
    if "hf_freeze" in arguments:
        _check_ours(arguments[arguments.index("hf_freeze") + 1 :], folder)
    for word in arguments:
        assert not word.endswith((".py", ".yaml")) or (folder / word).exists(), f"{word} does not exist"


def _check_python(arguments: list[str], folder: Path) -> None:
    script, *options = arguments
    if script == "-c":
        compile(options[0], "-c", "exec")
        return
    source = (folder / script).read_text(encoding="utf-8")
    for option in options:
        assert not option.startswith("-") or f'"{option}"' in source, f"{script} takes no {option}"


def _check_pip(arguments: list[str], folder: Path) -> None:
    assert arguments[0] == "install"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    options = iter(arguments[1:])
    for word in options:
        if word == "-c":
            assert (ROOT / (name := next(options))).exists(), f"{name} does not exist"
        elif word == "-e":
            path, _, extra = next(options).rstrip("]").partition("[")
            assert path == ".", path
            for name in filter(None, extra.split(",")):
                assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"no extra {name!r}"
        elif word == "--index-url":
            next(options)
        elif word == "--no-deps" or re.search(rf'^serve = \[.*"{re.escape(word)}>=', project, re.MULTILINE):
            continue  # what is installed without the rest
        else:
            assert word in constraints, f"{word} is not what constraints.txt pins"


def _check_lm_eval(arguments: list[str], folder: Path) -> None:
    """It runs where it is installed."""
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    known = {"--model", "--model_args", "--tasks", "--include_path", "--device"}
    assert arguments[0] == "run", arguments[0]
    assert options.keys() <= known, f"choose from {sorted(known)}"
    model = dict(word.split("=") for word in options["--model_args"].split(","))["pretrained"]
    assert (folder / model).is_dir(), f"{model} does not exist"
    assert (folder / options["--include_path"] / f"{options['--tasks']}.yaml").exists(), options["--tasks"]
    if find_spec("lm_eval") is not None:
        done = new_process("", *arguments, module="lm_eval", folder=folder)
        assert done.returncode == 0, done.stderr[-3000:]


def _check_make(arguments: list[str], folder: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in arguments:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target!r}"


def _check_export(arguments: list[str], folder: Path) -> None:
    assert all(re.fullmatch(r"\w+=.*", word) for word in arguments)


_PROGRAMS: dict[str, Callable[[list[str], Path], None]] = {
    "hf-freeze": _check_ours,
    "accelerate": _check_launcher,
    "torchrun": _check_launcher,
    "python": _check_python,
    "pip": _check_pip,
    "make": _check_make,
    "lm_eval": _check_lm_eval,
    "export": _check_export,
}


# -- recipes -----------------------------------------------------------------------------------------------------------------


def _load_yaml(block: Block, folder: Path) -> None:
    """A recipe, or a part of one, which then extends the recipe beside the page."""
    recipe = yaml.safe_load(block.code)
    recipe["extends"] = str(block.page.parent / recipe.get("extends", "recipe.yaml"))
    written = folder / "block.yaml"
    written.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    try:
        load_recipe(written)
    except Exception as error:
        raise AssertionError(f"{block.place}: {error!r}") from error
