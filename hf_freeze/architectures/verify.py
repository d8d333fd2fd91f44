"""Proofs: what was derived is used only where a small model shows that it is right.

Each proof is an exact identity of the maths that a wrong role or a wrong layout would break, on a model full of noise. It also
checks that half of the change does alter the outputs: otherwise the proof would show nothing.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_freeze.architectures.base import Architecture, Attention, Stack
from hf_freeze.architectures.blocks import LAYOUTS
from hf_freeze.architectures.describe import first_line
from hf_freeze.architectures.fields import change, multiples_of
from hf_freeze.architectures.kept_heads import prune_companions
from hf_freeze.architectures.probe import Probe, difference
from hf_freeze.architectures.roles import (
    EXPERT_OUTPUT,
    HIDDEN_SIZES,
    expert_input,
    features,
    has_module,
    is_norm,
    set_heads,
    table_scale,
    weight_as_rows,
)

_SAME, _OTHER = 2e-4, 1e-4  # relative differences: an identity holds below the first, a change matters above the second
_LONGEST = 90  # characters of a native error in a reason


def verify(architecture: Architecture, probe: Probe) -> Architecture:
    """The description with layouts filled in, and in `refusals`, for each capability that could not be proved, the reason."""
    refusals: dict[str, str] = {}
    stacks = {}
    for name, stack in architecture.stacks.items():
        attentions = {}
        for kind, attention in stack.attentions_in(probe.config).items():
            proved, reason = _heads(probe, stack, kind, attention)
            attentions[kind] = proved
            if reason is not None:
                refusals.setdefault("heads", f"{name} {kind}: {reason}")
        stacks[name] = replace(stack, attentions=stack.attentions | attentions)
        if stack.projections or not attentions:
            what = f"{stack.projections[0]!r} is no" if stack.projections else "it has no"
            refusals.setdefault("heads", f"{name}: {what} projection of plain queries, keys and values")
        reason = _neurons(probe, stack) if stack.ffn or not stack.experts else None
        if stack.experts and (of_experts := _neurons_of_experts(probe, stack)) is not None:
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
    return difference(outputs[:, :-1], probe.outputs[:, :-1]) > _OTHER  # products of experts round by their neighbours


# -- heads ---------------------------------------------------------------------------------------------------------------------


def _heads(probe: Probe, stack: Stack, kind: str, attention: Attention) -> tuple[Attention, str | None]:
    """The attention with the layout that is proved, and None; or as it was, and what went wrong."""
    layers = _layers_with(probe, stack, kind)
    heads, group = attention.head_count(probe.config), attention.group_size(probe.config)
    if heads < 2:
        return attention, "the small model has one head"
    permutation = _permuted_heads(heads, group)
    fused = max(attention.linears.values()) > 1
    reasons: list[str] = []
    for layout in LAYOUTS if fused else LAYOUTS[:1]:
        candidate = replace(attention, layout=layout)
        reason = _permuting(probe, layers, candidate, permutation, heads)
        if reason is not None:
            reasons.append(reason)
            continue
        whole, thinner = list(range(group, heads)) or list(range(heads)), [h for h in range(heads) if h % group]
        proved: list[Attention] = []
        for changes in ({}, {"resizes": HIDDEN_SIZES}, {"reads_config": True}):
            candidate = replace(attention, layout=layout, **changes)
            reason = _removing(probe, layers, candidate, whole, heads)
            if reason is not None:
                reasons.insert(0, reason)
            elif group == 1:
                return candidate, None
            elif _removing(probe, layers, candidate, thinner, heads) is None:
                return replace(candidate, thins=True), None
            else:
                proved.append(candidate)
        if proved:
            return proved[0], None
    return attention, reasons[0]


def _permuted_heads(heads: int, group: int) -> list[int]:
    """Another order of the heads, in which groups stay together: group by group backwards, and backwards within each."""
    return [number * group + head for number in reversed(range(heads // group)) for head in reversed(range(group))]


def _permuting(
    probe: Probe, layers: list[nn.Module], attention: Attention, permutation: list[int], heads: int
) -> str | None:
    """Permuting all heads, in queries, keys, values and outputs alike, changes nothing; without the outputs, it does."""
    with probe.changed():
        handles: list[Any] = []
        try:
            for layer in layers:
                for name in attention.linears:
                    if name != attention.o:
                        _permute(
                            layer.get_submodule(name),
                            attention.features(probe.config, name, permutation, heads),
                            outputs=True,
                        )
                handles += prune_companions(layer, attention, probe.config, permutation, heads)
            half = probe.differs()
            for layer in layers:
                index = attention.features(probe.config, attention.o, permutation, heads)
                _permute(layer.get_submodule(attention.o), index, outputs=False)
            whole = probe.differs()
        except (RuntimeError, IndexError) as error:
            return f"its projections do not hold {heads} heads as expected ({str(error).splitlines()[0][:80]})"
        finally:
            for handle in handles:
                handle.remove()
    if half < _OTHER:
        return "its heads do not matter for the outputs"
    return None if whole < _SAME else "exchanging its heads changes the outputs: heads are not alike"


def _removing(probe: Probe, layers: list[nn.Module], attention: Attention, kept: list[int], heads: int) -> str | None:
    """Heads that are zero, all but `kept`, can be removed, in one layer alone."""
    for layer in {id(layer): layer for layer in (layers[0], layers[-1])}.values():
        with probe.changed():
            for name in attention.linears:
                outputs = name != attention.o
                size = features(layer.get_submodule(name))[int(outputs)]
                gone = sorted(set(range(size)) - set(attention.features(probe.config, name, kept, heads)))
                _zero(layer.get_submodule(name), gone, outputs=outputs)
            zeroed = probe.run()
            with _without_heads(probe.config, layer, attention, kept, heads):
                try:
                    removed = probe.run()
                except Exception as error:  # whatever the native forward raises for other shapes
                    return f"heads cannot be removed from one layer ({first_line(error, _LONGEST)})"
            if difference(removed, zeroed) > _SAME:
                return "a removed head is not the same as one that is zero"
    return None


@contextmanager
def _without_heads(config: Any, layer: nn.Module, attention: Attention, kept: list[int], heads: int) -> Iterator[None]:
    """Inside, `layer` has only the heads `kept`."""
    linears = {name: layer.get_submodule(name) for name in attention.linears}
    owner = layer.get_submodule(attention.module) if attention.module else layer
    before = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    handles = prune_companions(layer, attention, config, kept, heads)
    try:
        for name, linear in linears.items():
            index = attention.features(config, name, kept, heads)
            layer.set_submodule(name, _selected(linear, index, outputs=name != attention.o))
        groups = len({head // attention.group_size(config) for head in kept})
        set_heads(owner, len(kept), attention.head_size(config), groups, attention.resizes)
        yield
    finally:
        for name, linear in linears.items():
            layer.set_submodule(name, linear)
        for handle in handles:
            handle.remove()
        vars(owner).update(before)


# -- neurons -------------------------------------------------------------------------------------------------------------------


def _neurons(probe: Probe, stack: Stack) -> str | None:
    """Permuting the neurons of all FFNs, before and after the activation, changes nothing; before alone, it does."""
    blocks = [
        [layer.get_submodule(name) for name in names]
        for number, layer in enumerate(_layers(probe, stack))
        for names in stack.ffns_in(number)
    ]
    if not blocks:
        return "no linears in its FFN"
    for linears in blocks:
        width = _width(linears)
        if len(linears) < 2 or any(features(linear)[1] not in (width, 2 * width) for linear in linears[:-1]):
            return "its FFN is not a matrix or two, an activation and a matrix"
    orders = [
        torch.randperm(width, generator=torch.Generator().manual_seed(2)).tolist() for width in map(_width, blocks)
    ]
    with probe.changed():
        for linears, order in zip(blocks, orders, strict=True):
            for linear in linears[:-1]:
                _permute(linear, _outputs_of_neurons(linear, order, len(order)), outputs=True)
        half = probe.differs()
        for linears, order in zip(blocks, orders, strict=True):
            _permute(linears[-1], order, outputs=False)
        whole = probe.differs()
    if half < _OTHER:
        return "the neurons of its FFN do not matter for the outputs"
    if whole > _SAME:
        return "exchanging the neurons of its FFN changes the outputs"
    return _removing_neurons(probe, stack)


def _removing_neurons(probe: Probe, stack: Stack) -> str | None:
    """Neurons that are zero can be removed, in one layer alone."""
    numbers = [number for number in range(len(_layers(probe, stack))) if stack.ffns_in(number)]
    layer, names = _layers(probe, stack)[numbers[-1]], stack.ffns_in(numbers[-1])[0]
    linears = {name: layer.get_submodule(name) for name in names}
    width = _width(list(linears.values()))
    kept, gone = range(width // 2), range(width // 2, width)

    def places(name: str, neurons: Sequence[int]) -> list[int]:
        return list(neurons) if name == names[-1] else _outputs_of_neurons(linears[name], neurons, width)

    with probe.changed():
        for name, linear in linears.items():
            _zero(linear, places(name, gone), outputs=name != names[-1])
        zeroed = probe.run()
        try:
            for name, linear in linears.items():
                layer.set_submodule(name, _selected(linear, places(name, kept), outputs=name != names[-1]))
            removed = probe.run()
        except Exception as error:  # whatever the native forward raises for other shapes
            return f"neurons cannot be removed from one layer ({first_line(error, _LONGEST)})"
        finally:
            for name, linear in linears.items():
                layer.set_submodule(name, linear)
    return None if difference(removed, zeroed) < _SAME else "a removed neuron is not the same as one that is zero"


def _neurons_of_experts(probe: Probe, stack: Stack) -> str | None:
    """The neurons of each expert can be exchanged, in another order for each; and those that are zero removed from one layer."""
    modules = [layer.get_submodule(module) for module in stack.experts for layer in _layers_with(probe, stack, module)]
    outputs = [experts.get_parameter(EXPERT_OUTPUT) for experts in modules]
    with probe.changed():
        generator = torch.Generator().manual_seed(2)
        orders = [
            torch.stack([torch.randperm(after.shape[2], generator=generator) for _ in after]) for after in outputs
        ]
        for experts, order in zip(modules, orders, strict=True):
            before = experts.get_parameter(expert_input(experts))
            for start in range(0, before.shape[1], order.shape[1]):
                part = before[:, start : start + order.shape[1]]
                part.copy_(part.gather(1, order[:, :, None].expand_as(part)))
        half = probe.differs()
        for after, order in zip(outputs, orders, strict=True):
            after.copy_(after.gather(2, order[:, None].expand_as(after)))
        whole = probe.differs()
    if half < _OTHER:
        return "the neurons of its experts do not matter for the outputs"
    if whole > _SAME:
        return "exchanging the neurons of its experts changes the outputs"
    return _removing_neurons_of_experts(probe, modules[-1])


def _removing_neurons_of_experts(probe: Probe, experts: Any) -> str | None:
    """Neurons of experts that are zero can be removed, in one layer alone."""
    names = (expert_input(experts), EXPERT_OUTPUT)
    whole = {name: experts.get_parameter(name) for name in names}
    width = whole[EXPERT_OUTPUT].shape[2]
    kept = range(width // 2)
    starts = range(0, whole[names[0]].shape[1], width)
    with probe.changed():
        whole[EXPERT_OUTPUT][:, :, width // 2 :] = 0
        zeroed = probe.run()
        try:
            rows = [start + neuron for start in starts for neuron in kept]
            setattr(experts, names[0], nn.Parameter(whole[names[0]][:, rows]))
            setattr(experts, EXPERT_OUTPUT, nn.Parameter(whole[EXPERT_OUTPUT][:, :, : width // 2]))
            removed = probe.run()
        except Exception as error:  # whatever the native forward raises for other shapes
            return f"neurons cannot be removed from the experts of one layer ({first_line(error, _LONGEST)})"
        finally:
            for name, parameter in whole.items():
                setattr(experts, name, parameter)
    return None if difference(removed, zeroed) < _SAME else "a removed neuron is not the same as one that is zero"


def _width(linears: list[Any]) -> int:
    """The number of neurons of an FFN."""
    return features(linears[-1])[0]


def _outputs_of_neurons(linear: Any, neurons: Sequence[int], width: int) -> list[int]:
    """Positions of `neurons`, out of `width`, among the outputs of a linear before the activation, which may hold gate and up."""
    halves = features(linear)[1] // width
    return [half * width + neuron for half in range(halves) for neuron in neurons]


# -- layers as they are called --------------------------------------------------------------------------------------------------


def _returns_tuple(probe: Probe, stack: Stack) -> bool:
    shown: list[bool] = []
    handle = _layers(probe, stack)[0].register_forward_hook(
        lambda *call: shown.append(isinstance(call[2], tuple | list))
    )
    probe.run()
    handle.remove()
    return any(shown)


def _only_in_first(probe: Probe, stack: Stack) -> tuple[str, ...]:
    """The parameters of the first layer that no other layer has, such as T5's table of relative positions."""
    first, *others = (set(dict(layer.named_parameters())) for layer in _layers(probe, stack))
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
        return difference(probe.run(), before) < _SAME
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
        for number in range(len(_layers(probe, stack)))
        for name in [*stack.ffn, *stack.projections, *(n for a in stack.attentions.values() for n in a.linears)]
    ]
    called: set[str] = set()
    other: set[str] = set()

    def hook(name: str) -> Callable[..., None]:
        def check(module: Any, args: Any, outputs: Any) -> None:
            called.add(name)
            try:
                expected = functional.linear(args[0], weight_as_rows(module), module.bias)
                same = torch.is_tensor(outputs) and torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5)
            except RuntimeError:  # a subclass of nn.Linear whose matrix has another shape, as in DeepSeek-V4
                same = False
            if not same:
                other.add(name)

        return check

    present = [name for name in dict.fromkeys(names) if has_module(probe.model, name)]
    handles = [probe.model.get_submodule(name).register_forward_hook(hook(name)) for name in present]
    probe.run()
    for handle in handles:
        handle.remove()
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
    with probe.changed():
        for weight in {table.weight.data_ptr(): table.weight for table in tables.values()}.values():
            weight.copy_(weight[order].clone())
        half = probe.differs()
        inputs = {
            name: order[probe.inputs[name]] for name in ("input_ids", "decoder_input_ids") if name in probe.inputs
        }
        whole = probe.differs(**inputs)
    if half < _OTHER:
        return "the rows of its table do not matter for the outputs"
    return None if whole < _SAME else "renumbering its tokens changes the outputs"


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
    depth = len(_layers(probe, stack))
    numbers = list(range(depth - 1))
    try:
        shallow = Probe(change(probe.config, **stack.config_changes(probe.config, numbers)))
    except Exception as error:  # whatever the native class raises for this config
        return f"no native model with one layer less ({(str(error) or type(error).__name__).splitlines()[0][:90]})"
    last = _layers(probe, stack)[-1]
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
    if changed < _OTHER:
        return "its last layer does not matter for the outputs"
    if difference(shallower, outputs) > 10 * _SAME:
        return "removing a layer that does nothing changes the outputs"
    return None


