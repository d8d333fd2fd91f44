"""The parts of a model as plain data: what `hf-freeze describe` shows of a model, and of a model type from a file."""

from collections import Counter
from typing import Any

from torch import nn

from hf_freeze.architectures.base import (
    Architecture,
    Attention,
    Stack,
    base_name,
    canonical_parameters,
    full_name,
    read,
)
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import EXPERT_OUTPUT, features
from hf_freeze.methods.registry import METHODS


def description_of(model: Any) -> dict[str, Any]:
    """Plain data of a native model without a head, or of a variant; `model` may be on `meta`.

    "stacks": name -> rows of (part, modules, sizes). "parameters": component -> how many, without the head of a task.
    "refused": method -> why it does not work. "advice": method -> the settings that this model needs. "names": how settings name
    its layers, attentions and FFNs.
    """
    architecture, config = architecture_for(model), model.config
    refused = {name: method.refusal(architecture) for name, method in METHODS.items()}
    advice = {name: method.advice(architecture, config) for name, method in METHODS.items() if not refused[name]}
    return {
        "model_type": architecture.model_type,
        "tasks": list(architecture.tasks),
        "stacks": {
            name: _rows(model, stack, architecture.depths(config)[name]) for name, stack in architecture.stacks.items()
        },
        "parameters": _components(model, architecture),
        "refused": {name: reason for name, reason in refused.items() if reason},
        "advice": {name: advised for name, advised in advice.items() if advised},
        "names": _names(config, architecture),
    }


def _rows(model: Any, stack: Stack, depth: int) -> list[list[str]]:
    """One row for each kind of attention and each FFN; modules are named below the layer."""
    config = model.config
    rows = [["layers", stack.layers, f"{depth} ({stack.depth})"]]
    for kind, attention in stack.attentions_in(config).items():
        sizes = _heads(model, stack, kind, attention, depth)
        rows.append([f"{kind} attention{_some(stack, kind, depth)}", "\n".join(attention.linears), sizes])
    for linear in stack.projections:
        rows.append([f"attention{_some(stack, linear, depth)}", linear, ""])
    for linears in dict.fromkeys(tuple(ffn) for number in range(depth) for ffn in stack.ffns_in(number)):
        sizes = _neurons(model, stack, linears[-1], depth)
        rows.append([f"FFN{_some(stack, linears[-1], depth)}", "\n".join(linears), sizes])
    for module in stack.experts:
        sizes = _neurons_of_experts(model, stack, module, depth)
        rows.append([f"experts{_some(stack, module, depth)}", module, sizes])
    return rows


def _some(stack: Stack, part: str, depth: int) -> str:
    """In how many of the layers the part is, if not in all."""
    count = sum(stack.has(part, number) for number in range(depth))
    return "" if count == depth else f", {count} of {depth} layers"


def _in_layers(model: Any, stack: Stack, part: str, name: str, depth: int) -> list[Any]:
    """The module `name` of each layer that has `part`; None where a method has removed it."""
    names = (f"{stack.layers.format(number)}.{name}" for number in range(depth) if stack.has(part, number))
    modules = dict(model.base_model.named_modules(remove_duplicate=False))
    return [modules.get(name) for name in names]


def _counts(numbers: list[int]) -> str:
    """Such as 3072, or 16 to 32 if layers differ."""
    return str(numbers[0]) if len(set(numbers)) == 1 else f"{min(numbers)} to {max(numbers)}"


def _inputs(linear: nn.Module) -> int:
    """The inputs of a linear; none if all heads before it were removed."""
    return features(linear)[0] if hasattr(linear, "in_features") or hasattr(linear, "nx") else 0


def _heads(model: Any, stack: Stack, kind: str, attention: Attention, depth: int) -> str:
    size = attention.head_size(model.config)
    linears = _in_layers(model, stack, kind, attention.o, depth)
    heads = [_inputs(linear) // size for linear in linears]
    group = attention.group_size(model.config)
    shared = "" if group == 1 else f", {_counts([count // group for count in heads])} for keys and values"
    return f"{_counts(heads)} heads of {size}{shared}"


def _neurons(model: Any, stack: Stack, last: str, depth: int) -> str:
    if stack.width is None and last not in stack.neurons:
        return ""
    counts = _counts([_inputs(linear) for linear in _in_layers(model, stack, last, last, depth)])
    return f"{counts} neurons{_field(model, stack.width, counts)}"


def _neurons_of_experts(model: Any, stack: Stack, module: str, depth: int) -> str:
    layers = _in_layers(model, stack, module, module, depth)
    counts = _counts([getattr(experts, EXPERT_OUTPUT).shape[-1] for experts in layers])
    return f"{counts} neurons each{_field(model, stack.expert_width, counts)}"


def _field(model: Any, field: str | None, counts: str) -> str:
    """The config field that holds the number of neurons, with its value if a method has left fewer."""
    if field is None:
        return ""
    native = read(model.config, field)
    return f" ({field})" if str(native) == counts or native is None else f", of {native} ({field})"


def _components(model: Any, architecture: Architecture) -> dict[str, int]:
    """Parameters of the model without a head, by component."""
    counts: Counter[str] = Counter()
    for name, parameter in canonical_parameters(model):
        if name.startswith(full_name(model, "")):
            counts[architecture.component(base_name(model, name))] += parameter.numel()
    return dict(counts)


def _names(config: Any, architecture: Architecture) -> str:
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
