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
    """Show the parts of a model: its stacks, heads and FFNs, what was proved of them, and which methods work on it.

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

    from hf_freeze.architectures.derive import base_model
    from hf_freeze.architectures.registry import architecture_for, architecture_of
    from hf_freeze.model.loading import config_of_type_or_model, empty_model

    logging.set_verbosity_error()
    config = config_of_type_or_model(name)
    architecture_of(config)  # tells why, if nothing is understood
    is_variant = hasattr(config, "native_architecture")
    model = empty_model(name) if is_variant else base_model(config)
    architecture = architecture_for(model)
    console = terminal.console
    console.print(_stacks(model, architecture))
    console.print(_components(model, architecture))
    console.print(_methods(model.config, architecture))
    terminal.say(f"Tasks: {', '.join(architecture.tasks)}")
    if is_variant:
        terminal.say(f"Methods of this variant: {', '.join(method.name for method in model.methods) or 'none'}")
    if examples := _names(model.config, architecture):
        terminal.say(f"Names in settings, for example: {examples}")


def _stacks(model: Any, architecture: Any) -> Table:
    """Each stack, with one row for each kind of attention and each FFN; modules are named below the layer."""
    config = model.config
    table = Table("stack", "part", "modules", "sizes", title=f"{architecture.model_type}: parts found")
    for name, stack in architecture.stacks.items():
        depth = architecture.depths(config)[name]
        table.add_row(name, "layers", stack.layers, f"{depth} ({stack.depth})")
        for kind, attention in stack.attentions_in(config).items():
            layers = _some(stack, kind, depth)
            sizes = _heads(model, stack, kind, attention, depth)
            table.add_row("", f"{kind} attention{layers}", "\n".join(attention.linears), sizes)
        for linear in stack.projections:
            table.add_row("", f"attention{_some(stack, linear, depth)}", linear, "")
        for linears in dict.fromkeys(tuple(ffn) for number in range(depth) for ffn in stack.ffns_in(number)):
            sizes = _neurons(model, stack, linears[-1], depth)
            table.add_row("", f"FFN{_some(stack, linears[-1], depth)}", "\n".join(linears), sizes)
        for module in stack.experts:
            sizes = _neurons_of_experts(model, stack, module, depth)
            table.add_row("", f"experts{_some(stack, module, depth)}", module, sizes)
        table.add_section()
    return table


def _some(stack: Any, part: str, depth: int) -> str:
    """In how many of the layers the part is, if not in all."""
    count = sum(stack.has(part, number) for number in range(depth))
    return "" if count == depth else f", {count} of {depth} layers"


def _in_layers(model: Any, stack: Any, part: str, name: str, depth: int) -> list[Any]:
    """The module `name` of each layer that has `part`; None where a method has removed it."""
    names = (f"{stack.layers.format(number)}.{name}" for number in range(depth) if stack.has(part, number))
    modules = dict(model.base_model.named_modules(remove_duplicate=False))
    return [modules.get(name) for name in names]


def _counts(numbers: list[int]) -> str:
    """Such as 3072, or 16 to 32 if layers differ."""
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"


def _inputs(linear: Any) -> int:
    """The inputs of a linear; none if all heads before it were removed."""
    from hf_freeze.architectures.roles import features

    return features(linear)[0] if hasattr(linear, "in_features") or hasattr(linear, "nx") else 0


def _heads(model: Any, stack: Any, kind: str, attention: Any, depth: int) -> str:
    size = attention.head_size(model.config)
    linears = _in_layers(model, stack, kind, attention.o, depth)
    heads = [_inputs(linear) // size for linear in linears]
    group = attention.group_size(model.config)
    shared = "" if group == 1 else f", {_counts([count // group for count in heads])} for keys and values"
    return f"{_counts(heads)} heads of {size}{shared}"


def _neurons(model: Any, stack: Any, last: str, depth: int) -> str:
    if stack.width is None and last not in stack.neurons:
        return ""
    counts = _counts([_inputs(linear) for linear in _in_layers(model, stack, last, last, depth)])
    return f"{counts} neurons{_field(model, stack.width, counts)}"


def _neurons_of_experts(model: Any, stack: Any, module: str, depth: int) -> str:
    from hf_freeze.architectures.roles import EXPERT_OUTPUT

    layers = _in_layers(model, stack, module, module, depth)
    counts = _counts([experts.get_parameter(EXPERT_OUTPUT).shape[2] for experts in layers])
    return f"{counts} neurons each{_field(model, stack.expert_width, counts)}"


def _field(model: Any, field: str | None, counts: str) -> str:
    """The config field that holds the number of neurons, with its value if a method has left fewer."""
    from hf_freeze.architectures.base import read

    if field is None:
        return ""
    native = read(model.config, field)
    return f" ({field})" if str(native) == counts or native is None else f", of {native} ({field})"


def _components(model: Any, architecture: Any) -> Table:
    """Parameters of the model without a head, by component, counted on meta."""
    from collections import Counter

    from hf_freeze.architectures.base import base_name, canonical_parameters, full_name

    counts: Counter[str] = Counter()
    for name, parameter in canonical_parameters(model):
        if name.startswith(full_name(model, "")):
            counts[architecture.component(base_name(model, name))] += parameter.numel()
    table = Table("component", "parameters", title="Parameters, without the head of a task")
    for component, count in counts.items():
        table.add_row(component, f"{count:,}")
    return table


def _names(config: Any, architecture: Any) -> str:
    """How settings name layers, attentions and FFNs of this model."""
    stack = next(iter(architecture.stacks))
    examples = [f"layers={{{stack!r}: [0]}}"]
    if "heads" not in architecture.refusals and (attentions := architecture.attentions(config)):
        name, attention = next(iter(attentions.items()))
        heads = list(range(attention.removed_together(config)))  # those that share keys and values go together
        examples.append(f"HeadPruning(heads={{{name!r}: {heads}}})")
    if "neurons" not in architecture.refusals:
        examples += [f"FFNPruning(keep={{{name!r}: [0, 1]}})" for name in list(architecture.ffns(config))[:1]]
        examples += [
            f"FFNPruning(keep={{{name!r}: [[0, 1, ...], ...]}})" for name in list(architecture.experts(config))[:1]
        ]
    return ", ".join(examples)


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
