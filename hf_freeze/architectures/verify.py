"""Proofs: what was derived is used only where a small model shows that it is right.

Each proof is an exact identity of the maths that a wrong role or a wrong layout would break, on a model full of noise. It also
checks that half of the change does alter the outputs: otherwise the proof would show nothing.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.architectures.base import Architecture, Stack
from hf_freeze.architectures.exchange import (
    LONGEST,
    OTHER,
    SAME,
    layers_in,
    prove_heads,
    prove_neurons,
    prove_neurons_of_experts,
)
from hf_freeze.architectures.fields import change, multiples_of
from hf_freeze.architectures.probe import Probe, difference
from hf_freeze.architectures.roles import has_module, is_norm, table_scale, weight_as_rows


def verify(architecture: Architecture, probe: Probe) -> Architecture:
    """The description with layouts filled in, and in `refusals`, for each capability that could not be proved, the reason."""
    refusals: dict[str, str] = {}
    stacks = {}
    for name, stack in architecture.stacks.items():
        attentions = {}
        for kind, attention in stack.attentions_in(probe.config).items():
            proved, reason = prove_heads(probe, stack, kind, attention)
            attentions[kind] = proved
            if reason is not None:
                refusals.setdefault("heads", f"{name} {kind}: {reason}")
        stacks[name] = replace(stack, attentions=stack.attentions | attentions)
        if stack.projections or not attentions:
            what = f"{stack.projections[0]!r} is no" if stack.projections else "it has no"
            refusals.setdefault("heads", f"{name}: {what} projection of plain queries, keys and values")
        reason = prove_neurons(probe, stack) if stack.ffn or not stack.experts else None
        if stack.experts and (of_experts := prove_neurons_of_experts(probe, stack)) is not None:
            stacks[name] = replace(stacks[name], experts={})
            reason = reason if stack.ffn else of_experts
        if reason is not None:
            refusals.setdefault("neurons", f"{name}: {reason}")
        own = _only_in_first(probe, stack)
        unread = own if own and _unread(probe, stack, own) else ()
        returns_tuple = _returns_tuple(probe, stack)
        stacks[name] = replace(stacks[name], returns_tuple=returns_tuple, leads=bool(own), unread=unread)
    if (reason := _calls(probe, architecture)) is not None:
        refusals["linears"] = reason
    if (reason := _vocabulary(probe, architecture)) is not None:
        refusals["vocabulary"] = reason
    return replace(architecture, stacks=stacks, refusals=refusals)


def sees_the_future(probe: Probe) -> bool:
    """Whether the outputs of earlier tokens depend on the last one."""
    ids = probe.inputs.get("input_ids")
    if ids is None or "decoder_input_ids" in probe.inputs:
        return True
    other = ids.clone()
    other[:, -1] = 12
    outputs = probe.run(input_ids=other)
    if outputs.ndim < 3 or outputs.shape != probe.outputs.shape:
        return True
    return difference(outputs[:, :-1], probe.outputs[:, :-1]) > OTHER  # products of experts round by their neighbours


# -- layers as they are called --------------------------------------------------------------------------------------------------


def _returns_tuple(probe: Probe, stack: Stack) -> bool:
    shown: list[bool] = []
    probe.watch({"": layers_in(probe, stack)[0]}, lambda _, __, output: shown.append(isinstance(output, tuple | list)))
    return any(shown)


def _only_in_first(probe: Probe, stack: Stack) -> tuple[str, ...]:
    """The parameters of the first layer that no other layer has, such as T5's table of relative positions."""
    first, *others = (set(dict(layer.named_parameters())) for layer in layers_in(probe, stack))
    return tuple(sorted(first - set[str]().union(*others))) if others else ()


def _unread(probe: Probe, stack: Stack, own: Sequence[str]) -> bool:
    """Whether a copy of the first layer, instead of the second, computes the same whatever its parameters `own` are."""
    layers: Any = probe.model.get_submodule(stack.layers.removesuffix(".{}"))
    second, copied = layers[1], copy.deepcopy(layers[0])
    for name, module in copied.named_modules():
        if has_module(second, name) and "layer_idx" in vars(second.get_submodule(name)):
            module.layer_idx = second.get_submodule(name).layer_idx  # its place in the cache
    layers[1] = copied
    try:
        before = probe.run()
        with torch.no_grad():
            for parameter in map(copied.get_parameter, own):  # no constant: softmax would not see it
                parameter.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        return difference(probe.run(), before) < SAME
    except Exception:  # whatever the native forward raises for a layer in another place
        return False
    finally:
        layers[1] = second


# -- linears, tables -----------------------------------------------------------------------------------------------------------


