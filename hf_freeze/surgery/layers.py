"""Whole layers: leave some out, repeat them, have some replace others."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_freeze.architectures.base import Architecture, Attention
from hf_freeze.layers.layer_forward import Replaced
from hf_freeze.seeded import Origin
from hf_freeze.surgery.heads import match_scales
from hf_freeze.surgery.replacing import replace


def layers_of(model: Any, architecture: Architecture, stack: str) -> list[Any]:
    """The layers of a stack, in order."""
    return list(model.base_model.get_submodule(architecture.stacks[stack].layers.removesuffix(".{}")))


def take_layers(model: Any, layers: str, taken: Sequence[int]) -> None:
    """Make the stack whose layers are named `layers` (such as "encoder.layers.{}") consist of these of them, numbered anew; one
    that is taken again is a copy."""
    name = layers.removesuffix(".{}")
    old: Any = model.base_model.get_submodule(name)
    new = nn.ModuleList(
        copy.deepcopy(old[number]) if number in taken[:place] else old[number] for place, number in enumerate(taken)
    )
    for place, layer in enumerate(new):
        for module in layer.modules():
            if "layer_idx" in vars(module):  # the place in the cache
                vars(module)["layer_idx"] = place
    replace(model, name, new)


def layer_origins(model: Any, layers: str, taken: Sequence[int]) -> dict[str, Origin]:
    """Where the parameters come from when `take_layers` takes these layers."""
    return {
        f"{layers.format(place)}.{name}": Origin(f"{layers.format(number)}.{name}")
        for place, number in enumerate(taken)
        for name, _ in model.base_model.get_submodule(layers.format(number)).named_parameters(remove_duplicate=False)
    }


def add_predecessors(model: Any, layers: str, count: int) -> None:
    """Make the stack whose layers are named `layers` consist of its first `count`, each of which has taken over equally many of
    all, in their order: it holds them as its `predecessor`."""
    stack: Any = model.base_model.get_submodule(layers.removesuffix(".{}"))
    former = [copy.deepcopy(layer) for layer in stack]
    take_layers(model, layers, range(count))
    stack = model.base_model.get_submodule(layers.removesuffix(".{}"))
    each = len(former) // count
    for place, layer in enumerate(stack):
        layer.add_module("predecessor", nn.ModuleList(former[place * each : (place + 1) * each]))
        Replaced(layer)


def drop_predecessors(layers: Iterable[Any]) -> None:
    """Leave what `add_predecessors` has made without the former layers."""
    for layer in layers:
        Replaced.of(layer).remove()
        del layer.predecessor


@torch.no_grad()
def copy_layer(old: Any, new: Any, attentions: Iterable[Attention]) -> None:
    """The values of one layer into another of the same shapes, which then computes the same, whatever either is to replace.

    Raises ValueError where `new` cannot take over the scale of the scores of one of the layer's `attentions`.
    """
    new.load_state_dict(
        {name: value for name, value in old.state_dict().items() if not name.startswith("predecessor.")}, strict=False
    )
    match_scales(old, new, attentions)