# -- helpers -------------------------------------------------------------------------------------------------------------------


def _layers(probe: Probe, stack: Stack) -> list[Any]:
    return list(probe.model.get_submodule(stack.layers.removesuffix(".{}")))


def _layers_with(probe: Probe, stack: Stack, part: str) -> list[Any]:
    return [layer for number, layer in enumerate(_layers(probe, stack)) if stack.has(part, number)]


def _permute(linear: Any, index: list[int], *, outputs: bool) -> None:
    weight = weight_as_rows(linear)
    weight.copy_(weight[index].clone() if outputs else weight[:, index].clone())
    if outputs and linear.bias is not None:
        linear.bias.copy_(linear.bias[index].clone())


def _zero(linear: Any, index: list[int], *, outputs: bool) -> None:
    weight = weight_as_rows(linear)
    if outputs:
        weight[index] = 0
        if linear.bias is not None:
            linear.bias[index] = 0
    else:
        weight[:, index] = 0


def _selected(linear: Any, index: list[int], *, outputs: bool) -> nn.Module:
    weight = weight_as_rows(linear)
    weight = weight[index] if outputs else weight[:, index]
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=linear.bias is not None)
    new.weight.copy_(weight)
    if linear.bias is not None:
        new.bias.copy_(linear.bias[index] if outputs else linear.bias)
    return new
