"""`hf-freeze describe`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_freeze.cli import terminal


def describe(
    model: Annotated[
        str | None, typer.Argument(help="A model type such as roberta, or a directory or Hub id of a model.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Derive and prove every family, and write families.md and families.json.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder that --all writes to.")] = Path("docs"),
) -> None:
    """Show what is understood of a model: its stacks, heads and FFNs, what was proved of them, and which methods work on it.

    Example: hf-freeze describe roberta

    Example: hf-freeze describe --all --out /tmp
    """
    with terminal.one_line_errors():
        if (model is None) != every:
            raise ValueError("give a model type or a model, or --all")
        if model is None:
            _describe_all(out)
        else:
            _describe_one(model)


def _describe_one(name: str) -> None:
    from hf_freeze.architectures.registry import architecture_of
    from hf_freeze.model.loading import config_of_type_or_model

    config = config_of_type_or_model(name)
    architecture = architecture_of(config)
    console = terminal.console
    stacks = Table(
        "stack", "layers", "attention", "heads", "FFN", "neurons", title=f"{architecture.model_type}: stacks"
    )
    for stack_name, stack in architecture.stacks.items():
        blocks = stack.attentions_in(config)
        first = next((i for i in range(architecture.depths(config).get(stack_name, 0)) if stack.ffns_in(i)), 0)
        stacks.add_row(
            stack_name,
            f"{architecture.depths(config).get(stack_name, '?')} × {stack.layers}",
            "\n".join(f"{kind}: {_linears(block)}" for kind, block in blocks.items())
            or ", ".join(stack.projections)
            or "–",
            "\n".join(_heads(block, config) for block in blocks.values()) or "–",
            "\n".join(", ".join(linears) for linears in stack.ffns_in(first)) or "–",
            "–" if stack.width is None else f"{stack.width}",
        )
    console.print(stacks)
    console.print(_components(config, architecture))
    console.print(_methods(architecture))
    terminal.say(f"Tasks: {', '.join(architecture.tasks)}")


def _linears(attention: Any) -> str:
    return ", ".join(attention.linears)


def _heads(attention: Any, config: Any) -> str:
    groups = attention.key_head_count(config)
    shared = "" if groups == attention.head_count(config) else f", {groups} for keys and values"
    return f"{attention.head_count(config)} of {attention.head_size(config)}{shared}"


def _components(config: Any, architecture: Any) -> Table:
    """Parameters of the model without a head, by component, counted on meta."""
    from collections import Counter

    from hf_freeze.architectures.base import canonical_parameters
    from hf_freeze.architectures.derive import base_model

    counts: Counter[str] = Counter()
    for name, parameter in canonical_parameters(base_model(config)):
        counts[architecture.component(name)] += parameter.numel()
    table = Table("component", "parameters", title="Parameters, without the head of a task")
    for component, count in counts.items():
        table.add_row(component, f"{count:,}")
    return table


def _methods(architecture: Any) -> Table:
    from hf_freeze.architectures.families import CAPABILITIES
    from hf_freeze.methods.registry import METHODS

    table = Table("method", "works", "because")
    for name, method in METHODS.items():
        reason = method.refusal(architecture)
        proofs = [CAPABILITIES[need] for need in sorted(method.needs) if need in CAPABILITIES]
        table.add_row(name, "yes" if reason is None else "no", "; ".join(proofs) if reason is None else reason)
    return table


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
