"""`hf-freeze describe`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
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
    from transformers.utils import logging

    from hf_freeze.architectures.registry import architecture_of
    from hf_freeze.model.loading import config_of_type_or_model

    logging.set_verbosity_error()
    config = config_of_type_or_model(name)
    architecture = architecture_of(config)
    console = terminal.console
    console.print(_stacks(config, architecture))
    console.print(_components(config, architecture))
    console.print(_methods(config, architecture))
    terminal.say(f"Tasks: {', '.join(architecture.tasks)}")


def _stacks(config: Any, architecture: Any) -> Table:
    """Each stack, with one row for each kind of attention and each FFN; modules are named below the layer."""
    from hf_freeze.architectures.base import read

    table = Table("stack", "part", "modules", "sizes", title=f"{architecture.model_type}: what is understood")
    for name, stack in architecture.stacks.items():
        depth = architecture.depths(config)[name]
        table.add_row(name, "layers", stack.layers, f"{depth} ({stack.depth})")
        for kind, attention in stack.attentions_in(config).items():
            layers = _some(stack, kind, depth)
            table.add_row("", f"{kind} attention{layers}", "\n".join(attention.linears), _heads(attention, config))
        for linear in stack.projections:
            table.add_row("", f"attention{_some(stack, linear, depth)}", linear, "")
        for linears in dict.fromkeys(tuple(ffn) for number in range(depth) for ffn in stack.ffns_in(number)):
            width = "" if stack.width is None else f"{read(config, stack.width)} neurons ({stack.width})"
            table.add_row("", f"FFN{_some(stack, linears[-1], depth)}", "\n".join(linears), width)
        for module, neurons in stack.experts.items():
            field = "" if stack.expert_width is None else f" ({stack.expert_width})"
            table.add_row("", f"experts{_some(stack, module, depth)}", module, f"{neurons} neurons each{field}")
        table.add_section()
    return table


def _some(stack: Any, part: str, depth: int) -> str:
    """In how many of the layers the part is, if not in all."""
    count = sum(stack.has(part, number) for number in range(depth))
    return "" if count == depth else f", {count} of {depth} layers"


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


def _methods(config: Any, architecture: Any) -> Table:
    """Which methods work. A method may be proved and fail all the same: the tests of all families know of it."""
    from hf_freeze.architectures.families import CAPABILITIES, known_failures
    from hf_freeze.methods.registry import METHODS

    failures = known_failures(architecture.model_type)
    table = Table("method", "works", "because")
    for name, method in METHODS.items():
        failure = failures.get(name, failures.get(""))
        if (reason := method.refusal(architecture)) is not None:
            table.add_row(name, "no", escape(reason))
        elif failure is not None:
            table.add_row(name, "fails", escape(f"known to fail on a small model: {failure} (docs/families.md)"))
        else:
            proofs = [CAPABILITIES[need] for need in sorted(method.needs) if need in CAPABILITIES]
            proofs += [advice] if (advice := method.advice(architecture, config)) else []
            table.add_row(name, "yes", escape("; ".join(proofs)))
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
