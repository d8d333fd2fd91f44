"""Proofs about heads and neurons: they can be exchanged, and those that are zero removed.

Where heads or neurons are exchanged in all weights alike, nothing changes; in half of the weights, the outputs do: otherwise the
proof would show nothing. Each function gives the reason why its part is not as described, or None.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Attention, Stack
from hf_freeze.architectures.blocks import LAYOUTS
from hf_freeze.architectures.describe import first_line
from hf_freeze.architectures.kept_heads import prune_companions
from hf_freeze.architectures.probe import Probe, difference
from hf_freeze.architectures.roles import (
    EXPERT_OUTPUT,
    HIDDEN_SIZES,
    expert_input,
    features,
    set_heads,
    weight_as_rows,
)

SAME, OTHER = 2e-4, 1e-4  # relative differences: an identity holds below the first, a change matters above the second
LONGEST = 90  # characters of a native error in a reason


def layers_in(probe: Probe, stack: Stack, part: str | None = None) -> list[Any]:
    """The layers of a stack of the small model; those that have `part`, if one is given."""
    layers = list(probe.model.get_submodule(stack.layers.removesuffix(".{}")))
    return [layer for number, layer in enumerate(layers) if part is None or stack.has(part, number)]


def exchanged(probe: Probe, what: str, half: Callable[[], Any], rest: Callable[[], Any]) -> str | None:
    """`half()` exchanges what comes before in the weights, `rest()` what follows."""
    with probe.changed():
        half()
        after_half = probe.differs()
        rest()
        after_all = probe.differs()
    if after_half < OTHER:
        return f"{what} do not matter for the outputs"
    return None if after_all < SAME else f"exchanging {what} changes the outputs"


def _removed(
    probe: Probe, what: str, where: str, zero: Callable[[], Any], without: AbstractContextManager[None]
) -> str | None:
    """`zero()` sets the weights of parts to zero; inside `without`, the model lacks these parts."""
    with probe.changed():
        zero()
        zeroed = probe.run()
        try:
            with without:
                removed = probe.run()
        except Exception as error:  # whatever the native forward raises for other shapes
            return f"{what}s cannot be removed from {where} ({first_line(error, LONGEST)})"
    return None if difference(removed, zeroed) < SAME else f"a removed {what} is not the same as one that is zero"


# -- heads ---------------------------------------------------------------------------------------------------------------------


def prove_heads(probe: Probe, stack: Stack, kind: str, attention: Attention) -> tuple[Attention, str | None]:
    """The attention with the layout that is proved, and None; or as it was, and what went wrong."""
    layers = layers_in(probe, stack, kind)
    heads, group = attention.head_count(probe.config), attention.group_size(probe.config)
    if heads < 2:
        return attention, "the small model has one head"
    fused = max(attention.linears.values()) > 1
    reasons: list[str] = []
    for layout in LAYOUTS if fused else LAYOUTS[:1]:
        candidate = replace(attention, layout=layout)
        reason = _exchanging_heads(probe, layers, candidate, heads, group)
        if reason is not None:
            reasons.append(reason)
            continue
        whole, thinner = list(range(group, heads)) or list(range(heads)), [h for h in range(heads) if h % group]
        proved: list[Attention] = []
        for changes in ({}, {"resizes": HIDDEN_SIZES}, {"reads_config": True}):
            candidate = replace(attention, layout=layout, **changes)
            reason = _removing_heads(probe, layers, candidate, whole, heads)
            if reason is not None:
                reasons.insert(0, reason)
            elif group == 1:
                return candidate, None
            elif _removing_heads(probe, layers, candidate, thinner, heads) is None:
                return replace(candidate, thins=True), None
            else:
                proved.append(candidate)
        if proved:
            return proved[0], None
    return attention, reasons[0]


def _exchanging_heads(
    probe: Probe, layers: list[nn.Module], attention: Attention, heads: int, group: int
) -> str | None:
    """All heads backwards, group by group and within each, in queries, keys, values and outputs."""
    order = [number * group + head for number in reversed(range(heads // group)) for head in reversed(range(group))]
    with ExitStack() as companions:

        def permute(layer: nn.Module, name: str, *, outputs: bool) -> None:
            index = attention.features(probe.config, name, order, heads)
            _permute(layer.get_submodule(name), index, outputs=outputs)

        def inputs() -> None:
            for layer in layers:
                for name in attention.linears:
                    if name != attention.o:
                        permute(layer, name, outputs=True)
                for handle in prune_companions(layer, attention, probe.config, order, heads):
                    companions.callback(handle.remove)

        def outputs() -> None:
            for layer in layers:
                permute(layer, attention.o, outputs=False)

        try:
            reason = exchanged(probe, "its heads", inputs, outputs)
        except (RuntimeError, IndexError) as error:
            return f"its projections do not hold {heads} heads as expected ({str(error).splitlines()[0][:80]})"
    return f"{reason}: heads are not alike" if reason is not None and reason.startswith("exchanging") else reason


def _removing_heads(
    probe: Probe, layers: list[nn.Module], attention: Attention, kept: list[int], heads: int
) -> str | None:
    """All heads but `kept` are removed, in the first layer alone and in the last."""
    for layer in {id(layer): layer for layer in (layers[0], layers[-1])}.values():

        def zero(layer: Any = layer) -> None:
            for name in attention.linears:
                outputs = name != attention.o
                size = features(layer.get_submodule(name))[int(outputs)]
                gone = sorted(set(range(size)) - set(attention.features(probe.config, name, kept, heads)))
                _zero(layer.get_submodule(name), gone, outputs=outputs)

        without = _without_heads(probe.config, layer, attention, kept, heads)
        if (reason := _removed(probe, "head", "one layer", zero, without)) is not None:
            return reason
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


def prove_neurons(probe: Probe, stack: Stack) -> str | None:
    """The neurons of all FFNs are exchanged, before and after the activation; half of those of one layer are removed."""
    layers = layers_in(probe, stack)
    blocks = [
        (layer, names, [layer.get_submodule(name) for name in names])
        for number, layer in enumerate(layers)
        for names in stack.ffns_in(number)
    ]
    if not blocks:
        return "no linears in its FFN"
    orders: list[list[int]] = []
    for _, _, linears in blocks:
        width = features(linears[-1])[0]
        if len(linears) < 2 or any(features(linear)[1] not in (width, 2 * width) for linear in linears[:-1]):
            return "its FFN is not a matrix or two, an activation and a matrix"
        orders.append(torch.randperm(width, generator=torch.Generator().manual_seed(2)).tolist())

    def before() -> None:
        for (_, _, linears), order in zip(blocks, orders, strict=True):
            for linear in linears[:-1]:
                _permute(linear, _outputs_of_neurons(linear, order, len(order)), outputs=True)

    def after() -> None:
        for (_, _, linears), order in zip(blocks, orders, strict=True):
            _permute(linears[-1], order, outputs=False)

    if (reason := exchanged(probe, "the neurons of its FFN", before, after)) is not None:
        return reason
    layer = blocks[-1][0]
    return _removing_neurons(probe, *next(block for block in blocks if block[0] is layer))


def _removing_neurons(probe: Probe, layer: nn.Module, names: list[str], linears: list[Any]) -> str | None:
    width, last = features(linears[-1])[0], names[-1]
    kept, gone = range(width // 2), range(width // 2, width)
    named = dict(zip(names, linears, strict=True))

    def places(name: str, neurons: Sequence[int]) -> list[int]:
        return list(neurons) if name == last else _outputs_of_neurons(named[name], neurons, width)

    def zero() -> None:
        for name, linear in named.items():
            _zero(linear, places(name, gone), outputs=name != last)

    @contextmanager
    def without() -> Iterator[None]:
        try:
            for name, linear in named.items():
                layer.set_submodule(name, _selected(linear, places(name, kept), outputs=name != last))
            yield
        finally:
            for name, linear in named.items():
                layer.set_submodule(name, linear)

    return _removed(probe, "neuron", "one layer", zero, without())


def prove_neurons_of_experts(probe: Probe, stack: Stack) -> str | None:
    """The neurons of each expert are exchanged, in another order for each; half of those of one layer are removed."""
    modules = [layer.get_submodule(module) for module in stack.experts for layer in layers_in(probe, stack, module)]
    generator = torch.Generator().manual_seed(2)
    matrices = []  # (before, after the activation, an order for each expert)
    for experts in modules:
        after = experts.get_parameter(EXPERT_OUTPUT)
        order = torch.stack([torch.randperm(after.shape[2], generator=generator) for _ in after])
        matrices.append((experts.get_parameter(expert_input(experts)), after, order))

    def exchange_before() -> None:
        for before, _, order in matrices:
            for part in before.split(order.shape[1], dim=1):
                part.copy_(part.gather(1, order[:, :, None].expand_as(part)))

    def exchange_after() -> None:
        for _, after, order in matrices:
            after.copy_(after.gather(2, order[:, None].expand_as(after)))

    reason = exchanged(probe, "the neurons of its experts", exchange_before, exchange_after)
    return _removing_neurons_of_experts(probe, modules[-1]) if reason is None else reason


def _removing_neurons_of_experts(probe: Probe, experts: Any) -> str | None:
    first = expert_input(experts)
    whole = {name: experts.get_parameter(name) for name in (first, EXPERT_OUTPUT)}
    width = whole[EXPERT_OUTPUT].shape[2]
    left = width // 2

    @contextmanager
    def without() -> Iterator[None]:
        before = torch.cat([part[:, :left] for part in whole[first].split(width, dim=1)], dim=1)
        try:
            setattr(experts, first, nn.Parameter(before))
            setattr(experts, EXPERT_OUTPUT, nn.Parameter(whole[EXPERT_OUTPUT][:, :, :left]))
            yield
        finally:
            for name, parameter in whole.items():
                setattr(experts, name, parameter)

    return _removed(
        probe, "neuron", "the experts of one layer", lambda: whole[EXPERT_OUTPUT][:, :, left:].zero_(), without()
    )


def _outputs_of_neurons(linear: Any, neurons: Sequence[int], width: int) -> list[int]:
    """Positions of `neurons`, out of `width`, among the outputs of a linear before the activation, which may hold gate and up."""
    halves = features(linear)[1] // width
    return [half * width + neuron for half in range(halves) for neuron in neurons]


# -- weights of linears --------------------------------------------------------------------------------------------------------


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
