"""`hf-freeze describe`."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_freeze import terminal
from hf_freeze.cli import facts
from hf_freeze.cli import options as shared

KNOWN = Path(__file__).with_name("known_types.json")  # written by `make families`
FAILURES = (
    Path(__file__).parents[1] / "architectures" / "known_failures.json"
)  # of architectures.families, without its imports


def describe(
    model: Annotated[
        str | None, typer.Argument(help="A model type such as roberta, or a directory or Hub id of a model.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Derive and prove every family, and write families.md and families.json.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder that --all writes to.")] = Path("docs"),
    texts: shared.CalibrationTexts = None,
    column: shared.Column = "text",
    samples: shared.Samples = 512,
) -> None:
    """Show the parts of a model: its stacks, heads and FFNs, what was proved of them, and which methods work on it.

    With texts and a model with weights, also how much of its output each part would lose by each cut.

    Example: hf-freeze describe roberta

    Example: hf-freeze describe MODEL --texts passages.txt

    Example: hf-freeze describe --all --out /tmp
    """
    with terminal.one_line_errors():
        if (model is None) != every:
            raise ValueError("give a model type or a model, or --all")
        if texts and (every or (not Path(str(model)).exists() and "/" not in str(model))):
            raise ValueError("--texts needs a folder or Hub id of a model with weights")
        if model is None:
            _describe_all(out)
        else:
            _describe_one(model)
            if texts:
                _describe_cuts(model, shared.sampled_texts(texts, column, samples))


def _describe_one(name: str) -> None:
    parts = _known(name) or derived(name)
    model_type = parts["model_type"]
    rows, sections = [], []
    for stack, described in parts["stacks"].items():
        rows += [(stack if number == 0 else "", *row) for number, row in enumerate(described)]
        sections.append(len(rows) - 1)
    headings = ("stack", "part", "modules", "sizes")
    terminal.show_table(headings, rows, title=f"{model_type}: parts found", sections=sections)
    counts = [(component, f"{count:,}") for component, count in parts["parameters"].items()]
    title = "Parameters, without the head of a task"
    terminal.show_table(("component", "parameters"), counts, title=title, numbers=["parameters"])
    terminal.show_table(("method", "works", "because"), _methods(parts))
    terminal.say(f"Tasks: {', '.join(parts['tasks'])}")
    if "methods" in parts:
        terminal.say(f"Methods of this variant: {', '.join(parts['methods']) or 'none'}")
    if parts["names"]:
        terminal.say(f"Names in settings, for example: {parts['names']}")


def _describe_cuts(name: str, texts: list[str]) -> None:
    from hf_freeze.analysis import calibrate, cut_losses
    from hf_freeze.model.loading import load_model

    model = load_model(name)
    losses = cut_losses(model, calibrate(model, texts, shared.tokenizer_for_texts(name)))
    headings, rows = losses.table()
    title = (
        f"What each part would lose of its output, untrained: on {losses.texts:,} texts with {losses.tokens:,} tokens"
    )
    terminal.show_table(headings, rows, title=title, numbers=headings[1:])


def _known(name: str) -> dict[str, Any] | None:
    """What was derived of a model type with the installed version of transformers, without importing it."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    is_same = known["transformers"] == version("transformers")
    return known["types"].get(name) if is_same and not Path(name).exists() else None


def derived(name: str) -> dict[str, Any]:
    """What `describe` shows of a model type or a model, without a file."""
    from transformers.utils import logging

    from hf_freeze.analysis.description import description_of
    from hf_freeze.architectures.derive import base_model
    from hf_freeze.architectures.registry import architecture_of
    from hf_freeze.model.loading import config_of_type_or_model, empty_model

    logging.set_verbosity_error()
    config = config_of_type_or_model(name)
    architecture_of(config)  # tells why, if nothing is understood
    if not hasattr(config, "native_architecture"):
        return description_of(base_model(config))
    variant = empty_model(name)
    return description_of(variant) | {"methods": [method.name for method in variant.methods]}


def _methods(parts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Which methods work. A method may be proved and fail all the same: the tests of all families know of it."""
    failures = json.loads(FAILURES.read_text(encoding="utf-8")).get(parts["model_type"], {})
    rows = []
    for name, method in facts.read()["methods"].items():
        failure = failures.get(name, failures.get(""))
        if name in parts["refused"]:
            rows.append((name, "no", parts["refused"][name]))
        elif failure is not None:
            rows.append((name, "fails", f"known to fail on a small model: {failure} (docs/families.md)"))
        else:
            advice = parts["advice"].get(name)
            rows.append((name, "yes", "; ".join([*method["needs"], *([advice] if advice else [])])))
    return rows


def _describe_all(folder: Path) -> None:
    from rich.progress import track
    from transformers.utils import logging

    from hf_freeze.architectures.families import describe_family, families_page, model_types
    from hf_freeze.io import write_whole

    logging.set_verbosity_error()
    folder.mkdir(parents=True, exist_ok=True)
    names = track(model_types(), description="Families", console=terminal.console)
    families = {name: describe_family(name) for name in names}
    write_whole(folder / "families.json", json.dumps(families, indent=1) + "\n")
    write_whole(folder / "families.md", families_page(families))
    terminal.say(f"Wrote {folder / 'families.md'} and {folder / 'families.json'}.")