def _calls(probe: Probe, architecture: Architecture) -> str | None:
    """Every linear is called as a module and computes x Wᵀ + b, so that another module can take its place."""
    names = [
        f"{stack.layers.format(number)}.{name}"
        for stack in architecture.stacks.values()
        for number in range(len(layers_in(probe, stack)))
        for name in [*stack.ffn, *stack.projections, *(n for a in stack.attentions.values() for n in a.linears)]
    ]
    called: set[str] = set()
    other: set[str] = set()

    def check(name: str, inputs: Any, outputs: Any) -> None:
        called.add(name)
        linear = probe.model.get_submodule(name)
        try:
            expected = functional.linear(inputs[0], weight_as_rows(linear), linear.bias)
            same = torch.is_tensor(outputs) and torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5)
        except RuntimeError:  # a subclass of nn.Linear whose matrix has another shape, as in DeepSeek-V4
            same = False
        if not same:
            other.add(name)

    present = [name for name in dict.fromkeys(names) if has_module(probe.model, name)]
    probe.watch({name: probe.model.get_submodule(name) for name in present}, check)
    if other:
        return f"{min(other)!r} computes something else than x Wᵀ + b"
    missing = [name for name in present if name not in called]
    return f"{missing[0]!r} is not called as a module" if missing else None


def _vocabulary(probe: Probe, architecture: Architecture) -> str | None:
    """Permuting the rows of the token tables and the ids alike changes nothing."""
    ids = probe.inputs.get("input_ids")
    if not architecture.token_tables or ids is None:
        return "it has no table of tokens"
    names = [name for name in architecture.token_tables if has_module(probe.model, name)]
    tables = {id(m): m for name in names for m in [probe.model.get_submodule(name)]}
    rows = {table.num_embeddings for table in tables.values()}
    if len(rows) > 1:
        return f"its tables of tokens have {sorted(rows)} rows"
    for table in tables.values():
        looked_up = table(ids).detach()
        if looked_up.shape[-1] != table.embedding_dim or not torch.allclose(
            looked_up, table.weight.detach()[ids] * table_scale(table), atol=1e-6
        ):
            return f"its {type(table).__name__} does more than look up rows and scale them"
    special = 3
    order = torch.arange(max(rows))
    order[special:] = order[special:].flip(0)
    inputs = {name: order[probe.inputs[name]] for name in ("input_ids", "decoder_input_ids") if name in probe.inputs}
    with probe.changed():
        for weight in {table.weight.data_ptr(): table.weight for table in tables.values()}.values():
            weight.copy_(weight[order].clone())
        half, whole = probe.differs(), probe.differs(**inputs)
    if half < OTHER:
        return "the rows of its table do not matter for the outputs"
    return None if whole < SAME else "renumbering its tokens changes the outputs"


# -- layers --------------------------------------------------------------------------------------------------------------------


def verify_layers(architecture: Architecture, probe: Probe) -> Architecture:
    """The description, with the reason in `refusals` if layers cannot be removed."""
    refusals, stacks = dict(architecture.refusals), dict(architecture.stacks)
    for name, stack in architecture.stacks.items():
        reason = _layer_removed(probe, stack) if stack.depth else None
        if reason is not None and (scaled := multiples_of(probe.config, stack.depth)):
            stack = replace(stack, scaled=scaled)
            if (reason := _layer_removed(probe, stack)) is None:
                stacks[name] = stack
        if reason is not None:
            refusals.setdefault("layers", f"{name}: {reason}")
    return replace(architecture, stacks=stacks, refusals=refusals)


def _layer_removed(probe: Probe, stack: Stack) -> str | None:
    """The last layer, made an identity, can be removed: the native model that is one layer shallower computes the same."""
    depth = len(layers_in(probe, stack))
    numbers = list(range(depth - 1))
    try:
        shallow = Probe(change(probe.config, **stack.config_changes(probe.config, numbers)))
    except Exception as error:  # whatever the native class raises for this config
        return f"no native model with one layer less ({(str(error) or type(error).__name__).splitlines()[0][:LONGEST]})"
    last = layers_in(probe, stack)[-1]
    prefix = f"{stack.layers.format(depth - 1)}."
    with probe.changed():
        for module in last.modules():
            if not is_norm(module):
                for parameter in module.parameters(recurse=False):
                    parameter.zero_()
        changed = probe.differs()
        outputs = probe.run()
        state = {name: value for name, value in probe.model.state_dict().items() if not name.startswith(prefix)}
        try:
            missing = shallow.model.load_state_dict(state, strict=False)
        except RuntimeError:
            return "a shallower native model has tensors of other shapes"
        if missing.missing_keys or missing.unexpected_keys:
            return (
                f"a shallower native model has other tensors: {[*missing.missing_keys, *missing.unexpected_keys][0]!r}"
            )
        shallower = shallow.run()
    if changed < OTHER:
        return "its last layer does not matter for the outputs"
    if difference(shallower, outputs) > 10 * SAME:
        return "removing a layer that does nothing changes the outputs"
    return None
