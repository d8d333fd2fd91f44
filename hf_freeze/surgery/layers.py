"""Whole layers: remove, repeat or replace them."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture, Attention, Stack
from hf_freeze.compat.transformers import LAYER_NUMBERS, is_packed
from hf_freeze.layers.layer_forward import Replaced
from hf_freeze.seeded import Origin
from hf_freeze.surgery.attention import match_scales
from hf_freeze.surgery.replacing import replace


def layers_of(model: Any, architecture: Architecture, stack: str) -> list[Any]:
    """The layers of a stack, in order."""
    return list(model.base_model.get_submodule(architecture.stacks[stack].layers.removesuffix(".{}")))


def take_layers(model: Any, layers: str, numbers: Sequence[int]) -> None:
    """Reduce a stack to the layers `numbers`, in this order and with new numbers. `layers`: the name of a layer, such as
    "encoder.layers.{}". A number may repeat: the stack then gets a copy of the layer."""
    name = layers.removesuffix(".{}")
    old: Any = model.base_model.get_submodule(name)
    new = nn.ModuleList(
        copy.deepcopy(old[number]) if number in numbers[:position] else old[number]
        for position, number in enumerate(numbers)
    )
    for attribute in LAYER_NUMBERS:
        steps = _steps(old, attribute)
        for position, number in enumerate(numbers):
            for path, module in new[position].named_modules():
                if path in steps and attribute in vars(module):
                    vars(module)[attribute] += (position - number) * steps[path]
    replace(model, name, new)


def move_first(model: Any, stack: Stack, number: int) -> None:
    """Give layer `number` the parameters that the others read from the first layer alone (`Stack.unread`), which goes, with the
    settings of the modules that have them."""
    first, layer = (model.base_model.get_submodule(stack.layers.format(place)) for place in (0, number))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in stack.unread):
        owner, _, name = path.rpartition(".")
        source, target = first.get_submodule(owner), layer.get_submodule(owner)
        target.add_module(name, source.get_submodule(name))
        switches = {n: v for n, v in vars(source).items() if type(v) is bool and n != "training"}
        vars(target).update(switches)


def _steps(layers: Iterable[nn.Module], attribute: str) -> dict[str, int]:
    """Module below a layer -> by how much its `attribute`, an integer, grows from one layer to the next: by 2 if each layer has
    two places in a cache."""
    values: dict[str, dict[int, int]] = {}
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            if type(vars(module).get(attribute)) is int:
                values.setdefault(path, {})[number] = vars(module)[attribute]
    places = {number: {of[number] for of in values.values() if number in of} for of in values.values() for number in of}
    steps = {}
    for path, of in values.items():
        (first, start), (last, end) = min(of.items()), max(of.items())
        steps[path] = (end - start) // (last - first) if last != first else len(places[first])
    return steps


def layer_origins(model: Any, layers: str, numbers: Sequence[int]) -> dict[str, Origin]:
    """The origins of the parameters after `take_layers` with the same arguments."""
    return {
        f"{layers.format(position)}.{name}": Origin(f"{layers.format(number)}.{name}")
        for position, number in enumerate(numbers)
        for name, _ in model.base_model.get_submodule(layers.format(number)).named_parameters(remove_duplicate=False)
    }


def add_predecessors(model: Any, layers: str, count: int) -> None:
    """Reduce a stack to its first `count` layers. Each holds an equal number of consecutive old layers, copied, in its
    `predecessor`. `layers`: the name of a layer, such as "encoder.layers.{}"."""
    stack: Any = model.base_model.get_submodule(layers.removesuffix(".{}"))
    predecessors = [copy.deepcopy(layer) for layer in stack]
    take_layers(model, layers, range(count))
    stack = model.base_model.get_submodule(layers.removesuffix(".{}"))
    per_layer = len(predecessors) // count
    for position, layer in enumerate(stack):
        own = predecessors[position * per_layer : (position + 1) * per_layer]
        layer.add_module("predecessor", nn.ModuleList(own))
        Replaced(layer)


def drop_predecessors(layers: Iterable[Any]) -> None:
    """Undo `add_predecessors`, except for the number of layers: remove the old layers."""
    for layer in layers:
        Replaced.of(layer).remove()
        del layer.predecessor


def take_values(old: Any, new: Any, others: Mapping[str, torch.Tensor]) -> None:
    """Give one layer the tensors of another of its kind, and `others` of any shape by their names in it, in the same memory.
    Linears that bitsandbytes has packed are there."""
    packed = tuple(f"{name}." for name, module in new.named_modules() if is_packed(module))
    tensors = {**old.state_dict(), **others}
    values = {name: value for name, value in tensors.items() if not name.startswith(packed)}
    new.load_state_dict(values, strict=not packed, assign=True)


@torch.no_grad()
def copy_layer(old: Any, new: Any, attentions: Iterable[Attention], config: Any, *, share: bool = False) -> None:
    """Copy the values of one layer into another, so that both compute the same where their tensors have the same shapes. With
    `share`, all have, and both layers have the same memory. Predecessors are not copied.

    Raises ValueError if `new` cannot adopt the score scale of one of the layer's `attentions`; see `match_scales`.
    """
    values = {
        name: value if share else value.clone()
        for name, value in old.state_dict().items()
        if not name.startswith("predecessor.")
    }
    if not share:  # of fresh weights, later methods have changed shapes already; they convert those of trained ones
        own = new.state_dict()
        values = {name: value for name, value in values.items() if name in own and own[name].shape == value.shape}
    new.load_state_dict(values, strict=False, assign=True)
    match_scales(old, new, attentions, config)
